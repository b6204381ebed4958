"""All sessions of a gateway, by id and by key.

On start the journal is replayed and open sessions go on. Sessions that are closed for good stay readable;
with a journal only the latest of them stay in memory, and an older one is read back when somebody asks.
Without a journal nothing is let go of unasked: it would be lost.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from datetime import datetime

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.errors import JournalError, MessageError, SessionError
from branchline.runtime.managed_session import (
    ManagedSession,
    SessionOpened,
    SessionOptions,
    decode_session_record,
    hash_key,
)
from branchline.tree.delta import encode_record
from branchline.tree.journal import Journal
from branchline.tree.session import Session
from branchline.tree.tree import Tree

log = logging.getLogger("branchline.sessions")

DEFAULT_SESSION = "default"
MAX_CLOSED_IN_MEMORY = 1_000
"""Closed sessions that stay in memory where a journal has them too."""


class SessionStore:
    """The sessions that a gateway holds, and those that its journal does."""

    def __init__(
        self,
        codec: Codec,
        *,
        history: HistoryPolicy = "template",
        journal: Journal | None = None,
        max_closed: int = MAX_CLOSED_IN_MEMORY,
    ) -> None:
        self._codec = codec
        self._history: HistoryPolicy = history
        self._journal = journal
        self._max_closed = max_closed
        self._by_id: dict[str, ManagedSession] = {}
        self._by_api_key: dict[bytes, ManagedSession] = {}
        self._closed_ids: OrderedDict[str, None] = OrderedDict()
        self._open_lock = threading.Lock()
        self._opening_ids: set[str] = set()
        self._default_number = 1
        if journal is not None:
            self._replay(journal.replay())

    def __iter__(self) -> Iterator[ManagedSession]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        """Sessions in memory."""
        return len(self._by_id)

    def open(self, options: SessionOptions) -> tuple[ManagedSession, str, str]:
        """A new session with its two keys, which nobody can read again."""
        session_id = options.id or secrets.token_hex(8)
        if not _is_valid_id(session_id):
            raise MessageError(
                "id", session_id, "letters, digits, '-', '_' or '.', at most 128, and not dots alone"
            )
        api_key, control_key = "sk-bl-" + secrets.token_urlsafe(24), "ck-bl-" + secrets.token_urlsafe(24)
        opened = SessionOpened(options, hash_key(api_key), hash_key(control_key), time.time())
        with self._open_lock:
            if session_id in self._by_id or session_id in self._opening_ids or self._is_journaled(session_id):
                raise SessionError("exists", f"session {session_id} exists already")
            self._opening_ids.add(session_id)
        try:
            if self._journal is not None:
                self._journal.append(session_id, encode_record(opened)).result()
            live = self._add(session_id, opened)
        finally:
            self._opening_ids.discard(session_id)
        log.info(
            "session opened",
            extra={
                "session": session_id,
                "group": options.group,
                "agent": options.agent,
                "eval": options.eval,
            },
        )
        return live, api_key, control_key

    def default_session(self) -> ManagedSession:
        """The session of those who name none, where no keys are asked for; behind a closed one a new one."""
        while (live := self._find(self._default_id)) is not None and live.is_closed:
            self._default_number += 1
        return live or self.open(SessionOptions(id=self._default_id))[0]

    @property
    def _default_id(self) -> str:
        return DEFAULT_SESSION if self._default_number == 1 else f"{DEFAULT_SESSION}-{self._default_number}"

    def opening_record(self, session_id: str) -> SessionOpened:
        """How a session began, with its keys' hashes; one that was let go of is not read back for that."""
        live = self._by_id.get(session_id)
        if live is not None:
            return SessionOpened(live.options, live.api_key_hash, live.control_key_hash, live.created_at)
        if self._journal is not None and _is_valid_id(session_id):
            first = next(iter(self._journal.read(session_id)), None)
            record = None if first is None else decode_session_record(first)
            if isinstance(record, SessionOpened):
                return record
        raise SessionError("unknown", f"no session {session_id!r}")

    def get(self, session_id: str) -> ManagedSession:
        """A session by its id; one that was let go of is read back."""
        live = self._find(session_id)
        if live is None:
            raise SessionError("unknown", f"no session {session_id!r}")
        return live

    def _find(self, session_id: str) -> ManagedSession | None:
        live = self._by_id.get(session_id)
        if live is None and self._journal is not None and _is_valid_id(session_id):
            self._replay((session_id, data) for data in self._journal.read(session_id))
            live = self._by_id.get(session_id)
        return live

    def by_api_key(self, key: str) -> ManagedSession | None:
        """The session a key opens. A hash is looked up, so nothing is learnt from how long it takes."""
        return self._by_api_key.get(hash_key(key))

    def idle_sessions(self, idle_s: float) -> list[ManagedSession]:
        """Sessions that take calls and have not been used for so long; 0 stands for ever."""
        return [live for live in self if live.is_idle(idle_s)]

    def mark_closed(self, live: ManagedSession) -> None:
        """A session that takes no more calls; the oldest of those may go."""
        self._closed_ids[live.id] = None
        self._closed_ids.move_to_end(live.id)
        while self._journal is not None and len(self._closed_ids) > self._max_closed:
            self._evict(next(iter(self._closed_ids)))

    def evict(self, live: ManagedSession) -> None:
        """Lets go of a closed session's memory; without a journal that is the end of it."""
        if not live.is_closed:
            raise SessionError("conflict", f"session {live.id} is {live.state}; finalize or abort it first")
        self._evict(live.id)

    def _evict(self, session_id: str) -> None:
        self._closed_ids.pop(session_id, None)
        live = self._by_id.pop(session_id, None)
        if live is not None:
            self._by_api_key.pop(live.api_key_hash, None)

    def _is_journaled(self, session_id: str) -> bool:
        return self._journal is not None and next(iter(self._journal.read(session_id)), None) is not None

    def _add(self, session_id: str, opened: SessionOpened) -> ManagedSession:
        started = datetime.fromtimestamp(opened.opened_at)
        session = Session(
            session_id,
            self._codec,
            history=opened.options.history or self._history,
            journal=self._journal,
            tree=Tree(restore_reasoning=opened.options.restore_reasoning),
            started_at=started,
        )
        live = ManagedSession(
            session,
            opened.options,
            opened.api_key_hash,
            opened.control_key_hash,
            opened.opened_at,
            self._journal,
        )
        self._by_id[session_id] = live
        self._by_api_key[opened.api_key_hash] = live
        return live

    def _replay(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Puts sessions back as their records say; what is closed for good may go again at once."""
        opened: set[str] = set()
        for session_id, data in records:
            record = decode_session_record(data)
            if isinstance(record, SessionOpened):
                opened.add(session_id)
                self._add(session_id, record)
                continue
            if session_id not in opened:
                raise JournalError(f"session {session_id}: a record before the one that opened it")
            live = self._by_id.get(session_id)
            if live is None:
                # Its end has sent it away; what was noted behind that is read when it is asked for.
                continue
            live.apply(record)
            if live.is_closed:
                self.mark_closed(live)


def _is_valid_id(text: str) -> bool:
    """Whether an id can be a part of a path; dots alone mean something else there."""
    letters = all(letter.isalnum() or letter in "-_." for letter in text)
    return letters and len(text) <= 128 and text.strip(".") != ""
