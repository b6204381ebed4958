"""The `branchline` command: selects one command, reads its options, runs it and turns errors into exit codes.

Only the selected command is imported. A command returns its output as one text, so after an error stdout is
empty. Exit codes: 0 success, 1 the doctor found the template unsafe, a check found damage or no session of a
run finished, 2 bad input (with one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from branchline import __version__
from branchline.cli.options.command import Command, CommandGroup
from branchline.cli.options.errors import UsageError, show, usage_error
from branchline.core.errors import BranchlineError, InputError
from branchline.core.extras import requires_extra
from branchline.core.suggestions import did_you_mean

_DESCRIPTION = """\
Records the LLM calls of agents as exact tokens and turns them into training samples in which every sampled
token is trained exactly once, in exactly the context it was sampled in.
"""
_EXAMPLES = """\
examples:
  branchline serve --engine scripted      start a gateway for agents that records every call
  branchline run tasks.jsonl --agent my_agent:run --reward my_agent:score --n 8
                                          run an agent on tasks; record, score and write every session
  branchline demo                         train a tiny model on a CPU and watch it learn
  branchline merge calls.jsonl            merge a log into timelines; list forks, causes and all tokens
  branchline tree calls.jsonl             print the same calls as a tree
  branchline doctor --tokenizer NAME      check what a model's chat template does to conversations
  branchline journal check run.journal    check the file that `serve --journal` writes for damage

`branchline merge --help` describes the format of calls.jsonl.
"""
COMMANDS: Mapping[str, str] = {
    "serve": "serve a model to agents and record every call",
    "run": "run agents on tasks; record, score and write every session",
    "train": "train a model on the rewards of an agent",
    "demo": "train a tiny model on a CPU and watch it learn",
    "merge": "merge the calls of a log into timelines and account for every sampled token",
    "tree": "print the calls of a log as a tree",
    "doctor": "check whether a model's chat template is safe to train with, and what it costs",
    "stats": "print the figures of a run",
    "export": "write the samples of a run as Parquet or JSON lines",
    "journal": "check a journal for damage, or repair it",
}
"""The commands; the options of each are in its module of `branchline.cli.commands`."""
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        with requires_extra():
            output = _run(sys.argv[1:] if argv is None else argv)
        text, code = output if isinstance(output, tuple) else (output, 0)
        _write(text)
    except BranchlineError as error:
        print(f"branchline: error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader closed the pipe. Python flushes stdout once more at exit: into /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except OSError as error:
        if error.filename is None:
            raise
        print(f"branchline: error: {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return code


def load_command(name: str) -> Command | CommandGroup:
    """Imports the options and texts of a command."""
    command: Command | CommandGroup = import_module(f"branchline.cli.commands.{name}").COMMAND
    return command


def parse_options(name: str, *arguments: str) -> Any:
    """The options of a command as a command line without variables gives them."""
    from branchline.cli.options.parser import read_options

    command = load_command(name)
    assert isinstance(command, Command)
    return read_options(command, arguments).options


def _run(arguments: Sequence[str]) -> str | tuple[str, int]:
    first, *rest = arguments or [""]
    if first in ("-h", "--help", "--help-all"):
        from branchline.cli.options.help import program_help

        return program_help(_DESCRIPTION, COMMANDS, _EXAMPLES)
    if first == "--version":
        return f"branchline {__version__}\n"
    if not first:
        raise usage_error("", f"got no command, expected one of {', '.join(COMMANDS)}")
    if first not in COMMANDS:
        what = "option" if first.startswith("-") else "command"
        raise usage_error("", f"{first}: unknown {what}{did_you_mean(first, (*COMMANDS, '--version'))}")
    command = load_command(first)
    if isinstance(command, CommandGroup):
        return _run_action(command, rest)
    return _execute(command, rest)


def _run_action(group: CommandGroup, arguments: Sequence[str]) -> str | tuple[str, int]:
    first, *rest = arguments or [""]
    if first in ("-h", "--help", "--help-all"):
        from branchline.cli.options.help import group_help

        return group_help(group)
    if first not in group.actions:
        expected = f"expected one of {', '.join(group.actions)}{did_you_mean(first, group.actions)}"
        raise usage_error(
            group.name, f"{group.name}: got {show(first) if first else 'no action'}, {expected}"
        )
    return _execute(group.actions[first][1], rest)


def _execute(command: Command, arguments: Sequence[str]) -> str | tuple[str, int]:
    from branchline.cli.options.parser import name_option, read_options

    read = read_options(command, arguments, os.environ)
    _warn_of_variables(command)
    if read.text is not None:
        return read.text
    try:
        return command.execute(read.options)
    except InputError as error:
        raise UsageError(name_option(command, str(error))) from error


def _warn_of_variables(command: Command) -> None:
    """Names variables that no command has, and that look like one of this command."""
    from branchline.cli.options.schema import OptionSchema
    from branchline.cli.options.sources import misspelt_variables

    for name, meant in misspelt_variables(OptionSchema(command.options), os.environ).items():
        if not any(name in _variables(load_command(other)) for other in COMMANDS):
            print(
                f"branchline: warning: {name}: no option has this variable; did you mean {meant}?",
                file=sys.stderr,
            )


def _variables(command: Command | CommandGroup) -> set[str]:
    from branchline.cli.options.schema import OptionSchema

    if isinstance(command, CommandGroup):
        return {name for _, action in command.actions.values() for name in _variables(action)}
    return {option.variable for option in OptionSchema(command.options).options.values()}


def _write(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks is escaped instead of raising an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stdout.write(text)
    sys.stdout.flush()
