"""A session as the gateway keeps it: its tree, its keys, its state, and the records that make it survive.

What changes a session is written to its journal: it was opened, paid, ended. Keys are kept as hashes only
and compared in constant time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from branchline.core.errors import JournalError, SessionError
from branchline.gateway.bodies import Memory
from branchline.tree.delta import Delivered, Delta, decode_array, encode_record
from branchline.tree.journal import Journal
from branchline.tree.session import Session

log = logging.getLogger("branchline.sessions")

State = Literal["open", "completed", "finalized", "aborted"]
CLOSED: tuple[State, ...] = ("finalized", "aborted")


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


SessionRecord = Delta | Delivered | Opened | Rewarded | Ended
_decoder: msgspec.msgpack.Decoder[SessionRecord] = msgspec.msgpack.Decoder(
    SessionRecord, dec_hook=decode_array
)


def decode_session_record(data: bytes) -> SessionRecord:
    return _decoder.decode(data)


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

    def apply(self, record: Rewarded | Ended | Delta | Delivered) -> None:
        """What the journal says happened, again."""
        if isinstance(record, Rewarded):
            self.rewards.append(record.reward)
        elif isinstance(record, Ended):
            self.state, self.reason = record.state, record.reason
            self.left_open.set()
        else:
            self.session.tree.apply(record)

    def _write(self, record: Rewarded | Ended) -> Future[int] | None:
        return self.journal.append(self.id, encode_record(record)) if self.journal else None


def key_hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def keys_match(given: str, expected: bytes) -> bool:
    return hmac.compare_digest(key_hash(given), expected)
