"""Config files, images and checkpoints that chance has damaged: a valid outcome or one line, never a traceback or a
hang.

Each test draws ``EXAMPLES`` examples, the same ones in every run; HVDBS_FUZZ_EXAMPLES=2000 (say) draws as many new
ones.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_folders import encode, photo, settle, two_classes, variants

from hvdbs import checkpoint, plan, train
from hvdbs.batching import MicroBatch
from hvdbs.comm.local import Solo
from hvdbs.command_line import RECIPES
from hvdbs.config import AugmentConfig, Config, DataConfig
from hvdbs.data.headers import read_header
from hvdbs.data.kept import share_index
from hvdbs.data.sources import open_source
from hvdbs.errors import HvdbsError

pytestmark = pytest.mark.usefixtures("parsers")

LONG = os.environ.get("HVDBS_FUZZ_EXAMPLES")
EXAMPLES = 150
fuzzed = settings(
    max_examples=int(LONG or EXAMPLES),
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
few = settings(fuzzed, max_examples=int(LONG or EXAMPLES) // 3)

CONFIG: dict[str, Any] = yaml.safe_load("""
seed: 1
micro_batch: 8
data: {kind: synthetic, image_size: 8, resize: 8, train_samples: 64, val_samples: 20, threads: 1}
model: {name: resnet8, classes: 4, width: 4}
optimizer: {momentum: 0.9, clip_norm: 1.0}
schedule: {method: constant, epochs: 2, global_batch: 16, lr: 0.1, warmup: {epochs: 1}}
checkpoint: {every_samples: 32}
evaluation: {every_epochs: 1}
logging: {tensorboard: false, every_steps: 1}
""")

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["1e-4", "8k", "1,5", "0x10", "1_000", ".inf", "~", "[1, 2]", "{a: 1}", "!!python/object:os.system x"]
    ),
    st.lists(st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=6), st.integers(-3, 3), max_size=3),
)


@st.composite
def changed(draw: st.DrawFn) -> dict[str, Any]:
    """CONFIG with one to three fields of any level replaced, removed, renamed or added."""
    config: dict[Any, Any] = json.loads(json.dumps(CONFIG))
    for _ in range(draw(st.integers(1, 3))):
        section = config
        while draw(st.booleans()) and (inner := [v for v in section.values() if isinstance(v, dict) and v]):
            section = draw(st.sampled_from(inner))
        name = draw(st.sampled_from(sorted(section, key=str))) if section else "x"
        kind = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
        if kind == "add":
            section[draw(st.one_of(st.text(max_size=8), st.integers(-2, 2), st.none()))] = draw(odd)
        elif kind == "replace":
            section[name] = draw(odd)
        elif (value := section.pop(name, None)) is not None and kind == "rename":
            section[f"{name}{draw(st.sampled_from('sx_ .'))}"] = value
    return config


@pytest.fixture
def answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """What an entry returns: 0, or 2 with one line on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(entry: Callable[[list[str]], int], *arguments: str) -> int:
        capsys.readouterr()
        try:
            code = entry(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        if code == 0:
            return 0
        assert code == 2, said.err
        assert said.err.startswith("hvdbs: error: ") and said.err.count("\n") == 1 and len(said.err) < 1500, said.err
        assert "Traceback" not in said.err + said.out
        return code

    return run


@fuzzed
@given(config=changed())
def test_a_config_with_odd_fields_is_planned_or_refused_in_a_line(
    config: dict[str, Any], answer: Callable[..., int]
) -> None:
    Path("odd.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    answer(plan.main, "--config", "odd.yaml", "--np", "3")


@fuzzed
@given(data=st.data())
def test_a_config_file_with_any_bytes_is_planned_or_refused_in_a_line(
    data: st.DataObject, answer: Callable[..., int]
) -> None:
    """A recipe with a few bytes overwritten, dropped or doubled, or nothing but random bytes."""
    # Those of ImageNet have the same sections, and planning a ResNet-50 takes five times as long.
    names = ["digits.yaml", "digits-vbs.yaml", "digits-sebs.yaml", "digits-extrapolation.yaml"]
    content = bytearray((RECIPES / data.draw(st.sampled_from(names))).read_bytes())
    if data.draw(st.integers(0, 4)) == 0:
        content = bytearray(data.draw(st.binary(max_size=200)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["write", "drop", "double"]))
        if kind == "write":
            content[at : at + 1] = data.draw(
                st.one_of(st.binary(max_size=3), st.sampled_from([b"&a ", b"*a", b"<<: "]))
            )
        else:
            part = content[at : at + data.draw(st.integers(1, 40))]
            content[at : at + len(part)] = b"" if kind == "drop" else part * 2
    Path("odd.yaml").write_bytes(bytes(content))
    answer(plan.main, "--config", "odd.yaml", "--np", "3", "--data.train_samples", "1000", "--model.classes", "10")


@fuzzed
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(
                ["--config", "digits", "--np", "--schedule.lr", "--seed", "--model.name", "--", "-h1", "=", "--out"]
            ),
            st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
            st.integers(-(2**70), 2**70).map(str),
        ),
        max_size=6,
    )
)
def test_any_words_are_a_plan_or_refused_in_a_line(words: list[str], answer: Callable[..., int]) -> None:
    if "--after" not in words and not any(word.startswith("-h") for word in words):
        answer(plan.main, *words)


