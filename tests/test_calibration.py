"""Links fitted to rows whose answer is known, networks by name, files that say what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibrations import calibration

from hvdbs.calibration import RING, advice, fit_link, network, read, to_json
from hvdbs.costs import ring_bytes
from hvdbs.errors import HvdbsError
from hvdbs.prediction import Link

SIZES = [4**power for power in range(5, 14)]


def rows(link: Link, operation: str, worlds: tuple[int, ...], noise: float = 0.0) -> list[dict[str, object]]:
    """Seconds as the formula has them; noise (seed 0) only adds, three times for each size."""
    draw, made = np.random.default_rng(0), []
    for ranks in worlds:
        for size in SIZES:
            sent = ring_bytes(size, ranks) if operation == "allreduce" else (ranks - 1) / ranks * size
            hops = (2 if operation == "allreduce" else 1) * (ranks - 1)
            least = link.operation_seconds + hops * link.latency_seconds + sent / link.bytes_per_second
            for late in [0.0, *(noise * draw.exponential(size=2))]:
                made.append(
                    {
                        "backend": "mpi",
                        "operation": operation,
                        "world_size": ranks,
                        "network": "",
                        "message_bytes": size,
                        "seconds": least * (1 + late),
                    }
                )
    return made


@pytest.mark.parametrize("operation", ["allreduce", "allgather"])
def test_a_fit_finds_the_link_that_made_the_rows(operation: str) -> None:
    """Over three world sizes all three numbers, to 1e-9; of one world size latencies are part of each operation."""
    link = Link(1.2e9, 3e-5, 2e-4)
    found, error = fit_link(rows(link, operation, (2, 3, 8), noise=0.5), operation)
    assert (found.bytes_per_second, found.latency_seconds, found.operation_seconds) == pytest.approx(
        (1.2e9, 3e-5, 2e-4), rel=1e-6
    )
    assert error < 1e-6
    single, _ = fit_link(rows(link, operation, (4,)), operation)
    hops = 6 if operation == "allreduce" else 3
    assert single.latency_seconds == 0
    assert single.operation_seconds == pytest.approx(2e-4 + hops * 3e-5)
    assert single.bytes_per_second == pytest.approx(1.2e9)


def test_a_fit_has_no_negative_part_and_says_how_far_it_is_off() -> None:
    """Rows faster than any line through them could be at 0 bytes: nothing below 0, an error as large as it is."""
    made = [
        {"operation": "allreduce", "world_size": 2, "message_bytes": n, "seconds": s}
        for n, s in ((1000, 1e-6), (10_000, 2e-5), (100_000, 4e-4))
    ]
    found, error = fit_link(made, "allreduce")
    assert found.operation_seconds >= 0 and found.latency_seconds >= 0 and found.bytes_per_second > 0
    worst = max(abs(found.seconds(row["message_bytes"], 2) / row["seconds"] - 1) for row in made)  # type: ignore[operator, arg-type]
    assert error == pytest.approx(worst)
    with pytest.raises(HvdbsError, match="allgather: 0 sizes"):
        fit_link(made, "allgather")


def test_networks_by_name() -> None:
    assert network("25gbit").bytes_per_second == pytest.approx(0.92 * 25e9 / 8)
    assert network("100mbit,20us").bits_per_second == 1e8
    assert network("1.5gbit,2ms").latency_seconds == pytest.approx(2e-3)
    for wrong in ("25", "25 Gb", "0gbit", "-1gbit", "25gbit,3", "", "nan"):
        with pytest.raises(HvdbsError, match="25gbit,20us"):
            network(wrong)


def test_a_file_comes_back_as_it_was_and_others_are_refused(tmp_path: Path) -> None:
    path, made = tmp_path / "node.json", calibration()
    path.write_bytes(to_json(made))
    assert read(path) == made
    whole = json.loads(path.read_text())
    for text, said in (
        ("", "no JSON"),
        ("[]", "schema_version None"),
        (json.dumps({**whole, "schema_version": 2}), "schema_version 2"),
        (json.dumps({**whole, "passes": {}}), "not whole"),
        (json.dumps({name: value for name, value in whole.items() if name != "model"}), "not whole"),
        (json.dumps({**whole, "micro_batch": 0}), "micro_batch: 0"),
        (json.dumps({**whole, "passes": {**whole["passes"], "jitter": "1"}}), "passes.jitter: 1"),
        (json.dumps({**whole, "passes": {**whole["passes"], "jitter": float("nan")}}), "passes.jitter: nan"),
        (path.read_text().replace('"bytes_per_second": 1000000000.0', '"bytes_per_second": -1'), "links.0.link"),
    ):
        path.write_text(text)
        with pytest.raises(HvdbsError, match=said):
            read(path)
    with pytest.raises(HvdbsError, match="cannot be read"):
        read(tmp_path)


def test_the_ring_is_recommended_only_where_a_bound_is_known_and_far() -> None:
    made = calibration(rate=5e6)
    assert advice(made, None) is None, "one host: no link"
    assert advice(made, network("50mbit")) is None
    hint = advice(made, network("100mbit"))
    assert hint is not None and all(f"{name}={value}" in hint for name, value in RING.items())
    assert "5 MB/s" in hint and "11.5 MB/s" in hint
    several = replace(made, hosts=2)
    assert advice(several, None) is None, "allgather is as slow"
    faster = replace(several, links=(made.links[0], replace(made.links[1], link=Link(1e7))))
    assert "gathered" in (advice(faster, None) or "")
    chosen = replace(made, facts={"variables": RING})
    assert "--gloo" in (advice(chosen, network("100mbit")) or "")
    assert advice(replace(made, backend="horovod-gloo"), network("100mbit")) is None
