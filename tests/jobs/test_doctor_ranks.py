"""The doctor's own trial: two ranks that really sum, by MPI and by Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ranks


@pytest.mark.timeout(240)
def test_both_ways_sum_on_two_ranks_and_the_exit_code_follows_the_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvdbs.doctor", "--json", "--data", str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, env=ranks.environment(), capture_output=True, text=True, timeout=200)
    told = json.loads(done.stdout)
    lines = {(line["group"], line["name"]): line for line in told["findings"]}
    for name in ("MPI", "Gloo"):
        line = lines["communication", name]
        assert line["word"] == "ok" and line["text"].startswith("2 ranks on 1 node"), line
    assert ("communication", "MPI or Gloo") in lines
    assert lines["software", "Horovod"]["word"] == "ok"
    assert "files/s" in lines["files", "data"]["text"]
    failed = any(line["word"] == "FAIL" for line in told["findings"])
    assert done.returncode == failed, done.stderr
