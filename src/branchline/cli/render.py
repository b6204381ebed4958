"""How things look in a terminal, and that they are the same without one.

Commands build rich renderables and turn them into text here, in one piece. Message text is somebody else's:
it is shown letter by letter, never read as markup, and its control characters are written out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.text import Text
from rich.tree import Tree as Branches

from branchline.core.message import Message
from branchline.timelines.causes import ForkReport
from branchline.tree.tree import NO_NODE, Node, Tree

_DEFAULT_WIDTH = 120
_INDENT = 4
_MIN_TEXT_WIDTH = 56
"""Columns that forks inside forks must leave to a message."""
_ROLE_STYLES = {
    "system": "magenta",
    "developer": "magenta",
    "user": "cyan",
    "tool": "blue",
    "function": "blue",
}
_JOINERS = "\u200c\u200d"
"""Unprintable by the book, yet parts of ordinary words and emoji."""


def output_width(width: int | None = None) -> int:
    """How wide stdout is; a pipe is as wide as it is told to be."""
    return _console(width).width


def _console(width: int | None) -> Console:
    if width is None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = _DEFAULT_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def to_text(*shown: RenderableType, width: int | None = None) -> str:
    """What these look like on stdout: coloured on a terminal, plain text elsewhere."""
    console = _console(width)
    with console.capture() as capture:
        for part in shown:
            # Sentences are cut by the terminal, not by us: a pipe gets them whole.
            console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def sanitize(text: str, max_chars: int = 400) -> str:
    """A message's text on one line, harmless to a terminal.

    >>> sanitize("two\\n lines \\x1b[31m")
    'two lines \\\\x1b[31m'
    """
    line = " ".join(text[:max_chars].split())
    if line.isprintable():
        return line
    return "".join(
        letter
        if letter.isprintable() or letter in _JOINERS
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in line
    )


def format_count(count: int) -> str:
    """A count as people read it: 12,345."""
    return f"{count:,}"


def pluralize(count: int, noun: str) -> str:
    """A count with its noun.

    >>> pluralize(1, "call"), pluralize(1200, "call")
    ('1 call', '1,200 calls')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def render_tree(
    tree: Tree, judgement: ForkReport, *, name: str = "", width: int | None = None
) -> RenderableType:
    """A session's tree to print: a message is a line, and only a fork indents.

    So a long conversation stays at its margin. Forks inside forks that would leave too little of `width`
    to the text go on at the margin further down.
    """
    deepest = max(1, ((width or output_width()) - _MIN_TEXT_WIDTH) // _INDENT)
    return Group(*_TreeRenderer(tree, judgement, name, deepest).render())


class _TreeRenderer:
    """One tree, drawn in as many parts as its depth asks for."""

    def __init__(self, tree: Tree, judgement: ForkReport, name: str, deepest: int) -> None:
        self._tree = tree
        self._name = name
        self._max_depth = deepest
        self._undelivered = judgement.undelivered
        self._causes = {fork.branch.id: fork.cause for fork in judgement.forks}
        self._token_width = max((len(_token_counts(node)) for node in self._tree.nodes), default=1)
        self._role_width = max(len(node.message.role) for node in self._tree.nodes)
        self._has_agents = len({call.agent for call in self._tree.calls}) > 1
        self._deferred: list[Node] = []

    def render(self) -> Iterator[RenderableType]:
        first = self._tree.root.all_children()
        if len(first) == 1:
            yield self._title()
            yield self._render_subtree(first[0])
        else:
            yield self._add_branches(Branches(self._title(), guide_style="dim"), first)
        # The list grows while it is read: a part may have parts of its own.
        for part, node in enumerate(self._deferred, start=1):
            yield Text(f"… part {part}", "bold")
            yield self._render_subtree(node)

    def _title(self) -> Text:
        name = f"session {sanitize(self._name)}" if self._name else "session"
        counts = (
            pluralize(len(self._tree.calls), "call"),
            pluralize(len(self._tree.leaves()), "timeline"),
            pluralize(self._tree.token_count, "token"),
        )
        return Text(" · ".join((name, *counts)), "bold")

    def _render_subtree(self, node: Node) -> Branches:
        lines, children = self._unforked_lines(node)
        return self._add_branches(Branches(lines, guide_style="dim"), children)

    def _unforked_lines(self, node: Node) -> tuple[Group, list[Node]]:
        """The messages from a node to the next fork, and the branches there."""
        lines = [self._line(node)]
        children = node.all_children()
        while len(children) == 1:
            lines.append(self._line(children[0]))
            children = children[0].all_children()
        return Group(*lines), children

    def _add_branches(self, top: Branches, branches: list[Node]) -> Branches:
        stack = [(top, node, 1) for node in reversed(branches)]
        while stack:
            above, node, depth = stack.pop()
            lines, children = self._unforked_lines(node)
            if children and depth > self._max_depth:
                self._deferred.append(node)
                above.add(
                    Text(f"… part {len(self._deferred)} below", "dim", no_wrap=True, overflow="ellipsis")
                )
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
        line.append(f"{_token_counts(node):>{self._token_width}}  ", "dim")
        for mark in self._labels(node):
            line.append(f"({mark}) ", "yellow")
        return line.append(_message_text(node.message))

    def _labels(self, node: Node) -> Iterator[str]:
        if node.id in self._causes:
            yield self._causes[node.id]
        if self._has_agents and node.is_sampled:
            yield sanitize(node.agent or "no agent named")
        if node.output is not None and node.output.finish_reason == "length":
            yield "cut"
        if node.output is not None and node.output.inexact and len(node.ids):
            yield "inexact"
        if node.id in self._undelivered:
            yield f"not trained: {self._undelivered[node.id]}"
        if node.source_id != NO_NODE:
            yield "shown again"


def _token_counts(node: Node) -> str:
    sampled = node.end - node.sampled_start
    before = len(node.ids) - sampled
    if not node.is_sampled:
        return format_count(before) if before else ""
    return f"{format_count(before)}+{format_count(sampled)}" if before else format_count(sampled)


def _message_text(message: Message) -> str:
    calls = " ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    media = " ".join(f"<{media.kind}>" for media in message.media)
    return sanitize(" ".join(part for part in (message.content, message.refusal, calls, media) if part))
