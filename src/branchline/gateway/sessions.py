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

from branchline.chat.base import Codec, History
from branchline.core.errors import JournalError, MessageError, SessionError
from branchline.gateway.live import LiveSession, Opened, SessionOptions, decode_session_record, key_hash
from branchline.tree.delta import encode_record
from branchline.tree.journal import Journal
from branchline.tree.session import Session
from branchline.tree.tree import Tree

log = logging.getLogger("branchline.sessions")

DEFAULT_SESSION = "default"
KEPT_CLOSED = 1_000
"""Closed sessions that stay in memory where a journal has them too."""


class Sessions:
    """The sessions that a gateway holds, and those that its journal does."""

    def __init__(
        self,
        codec: Codec,
        *,
        history: History = "template",
        journal: Journal | None = None,
        kept_closed: int = KEPT_CLOSED,
    ) -> None:
        self._codec = codec
        self._history: History = history
        self._journal = journal
        self._kept_closed = kept_closed
        self._by_id: dict[str, LiveSession] = {}
        self._by_api_key: dict[bytes, LiveSession] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._opening = threading.Lock()
        self._being_opened: set[str] = set()
        self._defaults = 1
        if journal is not None:
            self._replay(journal.replay())

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        """Sessions in memory."""
        return len(self._by_id)

    def open(self, options: SessionOptions) -> tuple[LiveSession, str, str]:
        """A new session with its two keys, which nobody can read again."""
        session_id = options.id or secrets.token_hex(8)
        if not _is_name(session_id):
            raise MessageError(
                "id", session_id, "letters, digits, '-', '_' or '.', at most 128, and not dots alone"
            )
        api_key, control_key = "sk-bl-" + secrets.token_urlsafe(24), "ck-bl-" + secrets.token_urlsafe(24)
        opened = Opened(options, key_hash(api_key), key_hash(control_key), time.time())
        with self._opening:
            if (
                session_id in self._by_id
                or session_id in self._being_opened
                or self._is_journaled(session_id)
            ):
                raise SessionError("exists", f"session {session_id} exists already")
            self._being_opened.add(session_id)
        try:
            if self._journal is not None:
                self._journal.append(session_id, encode_record(opened)).result()
            live = self._add(session_id, opened)
        finally:
            self._being_opened.discard(session_id)
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

    def default(self) -> LiveSession:
        """The session of those who name none, where no keys are asked for; behind a closed one a new one."""
        while (live := self._found(self._default)) is not None and live.is_closed:
            self._defaults += 1
        return live or self.open(SessionOptions(id=self._default))[0]

    @property
    def _default(self) -> str:
        return DEFAULT_SESSION if self._defaults == 1 else f"{DEFAULT_SESSION}-{self._defaults}"

    def opened(self, session_id: str) -> Opened:
        """How a session began, with its keys' hashes; one that was let go of is not read back for that."""
        live = self._by_id.get(session_id)
        if live is not None:
            return Opened(live.options, live.api_key_hash, live.control_key_hash, live.created)
        if self._journal is not None and _is_name(session_id):
            first = next(iter(self._journal.read(session_id)), None)
            record = None if first is None else decode_session_record(first)
            if isinstance(record, Opened):
                return record
        raise SessionError("unknown", f"no session {session_id!r}")

    def get(self, session_id: str) -> LiveSession:
        """A session by its id; one that was let go of is read back."""
        live = self._found(session_id)
        if live is None:
            raise SessionError("unknown", f"no session {session_id!r}")
        return live

    def _found(self, session_id: str) -> LiveSession | None:
        live = self._by_id.get(session_id)
        if live is None and self._journal is not None and _is_name(session_id):
            self._replay((session_id, data) for data in self._journal.read(session_id))
            live = self._by_id.get(session_id)
        return live

    def by_api_key(self, key: str) -> LiveSession | None:
        """The session a key opens. A hash is looked up, so nothing is learnt from how long it takes."""
        return self._by_api_key.get(key_hash(key))

    def idle(self, idle_s: float) -> list[LiveSession]:
        """Sessions that take calls and have not been used for so long; 0 stands for ever."""
        return [live for live in self if live.is_idle(idle_s)]

    def note_closed(self, live: LiveSession) -> None:
        """A session that takes no more calls; the oldest of those may go."""
        self._closed[live.id] = None
        self._closed.move_to_end(live.id)
        while self._journal is not None and len(self._closed) > self._kept_closed:
            self._let_go(next(iter(self._closed)))

    def forget(self, live: LiveSession) -> None:
        """Lets go of a closed session's memory; without a journal that is the end of it."""
        if not live.is_closed:
            raise SessionError("conflict", f"session {live.id} is {live.state}; finalize or abort it first")
        self._let_go(live.id)

    def _let_go(self, session_id: str) -> None:
        self._closed.pop(session_id, None)
        live = self._by_id.pop(session_id, None)
        if live is not None:
            self._by_api_key.pop(live.api_key_hash, None)

    def _is_journaled(self, session_id: str) -> bool:
        return self._journal is not None and next(iter(self._journal.read(session_id)), None) is not None

    def _add(self, session_id: str, opened: Opened) -> LiveSession:
        started = datetime.fromtimestamp(opened.at)
        session = Session(
            session_id,
            self._codec,
            history=opened.options.history or self._history,
            journal=self._journal,
            tree=Tree(restore_reasoning=opened.options.restore_reasoning),
            started=started,
        )
        live = LiveSession(
            session, opened.options, opened.api_key, opened.control_key, opened.at, self._journal
        )
        self._by_id[session_id] = live
        self._by_api_key[opened.api_key] = live
        return live

    def _replay(self, records: Iterable[tuple[str, bytes]]) -> None:
        """Puts sessions back as their records say; what is closed for good may go again at once."""
        opened: set[str] = set()
        for session_id, data in records:
            record = decode_session_record(data)
            if isinstance(record, Opened):
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
                self.note_closed(live)


def _is_name(text: str) -> bool:
    """Whether an id can be a part of a path; dots alone mean something else there."""
    letters = all(letter.isalnum() or letter in "-_." for letter in text)
    return letters and len(text) <= 128 and text.strip(".") != ""
