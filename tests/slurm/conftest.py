"""These tests submit batch jobs to a Slurm of their own (cluster.py), and are skipped where none can be started."""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(1, str(Path(__file__).parents[1] / "jobs"))

import ranks  # tools/, as conftest.py of tests has it
from cluster import Cluster, missing, wait_until
from launching import ROOT, Run, ended, rows

from hvdbs.data import digits

LIMIT_SECONDS = 240.0  # for any job here: most take some seconds on two cores that are not shared


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = missing()
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    # Not pytest's folder: munge wants its socket where everybody may look for it.
    with tempfile.TemporaryDirectory(prefix="hvdbs-slurm-") as folder, Cluster(Path(folder)) as started:
        yield started


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits of the demo, as image files."""
    root = tmp_path_factory.mktemp("digits") / "digits"
    assert digits.write(str(root)) == digits.TOTAL
    return root


@dataclass
class Batch:
    """A batch job under way; ``out``: its run directory. Nothing of it is left at the end of a test."""

    cluster: Cluster
    job: str
    out: Path
    log: Path
    mark: str

    def text(self) -> str:
        said = self.log.read_text(errors="replace")[-4000:] if self.log.exists() else "no output"
        return f"job {self.job} {self.cluster.record(self.job)}\n{said}\n{self.cluster.log()}"

    def until(self, condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
        wait_until(condition, what, seconds, self.text)

    def until_update(self, step: int) -> None:
        self.until(lambda: any(int(row["step"]) >= step for row in rows(self.out, "steps.csv")), f"update {step}")

    def until_state(self, *states: str) -> str:
        self.until(lambda: self.cluster.state(self.job) in states, f"{self.job} is {' or '.join(states)}")
        return self.cluster.state(self.job)

    def until_finished(self) -> Run:
        """The run, once the job has completed and none of its processes is left."""
        state = self.until_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "GONE")
        assert state == "COMPLETED", self.text()
        assert ended(self.out) == ("finished", 0), self.text()
        self.assert_nothing_left()
        return Run(self.out)

    def assert_nothing_left(self, seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while ranks.processes_with(self.mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ranks.processes_with(self.mark) == [], self.text()


Submit = Callable[..., Batch]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """``submit(script, "--options", "of sbatch", launch=[...])``: a script of slurm/ with arguments of hvdbs.launch."""
    batches: list[Batch] = []

    def begin(script: str | Path, *options: str, launch: list[str], out: Path | None = None) -> Batch:
        mark, log = uuid.uuid4().hex, tmp_path / f"{len(batches)}.out"
        path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
        more = ranks.environment() | cluster.environment | {"PATH": path, "VENV": sys.prefix, ranks.MARK: mark}
        where = ["--parsable", "--chdir", str(ROOT), "--output", str(log)]
        job = cluster.slurm("sbatch", *where, *options, ROOT / "slurm" / script, *launch, more=more).strip()
        batches.append(Batch(cluster, job, out or tmp_path / "run", log, mark))
        return batches[-1]

    yield begin
    for batch in batches:
        cluster.slurm("scancel", batch.job, check=False)
        wait_until(lambda batch=batch: batch.job not in cluster.slurm("squeue", "-h", "-o", "%A"), "it is gone", 60)
        ranks.end_marked(batch.mark)
