"""Puts a run together from its config: device, data, schedule, model, checkpoint, run directory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdbs import checkpoint, console, core_tuning, planning
from hvdbs.branch import branch
from hvdbs.checkpoint import Saver, State
from hvdbs.comm import Communicator, agree
from hvdbs.comm.cores import chosen, own_cores
from hvdbs.comm.traced import Traced
from hvdbs.config import Config, flatten, to_yaml, training_fields
from hvdbs.costs import Linear
from hvdbs.data.sources import open_source
from hvdbs.devices import alike, choose_device
from hvdbs.engine import Engine, EngineState, load_state, tunes
from hvdbs.environment import environment
from hvdbs.errors import HvdbsError, refusal
from hvdbs.factors import candidates
from hvdbs.files import write_atomically
from hvdbs.invariance import scale_invariant
from hvdbs.loop import Run
from hvdbs.metrics import RunDirectory
from hvdbs.model import network
from hvdbs.progress import Progress
from hvdbs.pulse import Pulse
from hvdbs.recorder import Account, Silent, Totals
from hvdbs.records import STOP_FILE, PlanRow
from hvdbs.schedule import decide
from hvdbs.stage_tables import resolve
from hvdbs.step import Replica, Requests
from hvdbs.surfaces import dimension
from hvdbs.tracing import ChromeTracer, Tracer, Untraced, writable
from hvdbs.trail import Trail, logged_weights
from hvdbs.watchdog import STUCK_FOLDER

_TRIAL_PIXELS, _TRIAL_SAMPLES = 64, 4
_OF_A_NODE = {"threads", "data.root", "data.index_dir", "data.threads"}


@contextmanager
def agreed(comm: Communicator) -> Iterator[None]:
    """Collective. An HvdbsError inside, on any rank, becomes an AgreedError on all."""
    error = None
    try:
        yield
    except HvdbsError as problem:
        error = str(problem)
    agree(comm, error)


@dataclass(frozen=True)
class Assembled:
    """A run that is ready to start at ``progress``.

    ``layers``: those that could go by factors. ``hosts`` by rank. ``files``, ``display`` and ``account`` are rank 0's,
    and None if the run is ``complete``: trained and summed up.
    """

    run: Run
    progress: Progress
    best_merit: float | None
    plan: list[PlanRow]
    layers: list[Linear]
    hosts: list[str]
    out: Path
    files: RunDirectory | None
    display: console.Display | None
    account: Account | None
    complete: bool


def same_on_all(comm: Communicator, config: Config, arguments: dict[str, str | None]) -> None:
    """Collective. Raises HvdbsError where this rank was started with another config or other ``arguments`` than rank 0.

    Where data lies and how many threads a rank has may differ between nodes.
    """
    own = {name: value for name, value in flatten(config).items() if name not in _OF_A_NODE}
    own |= {f"--{name}": value for name, value in arguments.items()}
    first = json.loads(comm.broadcast_bytes(json.dumps(own).encode()))
    for name, value in own.items():
        if json.dumps(value) != json.dumps(first.get(name)):  # nan equals nan, and a tuple a list
            rule = f"is not what rank 0 was started with, {first.get(name)}"
            raise refusal(name, value, rule, "the same config file and command line on every node")


def run_directory(comm: Communicator, config_name: str | None, out: str | None, resume: str | None) -> Path:
    """Collective. Where to write: ``--out``, the run of the checkpoint that is resumed, or runs/<recipe>-<time>."""
    if out is not None:
        return Path(out)
    if resume == "auto":
        raise refusal("--resume", "auto", "needs --out, the run directory to go on in")
    if resume is not None:
        path = Path(resume).resolve()
        return next((p.parent for p in (path, *path.parents) if p.name == "checkpoints"), path)
    name = Path(config_name).stem if config_name else "run"
    stamp = time.strftime("%Y%m%d-%H%M%S").encode()
    return Path("runs") / f"{name}-{comm.broadcast_bytes(stamp).decode()}"


def assemble(
    config: Config,
    comm: Communicator,
    out: Path,
    resume: str | None,
    requests: Requests,
    say: Callable[[str], None],
    branch_from: str | None = None,
    trace: Path | None = None,
    pulse: Pulse | None = None,
) -> Assembled:
    """Collective. Raises AgreedError for whatever is wrong; ``out`` is not touched then.

    ``resume``: ``auto`` or a path to go on from; ``branch_from``: a checkpoint of another run to start from.
    ``trace``: where a trace goes; ``comm`` is a ``Traced`` one then.
    """
    with agreed(comm):
        device = choose_device(config, comm)
        if trace is not None and comm.rank == 0:
            writable(trace)
    cores = own_cores(comm)
    settle(config, cores, device)
    with agreed(comm):
        _refuse_among_images(out, config)
        source = open_source(config, comm, device, say)
    with agreed(comm):
        n = source.train_samples
        schedule = resolve(config.schedule, n)
        period = planning.evaluation_period(config, n)
        classes = planning.outputs(config, source.classes)
        config = replace(  # with the sizes of the data, so that a run is not resumed on other data
            config, data=replace(config.data, train_samples=n), model=replace(config.model, classes=classes)
        )
        sketch = planning.meta_model(config, classes)
        plan = planning.plan(config, schedule, n, sketch, comm.world_size)
        layers = planning.linear_layers(config, sketch)
        model = initial_model(config, classes, device)
    state, found, parent = restore(config, comm, out, resume, branch_from, device, say)
    with agreed(comm):
        alike(config, comm, device)
    batches = (stage.global_batch for stage in schedule.stages)
    by_factors = candidates(config, layers, batches, comm.world_size)
    at = decide(schedule, Progress() if state is None else state.progress)
    tuned = None
    if config.communication.autotune and comm.backend.startswith("horovod") and at is not None:
        say(f"Horovod's autotune: at most {core_tuning.most_updates(os.environ)} updates that are thrown away")
        spare = initial_model(config, classes, device)
        count, tuned = core_tuning.tune(spare, config, comm, source, by_factors, at)
        del spare
        say(f"after {count} updates: {', '.join(f'{name} {value}' for name, value in tuned.items())}")
    replica = Replica(model, config, comm, by_factors)
    for name, tensor in model.state_dict().items():
        comm.broadcast(tensor, f"initial.{name}")
    progress, best, totals = Progress(), None, Totals()
    if state is not None:
        assert found is not None
        with agreed(comm), checkpoint.fitting(found):
            checkpoint.take_back(replica, state, found, say)
            progress, best, totals = state.progress, state.best_merit, Totals.of(state.totals)
    engine = None
    invariant: tuple[str, ...] = ()
    if config.schedule.method == "vbs":
        invariant = invariant_layers(model, config, comm)
    if tunes(config):
        with agreed(comm), checkpoint.fitting(found or out):
            known = EngineState(list(invariant)) if state is None else load_state(state.engine)
            engine = Engine(config, schedule, n, known)
    about = {"host": socket.gethostname(), "device": device_name(device)}
    everyone = [json.loads(text) for text in comm.gather_bytes(json.dumps(about).encode())]
    hosts = [entry["host"] for entry in everyone]
    unsaid = comm.broadcast_bytes(b"1" if comm.rank == 0 and _cut_off(out, found) else b"0") == b"1"
    complete = decide(schedule, progress) is None and not unsaid
    with agreed(comm):
        if complete and found is not None and (branch_from or not _is_of(out, found)):
            option, rule = "--branch-from" if branch_from else "--resume", f"is at sample {progress.samples_seen}"
            raise refusal(option, found, f"{rule}, where this schedule has ended", "--branch-from with a longer one")
    files, display, account = None, None, None
    with agreed(comm):
        if comm.rank == 0 and not complete:
            facts = environment(comm.world_size, comm.backend, hosts, [entry["device"] for entry in everyone]) | {
                "cores_of_rank_0": cores,
                "chosen": chosen(torch.get_num_threads()),
                "horovod_autotune": tuned,
            }
            weights = logged_weights(config, model)
            about_run = (to_yaml(config), facts, plan, config.logging.tensorboard, weights)
            try:
                if resume is None:
                    files = RunDirectory.create(out, *about_run)
                else:
                    files = RunDirectory.resume(out, progress, *about_run)
                if parent:
                    write_atomically(out / "parent.json", json.dumps(parent, indent=2).encode())
                (out / STOP_FILE).unlink(missing_ok=True)  # of a run that was ended before it could heed it
                shutil.rmtree(out / STUCK_FOLDER, ignore_errors=True)
            except OSError as error:
                raise HvdbsError(
                    f"--out: {error.filename or out} cannot be written: {error.strerror or error}"
                ) from None
            display = console.Display(plan[-1].samples_end, config.logging.line_seconds)
            trail = Trail(model, files) if weights else None
            account = Account(config, comm, schedule, n, files, display, totals, trail, invariant, layers)
    saver = Saver(out / "checkpoints", config, comm, found)

    def stop_asked() -> bool:
        return comm.rank == 0 and (out / STOP_FILE).exists()

    recorder = account or Silent()
    tracer: Tracer = Untraced()
    if trace is not None and isinstance(comm, Traced):
        tracer = ChromeTracer(comm, device, trace, config.logging)
    parts = (recorder, saver, requests, period, engine, pulse or Pulse(), stop_asked, tracer)
    run = Run(config, comm, source, schedule, replica, *parts)
    return Assembled(run, progress, best, plan, layers, hosts, out, files, display, account, complete)


def _is_of(out: Path, checkpoint: Path) -> bool:
    return checkpoint.parent.resolve() == (out / "checkpoints").resolve()


def _refuse_among_images(out: Path, config: Config) -> None:
    """A run in a class's place would be taken for an empty class from then on."""
    if config.data.kind != "images" or config.data.root is None:
        return
    for split in ("train", "val"):
        folder = Path(config.data.root).expanduser() / split
        if out.resolve().is_relative_to(folder.resolve()):
            raise refusal("--out", out, f"lies in {folder}, among the images", "for example runs/first")


