"""Starting a training job, watching its ranks, and reading what it left behind."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import ranks
import torch
import yaml

from hvdbs import checkpoint, records
from hvdbs.checkpoint import State
from hvdbs.metrics import TABLES

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
TRAIN = "import hvdbs.train\nsys.exit(hvdbs.train.main())"
LIMIT_SECONDS = 120.0  # for any job here; each takes a few seconds on two cores that are not shared

TINY: dict[str, Any] = {
    "seed": 1,
    "micro_batch": 8,
    "dtype": "float64",
    "device": "cpu",  # so that two ranks start where there is one GPU, and bits are those of the CPU everywhere
    "threads": 1,
    "data": {"kind": "synthetic", "image_size": 8, "resize": 8, "train_samples": 512, "val_samples": 100, "threads": 1},
    "model": {"name": "resnet8", "classes": 4, "width": 4, "dropout": 0.1},
    "schedule": {
        "method": "table",
        "stages": [
            {"epochs": 1, "global_batch": 20, "lr": 0.05, "weight_decay": 1.0e-4},
            {"epochs": 3, "global_batch": 50, "lr": 0.1, "weight_decay": 1.0e-4},
            {"epochs": 2, "global_batch": 131, "lr": 0.01},
        ],
    },
    "evaluation": {"every_epochs": 2},
    "checkpoint": {"every_samples": 400, "every_minutes": 0, "keep_last": 3},
    "logging": {"every_steps": 3, "tensorboard": False},
}

# Changes to TINY for real images: float32, augmented, with an epoch's end inside a window.
DIGITS: dict[str, Any] = {
    "micro_batch": 16,
    "dtype": "float32",
    "data": {
        **{"kind": "images", "image_size": 8, "resize": 8, "train_samples": None, "val_samples": None},
        **{"mean": [0.3, 0.3, 0.3], "std": [0.35, 0.35, 0.35]},
        "augment": {"scale": [0.6, 1.0], "ratio": [0.8, 1.25], "flip": False},
    },
    "model": {"name": "resnet8", "classes": None, "width": 8},
    "schedule": {
        "method": "table",
        "stages": [
            {"samples": 1500, "global_batch": 50, "lr": 0.1, "weight_decay": 5.0e-4},
            {"samples": 2811, "global_batch": 128, "lr": 0.1, "weight_decay": 5.0e-4},
        ],
    },
}


def write_config(path: Path, **changes: Any) -> Path:
    """TINY with ``changes``: whole sections, or sections in part where both are mappings."""
    config = dict(TINY)
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(config))
    return path


def launcher(kind: str, np: int) -> list[str]:
    if kind in ("plain", "launch"):
        assert np == 1 or kind == "launch"
        return []
    if kind == "mpirun":
        return [str(BIN / "mpirun"), "-np", str(np)]
    return [str(BIN / "horovodrun"), f"--{kind}", "-np", str(np)]


class Job:
    """`python -m hvdbs.train` on ``np`` ranks in a process group of its own; ``with`` ends whatever is left of it.

    ``kind``: mpi, gloo (horovodrun), mpirun, plain, or launch: python -m hvdbs.launch with mpirun. ``before``: Python
    that every rank runs first.
    """

    def __init__(
        self,
        kind: str,
        np: int,
        config: Path | str,
        out: Path | None,
        *more: str,
        before: str = "",
        env: dict[str, str] | None = None,
    ) -> None:
        program = ["-m", "hvdbs.train"] if not before else ["-c", f"import sys\n{before}\n{TRAIN}"]
        words = [*program, "--config", str(config), *([] if out is None else ["--out", str(out)]), *more]
        command = [*launcher(kind, np), sys.executable, *words]
        if kind == "launch":
            command = [sys.executable, "-m", "hvdbs.launch", "--np", str(np), "--launcher", "mpirun", *words[2:]]
        self.np, self.out, self.mark = np, out, uuid.uuid4().hex
        self._stdout, self._stderr = os.memfd_create("stdout"), os.memfd_create("stderr")
        self.begun = time.monotonic()
        self.launch = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env=ranks.environment() | (env or {}) | {ranks.MARK: self.mark},
            cwd=ROOT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ranks.end_marked(self.mark)
        self.launch.wait()
        os.close(self._stdout)
        os.close(self._stderr)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """The launcher's exit code, once it and every process of the job have ended. Fails after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.launch.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        ranks.wait_for_end_of(self.mark, max(0.0, deadline - time.monotonic()))
        left = ranks.processes_with(self.mark)
        assert not left, f"{len(left)} processes are left after {seconds:.0f} s\n{self.text()}"
        return self.launch.wait()

    def until(self, condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.launch.poll() is not None:
                assert condition(), f"the job ended before {what}\n{self.text()}"
                return
            assert time.monotonic() < deadline, f"not after {seconds:.0f} s: {what}\n{self.text()}"
            time.sleep(0.02)

    def until_update(self, step: int) -> None:
        """Wait for the row of an update at or after ``step``."""
        assert self.out is not None
        self.until(lambda: any(int(row["step"]) >= step for row in rows(self.out, "steps.csv")), f"update {step}")

    def pids(self) -> dict[int, int]:
        """The process of each rank that lives."""
        found = {}
        for pid in ranks.processes_with(self.mark):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                variables = dict(entry.split(b"=", 1) for entry in environ if b"=" in entry)
                program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
                rank = variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"HOROVOD_RANK"))
                if rank is not None and os.path.basename(program).startswith(b"python"):
                    found[int(rank)] = pid
        return found

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group of the launcher, as a terminal does for Ctrl-C."""
        os.killpg(self.launch.pid, number)

    @property
    def stdout(self) -> str:
        return _content(self._stdout)

    @property
    def stderr(self) -> str:
        return _content(self._stderr)

    @property
    def errors(self) -> list[str]:
        """Every line in which hvdbs says an error, without the launcher's prefix."""
        return re.findall(r"hvdbs: error: (.*)", self.stderr)

    def text(self) -> str:
        return f"--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"


