"""The benchmark of slow networks: what it asks, and the nodes that it runs on."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest
import torch

from benchmarks import nets, network, nodes
from benchmarks.shaped import config
from hvdbs.costs import ring_bytes


def row(contender: str, scheme: str, k: int, seconds: float, **other: object) -> dict[str, object]:
    made = {"model": "fc", "network": "100mbit", "backend": "gloo", "contender": contender, "scheme": scheme}
    made |= {"accumulation_steps": k, "global_batch": 64 * k, "round": 0, "updates": 1, "seconds": seconds}
    return made | {"samples_per_second": 64 * k / seconds, "bound_seconds": 3.0, "sent_bytes": 1.0} | other


def test_accumulation_s_predicted_speed_up_is_the_closed_form() -> None:
    """k (c(1) + R) / (c(k) + R): with c = 1 and 8 seconds and R = 3 that is 8 * 4 / 11."""
    rows = [row("hvdbs", "dense", 1, 4.0), row("alone", "none", 1, 1.0), row("alone", "none", 8, 8.0)]
    assert network.predicted(pd.DataFrame(rows), 8) == pytest.approx(32 / 11)


def test_answers_are_ratios_of_the_same_round_against_the_faster_of_the_others() -> None:
    rows = [row("hvdbs", "dense", 1, 4.0), row("ddp", "dense", 1, 5.0), row("hvdbs", "hybrid", 1, 1.0)]
    rows.append(row("hvdbs", "dense", 1, 3.5, backend="mpi-ring"))
    first, second = network.answers(pd.DataFrame(rows))
    assert first.ratio == pytest.approx(3.5) and second.ratio == pytest.approx(5.0) and first.least == 3.0
    assert "required 3: met" in str(first)
    assert network.far_from_bound(pd.DataFrame(rows)) == []


def test_an_algorithm_that_is_far_from_the_ring_is_named_with_its_cure() -> None:
    rows = [row("hvdbs", "dense", 1, 7.0, backend="mpi"), row("alone", "none", 1, 1.0, backend="mpi")]
    rows += [row("hvdbs", "dense", 1, 4.3, backend="mpi-ring"), row("alone", "none", 1, 1.0, backend="mpi-ring")]
    (line,) = network.far_from_bound(pd.DataFrame(rows))
    assert "2.00 times the ring bound; 1.10 times with OMPI_MCA_btl_tcp_flags=send" in line


def test_the_wide_networks_are_as_wide_as_they_say() -> None:
    """VGG-11 at 32 pixels by hand: 9,220,480 weights of convolutions; 512, 4,096, 4,096, 10 wide layers."""
    made = {name: nets.build(config(name, "dense", 2, 1e9), 10) for name in ("vgg11", "fc")}
    wide = 512 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
    assert sum(p.numel() for p in made["vgg11"].parameters()) == 9_220_480 + wide
    assert nets.fc_share(made["fc"]) >= 0.9
    for model in made.values():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_bytes_are_those_of_a_ring_and_of_the_factors() -> None:
    model = nets.build(config("fc", "dense", 16, 1e9), 10)
    nbytes = 4 * sum(p.numel() for p in model.parameters()) + 8 * 3
    assert nets.sent_bytes(model, config("fc", "dense", 16, 1e9), [], 64, 4) == ring_bytes(nbytes, 4)
    by_factors = config("fc", "hybrid", 16, 1.25e7)
    layers = nets.factor_layers(by_factors, 10, [64], 4)
    saved = sum(ring_bytes(4 * it.weights, 4) - 3 / 4 * 64 * 4 * (it.inputs + it.outputs) for it in layers)
    assert len(layers) >= 2
    assert nets.sent_bytes(model, by_factors, layers, 64, 4) == pytest.approx(ring_bytes(nbytes, 4) - saved)


@pytest.mark.skipif(nodes.not_permitted() is not None, reason=f"{nodes.not_permitted()}")
def test_nodes_are_apart_shaped_and_gone_with_their_first_process() -> None:
    """Two nodes with names of their own; the byte counters and links are those of the namespace, not of this one."""
    program = (
        "import sys\nfrom benchmarks import nodes\n"
        "if not nodes.inside(): sys.exit(nodes.enter(sys.orig_argv))\n"
        "import subprocess\nnodes.build(2)\nnodes.shape(2, '100mbit')\n"
        "print(subprocess.run(['tc', '-n', 'node1', 'qdisc', 'show', 'dev', 'eth0'], capture_output=True, text=True)"
        ".stdout)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "tbf" in done.stdout and "rate 100Mbit" in done.stdout
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "switch" not in links
