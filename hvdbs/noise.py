"""The gradient noise scale, from the gradient of a single micro-batch beside that of its whole window.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1: with gradients over
B_small and B_big samples,

    |G|^2 ~ (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
    tr S  ~ (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big),        noise scale = tr S / |G|^2.

Both are unbiased, their quotient is not, so they are averaged apart and divided last. The scale is a weak proxy of the
critical batch (Merrill et al., arXiv 2505.23971): it says where more samples stop averaging noise away, not where
training stops getting better.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOWS_PER_EPOCH = 20
_KEEP = 1.0 - 1.0 / WINDOWS_PER_EPOCH  # the averages forget over about an epoch


@dataclass(frozen=True)
class Pair:
    """Squared 2-norms of the mean gradient over ``small`` and over ``big`` samples of one window, small < big."""

    small_squares: float
    small: int
    big_squares: float
    big: int


@dataclass(frozen=True)
class LayerNorms:
    """By name of the weight, in one window: the ``squares`` of the weight itself, of its mean gradient over a
    ``single`` micro-batch of ``small`` samples, and over the ``whole`` of ``big``; without ``single`` if the window has
    but one.
    """

    squares: dict[str, float]
    single: dict[str, float]
    small: int
    whole: dict[str, float]
    big: int


def moments(small_squares: float, small: int, big_squares: float, big: int) -> tuple[float, float]:
    """Unbiased |G|^2 and tr S from squared norms of mean gradients over ``small`` and ``big`` samples, small < big."""
    signal = (big * big_squares - small * small_squares) / (big - small)
    return signal, (small_squares - big_squares) / (1 / small - 1 / big)


@dataclass(frozen=True)
class NoiseScale:
    """Exponential averages of |G|^2 (``signal``) and of tr S (``noise``) over ``windows`` measured windows."""

    signal: float = 0.0
    noise: float = 0.0
    windows: int = 0

    def after(self, pair: Pair) -> NoiseScale:
        """The averages with one more window. Their common bias at the start cancels in the quotient."""
        signal, noise = moments(pair.small_squares, pair.small, pair.big_squares, pair.big)
        return NoiseScale(
            _KEEP * self.signal + (1 - _KEEP) * signal, _KEEP * self.noise + (1 - _KEEP) * noise, self.windows + 1
        )

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None where the averages are still too noisy to give one."""
        return self.noise / self.signal if self.signal > 0 and self.noise >= 0 and self.windows else None


def period(train_samples: int) -> int:
    """Samples between measured windows: about WINDOWS_PER_EPOCH in an epoch, fewer where an epoch has fewer windows."""
    return max(1, train_samples // WINDOWS_PER_EPOCH)
