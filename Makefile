# What a person does with this repository; `make` alone lists it. Every target sets up the environment by itself.
# Choices count on the command line only (`make setup CUDA=13`): an environment variable CUDA means something else on
# many clusters. A choice once made holds for the environment until another is made.

VENV := .venv
CUDA :=
MPI :=
PYTHON :=
TORCH :=
WHEELS :=

BIN := $(VENV)/bin
SHELL_FILES := .ci/run $(wildcard tools/*.sh slurm/*.sbatch slurm/*.sh)
SETUP := PYTHON="$(PYTHON)" tools/setup.sh --venv "$(VENV)" $(if $(CUDA),--cuda "$(CUDA)") $(if $(MPI),--mpi "$(MPI)") \
    $(if $(TORCH),--torch "$(TORCH)")

.PHONY: help setup wheels demo test test-unit test-parallel test-slurm test-slurm-limit test-nccl test-gpu lint format type
.PHONY: bench bench-throughput bench-methods bench-theory bench-overhead bench-sharing bench-loader
.PHONY: bench-convergence bench-convergence-full bench-branch bench-tuning bench-network bench-communication clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r target what; do \
	    printf '  make %-14s %s\n' "$$target" "$$what"; done

setup: ## the environment in VENV=.venv; CUDA=cpu|12|13 MPI=system|pypi PYTHON= TORCH=existing WHEELS=dir (offline)
	@$(SETUP) $(if $(WHEELS),--wheels "$(WHEELS)")

wheels: ## download into WHEELS=dir what `make setup WHEELS=dir` needs on a machine without a network
	@$(SETUP) --fill "$(or $(WHEELS),wheels)"

demo: setup ## train on real digit images on two ranks, to 97 % and more
	@test -d data/digits/val || $(BIN)/python -m hvdbs.data digits --out data/digits
	@$(BIN)/python tools/demo.py

test: setup ## all tests: unit, inside ranks (np 1 to 4), and those that start jobs
	@$(BIN)/python tools/run_tests.py

test-unit: setup ## the tests that need one process, no Horovod
	@$(BIN)/python tools/run_tests.py --only unit

test-parallel: setup ## the tests inside ranks: np 1 to 4 with MPI, np 2 with Gloo
	@$(BIN)/python tools/run_tests.py --only parallel

test-slurm: setup ## batch jobs on a real Slurm that the tests start and stop: root, packages of slurm, munge and sshd
	@$(BIN)/python tools/run_tests.py --only slurm

test-slurm-limit: setup ## the same for a time limit, which Slurm counts in minutes
	@$(BIN)/python -m pytest tests/slurm -m "slurm and slow"

test-nccl: setup ## build Horovod with NCCL where nvcc is (no GPU needed), and test that build on the CPU
	@$(BIN)/python tools/build_horovod.py --venv "$(VENV)" --cuda torch
	@$(BIN)/python -m pytest tests/jobs/test_nccl_build.py

test-gpu: ## all checks that need a GPU, on as many ranks as there are GPUs; sets up with NCCL, CUDA=13 unless given
	@nvidia-smi -L 2>&1 | grep -q "^GPU 0" || \
	    { echo "make test-gpu: nvidia-smi -L lists no GPU: run it on a machine with one" >&2; exit 1; }
	@$(MAKE) --no-print-directory setup CUDA="$(or $(CUDA),13)"
	@$(BIN)/python tools/run_tests.py --only gpu

lint: setup ## ruff (rules and format), shellcheck
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/shellcheck $(SHELL_FILES)

format: setup ## put the source into ruff's format
	@$(BIN)/ruff check --fix --select I .
	@$(BIN)/ruff format .

type: setup ## mypy, strict on hvdbs
	@$(BIN)/mypy

RESULTS := benchmarks/results

bench-throughput: setup ## samples/s of updates, one rank and two, against plain PyTorch, Horovod's optimizer and DDP
	@$(BIN)/python -m benchmarks.throughput --out $(RESULTS)/throughput.csv
	@PATH="$(CURDIR)/$(BIN):$$PATH" horovodrun -np 2 $(BIN)/python -m benchmarks.throughput \
	    --out $(RESULTS)/throughput.csv --append

bench-methods: setup ## what extrapolation and the engine's statistics cost beside a plain update
	@$(BIN)/python -m benchmarks.methods --out $(RESULTS)/methods.csv

bench-theory: setup ## SEBS's theory on least squares: the best batch, and the gap of each stage
	@$(BIN)/python -m benchmarks.theory --out $(RESULTS)/theory.csv --plot docs/sebs-theory.png

bench-overhead: setup ## what the loop itself costs: between updates, per micro-batch, memory
	@$(BIN)/python -m benchmarks.overhead --out $(RESULTS)/overhead.csv

bench-sharing: setup ## ranks that share cores: Horovod's cycle time, MPI's yielding
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.sharing --out $(RESULTS)/sharing.csv

bench-loader: setup ## images/s of our sources, DALI's own reader and torch's DataLoader, on photographs made once
	@$(BIN)/python -m benchmarks.loader --out $(RESULTS)/loader.csv

bench-network: setup ## updates over links of 1 Gbit/s and 100 Mbit/s between network namespaces; root, 20 minutes
	@$(BIN)/python -m benchmarks.network --out $(RESULTS)/network.csv

bench-communication: setup ## reductions of 1 KB to 256 MB: Horovod, our reducer, raw mpi4py, torch's Gloo; 15 minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.communication --out $(RESULTS)/communication.csv

bench-convergence: setup ## the methods head to head on Fashion-MNIST, 5 seeds; hours, goes on where it was stopped
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.convergence --out $(RESULTS)/convergence.csv

bench-tuning: setup ## the lr of that comparison, swept on two other seeds; an hour
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.tuning --threads 1 --out $(RESULTS)/tuning.csv

bench-convergence-full: setup ## the same on all 60,000 images, 10 epochs in each stage: a night and more
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.convergence --samples 60000 --epochs 10 \
	    --out $(RESULTS)/convergence-full.csv

bench-branch: setup ## second stages of several batches from one first stage, and the norms of their weights
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.branch --out $(RESULTS)/branch.csv

bench: bench-throughput bench-methods bench-theory bench-overhead bench-sharing bench-loader ## all of these; see benchmarks/README.md

clean: ## remove what tools left; the environment, data/, runs/ and the cached wheels stay
	@rm -rf build dist ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find hvdbs tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
