"""Command lines: a config file or a packaged recipe, every field of Config as an option, errors in one line.

A packaged recipe is named without a path (``--config digits``); any field is overridden by its dotted name
(``--schedule.lr 0.1``).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import (
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
    _loaders_dumpers,
    set_loader,
    set_parsing_settings,
)

from hvdbs.config import Config, to_yaml
from hvdbs.errors import HvdbsError, refusal, suggestion
from hvdbs.rules import check, check_range
from hvdbs.schedule import StageConfig

RECIPES = Path(__file__).parent / "recipes"


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples."""


def recipe_path(name: str) -> Path:
    """The file of a config given as a path or as the name of a packaged recipe. Raises HvdbsError if neither exists."""
    path = Path(name)
    if name and path.is_dir():
        # A run directory, one of its checkpoints, or a folder of configs.
        found = [str(p / "config.yaml") for p in (path, *path.parents[:2]) if (p / "config.yaml").is_file()]
        found += sorted(str(p) for p in path.glob("*.yaml"))
        if not (RECIPES / f"{name}.yaml").is_file():
            raise refusal("--config", name, "is a folder", f"did you mean {found[0]}?" if found else "name a YAML file")
    if os.sep in name or name.endswith((".yaml", ".yml")):
        if not path.is_file():
            raise refusal("--config", name, "is not a file", f"packaged recipes: {', '.join(recipes())}")
        return path
    recipe = RECIPES / f"{name}.yaml"
    if not recipe.is_file():
        if name and path.is_file():
            return path
        nearest = f"did you mean {name}.yaml?" if Path(f"{name}.yaml").is_file() else suggestion(name, recipes())
        raise refusal("--config", name, "is neither a file nor a packaged recipe", nearest)
    return recipe


def recipes() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def parser(prog: str, description: str, examples: str) -> ArgumentParser:
    """A command line with ``--config`` and every field of Config; entries add their own arguments to it."""
    # Else a config could name a class of any module in place of a section, and reading it would import that module.
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=["hvdbs.schedule.StageConfig"])
    # Values on the command line, and words in a file that stand where numbers do, are read as those of a file are.
    set_loader("yaml", lambda text: yaml.load(text, _Loader), (yaml.YAMLError, ValueError))
    # Where a number is to stand and a word does, jsonargparse asks its own loader, and '1:30' would be ninety again.
    _loaders_dumpers.yaml_default_loader = _Loader  # type: ignore[assignment]  # None at first
    # It also reads plain numbers of its own accord, and 16.0 would be no whole number.
    _loaders_dumpers.load_basic = lambda text: _loaders_dumpers.not_loaded
    result = ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        exit_on_error=False,
        formatter_class=_Help,
        allow_abbrev=False,  # a misspelt option is an error, not another one
    )
    result.add_argument("--config", metavar="FILE|RECIPE", help=f"YAML file, or one of: {', '.join(recipes())}")
    result.add_argument("--print_config", action="store_true", help="print every field as YAML and exit")
    result.add_class_arguments(Config)
    return result


