"""The `branchline` command: reads its options, runs one command, and turns errors into exit codes.

A command returns all it has to say as one text, so an error leaves stdout empty. Exit codes: 0 done,
1 done and found unsafe (doctor), 2 bad input (with a sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from branchline import __version__
from branchline.cli import doctor, merge, serve, tree
from branchline.core.errors import BranchlineError

_DESCRIPTION = """\
Turns the LLM calls of agents into timelines and training samples in which every sampled token is trained
exactly once, behind exactly the context it was sampled in.
"""
_EPILOG = """\
example:
  branchline merge calls.jsonl            timelines, forks and their causes, the account of all tokens
  branchline tree calls.jsonl             the same calls as a tree to read
  branchline doctor --tokenizer DIR       what a model's chat template does to conversations
  branchline serve --engine scripted      a gateway that agents can talk to, every call recorded

`branchline merge --help` shows what a line of calls.jsonl looks like.
"""
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], str | tuple[str, int]] = options.run
    try:
        told = run(options)
        text, code = told if isinstance(told, tuple) else (told, 0)
        _write(text)
    except BranchlineError as error:
        print(f"branchline: error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has seen enough. Python flushes once more on its way out: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return code


def build_parser() -> argparse.ArgumentParser:
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
    return parser


def _write(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a letter gets its escape, not a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
