#!/usr/bin/env python3
"""Build the Horovod wheel for an environment, once, and keep it in a cache.

Horovod 0.28.1 exists only as a source package, and that package does not compile against a torch of today.
PATCHES lists each change made to it, with the reason. A wheel is good for one combination of Horovod and
patches, torch, Python, machine, MPI and CUDA; `Target.key`, the name of its folder in the cache, says which.

tools/environment.py calls this file; by hand, `python3.11 tools/build_horovod.py --venv .venv` prints the
path of the wheel. Standard library only.
"""

import argparse
import dataclasses
import hashlib
import os
import platform
import shutil
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from machine import (
    Mpi,
    check_compiler,
    cuda_home,
    cxx,
    memory_bytes,
    package_mpi,
    path_without,
    probe,
    system_mpi,
)
from steps import Log, Options, Refusal, digest, locked, main_guard, output_of, say

HOROVOD = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
CMAKE = "cmake==3.31.6"  # used only where the PATH has none
CUDA_ARCHITECTURES = (
    "80,90"  # A100 and H100, and PTX of the last for what is newer; HOROVOD_BUILD_CUDA_CC_LIST overrides
)
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Patch:
    """`old` stands exactly once in `file` of Horovod's source and becomes `new`, because of `why`."""

    why: str
    file: str
    old: str
    new: str


PATCHES = (
    Patch(
        "the headers of torch >= 2.1 need C++17, those of torch 2.14 C++20; Horovod asks for 14",
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
    ),
    Patch(
        "as above: this one sets 14 again for the torch extension",
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)",
        "    set(CMAKE_CXX_STANDARD 20)",
    ),
    Patch(
        "the wheel outlives the environment it was built in: it finds PyPI's MPI relative to itself "
        "(site-packages/horovod/torch -> lib), and only a system's MPI where the linker found it",
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..")\n'
        "set(CMAKE_INSTALL_RPATH_USE_LINK_PATH $ENV{HVDBS_SYSTEM_MPI})",
    ),
    Patch(
        "a torch built for CUDA and an nvcc on the PATH must not turn a CPU build into a CUDA build",
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)',
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        'if("$ENV{HOROVOD_GPU_OPERATIONS}" STREQUAL "")\n'
        "    set(Pytorch_CUDA FALSE)\n"
        "endif()",
    ),
    Patch(
        "Open MPI 5 refuses the single dash of `-bind-to` and with it `horovodrun --mpi`; 4 takes both",
        "horovod/runner/mpi_run.py",
        "return list(_OMPI_FLAGS), list(_NO_BINDING_ARGS), _OMPI_IMPL",
        "return list(_OMPI_FLAGS), ['--bind-to none', '--map-by slot'], _OMPI_IMPL",
    ),
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The environment a wheel is for."""

    venv: Path
    torch: str
    mpi: Mpi
    cuda: str  # "cpu", "12" or "13": what Horovod is built for, whatever torch is

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def key(self) -> str:
        patches = digest(repr([(patch.file, patch.old, patch.new) for patch in PATCHES]))
        device = "cpu" if self.cuda == "cpu" else f"cuda{self.cuda}-sm{architectures()}"
        return f"horovod-{HOROVOD}-{patches}-torch-{self.torch}-cp311-{platform.machine()}-{self.mpi.key}-{device}"


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HVDBS_CACHE") or Path(home) / "hvdbs") / "wheels"


def cached_wheel(key: str) -> Path | None:
    return next((cache_folder() / key).glob("horovod-*.whl"), None)


def any_cached(device: str) -> bool:
    """Whether the cache has a wheel, of any torch and MPI, for "cpu", "cuda12", "cuda13"."""
    return any(cache_folder().glob(f"horovod-{HOROVOD}-*-{device}*/horovod-*.whl"))


def wheel_for(target: Target, log: Log, wheels: Path | None = None) -> Path:
    """The wheel for `target`, built if the cache has none; offline from packages in `wheels` if given."""
    folder = cache_folder() / target.key
    with locked(folder.with_name(folder.name + ".lock"), "another build of the same wheel is at work; waiting for it"):
        if wheel := cached_wheel(target.key):
            return wheel
        check_compiler(target.python)
        say(f"    compiling it, once: {'2 to 5' if target.cuda == 'cpu' else '5 to 15'} minutes on two idle cores")
        with tempfile.TemporaryDirectory(prefix="hvdbs-horovod-") as work:
            built = build(target, Path(work), log, wheels)
            # A half-written wheel must never look like a whole one: same folder, other name, then rename.
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{built.name}.{os.getpid()}.partial"
            shutil.copyfile(built, partial)
            return partial.rename(folder / built.name)


def build(target: Target, work: Path, log: Log, wheels: Path | None) -> Path:
    index = ["--no-index", "--find-links", wheels] if wheels else []
    source = unpack(download(target.python, work, log, index), work)
    env = build_environment(target, work)
    if shutil.which("cmake", path=env["PATH"]) is None:
        tools = work / "cmake"
        log.pip(target.python, f"installing {CMAKE}", "install", *index, "--target", tools, CMAKE)
        env["PATH"] = f"{tools / 'bin'}{os.pathsep}{env['PATH']}"
        env["PYTHONPATH"] = str(tools)  # its `cmake` is a Python script
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--verbose", "--wheel-dir", work / "wheel"]
    log.pip(target.python, f"compiling Horovod {HOROVOD}", "wheel", *options, source, env=env)
    return next((work / "wheel").glob("horovod-*.whl"))


def download(python: Path, folder: Path, log: Log, index: Sequence[str | Path] = ()) -> Path:
    """Horovod's source package, in `folder`."""
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--dest", folder]
    what = f"downloading the source of Horovod {HOROVOD}"
    log.pip(python, what, "download", *index, *options, f"horovod=={HOROVOD}")
    return folder / f"horovod-{HOROVOD}.tar.gz"


