"""These tests submit batch jobs to a Slurm of their own (cluster.py), and are skipped where none can be started."""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(1, str(Path(__file__).parents[1] / "jobs"))

import ranks  # tools/, as conftest.py of tests has it
from batch import Batch, Submit
from cluster import Cluster, missing, wait_until
from launching import ROOT

from hvdbs.data import digits


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
