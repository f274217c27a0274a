"""How far a run has come: the replicated state that every policy reads and nothing else keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """``step`` windows, each an optimizer update, made from ``samples_seen`` training samples over all ranks.

    The same on every rank, at every world_size. ``samples_seen`` is the only clock: it is also the position in the
    sample stream of the next window's first sample. ``skipped`` windows changed nothing because their gradient was not
    finite, the last ``skipped_in_a_row`` of them without one between that did. ``stage`` is that of the last window,
    None before the first: what happens on entering a stage happens once, however often the run is resumed.
    """

    step: int = 0
    samples_seen: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    stage: int | None = None

    def after(self, global_batch: int, stage: int | None = None, *, skipped: bool = False) -> Progress:
        """The state once one window of ``global_batch`` samples of ``stage`` has been applied, or ``skipped``."""
        return Progress(
            self.step + 1,
            self.samples_seen + global_batch,
            self.skipped + skipped,
            self.skipped_in_a_row + 1 if skipped else 0,
            stage,
        )


def crossed(period: int, before: int, after: int) -> bool:
    """Whether a multiple of ``period`` lies in (``before``, ``after``], all in samples. Period 0 never is due.

    How things that repeat (an evaluation, a checkpoint) are due at a window boundary: a pure function of the clock, so
    a resumed run does them where the undisturbed one does.
    """
    return period > 0 and after // period > before // period
