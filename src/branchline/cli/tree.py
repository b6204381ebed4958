"""`branchline tree`: the merged calls of a log as a tree to read.

A message is a line; only a fork indents, so a long conversation stays at its margin.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree as Branches

from branchline.cli.account import is_exact
from branchline.cli.calls import LINE_HELP, Session, add_input_options, read_calls
from branchline.cli.show import columns, counted, number, plain, printed
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.timelines.causes import Cause
from branchline.tree.node import NOWHERE, Node

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

_INDENT = 4
_TEXT_WIDTH = 40
"""Columns left to a message; where forks inside forks would leave less, they go on at the margin below."""
_ROLE_STYLES = {
    "system": "magenta",
    "developer": "magenta",
    "user": "cyan",
    "tool": "blue",
    "function": "blue",
}


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
    deepest = max(1, (columns(options.width) - _TEXT_WIDTH) // _INDENT)
    shown: list[RenderableType] = []
    for session in chosen:
        shown += _Drawing(session, deepest).parts()
    if log.skipped:
        shown.append(Text(f"skipped {counted(len(log.skipped), 'bad line')}"))
    return printed(*shown, width=options.width)


class _Drawing:
    """One session's tree, drawn in as many parts as its depth asks for."""

    def __init__(self, session: Session, deepest: int) -> None:
        self._session = session
        self._deepest = deepest
        self._tree = session.merged.tree
        self._causes: dict[int, Cause] = {fork.branch.id: fork.cause for fork in session.judgement.forks}
        self._token_width = max((len(_tokens(node)) for node in self._tree.nodes), default=1)
        self._role_width = max(len(node.message.role) for node in self._tree.nodes)
        self._has_agents = len({call.agent for call in self._tree.calls}) > 1
        self._later: list[Node] = []

    def parts(self) -> Iterator[RenderableType]:
        first = self._tree.root.all_children()
        if len(first) == 1:
            yield self._title()
            yield self._draw(first[0])
        else:
            yield self._fork(Branches(self._title(), guide_style="dim"), first)
        # The list grows while it is read: a part may have parts of its own.
        for part, node in enumerate(self._later, start=1):
            yield Text(f"… part {part}", "bold")
            yield self._draw(node)

    def _title(self) -> Text:
        name = f"session {plain(self._session.name)}" if self._session.name else "session"
        counts = (
            counted(len(self._session.calls), "call"),
            counted(len(self._tree.leaves()), "timeline"),
            counted(self._tree.token_count, "token"),
        )
        return Text(" · ".join((name, *counts)), "bold")

    def _draw(self, node: Node) -> Branches:
        lines, children = self._chain(node)
        return self._fork(Branches(lines, guide_style="dim"), children)

    def _chain(self, node: Node) -> tuple[Group, list[Node]]:
        """The messages from a node to the next fork, and the branches there."""
        lines = [self._line(node)]
        children = node.all_children()
        while len(children) == 1:
            lines.append(self._line(children[0]))
            children = children[0].all_children()
        return Group(*lines), children

    def _fork(self, top: Branches, branches: list[Node]) -> Branches:
        stack = [(top, node, 1) for node in reversed(branches)]
        while stack:
            above, node, depth = stack.pop()
            lines, children = self._chain(node)
            if children and depth > self._deepest:
                self._later.append(node)
                above.add(Text(f"… part {len(self._later)} below", "dim", no_wrap=True, overflow="ellipsis"))
                continue
            here = above.add(lines)
            stack += [(here, child, depth + 1) for child in reversed(children)]
        return top

    def _line(self, node: Node) -> Text:
        sampled = node.is_sampled
        style = "bold green" if sampled else _ROLE_STYLES.get(node.message.role, "dim")
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("* " if sampled else "  ", style)
        line.append(f"{node.message.role:<{self._role_width}} ", style)
        line.append(f"{_tokens(node):>{self._token_width}}  ", "dim")
        for mark in self._marks(node):
            line.append(f"({mark}) ", "yellow")
        return line.append(_words(node.message))

    def _marks(self, node: Node) -> Iterator[str]:
        if node.id in self._causes:
            yield self._causes[node.id]
        if self._has_agents and node.is_sampled:
            yield plain(self._tree.agent_of(node) or "no agent named")
        if node.output is not None and node.output.finish == "length":
            yield "cut"
        if node.output is not None and len(node.ids) and not is_exact(node):
            yield "inexact"
        if node.source != NOWHERE:
            yield "shown again"


def _tokens(node: Node) -> str:
    sampled = node.end - node.sampled_start
    before = len(node.ids) - sampled
    if not node.is_sampled:
        return number(before) if before else ""
    return f"{number(before)}+{number(sampled)}" if before else number(sampled)


def _words(message: Message) -> str:
    calls = " ".join(f"{call.name}({call.arguments})" for call in message.calls)
    media = " ".join(f"<{media.kind}>" for media in message.media)
    return plain(" ".join(part for part in (message.text, message.refusal, calls, media) if part))