def test_aliases_that_grow_without_end_are_refused(answer: Callable[..., int]) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    Path("bomb.yaml").write_text("\n".join(lines))
    assert answer(plan.main, "--config", "bomb.yaml", "--np", "2") == 2


# --- images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_classes(tmp_path_factory.mktemp("images") / "root", train=2, val=1)


def decoded(root: Path, backend: str) -> tuple[int, ...] | None:
    """The shape of the training batch of ``root``, or None if it was refused with the path of the damaged file."""
    settings_ = DataConfig(
        root=str(root),
        backend=backend,
        image_size=16,
        resize=16,
        threads=1,
        augment=AugmentConfig("none", flip=False),  # type: ignore[arg-type]
    )
    try:
        source = open_source(Config(micro_batch=4, data=settings_), Solo(), torch.device("cpu"))
        (batch,) = source.train(iter([MicroBatch(0, 0, 4)]))
        return tuple(batch.inputs.shape)
    except HvdbsError as error:
        said = str(error)
    assert "cat/0.jpg" in said and "\n" not in said
    return None


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    small = photo().resize((48, 32))
    made = [encode(small, quality=85), encode(small, quality=85, progressive=True), encode(small, "PNG")]
    whole = draw(
        st.sampled_from([*made, encode(small, "GIF"), encode(small.convert("I;16"), "PNG"), *variants().values()])
    )
    kind = draw(st.sampled_from(["cut", "flip", "flip", "header", "zero", "noise", "tail"]))
    content = bytearray(whole)
    if kind == "cut":
        return bytes(content[: draw(st.integers(0, len(content)))])
    if kind == "zero":
        at = draw(st.integers(0, len(content)))
        content[at:] = bytes(len(content) - at)
    elif kind == "noise":
        return draw(st.binary(max_size=100))
    elif kind == "tail":
        content += draw(st.binary(max_size=100))
    else:
        end = min(len(content), 200) if kind == "header" else len(content)
        for at in draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=20)):
            content[at] ^= draw(st.integers(1, 255))
    return bytes(content)


@few
@given(content=damaged())
def test_a_damaged_image_is_decoded_or_named_by_both_back_ends(content: bytes, folder: Path) -> None:
    """Where one decodes and the other refuses is their libraries' affair (README); headers decide alike for both."""
    victim = folder / "train" / "cat" / "0.jpg"
    victim.write_bytes(content)
    settle(folder)
    shapes = [decoded(folder, backend) for backend in ("pillow", "dali")]
    assert set(shapes) <= {None, (4, 16, 16, 3)}
    try:
        read_header(content)
    except ValueError:
        assert shapes == [None, None]


@pytest.mark.parametrize("backend", ["pillow", "dali"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_bomb_is_refused_before_it_is_decoded(folder: Path, backend: str, kind: str) -> None:
    """30,000 x 30,000 pixels, of which the file holds few: by the header, in no time and no memory."""
    content = bytearray(encode(photo().resize((48, 32)), kind))
    at = 16 if kind == "PNG" else content.index(b"\xff\xc0") + 5
    content[at : at + (8 if kind == "PNG" else 4)] = (30000).to_bytes(4 if kind == "PNG" else 2, "big") * 2
    victim = folder / "train" / "cat" / "0.jpg"
    victim.write_bytes(content)
    settle(folder)
    assert decoded(folder, backend) is None
    victim.write_bytes(encode(photo().resize((48, 32))))


@few
@given(data=st.data())
def test_a_damaged_file_list_is_made_anew_or_refused(data: st.DataObject, folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "cat" / "0.jpg").write_bytes(encode(photo().resize((48, 32))))
    settle(folder)
    place = tmp_path / "index"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    whole = share_index(str(folder), str(place), Solo())
    (kept,) = [path for path in place.iterdir() if path.is_file()]
    content = bytearray(kept.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=10)):
        content[at] ^= data.draw(st.integers(1, 255))
    kept.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content))
    try:
        again = share_index(str(folder), str(place), Solo())
    except HvdbsError:
        return
    assert len(again.train) == len(whole.train) and again.classes == whole.classes
    assert [again.train.path(k) for k in range(len(again.train))] == [
        whole.train.path(k) for k in range(len(whole.train))
    ]


