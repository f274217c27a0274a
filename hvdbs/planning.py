"""The stage table of a run, and what is refused before anything starts. Needs neither MPI, Horovod nor a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from hvdbs import console, reach
from hvdbs.batch_norm import RunningStatistics
from hvdbs.batching import dealing, less_idle_micro_batch
from hvdbs.config import Config
from hvdbs.costs import Choice, Linear, reduced_bytes
from hvdbs.errors import refusal
from hvdbs.factors import choices, eligible, sizes
from hvdbs.model import network
from hvdbs.optim import effective_lr
from hvdbs.records import PlanRow
from hvdbs.schedule import Schedule, Stage, epochs_in_samples, spans
from hvdbs.surfaces import dimension

_IDLE_SHARE_WARNED = 0.2


def plan(config: Config, schedule: Schedule, train_samples: int, model: nn.Module, world_size: int) -> list[PlanRow]:
    """One row per stage of what ``world_size`` ranks would do with ``model``, which is on the meta device.

    Raises HvdbsError for images or a micro-batch that the model cannot take, and for extrapolation that does not fit.
    """
    _check_extrapolation(config, schedule, world_size)
    if config.data.kind != "analytic":
        _try_images(config, model)
    layers = linear_layers(config, model)
    rows = []
    for span in spans(schedule):
        stage = span.stage
        images = config.data.kind != "analytic"
        if images and span.steps and _last_size(stage.global_batch, config.micro_batch) == 1:
            _refuse_single_sample(stage, config, model)
        dealt = dealing(stage.global_batch, config.micro_batch, world_size)
        rows.append(
            PlanRow(
                stage=stage.index,
                epochs_begin=span.begin / train_samples,
                epochs_end=span.end / train_samples,
                samples_begin=span.begin,
                samples_end=span.end,
                global_batch=stage.global_batch,
                micro_batch=config.micro_batch,
                world_size=world_size,
                micro_batches_busiest=dealt.busiest,
                micro_batches_idlest=dealt.idlest,
                idle_share=dealt.idle_share,
                lr=stage.lr,
                weight_decay=stage.weight_decay,
                effective_lr=effective_lr(stage.lr, config.optimizer.momentum),
                steps=span.steps,
                reduced_bytes=span.steps
                * update_bytes(model, config, choices(config, layers, stage.global_batch, world_size)),
                reason=stage.reason,
            )
        )
    return rows


def _try_images(config: Config, model: nn.Module) -> None:
    """Two samples through ``model`` on the meta device. Raises HvdbsError if it cannot take them or gives no logits."""
    size, name = config.data.image_size, config.model.name
    try:
        outputs = model.train()(torch.empty(2, 3, size, size, device="meta", dtype=getattr(torch, config.dtype)))
    except NotImplementedError:  # an operation that the meta device does not know
        return
    except (RuntimeError, ValueError, AssertionError) as error:
        if "meta" in str(error):
            return
        raise refusal(
            "data.image_size", size, f"is no size that {name} can take ({' '.join(str(error).split())})"
        ) from None
    if not isinstance(outputs, torch.Tensor):
        raise refusal("model.name", name, f"gives {type(outputs).__name__} in training, not logits alone")


def _last_size(global_batch: int, micro_batch: int) -> int:
    return (global_batch - 1) % micro_batch + 1


def _refuse_single_sample(stage: Stage, config: Config, model: nn.Module) -> None:
    """Try one sample on the meta device: batch norm refuses it where nothing but the batch is left to average over."""
    size = config.data.image_size
    try:
        model.train()(torch.empty(1, 3, size, size, device="meta", dtype=getattr(torch, config.dtype)))
    except ValueError:
        rule = f"which batch norm in {config.model.name} at {size} pixels cannot take"
        if config.micro_batch == 1:
            raise refusal("micro_batch", 1, f"leaves single samples, {rule}", "at least 2") from None
        raise refusal(
            f"schedule: stage {stage.index} global_batch",
            stage.global_batch,
            f"leaves a last micro-batch of 1 sample (micro_batch {config.micro_batch}), {rule}",
            f"{stage.global_batch - 1} or {stage.global_batch + 1}",
        ) from None


def _check_extrapolation(config: Config, schedule: Schedule, world_size: int) -> None:
    reach.virtual_workers(config.extrapolation, world_size)
    until, stages = config.extrapolation.until.stage, len(schedule.stages)
    if config.extrapolation.enabled and until is not None and until >= stages:
        nearest = f"{stages - 1}, or leave it out" if stages > 1 else "leave it out"
        raise refusal("extrapolation.until.stage", until, f"is beyond the last stage, {stages - 1}", nearest)


def extrapolation_lines(config: Config, model: nn.Module, rows: list[PlanRow]) -> list[str]:
    """What a person should know beside the stage table: where gradients are taken, and what that costs in memory."""
    chosen = config.extrapolation
    if not chosen.enabled:
        return []
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    world_size = rows[0].world_size
    busiest = [
        row.micro_batches_busiest for row in rows if row.steps and reach.active(chosen, row.stage, row.samples_begin)
    ]
    times = reach.buffers(chosen, world_size, busiest)
    lines = [
        f"extrapolation: {reach.described(chosen, world_size)}.",
        f"memory for it on each rank: {times} x the trained parameters, {console.size(times * nbytes)} at most.",
    ]
    if chosen.depends_on_ranks:
        lines.append(
            "warning: extrapolation.virtual_workers: world_size makes the training depend on the number of ranks: the "
            "promise that it is the same on any does not hold"
        )
    return lines


def warnings(rows: list[PlanRow]) -> list[str]:
    """What a person should know about a plan that is allowed: stages that leave many ranks idle, or never run."""
    lines = []
    for row in rows:
        if row.steps == 0:
            lines.append(f"warning: stage {row.stage} never runs: the window that ends before it runs past its end")
        elif row.idle_share > _IDLE_SHARE_WARNED:
            better = less_idle_micro_batch(row.global_batch, row.micro_batch, row.world_size)
            advice = f"micro_batch {better} would do better" if better else "fewer ranks would do the same work"
            lines.append(
                f"warning: stage {row.stage}: {row.idle_share:.0%} of the ranks' turns are idle "
                f"(global_batch {row.global_batch}, micro_batch {row.micro_batch}, {row.world_size} ranks); {advice}"
            )
    return lines


def update_bytes(model: nn.Module, config: Config, chosen: Sequence[Choice] = ()) -> int:
    """Bytes of one update of ``model``: what one rank hands to allreduce, and the rows that all hand to allgather for
    those of the layers ``chosen`` that go by factors."""
    halved = config.communication.wire == "fp16"
    parameters = sum(p.numel() * (2 if halved else p.element_size()) for p in model.parameters() if p.requires_grad)
    size = sizes(config)
    gathered = [choice for choice in chosen if choice.factors]
    parameters -= sum(choice.layer.weights * size.gradient for choice in gathered)
    rows = sum(choice.gathered_bytes(size) for choice in gathered)
    return reduced_bytes(parameters, RunningStatistics(model).size) + rows


def sample_shape(config: Config) -> tuple[int, ...]:
    """Of one sample as the model gets it."""
    size = config.data.image_size
    return (dimension(config.data.analytic),) if config.data.kind == "analytic" else (3, size, size)


def linear_layers(config: Config, model: nn.Module) -> list[Linear]:
    """The layers of ``model``, which is on the meta device, that could go by factors; none under scheme dense.

    Raises HvdbsError if the scheme is factors and there are none.
    """
    if config.communication.scheme == "dense":
        return []
    found = eligible(model, sample_shape(config), getattr(torch, config.dtype))
    if not found and config.communication.scheme == "factors":
        rule = f"has no layer to act on: {config.model.name} has no fully connected layer whose weight is its own"
        raise refusal("communication.scheme", "factors", rule, "dense")
    return found


def communication_lines(config: Config, layers: Sequence[Linear], rows: list[PlanRow]) -> list[str]:
    """What a person should know beside the stage table: which of ``layers`` go by factors, and what that saves."""
    if config.communication.scheme == "dense":
        return []
    size, lines = sizes(config), []
    for row in rows:
        chosen = choices(config, layers, row.global_batch, row.world_size)
        gathered = [choice for choice in chosen if choice.factors]
        whole = sum(choice.layer.weights * size.gradient for choice in chosen)
        kinds = Counter(f"{choice.layer.inputs} x {choice.layer.outputs}" for choice in gathered)
        named = ", ".join(f"{many} of {kind}" for kind, many in kinds.items()) or "none"
        sent, dense = sum(c.factor_bytes for c in gathered), sum(c.gradient_bytes for c in gathered)
        line = f"communication: stage {row.stage}: by factors {named}, of {len(chosen)} that could"
        if gathered:
            line += f"; each rank sends {console.size(round(sent))} for them instead of {console.size(round(dense))}"
            line += f" (reduced: the rows of all ranks, {console.size(sum(c.gathered_bytes(size) for c in gathered))})"
        else:
            line += f"; their gradients are {console.size(whole)}"
        lines.append(f"{line}.")
    return lines


def meta_model(config: Config, classes: int | None) -> nn.Module:
    """The network without memory for its weights: shapes and bytes only."""
    try:
        with torch.device("meta"):
            model = network(config, classes)
    except RuntimeError as error:  # a size that no tensor can have
        raise refusal("model", config.model.name, f"cannot be built with these sizes ({error})") from None
    return model.to(getattr(torch, config.dtype))


def outputs(config: Config, names: Sequence[str]) -> int | None:
    """The model's outputs K for data with the classes ``names``; None where there are none. Raises HvdbsError for one
    class, or for more than the config has."""
    if len(names) == 1:
        rule = f"has one class, {names[0]}, and nothing to tell it from"
        raise refusal("data.root", config.data.root, rule, "a folder for each of two classes or more")
    classes = config.model.classes or len(names) or None
    if classes is not None and classes < len(names):
        raise refusal("model.classes", classes, f"is less than the {len(names)} classes of the data")
    return classes


def evaluation_period(config: Config, train_samples: int) -> int:
    """Samples between evaluations; 0 for the end alone."""
    every = config.evaluation.every_epochs
    return epochs_in_samples("evaluation.every_epochs", every, train_samples) if every else 0