def _content(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def end_of(job: Job) -> None:
    """Wait for a job that is to finish."""
    code = job.wait()
    assert code == 0, f"exit {code}\n{job.text()}"
    assert job.errors == []
    assert job.out is not None
    assert ended(job.out) == ("finished", 0)


def ended(out: Path) -> tuple[str, int] | None:
    """Outcome and exit code of exit.json, or None while there is none."""
    try:
        record = json.loads((out / "exit.json").read_text())
    except FileNotFoundError:
        return None
    return record["outcome"], record["exit_code"]


def rows(out: Path, table: str) -> list[dict[str, str]]:
    """The whole lines of a CSV file that may be under way."""
    try:
        text = (out / table).read_text()
    except FileNotFoundError:
        return []
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def whole_steps(out: Path) -> list[int]:
    """The steps of all whole checkpoints, in order."""
    folders = (out / "checkpoints").glob("step-*")
    return sorted(int(f.name.removeprefix("step-")) for f in folders if checkpoint.fault(f) is None)


class Run:
    """What a run left behind."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())

    @cached_property
    def state(self) -> State:
        """The final checkpoint."""
        folder = self.out / "checkpoints" / (self.out / "checkpoints" / "latest").read_text().strip()
        assert checkpoint.fault(folder) is None
        return checkpoint.load((folder / "model.pt").read_bytes(), torch.device("cpu"))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and momentum by name."""
        momentum = self.state.optimizer["state"]
        return {**self.state.model, **{f"momentum.{n}": s["momentum_buffer"] for n, s in momentum.items()}}

    def table(self, name: str) -> list[dict[str, str]]:
        """The rows of a CSV file without what differs from run to run: times and speeds."""
        timed = ("seconds", "samples_per_second")
        return [{k: v for k, v in row.items() if not k.endswith(timed)} for row in rows(self.out, name)]


def assert_same_bits(run: Run, other: Run) -> None:
    """Equal parameters, buffers, momentum, and equal files, row by row."""
    assert run.state.progress == other.state.progress
    assert run.tensors.keys() == other.tensors.keys()
    differ = [name for name, tensor in run.tensors.items() if not torch.equal(tensor, other.tensors[name])]
    assert differ == []
    assert run.summary["parameter_digest"] == other.summary["parameter_digest"]
    assert_same_rows(run, other)


def assert_same_rows(run: Run, other: Run) -> None:
    for name in TABLES:
        assert other.table(name), name
        assert run.table(name) == other.table(name), name
    timed = {"seconds", "peak_memory_bytes"}
    for field in records.columns(records.Summary):
        assert field in timed or run.summary[field] == other.summary[field], field


def assert_same_training(run: Run, other: Run, tolerance: float = 1e-12) -> None:
    """Law 1 over launchers, back-ends and world sizes: equal but for the order of summation; equal scores."""
    assert run.state.progress == other.state.progress
    for name, tensor in other.tensors.items():
        got = run.tensors[name]
        if tensor.is_floating_point():
            error = (got - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30)
            assert error <= tolerance, f"{name}: {error:.1e}"
        else:
            assert torch.equal(got, tensor), name
    for score in ("top1", "top5"):
        assert run.summary[score] == other.summary[score]
    scores = [
        [(row["step"], row["top1"], row["top5"], row["samples"]) for row in r.table("evals.csv")] for r in (run, other)
    ]
    assert scores[0] == scores[1]