def parse(command: ArgumentParser, argv: Sequence[str] | None = None) -> tuple[Config, Namespace]:
    """The Config and the remaining arguments of a command line. Raises HvdbsError, one line, for what it cannot read.

    The file given by ``--config`` is read first, then the other arguments override its fields one by one.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    show = "--print_config" in arguments  # jsonargparse has one of its own, which knows nothing of packaged recipes
    arguments = [word for word in arguments if word != "--print_config"]
    try:
        base = _read_file(command, arguments)
        space = command.parse_args(arguments, namespace=base)
        built = command.instantiate(space)
    except (ArgumentError, ValueError) as error:  # ValueError: an import that is denied
        raise HvdbsError(_readable(str(error), command)) from None
    except RecursionError:
        raise HvdbsError("a value on the command line or in --config is nested too deeply") from None
    fields = {name: built.pop(name) for name in Config.__dataclass_fields__}
    config = Config(**fields)
    check(config)
    del built.print_config
    for name, value in vars(built).items():
        check_range(f"--{name.replace('_', '-')}", value)
    if show:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config, built


def _read_file(command: ArgumentParser, arguments: list[str]) -> Namespace | None:
    name = None
    for at, word in enumerate(arguments):
        if word == "--config" and at + 1 < len(arguments):
            name = arguments[at + 1]
        elif word.startswith("--config="):
            name = word.removeprefix("--config=")
    if name is None:
        return None
    path = recipe_path(name)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise HvdbsError(f"--config: {path} cannot be read as YAML: {place}{error.problem}") from None
    except RecursionError:
        raise HvdbsError(f"--config: {path} cannot be read as YAML: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise HvdbsError(f"--config: {path} is no text in UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise HvdbsError(f"--config: {path} cannot be read: {error.strerror}") from None
    except Exception as error:  # PyYAML raises what int(), float() and its own slips raise for values with a tag
        raise HvdbsError(f"--config: {path} cannot be read as YAML: {error}") from None
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise refusal("--config", path, f"holds {kind}, not a mapping of fields", "--print_config shows them all")
    _check_names(data, Config, "")
    space: Namespace = command.parse_object(data, defaults=False)
    return space


class _Loader(yaml.SafeLoader):
    """YAML without code, and without a name that stands twice in one mapping (PyYAML would take the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} stands there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, PyYAML's, takes off, on, no and yes for truth values, 010 for eight, 1:30 for ninety and 1e-4 for a word;
# here they are a word, ten, refused and a number, nearly as in 1.2.
_RESOLVED = {
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$", "-+0123456789"),
    "float": (
        r"^(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
    "timestamp": None,
}
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _RESOLVED]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _how in _RESOLVED.items():
    if _how is not None:
        _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_how[0]), list(_how[1]))


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return int(text, 16 if text.startswith("0x") else 8 if text.startswith("0o") else 10)


def _refuse_minutes(loader: _Loader, node: yaml.ScalarNode) -> None:
    raise yaml.MarkedYAMLError(problem=f"{node.value} is no number, only a time", problem_mark=node.start_mark)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """16.0 and 1e3 are whole numbers: fields that take others make floats of them again."""
    value = loader.construct_yaml_float(node)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_implicit_resolver("!minutes", re.compile(r"^[-+]?[0-9]+(?::[0-9]+)+(?:\.[0-9]*)?$"), list("-+0123456789"))
_Loader.add_constructor("!minutes", _refuse_minutes)


def _check_names(data: dict[Any, Any], kind: type, prefix: str) -> None:
    """Raises HvdbsError for a name in ``data`` that dataclass ``kind`` has not, or a section that is no mapping."""
    hints = get_type_hints(kind)
    for name, value in data.items():
        if name not in hints:
            if f"{prefix}{name}" in _fields(Config):  # dotted, as on a command line
                *outer, leaf = f"{prefix}{name}".split(".")
                rule = f"is a name for the command line; in a file {leaf} stands under {'.'.join(outer)}"
                raise HvdbsError(f"{prefix}{name}: {rule}: {{{leaf}: ...}}")
            known = [*(f"{prefix}{one}" for one in hints), *_fields(Config)]
            raise HvdbsError(f"{prefix}{name}: no such field; {_closest(f'{prefix}{name}', known)}")
        if not dataclasses.is_dataclass(hints[name]):
            continue
        if not isinstance(value, dict):
            shown = "null" if value is None else value
            raise refusal(
                f"{prefix}{name}", shown, f"is not a mapping of its fields ({', '.join(_fields(hints[name]))})"
            )
        _check_names(value, hints[name], f"{prefix}{name}.")


def _fields(kind: Any, prefix: str = "") -> list[str]:
    """Dotted names of all values in dataclass ``kind``."""
    names = []
    for name, hint in get_type_hints(kind).items():
        names += _fields(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{name}"]
    return names


def _closest(name: str, known: Sequence[str], mark: str = "") -> str:
    """What may be meant: the names with the same last part, else with one spelt like it, in the same section if any.

    ``mark`` is what they are written with."""
    group, _, leaf = name.rpartition(".")
    leaves = {one: one.rpartition(".")[2] for one in known}
    close = [one for one in leaves if leaves[one] == leaf]
    for within in ([one for one in leaves if one.rpartition(".")[0] == group], leaves):
        similar = difflib.get_close_matches(leaf, [leaves[one] for one in within], n=1)
        close = close or [one for one in within if leaves[one] in similar]
    return f"did you mean {' or '.join(mark + one for one in close[:3])}?" if close else "--help lists all"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    "tuple": "a list",
}


