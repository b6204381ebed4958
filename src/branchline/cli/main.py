"""The `branchline` command: parses the options, runs one command and turns errors into exit codes.

A command returns its output as one text, so after an error stdout is empty. Exit codes: 0 success, 1 the
doctor found the template unsafe, a check found damage or no session of a run finished, 2 bad input (with one
sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from branchline import __version__
from branchline.cli import demo, doctor, export_run, journal, merge, run, serve, stats, train, tree
from branchline.core.errors import BranchlineError
from branchline.core.extras import requires_extra

_DESCRIPTION = """\
Records the LLM calls of agents as exact tokens and turns them into training samples in which every sampled
token is trained exactly once, in exactly the context it was sampled in.
"""
_EPILOG = """\
examples:
  branchline serve --engine scripted      start a gateway for agents that records every call
  branchline run tasks.jsonl --agent my_agent:run --reward my_agent:score --n 8 --out runs/first
                                          run an agent on tasks; record, score and write every session
  branchline demo                         train a tiny model on a CPU and watch it learn
  branchline merge calls.jsonl            merge a log into timelines; list forks, causes and all tokens
  branchline tree calls.jsonl             print the same calls as a tree
  branchline doctor --tokenizer NAME      check what a model's chat template does to conversations
  branchline journal check run.journal    check the file that `serve --journal` writes for damage

`branchline merge --help` describes the format of calls.jsonl.
"""
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = build_parser().parse_args(argv)
    execute: Callable[[argparse.Namespace], str | tuple[str, int]] = options.run
    try:
        with requires_extra():
            output = execute(options)
        text, code = output if isinstance(output, tuple) else (output, 0)
        _write(text)
    except BranchlineError as error:
        print(f"branchline: error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. Python flushes stdout once more at exit: into /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run` to the function that executes it."""
    parser = argparse.ArgumentParser(
        "branchline",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"branchline {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    merge.add_merge(commands)
    tree.add_tree(commands)
    doctor.add_doctor(commands)
    serve.add_serve(commands)
    run.add_run(commands)
    train.add_train(commands)
    stats.add_stats(commands)
    export_run.add_export(commands)
    demo.add_demo(commands)
    journal.add_journal(commands)
    return parser


def _write(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks is escaped instead of raising an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stdout.write(text)
    sys.stdout.flush()
