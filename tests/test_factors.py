"""Sufficient factors in one process: what is computed and what is not, which layers may, and what is left as it was.

Between real ranks: tests/parallel/test_factors_between_ranks.py. Models and samples are those of ``rig``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import rig
import torch
from reference import Stage
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hvdbs import plan, train
from hvdbs.batching import Window
from hvdbs.comm.local import Solo, ThreadWorld
from hvdbs.costs import Linear
from hvdbs.devices import alike, refuse_mixed
from hvdbs.errors import HvdbsError
from hvdbs.factors import Factors, eligible
from hvdbs.invariance import scale_invariant
from hvdbs.schedule import Decision
from hvdbs.step import Replica, Requests

STAGES = (Stage(131, 131, lr=0.0),)
LAYERS = [Linear("0", 20, 32, 1), Linear("2", 32, 24, 1), Linear("4", 24, rig.CLASSES, 1)]


def replica_of(model: nn.Module, scheme: str, layers: list[Linear], **rules: Any) -> Replica:
    made = Replica(model, rig.settings(STAGES, scheme=scheme, **rules), Solo(), layers)
    made.choose(131)
    return made


SOURCE = rig.memory(rig.FLAT)


def update(replica: Replica, **options: Any) -> None:
    window = Window(0, 131, 8)
    batches = SOURCE.train(window.dealt_to(0, 1))
    replica.run(window, Decision(0, 131, 0.0, 0.0), 0, batches, Requests(), **options)


# --- what is computed


class Products(TorchDispatchMode):
    """Shapes [rows, columns] of all matrix products, with how many terms each of their sums has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left = args[-2]
            self.seen.append((out.shape[0], out.shape[1], left.shape[1]))
        return out


@pytest.mark.parametrize("measure", [False, True])
def test_no_rank_forms_a_gradient_of_its_own_rows(measure: bool) -> None:
    """131 samples in 17 micro-batches: dense gradients are 17 products for each weight, of 8 rows or 3; by factors
    there is one of that shape, over all rows. In measured windows, too, but for a layer so small (24 x 5) that the
    product over the 8 rows of micro-batch 0 is less work than their pairs. The FLOP counter agrees, exactly: the one
    product has as many FLOPs as the 17 had together."""
    counted = {}
    for scheme in ("dense", "factors"):
        replica = replica_of(rig.built(rig.mlp), scheme, [] if scheme == "dense" else LAYERS)
        with Products() as products:
            update(replica, measure=measure)
        flops = FlopCounterMode(display=False)
        with flops:
            update(replica)
        counted[scheme] = flops.get_total_flops()
        for layer in LAYERS:
            of_shape = sorted(terms for *shape, terms in products.seen if shape == [layer.outputs, layer.inputs])
            own = [8] if measure and layer.name == "4" else []
            assert of_shape == ([3] + 16 * [8] if scheme == "dense" else [*own, 131])
    weights = [layer.weights for layer in LAYERS]
    forward_and_inputs = 2 * 131 * (2 * sum(weights) - weights[0])
    assert counted["dense"] == counted["factors"] == forward_and_inputs + 2 * 131 * sum(weights)


def test_backward_by_itself_does_no_work_for_weights() -> None:
    """FLOPs of one forward and backward, before anything is exchanged: forward, and gradients of inputs alone."""
    replica = replica_of(rig.built(rig.mlp), "factors", LAYERS)
    inputs = SOURCE.inputs[:8]
    replica.reducer.begin()
    with FlopCounterMode(display=False) as flops:
        replica.model(inputs).sum().backward()
    assert flops.get_total_flops() == 2 * 8 * (2 * sum(layer.weights for layer in LAYERS) - LAYERS[0].weights)


