"""Warns if a session that is easily shared gets a second, unrelated conversation.

A session is one episode, with one reward. The URL that `branchline serve` prints, and a gateway without keys,
take any conversation, so two tasks that are sent there become one trajectory. Only these sessions are
checked: a program that opens sessions knows what it does.

A conversation is unrelated if nothing explains it: no side call, other agent or system prompt, compaction,
retry or edit, as `classify_forks` finds them. It is judged when its first call is answered, in the thread of
the views, and only while few conversations have begun; so a busy session costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from itertools import takewhile

from branchline.core.errors import SessionError
from branchline.gateway.session_reads import run_in_view_thread
from branchline.runtime.call_record import CallRecord
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.session_store import DEFAULT_SESSION, SessionStore
from branchline.timelines.causes import Cause, Fork, classify_forks
from branchline.tree.tree import Node, Tree

log = logging.getLogger("branchline.sessions")

_MAX_CHECKS = 8
"""Beginnings of conversations that are judged in one session."""
_DEFAULT_ID = re.compile(rf"{DEFAULT_SESSION}(-\d+)?")
_INSTRUCTIONS = ("system", "developer")


class EpisodeCheck:
    """Observes the calls of a gateway."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self._watched: set[str] = set()
        self._checks: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()

    def watch(self, session_id: str) -> None:
        """Checks this session too, besides those of requests without a key."""
        self._watched.add(session_id)

    def record_call(self, record: CallRecord) -> None:
        is_shared = record.session_id in self._watched or _DEFAULT_ID.fullmatch(record.session_id)
        if not is_shared or record.result is None or record.call_request is None:
            return
        messages = record.call_request.request.messages
        if any(message.role == "assistant" for message in messages):
            return  # it continues a conversation
        try:
            managed = self._sessions.get(record.session_id)
        except SessionError:
            return
        if len(managed.session.tree.calls) > 1 and self._checks[managed.id] < _MAX_CHECKS:
            self._checks[managed.id] += 1
            task = asyncio.create_task(self._check(managed, record.call_id))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _check(self, managed: ManagedSession, call_id: str) -> None:
        tree = managed.session.snapshot()
        try:
            is_unrelated = await run_in_view_thread(lambda: begins_unrelated(tree, call_id))
        except Exception:
            log.exception("session %s: its conversations could not be compared", managed.id)
            return
        if is_unrelated and self._checks[managed.id] <= _MAX_CHECKS:
            self._checks[managed.id] = _MAX_CHECKS + 1  # once for each session
            log.warning(
                "session %s: call %s begins a conversation that has nothing to do with the earlier ones. A"
                " session is one episode: all of them become one trajectory with one reward. Open a session"
                " for each episode with POST /sessions",
                managed.id,
                call_id,
                extra={"session": managed.id, "call": call_id},
            )


def begins_unrelated(tree: Tree, call_id: str) -> bool:
    """Whether a call begins a conversation that nothing in the tree explains."""
    return any(fork.call.id == call_id and _is_unrelated(tree, fork) for fork in classify_forks(tree).forks)


def _is_unrelated(tree: Tree, fork: Fork) -> bool:
    above = [node.message.role for node in fork.parent.path()]
    if fork.cause not in (Cause.UNKNOWN, Cause.EDIT) or not set(above).issubset(_INSTRUCTIONS):
        return False
    return not _is_reworded(tree, fork)


def _is_reworded(tree: Tree, fork: Fork) -> bool:
    """Whether a user has changed the wording of a first message that had no more than an answer: half of the
    text is the same."""
    calls = [call for call in tree.calls if fork.sibling in tree.nodes[call.prompt_node].path()]
    if len(calls) > 1:
        return False
    old, new = _first_text(fork.sibling), _first_text(fork.branch)
    before = _count_equal(old, new)
    after = _count_equal(old[before:][::-1], new[before:][::-1])
    return before + after > max(len(old), len(new)) / 2


def _count_equal(old: str, new: str) -> int:
    """The number of characters at the beginning that are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _first_text(node: Node) -> str:
    """The text of the first user message at or below a node."""
    while node.message.role in _INSTRUCTIONS and node.all_children():
        node = node.all_children()[0]
    return node.message.content
