"""What the machine offers a set-up: MPI, C++ compiler, CUDA toolkit, GPUs, memory. Standard library only."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from steps import Refusal, digest, output_of


def path_without(folder: Path) -> str:
    """PATH less `folder`: what the machine offers by itself while an environment is active."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if entry and Path(entry).resolve() != folder.resolve())


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_gpu() -> bool:
    """Whether the driver sees an NVIDIA GPU."""
    return "GPU 0" in output_of(["nvidia-smi", "-L"])


@dataclasses.dataclass(frozen=True)
class Mpi:
    name: str
    version: str
    origin: str  # "system", or "pypi" for the package in the environment
    folder: Path  # of mpicxx

    @property
    def key(self) -> str:
        """A system's MPI is linked by its place, which is therefore part of the key."""
        place = "pypi" if self.origin == "pypi" else "system-" + digest(str(self.folder.resolve()))
        return f"{self.name}-{self.version}-{place}"

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({'PyPI package' if self.origin == 'pypi' else self.folder})"


def system_mpi(venv: Path) -> Mpi | None:
    """The MPI whose compiler is on the PATH, the environment's own apart."""
    compiler = shutil.which("mpicxx", path=path_without(venv / "bin"))
    return identify(Path(compiler).parent, "system") if compiler else None


def package_mpi(venv: Path) -> Mpi | None:
    """The MPI that PyPI's package has put into the environment."""
    folder = venv / "bin"
    return identify(folder, "pypi") if (folder / "mpicxx").exists() else None


def identify(folder: Path, origin: str) -> Mpi:
    folder = folder.absolute()  # the build runs elsewhere
    said = output_of([folder / "mpirun", "--version"])
    for name, pattern in (
        ("openmpi", r"Open MPI\) (\S+)"),
        ("mpich", r"Version:\s+(\S+)"),
        ("intelmpi", r"Intel\(R\) MPI Library.*Version (\S+)"),
    ):
        if found := re.search(pattern, said):
            return Mpi(name, found.group(1), origin, folder)
    return Mpi("mpi", "unknown", origin, folder)


# Asked of the environment's interpreter: torch's version without the three seconds of importing it, and what
# is there.
PROBE = """
import importlib.util, json, pathlib, runpy
torch = importlib.util.find_spec("torch")
values = runpy.run_path(str(pathlib.Path(torch.origin).with_name("version.py"))) if torch else {}
print(json.dumps({"torch": values.get("__version__"), "torch_cuda": values.get("cuda"),
                  "horovod": importlib.util.find_spec("horovod") is not None}))
"""


def probe(python: Path) -> dict:
    """Of an interpreter: torch's version and CUDA version (None where absent), and whether it has Horovod."""
    said = output_of([python, "-c", PROBE])
    return json.loads(said) if said else {"torch": None, "torch_cuda": None, "horovod": False}


def cxx() -> str:
    """The C++ compiler, `$CXX` first."""
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise Refusal(
            f"no C++ compiler (looked for {', '.join(names)}), and Horovod is compiled here: "
            "`apt install g++`, `dnf install gcc-c++` or `module load gcc`"
        )
    return found


def check_compiler(python: Path) -> None:
    """Raise Refusal unless Horovod can be compiled for `python` here."""
    compiler = cxx()
    probe_code = "#include <concepts>\n#include <span>\nint main() {}\n"
    try:
        subprocess.run(
            [compiler, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"],
            input=probe_code, text=True, capture_output=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        version = (output_of([compiler, "--version"]).splitlines() or ["unknown version"])[0]
        raise Refusal(
            f"{compiler} ({version}) does not compile C++20, which torch's headers need: "
            "g++ 11 or newer by `apt install g++`, `dnf install gcc-toolset-12` or `module load gcc`"
        ) from None
    include = output_of([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]).strip()
    if not (Path(include) / "Python.h").exists():
        raise Refusal(
            f"{include}/Python.h is missing, and Horovod is compiled against it: "
            "`apt install python3.11-dev`, `dnf install python3.11-devel`, or another Python with PYTHON="
        )


TOOLKITS = Path("/usr/local")  # where NVIDIA's packages put them


def cuda_home(major: str) -> Path:
    """The toolkit whose nvcc has the CUDA version `major`. Raises Refusal, with those that were found."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places += [Path(nvcc).resolve().parent.parent] if nvcc else []
    seen = []
    for place in [Path(place) for place in [*places, TOOLKITS / f"cuda-{major}", TOOLKITS / "cuda"] if place]:
        said = output_of([place / "bin" / "nvcc", "--version"])
        header = any(place.glob("include/cuda_runtime.h"))  # a lone nvcc on the PATH may be a script that calls another
        if header and (found := re.search(r"release (\d+)\.(\d+)", said)):
            if found.group(1) == major:
                return place
            seen.append(f"{place} has {found.group(1)}.{found.group(2)}")
    raise Refusal(
        f"CUDA={major} needs nvcc of CUDA {major}, found {' and '.join(dict.fromkeys(seen)) or 'none'}: "
        f"`module load cuda/{major}`, or CUDA_HOME=DIR, or CUDA=cpu for a build without NCCL"
    )