def _cut_off(out: Path, found: Path | None) -> bool:
    """Whether the run in ``out``, resumed from ``found``, was ended before it could say that it has finished."""
    if found is None or not _is_of(out, found):
        return False
    return not _finished(out)


def _finished(out: Path) -> bool:
    """Whether the run in ``out`` has said so."""
    try:
        outcome: object = json.loads((out / "exit.json").read_bytes())["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return outcome == "finished"


def settle(config: Config, cores: float, device: torch.device) -> None:
    """Threads of this rank, which has ``cores``, and which kernels torch may use."""
    torch.set_num_threads(config.threads or max(1, int(cores)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
        torch.backends.cudnn.benchmark = not config.deterministic
    torch.use_deterministic_algorithms(config.deterministic)
    # With them torch also fills each new tensor before it is written, a fill for every output of every layer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module


def invariant_layers(model: nn.Module, config: Config, comm: Communicator) -> tuple[str, ...]:
    """Collective. The scale-invariant weights of ``model``, as rank 0 finds them on noise of a few small samples."""
    names: list[str] = []
    if comm.rank == 0:
        size = min(config.data.image_size, _TRIAL_PIXELS)
        generator = torch.Generator().manual_seed(config.seed)
        shape = (dimension(config.data.analytic),) if config.data.kind == "analytic" else (3, size, size)
        inputs = torch.randn(_TRIAL_SAMPLES, *shape, generator=generator)
        names = scale_invariant(model, inputs.to(next(model.parameters()).device))
    return tuple(json.loads(comm.broadcast_bytes(json.dumps(names).encode())))


def initial_model(config: Config, classes: int | None, device: torch.device) -> nn.Module:
    """The network in training mode, its weights drawn on the CPU from the seed."""
    torch.manual_seed(config.seed)
    model = network(config, classes).to(getattr(torch, config.dtype))
    layout = torch.channels_last if config.model.channels_last else torch.contiguous_format
    return model.to(device).to(memory_format=layout).train()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def restore(
    config: Config,
    comm: Communicator,
    out: Path,
    resume: str | None,
    branch_from: str | None,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[State | None, Path | None, dict[str, Any]]:
    """Collective. The state to go on from, its folder, and of which run it is a branch, if it is one.

    Rank 0 finds, checks and reads it, the others are sent it.
    """
    source = branch_from or resume
    if source is None:
        return None, None, {}
    found, data = None, b""
    with agreed(comm):
        if comm.rank == 0:
            found = checkpoint.find(out, source, say, "--branch-from" if branch_from else "--resume")
            if found is None and _finished(out):
                raise refusal("--out", out, "has finished and its checkpoints are gone", "name another")
            data = b"" if found is None else (found / "model.pt").read_bytes()
    data = comm.broadcast_bytes(data)
    found = Path(os.fsdecode(comm.broadcast_bytes(os.fsencode(str(found))))) if data else None
    if found is None:
        say(f"no checkpoint in {out} yet: starting from the beginning")
        return None, None, {}
    parent: dict[str, Any] = {}
    with agreed(comm):
        state = checkpoint.load(data, device)
        if branch_from:
            state, parent = branch(state, config, found)
        else:
            checkpoint.same_training(state, training_fields(config), found)
    return state, found, parent
