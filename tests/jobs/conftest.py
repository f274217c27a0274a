"""These tests start jobs of their own: `python -m hvdbs.train` under each launcher, ended by signals, resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import Job, Run, end_of, write_config


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``Job(...)``, with nothing of it left at the end of the test."""
    with ExitStack() as jobs:

        def begin(*arguments: object, **options: object) -> Job:
            return jobs.enter_context(Job(*arguments, **options))  # type: ignore[arg-type]  # passed on as they are

        yield begin


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that most tests share: float64, three stages, 65 updates, about two seconds of training."""
    return write_config(tmp_path_factory.mktemp("config") / "tiny.yaml")


@pytest.fixture(scope="session")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The shared run under ``horovodrun --mpi -np 2``, to its end."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    with Job("mpi", 2, config, out) as job:
        end_of(job)
    return Run(out)


@pytest.fixture(scope="session")
def undisturbed_alone(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The shared run as a plain process that has neither Horovod nor MPI for Python."""
    out = tmp_path_factory.mktemp("alone") / "run"
    blocked = "import sys; sys.modules['horovod'] = sys.modules['mpi4py'] = None"
    with Job("plain", 1, config, out, before=blocked) as job:
        end_of(job)
    return Run(out)