@pytest.mark.parametrize("rows", [1, 5, 12, 60])
def test_the_norm_of_a_rank_s_own_gradient_needs_no_gradient(rows: int) -> None:
    """float64, 1e-12, on either side of where pairs of rows are less work than the product (7.7 rows)."""
    module, layer = nn.Linear(20, 12).double(), Linear("it", 20, 12, 1)
    factors = Factors(layer, module, Solo(), torch.float64, None)
    factors.use(True, rows)
    factors.begin()
    inputs = torch.randn(rows, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (module(inputs) ** 3).sum().backward()
    given = module.weight.detach().clone().requires_grad_()
    (F.linear(inputs, given, module.bias.detach()) ** 3).sum().backward()
    assert given.grad is not None
    with Products() as products:
        norm = factors.own_norm().item()
    assert abs(norm - given.grad.norm().item()) < 1e-12 * norm
    assert ((12, 20, rows) in products.seen) == (rows > 12 * 20 / 32)


def test_nothing_is_left_of_a_window_that_failed() -> None:
    """An error in the middle of a backward pass, then a whole window: the gradient of one that never failed."""
    gradients = []
    for fails in (False, True):
        model = rig.built(rig.mlp)
        replica = replica_of(model, "factors", LAYERS)
        if fails:

            def fail(gradient: torch.Tensor) -> None:
                raise ZeroDivisionError

            handle = model.get_submodule("1").register_forward_hook(lambda *it: it[2].register_hook(fail) and None)
            with pytest.raises(ZeroDivisionError):
                update(replica)
            handle.remove()
        update(replica)
        assert all(not factors._pieces for factors in replica.factors)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert rig.worst_error(gradients[1], gradients[0]) == 0.0


# --- what is left as it was


def test_the_module_its_names_and_its_evaluation_stay_what_they_are(tmp_path: Path) -> None:
    """Same objects, same state_dict, weights that need gradients as before; what is run without gradients, or by a
    copy, is not kept."""
    model = rig.built(rig.mlp)
    modules, names = list(model.modules()), list(model.state_dict())
    parameters = list(model.parameters())
    replica = replica_of(model, "factors", LAYERS)
    update(replica)
    assert list(model.modules()) == modules and list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.requires_grad and p.grad is not None and p.grad.shape == p.shape for p in parameters)
    replica.reducer.begin()
    with torch.no_grad():
        model(SOURCE.inputs[:8])
    twin = copy.deepcopy(model)
    twin(SOURCE.inputs[:8]).sum().backward()
    assert all(not factors._pieces and not factors._pending for factors in replica.factors)
    assert all(p.grad is not None for p in twin.parameters())
    assert scale_invariant(model, SOURCE.inputs[:4]) == []


def test_a_forward_that_raises_leaves_its_weight_trained() -> None:
    model = rig.built(rig.mlp)
    replica = replica_of(model, "factors", LAYERS)
    replica.reducer.begin()
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 19, dtype=torch.float64))
    assert all(p.requires_grad for p in model.parameters())


class Residual(nn.Module):
    """Changes the input of its layer in place, which plain autograd refuses too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.last = nn.Linear(20, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        y = self.last(h)
        h.mul_(2)
        logits: torch.Tensor = y + h.mean(1, keepdim=True)
        return logits


@pytest.mark.parametrize("scheme", ["dense", "factors"])
def test_an_input_that_was_modified_in_place_is_no_factor(scheme: str) -> None:
    replica = replica_of(rig.built(Residual), scheme, [Linear("last", 20, rig.CLASSES, 1)])
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace)"):
        update(replica)


class Borrowed(nn.Module):
    """The weight of one layer used once more by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.last = nn.Linear(20, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(torch.tanh(F.linear(torch.tanh(self.first(x)), self.first.weight.t())))
        return logits


def test_a_weight_used_outside_of_its_layer_is_refused_where_it_could_not_be_foreseen() -> None:
    replica = replica_of(rig.built(Borrowed), "factors", [Linear("first", 20, 20, 1)])
    with pytest.raises(HvdbsError, match=r"^model layer: first has a weight that is used outside .*scheme: dense$"):
        update(replica)


# --- which layers may


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, rig.CLASSES))
    model[1].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = rig.mlp()
    model.get_parameter("2.weight").requires_grad_(False)
    return model


def reparametrised() -> nn.Module:
    model = rig.mlp()
    nn.utils.parametrizations.weight_norm(model.get_submodule("2"))
    return model


