"""``python -m hvdbs.doctor.probe``: what torch and Horovod say of themselves, as one line of JSON.

In a process of its own, because a library that does not fit may end the process that loads it.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

MARK = "hvdbs.probe"
_LONGEST = 300  # characters of an error


def torch_facts() -> dict[str, Any]:
    begin = time.monotonic()
    import torch

    seconds = time.monotonic() - begin
    sees = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": seconds,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if sees else [],
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def horovod_facts() -> dict[str, Any]:
    import horovod
    import horovod.torch as hvd

    metadata = Path(horovod.__file__).with_name("metadata.json")
    built = json.loads(metadata.read_text()).get("pytorch") if metadata.is_file() else None
    return {
        "version": horovod.__version__,
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": int(hvd.nccl_built()),
        "torch": built,
        **mpi_loaded(),
    }


def mpi_loaded() -> dict[str, Any]:
    """The MPI library of this process, which is the one that Horovod was linked with, and what it calls itself."""
    maps = Path("/proc/self/maps").read_text()
    library = next(iter(re.findall(r"/\S*/libmpi\w*\.so[\d.]*", maps)), None)
    if library is None:
        return {"library": None, "library_says": None}
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(library).MPI_Get_library_version(text, ctypes.byref(length))  # may be asked before MPI_Init
    return {"library": library, "library_says": text.value.decode(errors="replace")}


def main() -> int:
    found: dict[str, Any] = {}
    for name, look in (("torch", torch_facts), ("horovod", horovod_facts)):
        try:
            found[name] = look()
        except Exception as error:  # whatever a broken installation raises
            found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST]}
        # A line for each stage: one that ends the process takes nothing of the others with it.
        sys.stdout.write(f"{MARK} {json.dumps(found)}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
