"""What was measured of one model on one node and of the links between ranks, as a file, and how links are fitted.

``measuring`` makes it, ``forecast`` reads it. Pure: numbers in, numbers out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdbs.costs import ring_bytes
from hvdbs.errors import HvdbsError, refusal
from hvdbs.prediction import Link

SCHEMA_VERSION = 1
ETHERNET_SHARE = 0.92  # of a line rate that TCP carries: 5 to 8 % are headers
NAMED_LATENCY = 5e-5  # seconds of one message where a named network comes without: as communication.link has it
FAR = 1.25  # times the bound from which another algorithm is recommended
RING = {  # Open MPI's ring over TCP, sent, not fetched by the other side
    "OMPI_MCA_btl_tcp_flags": "send",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
}


@dataclass(frozen=True)
class Spread:
    """A median in seconds with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = (float(q) for q in np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75]))
        return cls(median, low, high)


@dataclass(frozen=True)
class Passes:
    """Seconds of one rank in windows of its own, all ranks of the calibration at it together: ``prediction.Compute``.

    ``ready``: by parameter name, the share of the last backward pass after which its gradient is final. ``data``: of
    one micro-batch from the source, alone; None if there was no data. ``flops_per_sample``: of forward and backward
    together, counted. ``product``: (seconds for each weight, seconds for each weight and row) of a product of factors,
    None without a layer for it.
    """

    forward: Spread
    backward: Spread
    again: Spread
    backward_again: Spread
    optimizer: Spread
    jitter: float
    ready: dict[str, float]
    data: float | None
    flops_per_sample: float
    product: tuple[float, float] | None


@dataclass(frozen=True)
class Fitted:
    """One kind of reduction over ``world_size`` ranks: the ``link`` and the largest relative ``error`` of its fit."""

    operation: str
    world_size: int
    link: Link
    error: float
    rows: tuple[tuple[int, float], ...]  # bytes, seconds


@dataclass(frozen=True)
class Calibration:
    """One file. ``facts``: versions, hosts, device, cores, date, command: what a person wants to know of it."""

    model: str
    micro_batch: int
    image_size: int
    dtype: str
    autocast: str
    wire: str
    device: str
    world_size: int
    local_size: int
    hosts: int
    cores: float
    threads: int
    backend: str
    passes: Passes
    links: tuple[Fitted, ...]
    facts: dict[str, Any]
    schema_version: int = SCHEMA_VERSION

    def fitted(self, operation: str) -> Fitted | None:
        return next((one for one in self.links if one.operation == operation), None)


def to_json(calibration: Calibration) -> bytes:
    return (json.dumps(asdict(calibration), indent=2) + "\n").encode()


