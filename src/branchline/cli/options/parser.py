"""A command line to the options of a command. argparse splits it; values of all sources are read alike.

read_options(command, ["--port", "0"], os.environ)
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from branchline.cli.options.command import Command
from branchline.cli.options.errors import UsageError, either, show, usage_error
from branchline.cli.options.schema import Option, OptionSchema, build
from branchline.cli.options.sources import (
    CONFIG_VARIABLE,
    Given,
    read_arguments,
    read_file,
    read_variables,
    unknown,
)
from branchline.cli.options.values import to_data
from branchline.core.errors import BranchlineError


@dataclass(frozen=True)
class ReadOptions:
    """What a command line asks for: the options, or a text to print in place of running the command."""

    options: Any = None
    text: str | None = None


def read_options(
    command: Command, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> ReadOptions:
    """Reads the options of a command from all sources. Raises UsageError with the source of what is wrong."""
    environ = environ or {}
    schema = OptionSchema(command.options)
    if level := {"-h", "--help", "--help-all"} & set(_before_separator(arguments)):
        from branchline.cli.options.help import command_help

        return ReadOptions(text=command_help(command, schema, everything="--help-all" in level))
    texts = _split(command, schema, arguments)
    config = _read_config(command, schema, texts.pop("config", []), environ)
    is_printed = bool(texts.pop("print_config", None))
    given = {
        **config,
        **read_variables(command, schema, environ),
        **read_arguments(command, schema, texts),
    }
    values = {name: entry.value for name, entry in given.items()}
    missing = [one for one in schema.options.values() if one.is_required and one.name not in values]
    if is_printed and missing:
        return ReadOptions(text=to_yaml(schema, values))
    for option in missing:
        what = option.help[:1].lower() + option.help[1:].removesuffix(".")
        what = what if option.about.positional else f"{option.metavar}, {what}"
        raise usage_error(command.name, f"{option.flag}: got none, expected {what}")
    _check_effects(command, schema, given)
    options = make_options(command, schema, given)
    return ReadOptions(text=to_yaml(schema, values)) if is_printed else ReadOptions(options)


def _read_config(
    command: Command, schema: OptionSchema, files: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Given]:
    """The values of the file that the command line names, else of the one that the variable names."""
    if len(set(files)) > 1:
        raise usage_error(command.name, f"--config: got {' and '.join(files)}, expected one of them")
    if files:
        return read_file(command, schema, Path(files[0]), "--config")
    if file := environ.get(CONFIG_VARIABLE):
        return read_file(command, schema, Path(file), CONFIG_VARIABLE)
    return {}


def make_options(command: Command, schema: OptionSchema, given: Mapping[str, Given]) -> Any:
    """The dataclass of a command, from what was given. What it refuses is an error of the source."""

    def on_error(option: Option | None, error: BranchlineError) -> Exception:
        if option is None:
            return usage_error(command.name, str(error))
        source = given[option.name].source if option.name in given else option.flag
        problem = source + str(error).removeprefix(option.field.name)
        return usage_error(command.name, problem, all_options=not option.about.basic)

    return build(schema, {name: entry.value for name, entry in given.items()}, on_error)


def name_option(command: Command, problem: str) -> str:
    """The problem of a running command; an option of which it says what it got is named as it is typed."""
    name, got, rest = problem.partition(": got ")
    option = OptionSchema(command.options).options.get(name)
    return f"{option.flag}{got}{rest}" if option is not None else problem


def to_yaml(schema: OptionSchema, given: Mapping[str, object]) -> str:
    """All options as YAML, those of groups nested; secrets and what is required and missing are left out."""
    import yaml  # type: ignore[import-untyped]

    content: dict[str, Any] = {}
    for option in schema.options.values():
        value = given.get(option.name, option.default)
        if option.about.secret or (option.is_required and option.name not in given):
            continue
        place = content
        for key in option.path:
            place = place.setdefault(key, {})
        place[option.name] = to_data(value)
    # Without allow_unicode, which would write some characters so that they are read as others.
    text: str = yaml.safe_dump(content, sort_keys=False)
    return text


def options_to_yaml(options: Any) -> str:
    """The options of a command as YAML, as `--print-config` prints them."""
    schema = OptionSchema(type(options))
    values = {}
    for option in schema.options.values():
        owner = options
        for key in option.path:
            owner = getattr(owner, key)
        values[option.name] = getattr(owner, option.field.name)
    return to_yaml(schema, values)


def _check_effects(command: Command, schema: OptionSchema, given: Mapping[str, Given]) -> None:
    """Refuses options that have no effect beside the others. Variables may be set for many commands."""
    for name, entry in given.items():
        option = schema.options[name]
        if entry.kind == "variable" or (entry.kind == "file" and entry.value == option.default):
            continue
        for other_name, accepted in option.about.needs.items():
            other = schema.options.get(other_name)
            if other is None:
                continue
            value = given[other_name].value if other_name in given else other.default
            if value in accepted if accepted else value != other.default:
                continue
            with_others = f"with {other.flag} {either(map(str, accepted))}".rstrip()
            if other.type.is_switch and False in accepted:
                with_others = f"without {other.flag}"
            got = "" if option.type.is_switch else f"got {show(to_data(entry.value))}, "
            problem = f"{entry.source}: {got}expected it {with_others} only"
            raise usage_error(command.name, problem, all_options=not option.about.basic)


# -- argparse ---------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print after its usage."""

    def __init__(self, command: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._command = command

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("expected one argument", "expected a value")
        message = re.sub("ignored explicit argument (.*)", r"got \1, expected no value", message)
        raise usage_error(self._command, message)


def _before_separator(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments before `--`, after which all are values."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _split(command: Command, schema: OptionSchema, arguments: Sequence[str]) -> dict[str, list[str]]:
    """The texts of each option that a command line names."""
    parser = _Parser(command.name)
    parser.add_argument("--config", action="append", metavar="FILE")
    parser.add_argument("--print-config", action="append_const", const="yes")
    for option in schema.options.values():
        name = option.name.replace("_", "-")
        if option.about.positional:
            parser.add_argument(option.name, nargs="?")
        elif option.type.is_switch:
            for prefix, const in (("", "yes"), ("no-", "no")):
                parser.add_argument(f"--{prefix}{name}", action="append_const", const=const, dest=option.name)
        else:
            parser.add_argument(f"--{name}", action="append", dest=option.name, metavar=option.metavar)
    parsed, extra = parser.parse_known_args(arguments)
    if extra:
        raise _extra_error(command, schema, extra)
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    return {name: value if isinstance(value, list) else [value] for name, value in given.items()}


def _extra_error(command: Command, schema: OptionSchema, extra: Sequence[str]) -> UsageError:
    known = {option.flag for option in schema.options.values()}  # It stands after `--`.
    for text in extra:
        flag = text.partition("=")[0]
        if text.startswith("-") and text != "-" and flag not in known:
            return usage_error(command.name, f"{flag}: {unknown(command, schema, flag, 'option')}")
    positional = schema.positional
    what = "options only" if positional is None else f"{positional.metavar} only"
    if positional is None and "run_folder" in schema.options:
        what += ", the folder of a run with --run-folder"
    return usage_error(command.name, f"got {show(extra[0])}, expected {what}")
