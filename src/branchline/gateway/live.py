"""A session as the gateway keeps it: its tree, its keys, its state; and all of them, journaled.

What changes a session goes through its journal first: it was opened, paid, ended. Keys are kept as hashes
only and compared in constant time. On start the journal is replayed and open sessions go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import msgspec

from branchline.chat.base import Codec, History
from branchline.core.errors import JournalError, SessionError
from branchline.gateway.bodies import Memory
from branchline.tree.delta import Delivered, Delta, decode_array, encode_record
from branchline.tree.journal import Journal
from branchline.tree.session import Session
from branchline.tree.tree import Tree

log = logging.getLogger("branchline.sessions")

State = Literal["open", "completed", "finalized", "aborted"]
CLOSED: tuple[State, ...] = ("finalized", "aborted")
DEFAULT_SESSION = "default"


class SessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `POST /sessions` takes; everything is optional."""

    id: str = ""
    agent: str = ""
    group: str = ""
    metadata: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """Overrides what clients ask for."""
    sampling_defaults: dict[str, Any] = {}
    """Fills what clients leave open."""
    limits: dict[str, int] = {}
    """`calls`: how many calls the session may make. `tokens`: how many it may sample."""
    eval: bool = False
    """Never exported."""
    agent_reward: bool = False
    """The agent's own key may post rewards."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A session began."""

    options: SessionOptions
    api_key: bytes
    control_key: bytes
    at: float


class Rewarded(msgspec.Struct, frozen=True, array_like=True, tag="rewarded"):
    """A reward was posted: a number or an object with a score."""

    reward: dict[str, Any]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A session changed its state."""

    state: State
    reason: str = ""


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Delta | Delivered | Opened | Rewarded | Ended, dec_hook=decode_array
)


@dataclass
class LiveSession:
    """One session of a running gateway."""

    session: Session
    options: SessionOptions
    api_key_hash: bytes
    control_key_hash: bytes
    created: float
    journal: Journal | None
    state: State = "open"
    reason: str = ""
    rewards: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    last_used: float = field(default_factory=time.monotonic)
    running: dict[str, asyncio.Event] = field(default_factory=dict, repr=False)
    """Calls that are being sampled; each event is set when its call is over and in the tree."""
    memory: Memory = field(default_factory=Memory, repr=False)
    left_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the session is completed, finalized or aborted."""

    @property
    def id(self) -> str:
        return self.session.id

    @property
    def is_closed(self) -> bool:
        return self.state in CLOSED

    @property
    def reward(self) -> float | None:
        """The last score posted for the whole session."""
        for reward in reversed(self.rewards):
            if "score" in reward and not {"timeline", "turn", "tool"} & reward.keys():
                return float(reward["score"])
        return None

    @property
    def sampled_tokens(self) -> int:
        tree = self.session.tree
        return sum(
            len(node.sampled_ids)
            for node in tree.nodes
            if node.output and node.sampled_ids is not None and not tree.is_resumed(tree.call_of(node))
        )

    def require_open(self) -> None:
        """Raises where nothing may be added any more."""
        if self.is_closed:
            raise SessionError("closed", f"session {self.id} is {self.state} and takes no more calls")
        if self.journal is not None and self.journal.failed is not None:
            raise JournalError(f"session {self.id} can only be read: {self.journal.failed}")

    def post_reward(self, reward: Mapping[str, Any]) -> Future[int] | None:
        self.require_open()
        self.last_used = time.monotonic()
        self.rewards.append(dict(reward))
        return self._write(Rewarded(dict(reward)))

    def end(self, state: State, reason: str = "") -> Future[int] | None:
        """Moves on to a state; ending twice the same way is fine."""
        if self.state == state:
            return None
        self.require_open()
        self.state, self.reason = state, reason
        self.last_used = time.monotonic()
        self.left_open.set()
        if self.is_closed:
            self.memory.clear()
        log.info(
            "session %s",
            state,
            extra={
                "session": self.id,
                "group": self.options.group,
                "reason": reason,
                "reward": self.reward,
                "calls": len(self.session.tree.calls),
                "open_s": time.time() - self.created,
            },
        )
        return self._write(Ended(state, reason))

    def _write(self, record: Rewarded | Ended) -> Future[int] | None:
        return self.journal.append(self.id, encode_record(record)) if self.journal else None


def key_hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Sessions:
    """All sessions of a gateway, by id and by key."""

    def __init__(
        self, codec: Codec, *, history: History = "template", journal: Journal | None = None
    ) -> None:
        self._codec = codec
        self._history: History = history
        self._journal = journal
        self._by_id: dict[str, LiveSession] = {}
        self._by_api_key: dict[bytes, LiveSession] = {}
        if journal is not None:
            self._replay(journal)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, options: SessionOptions) -> tuple[LiveSession, str, str]:
        """A new session with its two keys, which nobody can read again."""
        session_id = options.id or secrets.token_hex(8)
        if not _is_name(session_id):
            raise SessionError(
                "exists", f"id: got {session_id!r}, expected letters, digits, '-', '_' or '.', at most 128"
            )
        if session_id in self._by_id:
            raise SessionError("exists", f"session {session_id} exists already")
        api_key, control_key = "sk-bl-" + secrets.token_urlsafe(24), "ck-bl-" + secrets.token_urlsafe(24)
        opened = Opened(options, key_hash(api_key), key_hash(control_key), time.time())
        live = self._add(session_id, opened, Tree())
        if self._journal is not None:
            self._journal.append(session_id, encode_record(opened)).result()
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
        """The session of those who name none, where no keys are asked for."""
        if DEFAULT_SESSION not in self._by_id:
            self.open(SessionOptions(id=DEFAULT_SESSION))
        return self._by_id[DEFAULT_SESSION]

    def idle(self, idle_s: float) -> list[LiveSession]:
        """Sessions that take calls and have not been used for so long; 0 stands for ever."""
        before = time.monotonic() - idle_s
        return [
            live
            for live in self
            if idle_s and not live.is_closed and not live.in_flight and live.last_used < before
        ]

    def get(self, session_id: str) -> LiveSession:
        live = self._by_id.get(session_id)
        if live is None:
            raise SessionError("unknown", f"no session {session_id!r}")
        return live

    def by_api_key(self, key: str) -> LiveSession | None:
        """The session a key opens. A hash is looked up, so nothing is learnt from how long it takes."""
        return self._by_api_key.get(key_hash(key))

    def _add(self, session_id: str, opened: Opened, tree: Tree) -> LiveSession:
        started = datetime.fromtimestamp(opened.at)
        session = Session(
            session_id, self._codec, history=self._history, journal=self._journal, tree=tree, started=started
        )
        live = LiveSession(
            session, opened.options, opened.api_key, opened.control_key, opened.at, self._journal
        )
        self._by_id[session_id] = live
        self._by_api_key[opened.api_key] = live
        return live

    def _replay(self, journal: Journal) -> None:
        for session_id, data in journal.replay():
            record = _decoder.decode(data)
            if isinstance(record, Opened):
                self._add(session_id, record, Tree())
                continue
            live = self._by_id[session_id]
            if isinstance(record, Rewarded):
                live.rewards.append(record.reward)
            elif isinstance(record, Ended):
                live.state, live.reason = record.state, record.reason
                live.left_open.set()
            else:
                live.session.tree.apply(record)


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 128 and all(letter.isalnum() or letter in "-_." for letter in text)


def keys_match(given: str, expected: bytes) -> bool:
    return hmac.compare_digest(key_hash(given), expected)
