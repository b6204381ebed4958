"""Help texts in two levels: `--help` has what most people need, `--help-all` everything."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping

from branchline.cli.options.command import Command, CommandGroup
from branchline.cli.options.schema import Option, OptionSchema

_COLUMN = 26
"""Where the text of an option begins."""
_MAX_WIDTH = 110
_FIRST_SENTENCE = re.compile(r"(?s)^(.*?[^.])\.(?:\s|$)")
_COMMON = {
    "-h, --help": "Show what most people need",
    "--help-all": "Show every option, with all that there is to say",
    "--config FILE": "Read options from a YAML or TOML file; its keys are their names, with underscores",
    "--print-config": "Print the options in effect as YAML, which --config reads, and exit",
}
_SOURCES = """\
Each option is also a key of --config FILE ({key}) and a variable
({variable}; several values are lines or a JSON array).
The command line comes before variables, these before the file."""


def command_help(command: Command, schema: OptionSchema, *, everything: bool) -> str:
    """The help of a command."""
    options = list(schema.options.values())
    hidden = [option for option in options if not _is_basic(option)]
    positional = schema.positional
    usage = f"usage: branchline {command.name} [options]"
    if positional is not None:
        usage += f" {positional.metavar}" if positional.is_required else f" [{positional.metavar}]"
    parts = [usage, command.description.strip()]
    shown = [option for option in options if everything or _is_basic(option)]
    for title in dict.fromkeys(option.title for option in shown):
        rows = {_heading(option): _text(option, everything) for option in shown if option.title == title}
        parts.append(_table(title, rows))
    parts.append(_table("help and files", _COMMON))
    if everything:
        example = next((option for option in options if not option.about.positional), options[0])
        parts.append(_SOURCES.format(key=example.name, variable=example.variable))
    elif hidden:
        parts.append(f"{len(hidden)} more options: branchline {command.name} --help-all")
    parts += [text.rstrip() for text in (command.examples, command.details if everything else "") if text]
    return "\n\n".join(parts) + "\n"


def group_help(group: CommandGroup) -> str:
    """The help of a command that has actions."""
    rows = {name: summary for name, (summary, _) in group.actions.items()}
    usage = f"usage: branchline {group.name} ACTION [options]"
    parts = [usage, group.description.strip(), _table("actions", rows), group.examples.rstrip()]
    return "\n\n".join(filter(None, parts)) + "\n"


def program_help(description: str, commands: Mapping[str, str], examples: str) -> str:
    """The help of `branchline`."""
    usage = "usage: branchline COMMAND [options]"
    options = {
        "-h, --help": "Show this; branchline COMMAND --help shows a command's",
        "--version": "Print it",
    }
    tables = (_table("commands", commands), _table("options", options))
    return "\n\n".join([usage, description.strip(), *tables, examples.rstrip()]) + "\n"


def _is_basic(option: Option) -> bool:
    return option.about.basic or option.about.positional or option.is_required


def _heading(option: Option) -> str:
    if option.about.positional or option.type.is_switch:
        return option.flag
    return f"{option.flag} {option.metavar}"


def _text(option: Option, everything: bool) -> str:
    text = option.help
    first = _FIRST_SENTENCE.match(text)
    if first is not None and not everything:
        text = first[1]
    notes = []
    if option.is_required and not option.about.positional:
        notes.append("required")
    if option.type.is_repeated:
        notes.append("repeatable")
    if default := _default_text(option):
        notes.append(f"default: {default}")
    return text.removesuffix(".") + (f" ({'; '.join(notes)})" if notes else "")


def _default_text(option: Option) -> str:
    value = option.default
    if option.is_required or value is None or isinstance(value, bool) or value in ("", (), [], {}):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(title: str, rows: Mapping[str, str]) -> str:
    return "\n".join([f"{title}:", *_lines(rows)])


def _lines(rows: Mapping[str, str]) -> Iterator[str]:
    width = min(shutil.get_terminal_size((100, 0)).columns, _MAX_WIDTH) - _COLUMN
    for heading, text in rows.items():
        lines = textwrap.wrap(text, max(width, 30), break_on_hyphens=False) or [""]
        if len(heading) + 4 <= _COLUMN:
            yield f"  {heading:<{_COLUMN - 2}}{lines.pop(0)}".rstrip()
        else:
            yield f"  {heading}"
        yield from (" " * _COLUMN + line for line in lines)
