"""Gradients taken at a displaced place, y = x - length * direction, and applied to x.

Lin, Kong, Stich and Jaggi, "Extrapolation for Large-batch Training in Deep Learning", ICML 2020, arXiv 2006.05720:
direction ``local_past`` is their EXTRAP-SGD, the others belong to the framework they put it in. The scalings of the
noise are those of SmoothOut (Wen et al., arXiv 1805.07898). What a direction is and where it ends is said by
``hvdbs.reach``.

y has memory of its own, and x is neither changed nor copied: the parameters point at y for the passes and at x for the
rest. What is kept from one window to the next is a mean gradient: after the loss scale is taken out, before clipping,
weight decay and the precision of the wire. It is no part of the optimizer. A window without a finite gradient leaves
none, so the next update is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hvdbs import reach
from hvdbs.batching import MicroBatch, Window
from hvdbs.data.streams import noise_seed
from hvdbs.gradients import GradientReducer, Gradients
from hvdbs.optim import trained
from hvdbs.reach import ExtrapolationConfig, Part
from hvdbs.schedule import Decision

Tensors = dict[str, torch.Tensor]
WHOLE = -1  # in place of a virtual worker: what belongs to all of them


class Extrapolation:
    """Moves this rank's parameters within a window. A class because it keeps gradients from one window to the next.

    Order of a window: ``begin``; for each part ``look`` where ``looks``, ``move``, the backward passes with the last
    part's ``keeper`` handed to ``GradientReducer.arm``, ``leave``; ``restore``; ``finish``.
    """

    def __init__(
        self,
        config: ExtrapolationConfig,
        model: nn.Module,
        reducer: GradientReducer,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        """Raises HvdbsError if the virtual workers cannot be shared by ``world_size`` ranks."""
        self.config = config
        self.workers = reach.virtual_workers(config, world_size)
        self._reducer = reducer
        self._seed = seed
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameters = reducer.parameters
        self._in_turn = list(reversed(trained(model)))  # draws, so that noise does not hang on how buckets lie
        per_rank = self.workers // world_size if config.direction == "local_past" else 0
        self._own = range(rank * per_rank, (rank + 1) * per_rank)
        # Mean gradients by virtual worker, or one under WHOLE; those that have been taken stand in _known.
        self._kept: dict[int, Gradients] = {}
        self._known: set[int] = set()
        # By parameter, in their order: the memory of y, and x while the parameters are away from it.
        self._y: list[torch.Tensor] = []
        self._x: list[torch.Tensor] = []
        self._length = self._factor = 0.0
        self._last: Part | None = None

    @property
    def looks(self) -> bool:
        """Whether each part of this window is gone through at x first."""
        return bool(self._length) and self.config.direction == "same_sample"

    @property
    def per_rank(self) -> bool:
        """Whether ranks hold what others do not, so that each writes a file of its own into checkpoints.

        The same on every rank once the first window has begun.
        """
        return bool(self._y) and self.config.direction == "local_past"

    @property
    def held_bytes(self) -> int:
        """What y and the kept gradients take."""
        flats = [flat for kept in self._kept.values() for flat in kept.flats]
        return sum(tensor.nbytes for tensor in (*self._y, *flats))

    def begin(
        self, window: Window, mine: Sequence[MicroBatch], decision: Decision, scale: Callable[[], float]
    ) -> list[Part]:
        """This rank's parts of ``window``; at most one where nothing is taken apart. ``scale``: of the loss."""
        self._length = reach.length(self.config, decision.stage, window.begin, decision.lr)
        if not reach.active(self.config, decision.stage, window.begin):
            if self._y or self._kept:
                self._release()
            return [Part(0, mine)] if mine else []
        if not self._y:
            self._y = [torch.empty_like(value) for value in self._values()]
        self._factor = window.global_batch / scale()
        result = list(reach.parts(mine, window.micro_batches, self.workers, self.config.unit))
        self._last = result[-1] if result else None
        return result

    def look(self, part: Part) -> None:
        """The gradients of ``part`` at x are in the buckets: they become its direction."""
        self._reducer.copy_to(self._room(WHOLE), self._factor / part.size)
        self._known = {WHOLE}
        self._reducer.begin_part()

    def move(self, part: Part, step: int) -> None:
        """From wherever the parameters are to the place of ``part``; to x itself if it has no direction yet."""
        if not self._length:
            return
        self.restore()
        which = part.worker if self.config.direction == "local_past" else WHOLE
        if self.config.noise:
            self._add_noise(noise_seed(self._seed, step, part.micro_batches[0].index))
        elif which in self._known:
            for x, direction, y in zip(self._values(), self._kept[which].views, self._y, strict=True):
                torch.add(x, direction, alpha=-self._length, out=y)
        else:
            return
        self._x = self._values()
        self._point_at(self._y)

    def keeper(self, part: Part) -> tuple[Gradients | None, float]:
        """Where the gradients of the rank's last part of a window are copied to, and the factor that makes them means.

        In the hook that sends a bucket, so that reductions still overlap backward.
        """
        if not self._y or self.config.direction != "local_past":
            return None, 1.0
        self._known.add(part.worker)
        return self._room(part.worker), self._factor / part.size

    def leave(self, part: Part) -> None:
        """The last backward pass of ``part`` is done."""
        if part is self._last or not self._y:
            return
        if self.config.direction == "local_past":
            target, factor = self.keeper(part)
            assert target is not None
            self._reducer.copy_to(target, factor)
        if self.config.direction in ("local_past", "same_sample"):
            self._reducer.end_part()

    def restore(self) -> None:
        """The parameters are x, whatever has happened."""
        if self._x:
            self._point_at(self._x)
            self._x = []

    def finish(self, finite: bool) -> None:
        """The buckets hold the window's mean gradient, which is about to be clipped and applied if it is ``finite``."""
        if not finite:
            self._known = set()
        elif self._y and self.config.direction == "global_past":
            self._reducer.copy_to(self._room(WHOLE), 1.0)
            self._known = {WHOLE}

    def replicated_state(self) -> Tensors:
        """What every rank holds alike, by parameter name, for model.pt; empty where there is nothing."""
        return self._named(WHOLE) if self.config.direction == "global_past" and WHOLE in self._known else {}

    def own_state(self) -> dict[int, Tensors]:
        """By virtual worker what this rank alone holds."""
        return {worker: self._named(worker) for worker in self._own if worker in self._known}

    def wanted(self, saved_by: int) -> dict[int, list[int]]:
        """The virtual workers of this rank by the rank that has saved them, of ``saved_by`` ranks."""
        found: dict[int, list[int]] = {}
        for worker in self._own:
            found.setdefault(worker * saved_by // self.workers, []).append(worker)
        return found

    def load(self, state: dict[int, Tensors]) -> None:
        """Take back what ``own_state`` gave, of these virtual workers; ``replicated_state`` under WHOLE."""
        for worker, tensors in state.items():
            for parameter, view in zip(self._parameters, self._room(worker).views, strict=True):
                view.copy_(tensors[self._names[id(parameter)]])
            self._known.add(worker)

    def _room(self, which: int) -> Gradients:
        """Where the gradient of ``which`` is kept; there may be many workers that never have a micro-batch."""
        if which not in self._kept:
            self._kept[which] = self._reducer.blank()
        return self._kept[which]

    def _named(self, which: int) -> Tensors:
        names = (self._names[id(parameter)] for parameter in self._parameters)
        return dict(zip(names, self._kept[which].views, strict=True))

    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    def _release(self) -> None:
        self._y, self._kept, self._known = [], {}, set()
        self._reducer.release()

    def _point_at(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def _add_noise(self, seed: int) -> None:
        generator = torch.Generator(self._y[0].device).manual_seed(seed)
        places = {id(parameter): y for parameter, y in zip(self._parameters, self._y, strict=True)}
        for parameter in self._in_turn:
            x, y = parameter.detach(), places[id(parameter)]
            if x.ndim > 1:
                torch.add(x, noise(self.config.direction, x, generator), alpha=-self._length, out=y)
            else:
                y.copy_(x)


def noise(direction: str, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One parameter's direction, at scale 1; ``x`` has two dimensions or more, filters along the first.

    noise_uniform U(-1, 1), noise_gaussian N(0, 1), noise_weight |x| U(-1, 1); noise_filter n_f |x_f| / |n_f| with
    n ~ N(0, 1), so that each filter moves by the scale times its own 2-norm.
    """
    if direction in ("noise_uniform", "noise_weight"):
        drawn = torch.empty_like(x).uniform_(-1.0, 1.0, generator=generator)
        return drawn.mul_(x.abs()) if direction == "noise_weight" else drawn
    drawn = torch.empty_like(x).normal_(generator=generator)
    if direction == "noise_gaussian":
        return drawn
    along = tuple(range(1, x.ndim))
    size = torch.linalg.vector_norm(drawn, dim=along, keepdim=True)
    return drawn.mul_(torch.linalg.vector_norm(x, dim=along, keepdim=True) / size)
