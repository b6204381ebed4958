"""All sessions of a process, by id and by key: opened, found, ended, evicted.

On start the journal is replayed and open sessions continue. Closed sessions stay readable: with a journal
the latest of them stay in memory and older ones are read back on demand. Without a journal no session is
evicted unless asked, because it would be lost.

A session with a damaged record in the journal is quarantined: it is neither read nor continued, because what
follows the damage has lost its context. All others start. Its records stay in the journal.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime

import msgspec

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.errors import JournalError, MessageError, SessionError, TreeError
from branchline.runtime.managed_session import (
    ManagedSession,
    SessionObserver,
    SessionOpened,
    SessionOptions,
    SessionState,
    decode_session_record,
    hash_key,
)
from branchline.runtime.router import POLICY_RECORDS
from branchline.runtime.sampling import check_session_sampling
from branchline.tree.journal import Journal
from branchline.tree.journal_file import DamagedRecord
from branchline.tree.session import Session
from branchline.tree.tree import Tree, TreeDelta, encode_record

log = logging.getLogger("branchline.sessions")

DEFAULT_SESSION = "default"
MAX_CLOSED_IN_MEMORY = 1_000
"""How many closed sessions stay in memory with a journal."""


class SessionStore:
    """The sessions in memory and those in the journal."""

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
        self.quarantined: dict[str, str] = {}
        """Why a session cannot be used, by its id."""
        self.max_version = 0
        """The highest policy version of all tokens in the journal."""
        self.stopping = asyncio.Event()
        """Set when the process stops: ends every `wait_until_ended`."""
        self.on_session_end: list[SessionObserver] = []
        """Called in the event loop when a session ends for good."""
        self.on_session_end_in_thread: list[SessionObserver] = []
        """Called in a thread after those, for observers that read the whole tree."""
        if journal is not None:
            self._replay(journal.replay())

    def __iter__(self) -> Iterator[ManagedSession]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        """The number of sessions in memory."""
        return len(self._by_id)

    @property
    def journal_failure(self) -> JournalError | None:
        """Why the journal takes no records; None if it does, or if there is none."""
        return None if self._journal is None else self._journal.failure

    # -- opening and finding -------------------------------------------------------------------------

    def open(
        self, options: SessionOptions, idempotency_key: str = "", secret: str = ""
    ) -> tuple[ManagedSession, str, str]:
        """Opens a session; returns it with its API key and its control key, which are not stored.

        With an idempotency key both keys follow from it and from `secret`, and so does the id if none is
        given. So the same request, sent again, returns the same session, also after a restart.
        """
        session_id, api_key, control_key = _new_names(options.id, idempotency_key, secret)
        if not _is_valid_id(session_id) or session_id == "v1":  # `/sessions/v1/…` would be ambiguous
            expected = "letters, digits, '-', '_' or '.', at most 128, and neither dots alone nor v1"
            raise MessageError("id", session_id, expected)
        check_session_sampling(options)
        opened = SessionOpened(options, hash_key(api_key), hash_key(control_key), time.time())
        with self._open_lock:
            if session_id in self._opening_ids and idempotency_key:
                raise SessionError("busy", f"session {session_id} is being opened, try again in a moment")
            if session_id in self._by_id or session_id in self._opening_ids or self._is_journaled(session_id):
                if idempotency_key and self._was_opened_as(session_id, opened):
                    return self.get(session_id), api_key, control_key
                raise SessionError("exists", f"session {session_id} exists already")
            self._opening_ids.add(session_id)
        try:
            if self._journal is not None:
                self._journal.append(session_id, encode_record(opened)).result()
            managed = self._add(session_id, opened)
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
        return managed, api_key, control_key

    def _was_opened_as(self, session_id: str, opened: SessionOpened) -> bool:
        """Whether an existing session was opened by the same request."""
        found = self.find_keys(session_id)
        is_same = hmac.compare_digest(found.control_key_hash, opened.control_key_hash)
        return is_same and found.options == opened.options

    def default_session(self) -> ManagedSession:
        """The session of requests without a key; a new one replaces a closed one."""
        while (managed := self._find(self._default_id)) is not None and managed.is_closed:
            self._default_number += 1
        return managed or self.open(SessionOptions(id=self._default_id))[0]

    @property
    def _default_id(self) -> str:
        return DEFAULT_SESSION if self._default_number == 1 else f"{DEFAULT_SESSION}-{self._default_number}"

    def find_keys(self, session_id: str) -> ManagedSession | SessionOpened:
        """The session, or the record that opened it if it was evicted; both have the hashes of its keys.

        Reads no evicted session back. Raises SessionError if there is none.
        """
        managed = self._by_id.get(session_id)
        if managed is not None:
            return managed
        if self._journal is not None and _is_valid_id(session_id):
            with suppress(JournalError):  # the first record, which has its keys, is damaged
                first = next(iter(self._journal.read(session_id)), None)
                record = None if first is None else decode_session_record(first)
                if isinstance(record, SessionOpened):
                    return record
        raise SessionError("unknown", f"no session {session_id!r}")

    def get(self, session_id: str) -> ManagedSession:
        """Returns a session by its id; an evicted one is read back. Raises SessionError if there is none."""
        managed = self._find(session_id)
        if managed is None:
            raise SessionError("unknown", f"no session {session_id!r}")
        return managed

    def _find(self, session_id: str) -> ManagedSession | None:
        managed = self._by_id.get(session_id)
        if managed is None and self._journal is not None and _is_valid_id(session_id):
            if session_id not in self.quarantined:
                try:
                    self._replay((session_id, data) for data in self._journal.read(session_id))
                except JournalError as error:
                    self._quarantine(session_id, str(error))
            if session_id in self.quarantined:
                problem = self.quarantined[session_id]
                raise SessionError("closed", f"session {session_id} is quarantined: {problem}")
            managed = self._by_id.get(session_id)
        return managed

    def by_api_key(self, key: str) -> ManagedSession | None:
        """Returns the session of an API key. The lookup by hash does not leak the key by its timing."""
        return self._by_api_key.get(hash_key(key))

    # -- ending --------------------------------------------------------------------------------------

    async def end_session(self, managed: ManagedSession, state: SessionState, reason: str = "") -> None:
        """Sets a session's state. When that closes the session, calls the observers."""
        await managed.end(state, reason)

    async def _handle_closed(self, managed: ManagedSession) -> None:
        self._mark_closed(managed)
        for observe in self.on_session_end:
            _observe(observe, managed)
        for observe in self.on_session_end_in_thread:
            await asyncio.to_thread(_observe, observe, managed)

    async def wait_until_ended(self, managed: ManagedSession, timeout_s: float | None = None) -> None:
        """Waits until a session is no longer open, the process stops, or the timeout is over."""
        waits = [asyncio.ensure_future(event.wait()) for event in (managed.ended_event, self.stopping)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def expire_idle(self, idle_s: float) -> None:
        """Finalizes the sessions that were not used for `idle_s` seconds."""
        for managed in self:
            # Checked one by one: a session may be used again while another is being ended.
            if managed.is_idle(idle_s):
                log.info("session expired", extra={"session": managed.id, "idle_s": idle_s})
                await self.end_session(managed, "finalized", f"idle for {idle_s:g} s")

    def close(self) -> None:
        """Calls the observers for open sessions that are lost now, because there is no journal."""
        if self._journal is None:
            for managed in self:
                if not managed.is_closed:
                    for observe in self.on_session_end:
                        _observe(observe, managed)

    # -- memory --------------------------------------------------------------------------------------

    def _mark_closed(self, managed: ManagedSession) -> None:
        """Makes a closed session a candidate for eviction and evicts the oldest ones."""
        self._closed_ids[managed.id] = None
        self._closed_ids.move_to_end(managed.id)
        while self._journal is not None and len(self._closed_ids) > self._max_closed:
            self._evict(next(iter(self._closed_ids)))

    def evict(self, managed: ManagedSession) -> None:
        """Removes a closed session from memory; without a journal it is lost."""
        if not managed.is_closed:
            raise SessionError(
                "conflict", f"session {managed.id} is {managed.state}; finalize or abort it first"
            )
        self._evict(managed.id)

    def _evict(self, session_id: str) -> None:
        self._closed_ids.pop(session_id, None)
        managed = self._by_id.pop(session_id, None)
        if managed is not None:
            self._by_api_key.pop(managed.api_key_hash, None)

    def _is_journaled(self, session_id: str) -> bool:
        if session_id in self.quarantined:
            return True
        return self._journal is not None and next(iter(self._journal.read(session_id)), None) is not None

    def _add(self, session_id: str, opened: SessionOpened) -> ManagedSession:
        session = Session(
            session_id,
            self._codec,
            history=opened.options.history or self._history,
            restore_reasoning=opened.options.restore_reasoning,
            ignore_tools=opened.options.ignore_tools,
            journal=self._journal,
            tree=Tree(),
            started_at=datetime.fromtimestamp(opened.opened_at),
        )
        managed = ManagedSession(
            session,
            opened.options,
            opened.api_key_hash,
            opened.control_key_hash,
            opened.opened_at,
            self._journal,
            on_closed=self._handle_closed,
        )
        self._by_id[session_id] = managed
        self._by_api_key[opened.api_key_hash] = managed
        return managed

    def _replay(self, records: Iterable[tuple[str, bytes | DamagedRecord]]) -> None:
        """Restores sessions from their records; closed ones may be evicted while it runs."""
        opened: set[str] = set()
        for session_id, data in records:
            if session_id == POLICY_RECORDS or session_id in self.quarantined:
                continue
            try:
                if isinstance(data, DamagedRecord):
                    raise JournalError(str(data))
                record = decode_session_record(data)
                if isinstance(record, SessionOpened):
                    opened.add(session_id)
                    self._add(session_id, record)
                    continue
                if session_id not in opened:
                    raise JournalError("a record before the one that opened the session")
                if isinstance(record, TreeDelta):
                    versions = [
                        run[1] for node in record.nodes if node.output for run in node.output.versions
                    ]
                    self.max_version = max(self.max_version, *versions, 0)
                managed = self._by_id.get(session_id)
                if managed is None:
                    # Evicted since it was closed; this record is read when the session is read back.
                    continue
                managed.apply(record)
            # An index error: a delivery of a call that is not there.
            except (JournalError, TreeError, msgspec.DecodeError, ValueError, LookupError) as error:
                self._quarantine(session_id, str(error))
                continue
            if managed.is_closed:
                self._mark_closed(managed)

    def _quarantine(self, session_id: str, problem: str) -> None:
        """Removes a session with a damaged record from memory, and refuses it from now on."""
        managed = self._by_id.get(session_id)
        self._evict(session_id)
        self.quarantined[session_id] = problem
        log.error(
            "session %s is quarantined: %s",
            session_id,
            problem,
            extra={"session": session_id, "calls_before": len(managed.session.tree.calls) if managed else 0},
        )


def _observe(observe: SessionObserver, managed: ManagedSession) -> None:
    """Calls an observer; one that raises is logged, so that the others and the session's end are not hurt."""
    try:
        observe(managed)
    except Exception:
        log.exception("an observer failed for the end of session %s", managed.id)


def _new_names(session_id: str, idempotency_key: str, secret: str) -> tuple[str, str, str]:
    """The id, the API key and the control key of a new session."""
    if not idempotency_key:
        names = [secrets.token_hex(8), secrets.token_urlsafe(24), secrets.token_urlsafe(24)]
    else:
        request = f"{session_id}\0{idempotency_key}"
        digests = [
            hmac.digest(secret.encode(), f"{purpose}\0{request}".encode(), "sha256")
            for purpose in ("id", "api_key", "control_key")
        ]
        names = [digests[0][:8].hex(), *(urlsafe_b64encode(digest[:24]).decode() for digest in digests[1:])]
    return session_id or names[0], "sk-bl-" + names[1], "ck-bl-" + names[2]


def _is_valid_id(text: str) -> bool:
    """Whether an id can be one segment of a URL path; "." and ".." have another meaning there."""
    is_plain = all(character.isalnum() or character in "-_." for character in text)
    return is_plain and len(text) <= 128 and text.strip(".") != ""
