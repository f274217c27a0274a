"""A batch job, and waiting for what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ranks
from cluster import Cluster, wait_until
from launching import Run, ended, rows

LIMIT_SECONDS = 240.0  # for any job here: most take some seconds on two cores that are not shared


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

    def until_state(self, *states: str, seconds: float = LIMIT_SECONDS) -> str:
        self.until(lambda: self.cluster.state(self.job) in states, f"{self.job} is {' or '.join(states)}", seconds)
        return self.cluster.state(self.job)

    def until_finished(self, seconds: float = LIMIT_SECONDS) -> Run:
        """The run, once the job has completed and none of its processes is left."""
        state = self.until_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "GONE", seconds=seconds)
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