def unpack(archive: Path, work: Path) -> Path:
    """The patched source tree of Horovod."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise Refusal(f"{archive.name} has sha256 {found}, and the patches are for {SDIST_SHA256}")
    with tarfile.open(archive) as tar:
        tar.extractall(work)  # safe: the contents are known by their digest
    source = work / f"horovod-{HOROVOD}"
    for patch in PATCHES:
        file = source / patch.file
        text = file.read_text()
        if text.count(patch.old) != 1:
            raise Refusal(f"{patch.file} of Horovod has {patch.old!r} {text.count(patch.old)} times, not once")
        file.write_text(text.replace(patch.old, patch.new))
    return source


def build_environment(target: Target, work: Path) -> dict[str, str]:
    # What HOROVOD_* the shell happens to hold must not change a wheel under the same key.
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    jobs = max(1, min(len(os.sched_getaffinity(0)), memory_bytes() // (2 * GIB)))
    path = [str(target.mpi.folder), path_without(target.venv / "bin")]
    gpu = {}
    if target.cuda != "cpu":
        toolkit = cuda_home(target.cuda)
        path.insert(0, str(toolkit / "bin"))  # Horovod asks the first nvcc for its flags, whatever its version
        gpu = nccl_variables(target, toolkit, work)
    return env | {
        "PATH": os.pathsep.join(path),
        "MAKEFLAGS": f"-j{jobs}",  # and not those of the make that called us
        "CXX": cxx(),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # cmake 4 refuses Gloo's older minimum without it
        "HVDBS_SYSTEM_MPI": "TRUE" if target.mpi.origin == "system" else "FALSE",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
        **gpu,
    }


def nccl_variables(target: Target, toolkit: Path, work: Path) -> dict[str, str]:
    """What turns the build into one for NCCL."""
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(toolkit),
        "CUDA_HOME": str(toolkit),  # torch looks for libcudart beside the nvcc of the PATH, which may be a script
        "HOROVOD_NCCL_HOME": str(nccl_home(target, work)),
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": architectures(),
    }


def architectures() -> str:
    return os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", CUDA_ARCHITECTURES)


def nccl_home(target: Target, work: Path) -> Path:
    """A folder with NCCL's `include` and `lib/libnccl.so`: the caller's, else links to torch's package."""
    if given := os.environ.get("HOROVOD_NCCL_HOME"):
        return Path(given)
    place = output_of([target.python, "-c", "import nvidia.nccl as nccl; print(next(iter(nccl.__path__)))"]).strip()
    library = Path(place) / "lib" / "libnccl.so.2"
    if not place or not library.exists():
        raise Refusal(
            f"CUDA={target.cuda} needs NCCL, and torch {target.torch} brings no package of it: "
            "`module load nccl` and HOROVOD_NCCL_HOME=DIR"
        )
    home = work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(Path(place) / "include")
    (home / "lib" / "libnccl.so").symlink_to(library)
    return home


def cuda_for(asked: str, torch: str, torch_cuda: str | None) -> str:
    """What to build for a `torch` of CUDA `torch_cuda` (None: for the CPU): "cpu", "12" or "13".

    `asked` is one of these, or "torch". Raises Refusal.
    """
    major = torch_cuda.split(".")[0] if torch_cuda else "cpu"
    cuda = major if asked == "torch" else asked
    if cuda not in ("cpu", major):
        others = "" if major == "cpu" else f" or CUDA={major}"
        raise Refusal(f"CUDA={cuda}, and torch {torch} is built for CUDA {torch_cuda or 'none'}: CUDA=cpu{others}")
    if cuda == "cpu" and asked == "torch":
        raise Refusal(
            f"NCCL needs a torch for CUDA, and torch {torch} is for the CPU: VENV=DIR for another environment"
        )
    return cuda


def target_of(venv: Path, cuda: str) -> Target:
    """The target of an environment that is set up; `cuda` as in `cuda_for`. Raises Refusal."""
    mpi = system_mpi(venv) or package_mpi(venv)
    found = probe(venv / "bin" / "python")
    if mpi is None or found["torch"] is None:
        raise Refusal(f"{venv} lacks {'an MPI' if mpi is None else 'torch'}: run `make setup`")
    return Target(venv.resolve(), found["torch"], mpi, cuda_for(cuda, found["torch"], found["torch_cuda"]))


def main() -> None:
    parser = Options(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="the environment, with torch and an MPI in it")
    what = "what to build for; torch: the CUDA version of the environment's torch (default: cpu)"
    parser.add_argument("--cuda", choices=["cpu", "12", "13", "torch"], default="cpu", help=what)
    parser.add_argument("--wheels", type=Path, help="use packages from this folder only")
    parser.add_argument("--print-key", action="store_true", help="print the name of the wheel's folder and stop")
    args = parser.parse_args()
    target = target_of(args.venv, args.cuda)
    if args.print_key:
        print(target.key)
        return
    begin = time.monotonic()
    wheel = wheel_for(target, Log(args.venv / "setup.log"), args.wheels)
    say(f"    done in {time.monotonic() - begin:.0f} s")
    print(wheel)


if __name__ == "__main__":
    main_guard(main, "build_horovod")
