"""What is installed, and whether it fits together: packages, torch, Horovod, MPI, DALI, the driver and GPUs."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from hvdbs.doctor.findings import Finding
from hvdbs.doctor.machine import said, which
from hvdbs.environment import git_commit, versions

TESTED = {"torch": "2.14.1", "horovod": "0.28.1"}  # constraints.txt, tools/build_horovod.py
_NEEDED = ("jsonargparse", "matplotlib", "numpy", "pandas", "PIL", "yaml", "tensorboard", "torchvision", "tqdm")
_SLOW_SECONDS = 30.0  # to import torch
_SETUP = "make setup (README: Two commands)"
_NVIDIA = "0x10de"  # PCI vendor
_ROOT_ALLOWED = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_VENDORS = (
    ("Open MPI", r"Open MPI\)? v?(\d+)\.(\d+)\.(\d+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*(\d+)\.(\d+)"),
    ("MPICH", r"(?:MPICH Version|Version):\s*(\d+)\.(\d+)"),
)


def hvdbs() -> Finding:
    folder = Path(__file__).parents[1]
    commit = git_commit(folder)
    version = f"{versions()['hvdbs']}{f', commit {commit[:8]}{commit[40:]}' if commit else ''}"
    return Finding("software", "hvdbs", "ok", f"{version}, {folder.parent}", alike=version)


def packages() -> Finding:
    missing = [name for name in _NEEDED if util.find_spec(name) is None]
    if missing:
        return Finding("software", "packages", "FAIL", f"missing: {', '.join(missing)}", _SETUP)
    return Finding("software", "packages", "ok", "all that hvdbs imports are there")


def torch(found: Mapping[str, Any]) -> Finding:
    facts = found.get("torch", {"error": found.get("problem", "nothing was said")})
    if "error" in facts:
        there = _installed("torch")
        text = f"{there} is installed and cannot be imported ({facts['error']})" if there else "not installed"
        return Finding("software", "torch", "FAIL", text, _SETUP, "none")
    version, seconds = facts["version"], facts["seconds"]
    text = f"{version}, imported in {seconds:.1f} s"
    if seconds > _SLOW_SECONDS:
        fix = "the environment on a faster file system: every rank of every start waits for it"
        return Finding("software", "torch", "note", text, fix, version)
    if version.partition("+")[0] != TESTED["torch"]:
        fix = f"make test shows whether it does: hvdbs was tested with {TESTED['torch']}"
        return Finding("software", "torch", "note", text, fix, version)
    return Finding("software", "torch", "ok", text, alike=version)


def horovod(found: Mapping[str, Any]) -> Finding:
    facts = found.get("horovod", {"error": found.get("problem", "it ends the process that imports it")})
    there = _installed("horovod")
    if "error" in facts:
        if there is None:
            fix = f"{_SETUP}: it compiles Horovod once; pip install horovod does not work with a torch of today"
            return Finding(
                "software", "Horovod", "FAIL", "not installed: one process trains, several do not", fix, "none"
            )
        built, now = _built_against(), found.get("torch", {}).get("version") or _installed("torch")
        against = f", built against torch {built} while {now or 'none'} is installed" if built and built != now else ""
        text = f"{there} cannot be imported{against} ({facts['error']})"
        return Finding(
            "software", "Horovod", "FAIL", text, "make setup compiles it anew for this torch and MPI", "none"
        )
    features = [name for name in ("mpi", "gloo", "nccl") if facts[name]]
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}
    text = f"{facts['version']}, built with {' and '.join(names[name] for name in features) or 'nothing'}"
    text += f" against torch {facts['torch']}" if facts["torch"] else ""
    alike = f"{facts['version']} {features} {facts['torch']}"
    now = found["torch"].get("version")
    if not facts["mpi"] and not facts["gloo"]:
        return Finding("software", "Horovod", "FAIL", f"{text}: ranks cannot meet", _SETUP, alike)
    if facts["torch"] and now and facts["torch"] != now:
        fix = "make setup compiles it anew; it may crash, or be wrong, with another torch"
        return Finding("software", "Horovod", "FAIL", f"{text}, and torch {now} is installed", fix, alike)
    if not facts["mpi"]:
        fix = "make setup where mpicxx is on the PATH; until then horovodrun --gloo, or srun-gloo in a job of Slurm"
        return Finding("software", "Horovod", "note", text, fix, alike)
    return Finding("software", "Horovod", "ok", text, alike=alike)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _built_against() -> str | None:
    """The torch that Horovod was built against, from its own file; it need not be importable."""
    spec = util.find_spec("horovod")
    for folder in spec.submodule_search_locations or () if spec else ():
        file = Path(folder) / "metadata.json"
        if file.is_file():
            built = json.loads(file.read_text()).get("pytorch")
            return built if isinstance(built, str) else None
    return None


def mpi(found: Mapping[str, Any]) -> Finding:
    facts = found.get("horovod", {})
    launcher = which("mpirun")
    library = facts.get("library")
    ours = f"Horovod's is {named(facts.get('library_says') or '')[0]}, {library}" if library else ""
    if launcher is None:
        without = f"no mpirun on the PATH{f'; {ours}' if ours else ''}"
        fix = "module load openmpi, or make setup, which brings one; until then horovodrun --gloo or srun"
        return Finding("software", "MPI", "note", without, fix, "none")
    _, text = said(launcher, "--version")
    name, version = named(text)
    shown = f"{name}, {launcher}"
    if library:
        of_library, linked = named(facts.get("library_says") or "")
        if (name.split()[0], version[:1]) != (of_library.split()[0], linked[:1]):
            fix = "the bin folder of Horovod's MPI first on the PATH; or make setup, with this one's mpicxx on it"
            text = f"{shown}, but {ours}: each rank would be alone"
            return Finding("software", "MPI", "FAIL", text, fix, f"{name} {of_library}")
        if version != linked:
            fix = "one MPI: the bin folder of Horovod's first on the PATH, or make setup with this one"
            return Finding("software", "MPI", "note", f"{shown}; {ours}", fix, f"{name} {of_library}")
    if (
        os.geteuid() == 0
        and name.startswith("Open MPI")
        and not all(os.environ.get(one) == "1" for one in _ROOT_ALLOWED)
    ):
        fix = f"export {'=1 '.join(_ROOT_ALLOWED)}=1; horovodrun and python -m hvdbs.launch need neither"
        return Finding("software", "MPI", "note", f"{shown}; a bare mpirun refuses root, as whom this runs", fix, name)
    return Finding("software", "MPI", "ok", f"{shown}{', as Horovod was built with' if library else ''}", alike=name)


def named(text: str) -> tuple[str, tuple[int, ...]]:
    """Whose MPI it is that says ``text``, with its version as text and as numbers."""
    for vendor, pattern in _VENDORS:
        if match := re.search(pattern, text):
            numbers = tuple(int(number) for number in match.groups())
            return f"{vendor} {'.'.join(map(str, numbers))}", numbers
    return " ".join(text.split())[:60] or "unknown MPI", ()


def dali() -> Finding:
    version = versions()["dali"]
    if version is None:
        fix = "pip install nvidia-dali-cuda130 (nvidia-dali-cuda120 for CUDA 12); it needs no GPU"
        return Finding(
            "software", "DALI", "note", "not installed: Pillow decodes images, fewer per second", fix, "none"
        )
    return Finding("software", "DALI", "ok", version, alike=version)


def mpi4py(found: Mapping[str, Any]) -> Finding | None:
    if not found.get("horovod", {}).get("mpi"):
        return None
    version = _installed("mpi4py")
    if version is None:
        fix = "pip install mpi4py: with it a rank that fails ends the others at once"
        return Finding("software", "mpi4py", "note", "not installed", fix)
    return Finding("software", "mpi4py", "ok", version)


def gpus(found: Mapping[str, Any]) -> Finding:
    """The GPUs that are in the machine, that the driver lists and that torch sees."""
    facts = found.get("torch", {})
    works, text = said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    listed = [" ".join(line.split()) for line in text.splitlines() if line.strip()] if works else []
    in_slots = nvidia_devices(Path("/sys/bus/pci/devices"))
    alike = "; ".join(listed) or str(in_slots)
    if not listed and not in_slots:
        return Finding("GPU", "GPUs", "ok", "none, training is on the CPU", alike=alike)
    if not listed:
        fix = "load the driver: nvidia-smi says why it does not; or train with device: cpu"
        said_so = " ".join(text.split())[:120]
        return Finding(
            "GPU", "GPUs", "FAIL", f"{in_slots} in the machine, none through the driver ({said_so})", fix, alike
        )
    shown = f"{len(listed)} x {listed[0]}" if len(set(listed)) == 1 else "; ".join(listed)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sees = len(facts.get("gpus", []))
    if "error" not in facts and facts and not sees:
        why = "torch is built for the CPU" if facts["cuda"] is None else f"CUDA_VISIBLE_DEVICES {visible!r}"
        fix = "make setup CUDA=13" if facts["cuda"] is None else "the driver's line above; nvidia-smi; dmesg"
        return Finding("GPU", "GPUs", "FAIL", f"{shown}, and torch sees none of them ({why})", fix, alike)
    limited = f"; CUDA_VISIBLE_DEVICES shows {sees}" if visible is not None and facts else ""
    return Finding("GPU", "GPUs", "ok", f"{shown}{limited}", alike=alike)


def nvidia_devices(folder: Path) -> int:
    """How many NVIDIA display or 3D controllers are on the PCI bus, whatever the driver makes of them."""
    found = 0
    for device in folder.glob("*"):
        with_class = (device / "class").read_text() if (device / "class").is_file() else ""
        if with_class.startswith("0x03") and (device / "vendor").read_text().strip() == _NVIDIA:
            found += 1
    return found


def driver(found: Mapping[str, Any]) -> Finding | None:
    cuda = found.get("torch", {}).get("cuda")
    newest = driver_cuda()
    if newest is None:
        if nvidia_devices(Path("/sys/bus/pci/devices")):
            return None  # the line of the GPUs says it
        return Finding("GPU", "driver", "ok", "none, and no GPU that would need it", alike="none")
    _, answer = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    version = (answer.split() or ["unknown"])[0]
    text = f"{version}, runs CUDA {newest[0]}.{newest[1]}"
    return fits(text, newest, cuda)


def fits(text: str, newest: tuple[int, int], cuda: str | None) -> Finding:
    """``newest``: the CUDA that the driver runs; ``cuda``: that of torch, which within a major version may be newer."""
    if cuda is None:
        return Finding("GPU", "driver", "ok", text, alike=text)
    major = int(cuda.split(".")[0])
    if newest[0] < major:
        fix = f"a newer driver, or make setup CUDA={newest[0]}" if newest[0] >= 12 else "a newer driver"
        return Finding("GPU", "driver", "FAIL", f"{text}, and torch is built for CUDA {cuda}", fix, text)
    return Finding("GPU", "driver", "ok", f"{text}; torch is built for {cuda}", alike=text)


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, by its own word; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def nccl(found: Mapping[str, Any]) -> Finding | None:
    """None where the line of Horovod says that there is none."""
    if "nccl" not in found.get("horovod", {}):
        return None
    there = bool(found.get("torch", {}).get("gpus"))
    own, of_torch = found.get("horovod", {}).get("nccl"), found.get("torch", {}).get("nccl")
    brought = f"torch brings {of_torch}" if of_torch else "torch brings none"
    if own:
        version = f"{own // 10000}.{own % 10000 // 100}.{own % 100}"
        return Finding("GPU", "NCCL", "ok", f"Horovod is built with {version}; {brought}", alike=version)
    if there:
        fix = "make setup CUDA=13 (12 for a torch of CUDA 12)"
        text = f"Horovod is built without it: gradients go through the host's memory; {brought}"
        return Finding("GPU", "NCCL", "note", text, fix, "none")
    return Finding("GPU", "NCCL", "ok", f"Horovod is built without it, as GPUs alone need it; {brought}", alike="none")
