"""This machine: Python, compiler, cores, memory, limits, shared memory."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hvdbs.doctor.findings import Finding, Word, amount

SECONDS = 10.0  # for a command that answers at once or never
_CXX20 = "#include <concepts>\n#include <span>\nint main() {}\n"
_SHM_BYTES = 500e6
_FILES = 1024
_MEMLOCK = "*  -  memlock  unlimited in /etc/security/limits.conf; for Slurm's jobs LimitMEMLOCK=infinity of slurmd"


def said(*command: str, seconds: float = SECONDS, text: str | None = None) -> tuple[bool, str]:
    """Whether a short command succeeded, and all that it said. What is not installed has not."""
    try:
        done = subprocess.run(
            command, input=text or "", capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer in {seconds:g} s"
    except OSError as error:
        return False, error.strerror or str(error)
    return done.returncode == 0, done.stdout + done.stderr


def path() -> str:
    """The PATH, after the folder of this Python: launchers stand there, also where no environment is activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def which(name: str) -> str | None:
    return shutil.which(name, path=path())


def python() -> Finding:
    own = platform.python_version()
    where = f"{own}, {sys.executable}"
    if sys.version_info[:2] != (3, 11):
        fix = "python3.11 (module load python/3.11), then make setup PYTHON=python3.11"
        return Finding("software", "Python", "FAIL", f"{where}: hvdbs is for 3.11", fix, own)
    return Finding("software", "Python", "ok", where, alike=own)


def compiler(needed: bool) -> Finding:
    """Whether Horovod could be compiled; ``needed``: it is not there yet."""
    word: Word = "FAIL" if needed else "note"
    names = [name for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name]
    found = next((place for name in names if (place := which(name))), None)
    why = "" if needed else " (only to compile Horovod anew)"
    if found is None:
        fix = "apt install g++, dnf install gcc-c++ or module load gcc"
        return Finding("software", "compiler", word, f"none: {', '.join(names)} are not there{why}", fix)
    version = (said(found, "--version")[1].splitlines() or ["unknown"])[0]
    good, _ = said(found, "-std=c++20", "-x", "c++", "-fsyntax-only", "-", text=_CXX20)
    if not good:
        fix = "g++ 11 or newer: apt install g++, dnf install gcc-toolset-12 or module load gcc"
        return Finding("software", "compiler", word, f"{version} does not compile C++20, as torch needs{why}", fix)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        fix = "apt install python3.11-dev or dnf install python3.11-devel"
        return Finding("software", "compiler", word, f"{version}, but {header} is missing{why}", fix)
    return Finding("software", "compiler", "ok", f"{version}, compiles C++20")


def cores() -> Finding:
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    quota = _quota()
    text = f"{allowed} of {there}, {model()}, load {os.getloadavg()[0]:.1f}"
    if quota is not None and quota < allowed:
        fix = (
            f"not more than {max(1, int(quota))} ranks with threads: 1 (--threads), or a larger limit of the container"
        )
        return Finding("machine", "cores", "note", f"{text}; a control group lets {quota:g} of them work", fix, model())
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > allowed:
        fix = "unset OMP_NUM_THREADS: a rank then takes as many as it has cores"
        return Finding("machine", "cores", "note", f"{text}; OMP_NUM_THREADS is {threads}", fix, model())
    return Finding("machine", "cores", "ok", text, alike=model())


def model() -> str:
    from hvdbs.environment import cpu_model

    return cpu_model()


def _quota() -> float | None:
    """Cores' worth of time that this process's control group has, where it is limited."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, below = line.split(":", 2)
        if number == "0":
            files = [Path(f"/sys/fs/cgroup{below}/cpu.max"), Path("/sys/fs/cgroup/cpu.max")]
        elif "cpu" in controllers.split(","):
            files = [Path(f"/sys/fs/cgroup/cpu{at}/cpu.cfs_quota_us") for at in (below, "")]
        else:
            continue
        for file in files:
            if file.is_file():
                words = file.read_text().split()
                period = words[1] if len(words) > 1 else file.with_name("cpu.cfs_period_us").read_text()
                if words[0] not in ("max", "-1"):
                    return int(words[0]) / int(period)
                break
    return None


def memory() -> Finding:
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(values[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    text = f"{amount(total)}, {amount(free)} of it free"
    if free < 2e9:
        return Finding("machine", "memory", "note", text, "a rank with torch takes 0.5 to 2 GB before its model: fewer")
    return Finding("machine", "memory", "ok", text)


def locked_memory(infiniband: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("machine", "memlock", "ok", "unlimited", alike="unlimited")
    if infiniband:
        return Finding("machine", "memlock", "note", f"{amount(soft)}, too little for InfiniBand", _MEMLOCK, str(soft))
    return Finding("machine", "memlock", "ok", f"{amount(soft)}; InfiniBand, which is not here, needs it unlimited")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if 0 <= soft < _FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        text = f"{text} open files, and a rank of Gloo has a connection to every other besides its data"
        return Finding("machine", "nofile", "FAIL" if soft < 128 else "note", text, f"ulimit -n {most}")
    return Finding("machine", "nofile", "ok", f"{text} open files")


def shared_memory() -> Finding:
    place = Path("/dev/shm")
    if not place.is_dir() or not os.access(place, os.W_OK):
        fix = "mount -t tmpfs tmpfs /dev/shm; in a container --shm-size=1g"
        return Finding("machine", "/dev/shm", "note", "cannot be written: ranks of one node meet there", fix)
    status = os.statvfs(place)
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    text = f"{amount(size)}, {amount(free)} of it free"
    if free < _SHM_BYTES:
        left = (
            "remove what dead jobs have left in it" if size >= _SHM_BYTES else "docker run --shm-size=1g, or --ipc=host"
        )
        return Finding("machine", "/dev/shm", "note", f"{text}; MPI and NCCL take some MB for each rank", left)
    return Finding("machine", "/dev/shm", "ok", text)
