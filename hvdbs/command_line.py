"""Command lines: a config file or a packaged recipe, every field of Config as an option, errors in one line.

A packaged recipe is named without a path (``--config digits``); any field is overridden by its dotted name
(``--schedule.lr 0.1``).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from hvdbs.config import Config, check, to_yaml
from hvdbs.errors import HvdbsError, refusal, suggestion

RECIPES = Path(__file__).parent / "recipes"


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples."""


def recipe_path(name: str) -> Path:
    """The file of a config given as a path or as the name of a packaged recipe. Raises HvdbsError if neither exists."""
    if os.sep in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise refusal("--config", name, "is not a file", f"packaged recipes: {', '.join(recipes())}")
        return path
    path = RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise refusal("--config", name, "is neither a file nor a packaged recipe", suggestion(name, recipes()))
    return path


def recipes() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def parser(prog: str, description: str, examples: str) -> ArgumentParser:
    """A command line with ``--config`` and every field of Config; entries add their own arguments to it."""
    # Else a config could name a class of any module in place of a section, and reading it would import that module.
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=["hvdbs.schedule.StageConfig"])
    result = ArgumentParser(
        prog=prog, description=description, epilog=examples, exit_on_error=False, formatter_class=_Help
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
    fields = {name: built.pop(name) for name in Config.__dataclass_fields__}
    config = Config(**fields)
    check(config)
    del built.print_config
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
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise HvdbsError(f"--config: {path} cannot be read as YAML: {error}") from None
    if not isinstance(data, dict):
        raise refusal("--config", path, f"holds {type(data).__name__}, not a mapping of fields")
    space: Namespace = command.parse_object(data, defaults=False)
    return space


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    "tuple": "a list",
}


def _readable(text: str, command: ArgumentParser) -> str:
    """jsonargparse's message as one line: the field, the value, what it must be, the closest name for an unknown
    one."""
    known = [action.dest for action in command._actions if action.dest and action.dest != argparse.SUPPRESS]
    key = re.search(r'Parser key "([^"]+)"', text)
    field = key.group(1) if key else ""
    if found := re.search(r"unrecognized arguments: -*([^\s=]+)", text):
        return f"--{found.group(1)}: no such option; {suggestion(found.group(1), known)}"
    if found := re.search(r"'([^']+)' (?:is not accepted|does not accept option '([^']+)')", text):
        inner = re.search(r"Option '([^']+)' is not accepted", text)
        if field and inner:  # a row of a list
            return f"{field}: {inner.group(1)} is no field of a row; {suggestion(inner.group(1), _row_fields(text))}"
        name = f"{found.group(1)}.{found.group(2)}" if found.group(2) else found.group(1)
        return f"{name}: no such field; {suggestion(name, known)}"
    if found := re.search(r"Literal\[([^\]]+)\]. Got value: (.*)", text, re.DOTALL):
        choices = re.findall(r"'([^']+)'", found.group(1))
        value = found.group(2).strip()
        return f"{field}: {value} is none of {', '.join(choices)}; {suggestion(value, choices)}"
    kinds = [_KINDS[name] for name in re.findall(r"Expected a <class '(\w+)'>", text) if name in _KINDS]
    value = re.search(r"(?:Given value: |Got value: )(.*)", text)
    if found := re.search(r"(?:Importing|class_path) '([^']+)'", text):
        return f"{field or '--config'}: {found.group(1)} is the name of a class, and a config has values only"
    if "Not a valid subclass of StageConfig" in text and value:
        row = "{epochs: 1, global_batch: 256, lr: 0.1}"
        return f"{field}: {value.group(1).split('   ')[0]} is not a row such as {row}"
    if field and kinds and value:
        return f"{field}: {value.group(1).strip()} is not {' or '.join(dict.fromkeys(kinds))}"
    return " ".join(text.split())


def _row_fields(text: str) -> list[str]:
    """Fields of the dataclass that jsonargparse names in ``text``."""
    from hvdbs.schedule import StageConfig

    return list(StageConfig.__dataclass_fields__) if "StageConfig" in text else []
