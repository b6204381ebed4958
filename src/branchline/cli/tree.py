"""`branchline tree`: the merged calls of a log as a tree in the terminal.

One message is one line and only a fork indents, so a long conversation stays at the left margin. A subtree
that would be indented too far is printed at the margin, further down.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree as RichTree

from branchline.cli.call_log import load_call_log
from branchline.cli.commands.tree import TreeOptions
from branchline.cli.render import format_count, output_width, pluralize, sanitize, to_text
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.timelines.causes import ForkReport
from branchline.tree.tree import NO_NODE, Node, Tree

_INDENT = 4
_MIN_TEXT_WIDTH = 56
"""Columns left for a message after the indentation of nested forks."""
_ROLE_STYLES = {
    "system": "magenta",
    "developer": "magenta",
    "user": "cyan",
    "tool": "blue",
    "function": "blue",
}


def run(options: TreeOptions) -> str:
    """The trees of the selected sessions, as text."""
    log = load_call_log(options.log)
    sessions = [session for session in log.sessions if options.session in (None, session.name)]
    if not sessions:
        known = ", ".join(session.name or "(no name)" for session in log.sessions[:10])
        raise InputError(f"--session: got {options.session!r}, expected one of the log's: {known}")
    parts: list[RenderableType] = [
        render_tree(
            session.merged.tree, session.fork_report, name=session.name, width=output_width(options.width)
        )
        for session in sessions
    ]
    if log.skipped:
        parts.append(Text(f"skipped {pluralize(len(log.skipped), 'bad line')}"))
    return to_text(*parts, width=options.width)


def render_tree(
    tree: Tree, fork_report: ForkReport, *, name: str = "", width: int | None = None
) -> RenderableType:
    """A session's tree as a rich renderable for `width` columns (default: those of stdout)."""
    max_depth = max(1, ((width or output_width()) - _MIN_TEXT_WIDTH) // _INDENT)
    return Group(*_TreeRenderer(tree, fork_report, name, max_depth).render())


class _TreeRenderer:
    """Renders one tree: the part at the top, then one part for each subtree deeper than `max_depth`."""

    def __init__(self, tree: Tree, fork_report: ForkReport, name: str, max_depth: int) -> None:
        self._tree = tree
        self._name = name
        self._max_depth = max_depth
        self._undelivered = fork_report.undelivered
        self._causes = {fork.branch.id: fork.cause for fork in fork_report.forks}
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
            yield self._add_branches(RichTree(self._title(), guide_style="dim"), first)
        # Rendering a deferred subtree may defer more of them: the list grows during the iteration.
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

    def _render_subtree(self, node: Node) -> RichTree:
        lines, children = self._unforked_lines(node)
        return self._add_branches(RichTree(lines, guide_style="dim"), children)

    def _unforked_lines(self, node: Node) -> tuple[Group, list[Node]]:
        """The lines from a node down to the next fork, and the branches of that fork."""
        lines = [self._line(node)]
        children = node.all_children()
        while len(children) == 1:
            lines.append(self._line(children[0]))
            children = children[0].all_children()
        return Group(*lines), children

    def _add_branches(self, top: RichTree, branches: list[Node]) -> RichTree:
        stack = [(top, node, 1) for node in reversed(branches)]
        while stack:
            parent, node, depth = stack.pop()
            lines, children = self._unforked_lines(node)
            if children and depth > self._max_depth:
                self._deferred.append(node)
                parent.add(
                    Text(f"… part {len(self._deferred)} below", "dim", no_wrap=True, overflow="ellipsis")
                )
                continue
            rendered = parent.add(lines)
            stack += [(rendered, child, depth + 1) for child in reversed(children)]
        return top

    def _line(self, node: Node) -> Text:
        sampled = node.is_sampled
        style = "bold green" if sampled else _ROLE_STYLES.get(node.message.role, "dim")
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("* " if sampled else "  ", style)
        line.append(f"{node.message.role:<{self._role_width}} ", style)
        line.append(f"{_token_counts(node):>{self._token_width}}  ", "dim")
        for label in self._labels(node):
            line.append(f"({label}) ", "yellow")
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