class Own(nn.Linear):
    """A layer of somebody else's making."""


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(20, 20)
        self.table = nn.Linear(4, 20)  # its rows are not those of samples
        self.last = nn.Linear(20, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(x + self.table(torch.ones(1, 4, device=x.device, dtype=x.dtype)))
        return logits


class Undecided(nn.Module):
    """Cannot be tried without data."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(20, rig.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(x) if float(x.mean()) > 0 else self.last(-x)
        return logits


@pytest.mark.parametrize(
    ("make", "shape", "names"),
    [
        (rig.mlp, rig.FLAT, ["0", "2", "4"]),
        (rig.ConvNet, rig.IMAGE, ["fc"]),
        (tied, rig.FLAT, ["2"]),
        (frozen, rig.FLAT, ["0", "4"]),
        (reparametrised, rig.FLAT, ["0", "4"]),
        (lambda: nn.Sequential(Own(20, 9), nn.Linear(9, 5)), rig.FLAT, ["1"]),
        (Borrowed, rig.FLAT, ["last"]),
        (Unused, rig.FLAT, ["last"]),
        (Undecided, rig.FLAT, []),
        (lambda: nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), (6, 12), ["linear1", "linear2"]),
    ],
    ids=["mlp", "convolutions", "tied", "frozen", "weight norm", "subclass", "borrowed", "unused", "undecided", "mha"],
)
def test_layers_whose_gradient_is_not_theirs_alone_stay_dense(
    make: Callable[[], nn.Module], shape: tuple[int, ...], names: list[str]
) -> None:
    model = rig.sketch(rig.built(make))
    found = eligible(model, shape, torch.float64)
    assert [layer.name for layer in found] == names
    assert [layer.positions for layer in found] == [1 if len(shape) != 2 else 6] * len(names)
    assert all(p.grad is None for p in model.parameters())


def test_ranks_on_unlike_devices_are_refused_in_one_line() -> None:
    refuse_mixed("hybrid", ["NVIDIA H100"] * 3)
    with pytest.raises(HvdbsError) as caught:
        refuse_mixed("hybrid", ["NVIDIA H100", "NVIDIA H100", "NVIDIA A100"])
    assert str(caught.value) == (
        "communication.scheme: hybrid needs the same device on every rank, not NVIDIA H100 on rank 0 and NVIDIA A100 "
        "on rank 2; communication.scheme: dense, or threads: 1 for CPUs alike"
    )
    config = rig.settings(STAGES, scheme="hybrid")
    ThreadWorld(2).run(lambda comm: alike(config, comm, torch.device("cpu")))


# --- a run through the entries

RUN = """\
micro_batch: 8
threads: 1
data: {kind: synthetic, image_size: 8, resize: 8, train_samples: 64, val_samples: 20, threads: 1}
model: {name: resnet8, classes: 30, width: 8}
schedule: {method: table, stages: [{samples: 64, global_batch: 20, lr: 0.1}, {samples: 64, global_batch: 33, lr: 0.1}]}
communication: {scheme: factors}
logging: {tensorboard: false, every_steps: 1}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    yield tmp_path
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_a_run_counts_what_its_plan_says_and_writes_down_both_costs(work: Path) -> None:
    """np 1: the classifier of ResNet-8, 32 x 30, by factors. Bytes by hand: all parameters but that weight, the carry
    with batch norm's statistics, and the rows."""
    assert train.main(["--config", "run.yaml", "--out", "run"]) == 0
    summary = json.loads((work / "run" / "summary.json").read_text())
    planned = json.loads((work / "run" / "plan.json").read_text())
    rows = planned["stages"] if isinstance(planned, dict) else planned
    assert summary["reduced_bytes"] == sum(row["reduced_bytes"] for row in rows)
    assert [row["steps"] for row in rows] == [4, 2]
    (first, second) = (row["reduced_bytes"] / row["steps"] for row in rows)
    assert second - first == (33 - 20) * (32 + 30) * 4
    decisions = pd.read_csv(work / "run" / "decisions.csv")
    written = decisions[decisions.quantity == "factors.fc"]
    assert list(written.stage) == [0, 1] and list(written.new) == [1, 1] and set(written.source) == {"costs"}
    assert pd.isna(written.old.iloc[0]) and written.old.iloc[1] == 1
    inputs = json.loads(written["inputs"].iloc[1])
    assert inputs["rows"] == 33 and {"gradient_bytes", "factor_bytes", "gradient_seconds", "factor_seconds"} <= {
        *inputs
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--np 4", ["stage 0: by factors 1 of 32 x 30, of 1 that could", "stage 1: by factors 1 of 32 x 30"]),
        ("--np 4 --communication.scheme hybrid --communication.link.latency_seconds 0", ["1 of 32 x 30", "none, of 1"]),
        ("--np 1 --communication.scheme hybrid", ["stage 0: by factors none", "stage 1: by factors none"]),
        ("--np 4 --communication.scheme dense", []),
    ],
)
def test_the_plan_says_which_layers_go_by_factors(
    work: Path, capsys: pytest.CaptureFixture[str], options: str, said: list[str]
) -> None:
    """32 x 30 breaks even at 31 rows: stage 0 has 20, stage 1 has 33."""
    assert plan.main(["--config", "run.yaml", *options.split()]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("communication: ")]
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True)), lines


def test_the_schedule_s_batches_alone_decide_which_layers_get_a_bucket_of_their_own() -> None:
    """Layers that no stage sends as factors stay in the shared buckets: the reductions of a dense run."""
    config = rig.settings((Stage(400, 400, lr=0.1),), scheme="hybrid", bucket_bytes=2**30)
    config = replace(config, communication=replace(config.communication, link=rig.EVERY_BYTE))

    def run(comm: Any) -> int:
        made = rig.assembled(comm, config, models[comm.rank], rig.memory(rig.FLAT), Path("unused"))
        return len(made.replica.reducer.buckets)

    models = [rig.built(rig.mlp) for _ in range(2)]
    assert ThreadWorld(2).run(run) == [1, 1]