# --- checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of eight updates with checkpoints at 6 and 8."""
    place = tmp_path_factory.mktemp("finished")
    (place / "good.yaml").write_text(yaml.safe_dump(CONFIG | {"threads": 1}))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert train.main(["--config", str(place / "good.yaml"), "--out", str(place / "run")]) == 0
    yield place
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@few
@given(data=st.data())
def test_a_damaged_checkpoint_is_passed_over_or_refused(
    data: st.DataObject, finished: Path, tmp_path: Path, answer: Callable[..., int]
) -> None:
    """Bytes of model.pt or manifest.json of the newest checkpoint changed or cut: the one before is used."""
    out = tmp_path / "run"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(finished / "run", out)
    victim = out / "checkpoints" / "step-8" / data.draw(st.sampled_from(["model.pt", "manifest.json"]))
    content = bytearray(victim.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=10)):
        content[at] ^= data.draw(st.integers(1, 255))
    victim.write_bytes(
        bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    )
    found = checkpoint.find(out, "auto", lambda text: None)
    assert found is not None
    whole = [finished / "run" / "checkpoints" / name / "model.pt" for name in ("step-8", "step-6")]
    assert (found / "model.pt").read_bytes() in [path.read_bytes() for path in whole]


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def tampered(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """States that a manifest may vouch for all the same: someone wrote them."""
    yield "a list", [1, 2]
    yield "code", {**state, "model": Code()}
    for name in state:
        yield f"without {name}", {k: v for k, v in state.items() if k != name}
        yield f"{name} a word", {**state, name: "word"}
        yield f"{name} none", {**state, name: None}
    model = state["model"]
    first = next(iter(model))
    yield "another shape", {**state, "model": {**model, first: torch.zeros(2, 2)}}
    yield "a tensor less", {**state, "model": {k: v for k, v in model.items() if k != first}}
    yield "a tensor more", {**state, "model": {**model, "other": torch.zeros(2)}}
    yield "optimizer of another", {**state, "optimizer": {"state": {}, "param_groups": []}}
    yield "progress of another", {**state, "progress": {"steps": 1}}
    yield "engine of another", {**state, "engine": {"layers": 3}}


def test_a_checkpoint_that_someone_wrote_is_refused_in_a_line_and_runs_nothing(
    finished: Path, tmp_path: Path, answer: Callable[..., int]
) -> None:
    state = torch.load(finished / "run" / "checkpoints" / "step-6" / "model.pt", weights_only=True)
    harmless = {"training", "totals", "engine", "extrapolation", "anchor", "best_merit", "world_size", "scaler"}
    for what, content in tampered(state):
        out = tmp_path / "run"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(finished / "run", out)
        for step in ("step-8", "step-6"):
            target = out / "checkpoints" / step
            buffer = io.BytesIO()
            torch.save(content, buffer, pickle_module=pickle)
            (target / "model.pt").write_bytes(buffer.getvalue())
            manifest = {"format": 1, "files": {"model.pt": checkpoint._fingerprint(target / "model.pt")}}
            (target / "manifest.json").write_text(json.dumps(manifest))
        code = answer(train.main, "--config", str(finished / "good.yaml"), "--out", str(out), "--resume", "auto")
        assert code == 2 or any(name in what for name in harmless), what
        assert not Path("executed").exists(), what


def test_the_fields_of_a_checkpoint_are_known_to_this_test(finished: Path) -> None:
    state = torch.load(finished / "run" / "checkpoints" / "step-8" / "model.pt", weights_only=True)
    assert set(state) == {"format", *checkpoint.State.__dataclass_fields__}
    assert asdict(checkpoint.Progress(**state["progress"])) == state["progress"]