def _readable(text: str, command: ArgumentParser) -> str:
    """jsonargparse's message as one line: the field, the value and what it must be, or the name that may be meant."""
    key = re.match(r'\s*Parser key "([^"]+)"', text)
    field = key.group(1) if key else ""
    if field and field.partition(".")[0] not in {**get_type_hints(Config), **get_type_hints(StageConfig)}:
        field = f"--{field.replace('_', '-')}"
    if found := re.search(r"Importing '([^']+)'", text):
        return f"{field or '--config'}: {found.group(1)} is the name of a class, and a config has values only"
    if found := re.search(r"given class_path '[\w.]+StageConfig':(.*)", text, re.DOTALL):
        return f"{field}: {_row(found.group(1), command)}"
    if found := re.search(r"unrecognized arguments: ([^\s=]+)", text):
        word = found.group(1)
        own = [action.dest for action in command._actions if "." not in action.dest]
        known = [*_fields(Config), *(name for name in own if name not in get_type_hints(Config))]
        return f"{word}: no such option; {_closest(word.lstrip('-'), known, '--')}"
    if found := re.search(r"Group '([^']+)' does not accept option '([^']+)'", text):
        name = f"{found.group(1)}.{found.group(2)}"
        return f"{name}: no such field; {_closest(name, _fields(Config))}"
    if found := re.search(r"Literal\[([^\]]+)\]. Got value: (.*)", text, re.DOTALL):
        choices = _quoted(found.group(1))
        value = found.group(2).strip()
        return f"{field}: {value} is none of {', '.join(choices)}; {suggestion(value, choices)}"
    if found := re.search(r"Unable to load config '([^']*)'", text):
        return f"{field}: {found.group(1)} is not a mapping of its fields; set them one by one, as --{field}.NAME VALUE"
    value = re.search(r"(?:Given value: |Got value: )(.*)", text)
    if value and (found := re.search(r"Expected a tuple with (\d+) elements", text)):
        return f"{field}: {value.group(1).strip()} is not a list of {found.group(1)} numbers"
    if value and "Not a valid subclass of StageConfig" in text:
        return (
            f"{field}: {value.group(1).split('   ')[0]} is not a row such as {{epochs: 1, global_batch: 256, lr: 0.1}}"
        )
    kinds = [_KINDS[name] for name in re.findall(r"Expected a <class '(\w+)'>", text) if name in _KINDS]
    kinds[:0] = [word for words in re.findall(r"Expected a typing.Literal\[(.+)\]", text) for word in _quoted(words)]
    if field and kinds and value:
        given = value.group(1).strip()
        if "a whole number" in kinds and _is_whole(given):
            return f"{field}: {given} must lie between -2^63 and 2^63"
        return f"{field}: {given} is not {' or '.join(dict.fromkeys(kinds))}"
    if found := re.match(r"argument (--\S+): (.*)", text):
        return f"{found.group(1)}: {found.group(2)}"
    rest = " ".join(text.split())
    return f"{field}: {rest.removeprefix(key.group(0).strip()).lstrip(': ')}" if key else rest


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except ValueError:
        return False


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']+)'", text)


def _row(text: str, command: ArgumentParser) -> str:
    """What is wrong with a row of a stage table."""
    if found := re.search(r"arguments are required: (.*)", text):
        return f"a row has no {found.group(1).strip()}; it needs global_batch, lr, and epochs or samples"
    if found := re.search(r"Option '([^']+)' is not accepted", text):
        return f"{found.group(1)} is no field of a row; {suggestion(found.group(1), _fields(StageConfig))}"
    return _readable(text, command)
