"""A calibration with round numbers."""

from __future__ import annotations

from hvdbs.calibration import Calibration, Fitted, Passes, Spread
from hvdbs.prediction import Link


def spread(seconds: float) -> Spread:
    return Spread(seconds, 0.9 * seconds, 1.1 * seconds)


def calibration(
    model: str = "resnet8", micro_batch: int = 8, image_size: int = 16, world_size: int = 2, rate: float = 1e9
) -> Calibration:
    """Forward 10 ms, backward 20, each further micro-batch 32; ``rate`` bytes a second, 0.2 ms an operation."""
    link = Link(rate, 0.0, 2e-4, 5e-4)
    passes = Passes(
        forward=spread(0.01),
        backward=spread(0.02),
        again=spread(0.032),
        backward_again=spread(0.022),
        optimizer=spread(0.002),
        jitter=0.001,
        ready={},
        data=None,
        flops_per_sample=0.0,
        product=(1e-9, 2e-11),
    )
    rows = ((1024, 2e-4), (2**20, 2e-4 + 2**20 / rate))
    links = tuple(Fitted(name, world_size, link, 0.05, rows) for name in ("allreduce", "allgather"))
    return Calibration(
        model=model,
        micro_batch=micro_batch,
        image_size=image_size,
        dtype="float32",
        autocast="none",
        wire="none",
        device="cpu",
        world_size=world_size,
        local_size=world_size,
        hosts=1,
        cores=1.0,
        threads=1,
        backend="horovod-mpi" if world_size > 1 else "solo",
        passes=passes,
        links=links if world_size > 1 else (),
        facts={"date": "2026-01-01", "variables": {}},
    )
