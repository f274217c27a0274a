"""The doctor in a job of Slurm: every node is looked at, and ranks on both of them sum."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import ranks
from cluster import Cluster, wait_until
from launching import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def test_every_node_of_a_job_answers_and_their_ranks_sum_by_mpi_and_gloo(cluster: Cluster, tmp_path: Path) -> None:
    more = ranks.environment() | cluster.environment | {"PYTHONPATH": str(ROOT)}
    where = ["--chdir", str(tmp_path), "--output", str(tmp_path / "said"), "--error", str(tmp_path / "complaints")]
    line = f"{sys.executable} -m hvdbs.doctor --json"
    job = cluster.slurm("sbatch", "--parsable", "-N2", "--ntasks-per-node=1", *where, "--wrap", line, more=more).strip()
    wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), "the doctor has ended", 300, cluster.log)
    told = json.loads((tmp_path / "said").read_text())
    lines = {(line["group"], line["name"]): line for line in told["findings"]}
    assert lines["nodes", "reached"]["text"] == "2 of 2 by srun: node1, node2"
    assert lines["nodes", "clocks"]["word"] == "ok"
    assert lines["software", "Horovod"]["nodes"] == ["node1", "node2"]
    assert lines["cluster", "Slurm"]["word"] == "ok"
    for name, launcher in (("MPI", "srun"), ("Gloo", "srun-gloo")):
        line = lines["communication", name]
        assert line["word"] == "ok" and line["text"].startswith(f"2 ranks on 2 nodes by {launcher}: "), line
    assert cluster.state(job) == "COMPLETED", (tmp_path / "complaints").read_text()
