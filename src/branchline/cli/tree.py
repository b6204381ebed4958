"""`branchline tree`: the merged calls of a log as a tree to read."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from branchline.cli.call_log import LOG_FORMAT_HELP, add_log_options, load_call_log
from branchline.cli.render import output_width, pluralize, render_tree, to_text
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

{LOG_FORMAT_HELP}"""


def add_tree(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "tree",
        help=HELP,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_log_options(parser)
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
    log = load_call_log(options)
    chosen = [session for session in log.sessions if options.session in (None, session.name)]
    if not chosen:
        known = ", ".join(session.name or "(no name)" for session in log.sessions[:10])
        raise InputError(f"--session: got {options.session!r}, expected one of the log's: {known}")
    shown: list[RenderableType] = [
        render_tree(
            session.merged.tree, session.fork_report, name=session.name, width=output_width(options.width)
        )
        for session in chosen
    ]
    if log.skipped:
        shown.append(Text(f"skipped {pluralize(len(log.skipped), 'bad line')}"))
    return to_text(*shown, width=options.width)