def read(path: Path) -> Calibration:
    """The calibration at ``path``. Raises HvdbsError if it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal("--calibration", path, f"cannot be read: {error.strerror}", "--calibrate makes one") from None
    except ValueError:
        raise refusal("--calibration", path, "is no JSON", "--calibrate makes one") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise refusal("--calibration", path, f"has schema_version {version}", f"--calibrate makes {SCHEMA_VERSION}")
    try:
        return _built(data)
    except (KeyError, TypeError, ValueError) as error:
        raise refusal("--calibration", path, f"is not whole ({error})", "--calibrate makes one anew") from None


def _built(data: dict[str, Any]) -> Calibration:
    passes = dict(data["passes"])
    for field in dataclasses.fields(Passes):
        if field.type == "Spread":
            passes[field.name] = Spread(**passes[field.name])
    passes["product"] = None if passes["product"] is None else tuple(passes["product"])
    passes["ready"] = dict(passes["ready"])
    links = tuple(
        Fitted(**{**one, "link": Link(**one["link"]), "rows": tuple((int(n), float(s)) for n, s in one["rows"])})
        for one in data["links"]
    )
    made = Calibration(**{**data, "passes": Passes(**passes), "links": links, "facts": dict(data["facts"])})
    for name, value in _leaves({**asdict(made), "facts": {}}):
        if not _plausible(name, value):
            raise ValueError(f"{name}: {value}")
    return made


_WORDS = {"model", "dtype", "autocast", "wire", "device", "backend", "operation"}
_ABOVE_ZERO = {"micro_batch", "image_size", "world_size", "local_size", "hosts", "threads", "bytes_per_second"}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is no container in ``value``, by its place: links.0.link.busy."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _plausible(name: str, value: Any) -> bool:
    field = name.rpartition(".")[2]
    if field in _WORDS:
        return isinstance(value, str)
    if value is None:
        return name in ("passes.data", "passes.product")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    finite = math.isfinite(value) or field == "bytes_per_second"  # of a fit that no size slows down: infinite
    return finite and (value > 0 if field in _ABOVE_ZERO else value >= 0)


# --- links


def fit_link(rows: Sequence[Mapping[str, Any]], operation: str) -> tuple[Link, float]:
    """The link of ``operation`` (allreduce or allgather), and the largest relative error of the fit.

    ``rows``: mappings with operation, world_size, message_bytes and seconds, as in ``benchmarks/communication.py``; an
    allgather's bytes are those of all ranks together. Of the rows of one size and world_size the least is taken: noise
    only adds. Least squares of relative errors with no coefficient below 0, of

        seconds = operation + messages * latency + sent bytes / rate.

    With rows of one world_size the first two cannot be told apart and all is put to the operation. Raises HvdbsError
    for fewer than two sizes.
    """
    least: dict[tuple[int, int], float] = {}
    for row in rows:
        world_size = int(row["world_size"])
        if row["operation"] == operation and world_size > 1:
            key = world_size, int(row["message_bytes"])
            least[key] = min(float(row["seconds"]), least.get(key, math.inf))
    if len({nbytes for _, nbytes in least}) < 2:
        raise HvdbsError(f"{operation}: {len(least)} sizes were measured, a line needs two at least")
    gathered = operation == "allgather"
    columns = []
    for ranks, nbytes in least:
        sent = (ranks - 1) / ranks * nbytes if gathered else ring_bytes(nbytes, ranks)
        columns.append([1.0, (1 if gathered else 2) * (ranks - 1.0), sent])
    design, seconds = np.array(columns), np.array(list(least.values()))
    if len({ranks for ranks, _ in least}) == 1:
        design[:, 1] = 0.0
    found = _nonnegative(design / seconds[:, None], np.ones(len(seconds)))
    error = float(np.abs(design @ found / seconds - 1).max())
    rate = 1 / found[2] if found[2] > 0 else math.inf
    return Link(float(rate), float(found[1]), float(found[0])), error


def _nonnegative(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """argmin |design x - target| over x >= 0: the best of all choices of columns that keep x so; few columns only."""
    count = design.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for chosen in range(1, 2**count):
        places = [place for place in range(count) if chosen >> place & 1 and design[:, place].any()]
        if not places:
            continue
        scale = np.abs(design[:, places]).max(0)
        part = np.linalg.lstsq(design[:, places] / scale, target, rcond=None)[0] / scale
        rest = target - design[:, places] @ part
        if (part >= 0).all() and float(rest @ rest) < least * (1 - 1e-9):
            best, least = np.zeros(count), float(rest @ rest)
            best[places] = part
    return best


@dataclass(frozen=True)
class Network:
    """A link by name: bits per second on the line and seconds of one message; ``text`` as it was given."""

    text: str
    bits_per_second: float
    latency_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """What is left for a message's bytes."""
        return self.bits_per_second / 8 * ETHERNET_SHARE


_UNITS = {"mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3}


def network(text: str) -> Network:
    """``25gbit`` or ``100mbit,20us``. Raises HvdbsError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)(?:,(\d+(?:\.\d+)?)(us|ms))?", text.strip().lower())
    if found is None or float(found.group(1)) == 0:
        raise refusal("--network", text, "is no rate in mbit or gbit", "for example 25gbit, or 25gbit,20us")
    rate, unit, latency, time = found.groups()
    return Network(text, float(rate) * _UNITS[unit], float(latency) * _TIMES[time] if latency else NAMED_LATENCY)


def advice(calibration: Calibration, named: Network | None) -> str | None:
    """What to set where Open MPI's allreduce is ``FAR`` from the ring's bound; None where it is not, or not known.

    The bound needs the link's own rate: that of ``named`` if the ranks talked over it, which only who measured can
    know. Without one the best that is known is what the same ranks moved by allgather, of several hosts: no proof, as
    that neither adds nor goes both ways, and said so.
    """
    reduced, gathered = calibration.fitted("allreduce"), calibration.fitted("allgather")
    if calibration.backend != "horovod-mpi" or reduced is None:
        return None
    if named is not None:
        bound, what = named.bytes_per_second, f"the {named.text} that --network names would let a ring move"
    elif calibration.hosts > 1 and gathered is not None:
        bound, what = gathered.link.bytes_per_second, "the same ranks gathered (--network RATE would tell for sure)"
    else:
        return None
    rate = reduced.link.bytes_per_second
    if rate * FAR >= bound:
        return None
    said = f"Open MPI's allreduce moves {rate / 1e6:.3g} MB/s of a rank's bytes, {what} {bound / 1e6:.3g} MB/s"
    variables = calibration.facts.get("variables", {})
    if all(variables.get(name) == value for name, value in RING.items()):
        return f"{said}, with its ring already chosen: horovodrun --gloo may do better"
    settings = " ".join(f"{name}={value}" for name, value in RING.items())
    return f"{said}.\nTry its ring, in the environment of all ranks: {settings}"
