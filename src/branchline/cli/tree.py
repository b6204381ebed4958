"""`branchline tree`: the merged calls of a log as a tree to read."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from branchline.cli.calls import LINE_HELP, add_input_options, read_calls
from branchline.cli.show import columns, counted, printed, tree_view
from branchline.core.errors import InputError

HELP = "show the calls of a log as a tree"
_DESCRIPTION = """\
Shows the merged calls of a log as a tree in the terminal. A line is a message: * marks what the model
sampled, then come its role and its tokens (12+3: 12 of the prompt, 3 sampled; a log knows the ids of whole
prompts only, so they stand before the output), then why there is a branch, and its first words.
"""
_EPILOG = f"""\
example:
  branchline tree calls.jsonl --session task-7 --width 100

{LINE_HELP}"""


def add_tree(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "tree",
        help=HELP,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_options(parser)
    parser.add_argument("--session", metavar="ID", help="show this session only")
    parser.add_argument("--width", type=_width, metavar="N", help="columns to use (default: the terminal's)")
    parser.set_defaults(run=run)


def _width(text: str) -> int:
    width = int(text) if text.isdecimal() else 0
    if width < 20:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of columns from 20")
    return width


def run(options: argparse.Namespace) -> str:
    """What the command prints."""
    log = read_calls(options)
    chosen = [session for session in log.sessions if options.session in (None, session.name)]
    if not chosen:
        known = ", ".join(session.name or "(no name)" for session in log.sessions[:10])
        raise InputError(f"--session: got {options.session!r}, expected one of the log's: {known}")
    shown: list[RenderableType] = [
        tree_view(session.merged.tree, session.judgement, name=session.name, width=columns(options.width))
        for session in chosen
    ]
    if log.skipped:
        shown.append(Text(f"skipped {counted(len(log.skipped), 'bad line')}"))
    return printed(*shown, width=options.width)
