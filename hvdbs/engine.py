"""Measures what the auto-tuning engine goes by and asks it at each stage boundary, the same on all ranks."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from hvdbs import autotune
from hvdbs.autotune import Boundary, Layer
from hvdbs.comm import Communicator
from hvdbs.config import Config
from hvdbs.noise import LayerNorms, moments
from hvdbs.schedule import Schedule, spans


@dataclass
class Sums:
    """Of one weight over some measured windows: its square, and the moments of its gradient (see ``noise``)."""

    windows: int = 0
    squares: float = 0.0
    signal: float = 0.0
    noise: float = 0.0


@dataclass
class EngineState:
    """What the engine knows, as plain data for the checkpoint.

    ``layers``: names of the scale-invariant weights. ``measured``: sums over the last epoch of the stage under way, on
    rank 0 alone. ``reference``: the effective lr of each weight in stage 0. ``tuned``: of stages entered so far, lr,
    weight decay, the reason in words and the inputs as JSON.
    """

    layers: list[str]
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    reference: dict[str, float] = field(default_factory=dict)
    tuned: dict[int, tuple[float, float, str, str]] = field(default_factory=dict)


class Engine:
    """``schedule`` as it stands, with the stages that were tuned so far."""

    def __init__(self, config: Config, schedule: Schedule, train_samples: int, state: EngineState) -> None:
        self.schedule = schedule
        self.state = state
        self._config = config
        self._train_samples = train_samples
        self._spans = spans(schedule)
        for index, tuned in state.tuned.items():
            self._retune(index, *tuned)

    def wants(self, stage: int, samples_seen: int) -> bool:
        """Whether windows that begin at ``samples_seen`` are to be measured: in the last epoch before a boundary."""
        stages = self.schedule.stages
        return stage + 1 < len(stages) and samples_seen >= stages[stage].end - self._train_samples

    def observe(self, norms: LayerNorms | None) -> None:
        """One measured window; rank 0 has its ``norms``."""
        if norms is None:
            return
        for name in self.state.layers:
            sums = Sums(**self.state.measured.get(name, {}))  # type: ignore[arg-type]  # of JSON's numbers
            single, whole = norms.single.get(name), norms.whole[name]
            signal, noise = moments(single, norms.small, whole, norms.big) if single is not None else (whole, 0.0)
            sums.windows += 1
            sums.squares += norms.squares[name]
            sums.signal += signal
            sums.noise += noise
            self.state.measured[name] = dataclasses.asdict(sums)

    def enter(self, stage: int, comm: Communicator) -> None:
        """Collective. Decide for ``stage``, which is entered for the first time, from what rank 0 has measured."""
        measured = json.loads(comm.broadcast_bytes(json.dumps(self.state.measured).encode()))
        self.state.measured = {}
        if stage == 0 or self._spans[stage].steps == 0:
            return
        layers = {name: Sums(**sums) for name, sums in measured.items()}
        if not self.state.reference:
            before = self.schedule.stages[stage - 1]
            momentum = self._config.optimizer.momentum
            self.state.reference = {
                name: autotune.effective_lr(before.lr, momentum, sums.squares / sums.windows)
                for name, sums in layers.items()
            }
        tuned = self._decide(stage, layers)
        self.state.tuned[stage] = tuned
        self._retune(stage, *tuned)

    def _decide(self, index: int, measured: dict[str, Sums]) -> tuple[float, float, str, str]:
        stages, config = self.schedule.stages, self._config.schedule
        before, stage = stages[index - 1], stages[index]
        decay, growth = 1 / config.factor, stage.global_batch / before.global_batch
        lr, weight_decay = autotune.rule(before.lr, before.weight_decay, growth, decay)
        at = Boundary(
            lr=lr,
            weight_decay=weight_decay,
            momentum=self._config.optimizer.momentum,
            batch=stage.global_batch,
            first_batch=stages[0].global_batch,
            decayed=decay**index,
            steps=self._spans[index].steps,
            first_weight_decay=stages[0].weight_decay,
            excess=growth / decay,
        )
        layers = [self._layer(name, sums, growth) for name, sums in measured.items() if name in self.state.reference]
        inputs: dict[str, Any] = {**dataclasses.asdict(at), "layers": len(layers)}
        if not layers or weight_decay == 0:
            why = "weight decay is 0" if layers else "nothing was measured of a scale-invariant weight"
            return lr, weight_decay, f"{stage.reason}; the band is not used: {why}", json.dumps(inputs)
        tuned = autotune.band(layers, at, config.autotune)
        inputs |= dataclasses.asdict(tuned) | {"rule_weight_decay": weight_decay}
        return lr, tuned.weight_decay, f"{stage.reason}; {_words(tuned, weight_decay)}", json.dumps(inputs)

    def _layer(self, name: str, sums: Sums, growth: float) -> Layer:
        n = sums.windows
        signal, noise = sums.signal / n, sums.noise / n
        if (
            noise == 0
        ):  # single micro-batches only: between all signal, which stays, and all noise, which falls by growth
            signal /= growth**0.5
        return Layer(sums.squares / n, signal, noise, self.state.reference[name])

    def _retune(self, index: int, lr: float, weight_decay: float, reason: str, inputs: str) -> None:
        self.schedule = self.schedule.retuned(index, lr, weight_decay, reason, inputs)


def _words(tuned: autotune.Tuned, weight_decay: float) -> str:
    place = f"{tuned.before:.3g} times that of stage 0, for a band of {tuned.low:.3g} to {tuned.high:.3g}"
    if tuned.weight_decay == weight_decay:
        return f"the effective lr will be {place}: weight decay stays{', at its limit' if tuned.clamped else ''}"
    end = " at its limit" if tuned.clamped else f", for {tuned.after:.3g}"
    return f"the effective lr would be {place}: weight decay is times {tuned.weight_decay / weight_decay:.4g}{end}"


def clamp_warning(stage: int, inputs: str) -> str | None:
    """What a person should see of a decision for ``stage`` with these ``inputs`` (JSON) that met a limit; else None."""
    found = json.loads(inputs)
    if not found.get("clamped"):
        return None
    value, rules = found["weight_decay"], found["rule_weight_decay"]
    what = (
        f"stays at the rule's {value:.4g}"
        if value == rules
        else f"is {value:.4g}, the rule's times {value / rules:.4g}"
    )
    limit = f"{found['limit']:.4g} of {found['limited_by']}"
    place = f"{found['after']:.3g} times that of stage 0, outside its band of {found['low']:.3g} to {found['high']:.3g}"
    return (
        f"warning: stage {stage}: weight decay {what}, clamped by its limit {limit}: the effective lr will be {place}"
    )


def load_state(saved: dict[str, Any]) -> EngineState:
    """The inverse of dataclasses.asdict."""
    tuned = {int(index): tuple(row) for index, row in saved["tuned"].items()}
    return EngineState(saved["layers"], saved["measured"], saved["reference"], tuned)


def tunes(config: Config) -> bool:
    """Whether a run of ``config`` needs an engine: one that goes by measurements."""
    return config.schedule.method == "vbs" and config.schedule.autotune.mode == "band"
