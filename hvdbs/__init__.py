"""hvdbs: Horovod/MPI allreduce training that grows the global batch by gradient accumulation."""

__version__ = "0.1.0"
