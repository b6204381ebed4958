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
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import msgspec

from branchline.chat.base import HistoryPolicy
from branchline.core.errors import InputError, JournalError, MessageError, SessionError
from branchline.engines.base import SamplingParams
from branchline.export.samples import Export, ExportPolicy, export_samples
from branchline.runtime.message_cache import MessageCache
from branchline.runtime.rewards import validate_reward
from branchline.tree.delta import Delivered, TreeDelta, decode_array, encode_record
from branchline.tree.journal import Journal
from branchline.tree.session import Session

log = logging.getLogger("branchline.sessions")

SESSION_SAMPLING_FIELDS = frozenset(
    {field.name for field in fields(SamplingParams)} - {"stop_ids", "grammar", "extra", "flush_s"}
    | {"n", "response_format", "stop"}
)
"""What a session may say about how it is sampled."""
SessionState = Literal["open", "completed", "finalized", "aborted"]
CLOSED_STATES: tuple[SessionState, ...] = ("finalized", "aborted")


class SessionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session may use; None: as much as it likes."""

    calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Sampled ones, of all its calls together."""


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
    limits: SessionLimits = SessionLimits()
    eval: bool = False
    """Never exported."""
    agent_reward: bool = False
    """The agent's own key may post rewards."""
    history: HistoryPolicy | None = None
    """How earlier turns are shown, `template` or `verbatim`; None: as the gateway does everywhere."""
    restore_reasoning: bool = True
    """Reasoning that a client leaves out is shown all the same; false lets clients really drop it."""

    def __post_init__(self) -> None:
        for name, given in (("sampling", self.sampling), ("sampling_defaults", self.sampling_defaults)):
            for key in given.keys() - SESSION_SAMPLING_FIELDS:
                raise MessageError(
                    f"{name}.{key}", given[key], f"one of {', '.join(sorted(SESSION_SAMPLING_FIELDS))}"
                )


def read_session_options(given: object) -> SessionOptions:
    """Options as a client or a program wrote them; nothing at all is all defaults."""
    try:
        return msgspec.convert({} if given is None else given, SessionOptions)
    except msgspec.ValidationError as problem:
        raise InputError(str(problem)) from problem


class SessionOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A session began."""

    options: SessionOptions
    api_key_hash: bytes
    control_key_hash: bytes
    opened_at: float


class SessionRewarded(msgspec.Struct, frozen=True, array_like=True, tag="rewarded"):
    """A reward was posted: a number or an object with a score."""

    reward: dict[str, Any]


class SessionEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A session changed its state."""

    state: SessionState
    reason: str = ""


SessionRecord = TreeDelta | Delivered | SessionOpened | SessionRewarded | SessionEnded
_decoder: msgspec.msgpack.Decoder[SessionRecord] = msgspec.msgpack.Decoder(
    SessionRecord, dec_hook=decode_array
)


def decode_session_record(data: bytes) -> SessionRecord:
    return _decoder.decode(data)


@dataclass
class ManagedSession:
    """One session of a running gateway."""

    session: Session
    options: SessionOptions
    api_key_hash: bytes
    control_key_hash: bytes
    created_at: float
    journal: Journal | None
    state: SessionState = "open"
    reason: str = ""
    rewards: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    last_used: float = field(default_factory=time.monotonic)
    running_calls: dict[str, asyncio.Event] = field(default_factory=dict, repr=False)
    """Calls that are being sampled; each event is set when its call is over and in the tree."""
    attempt_counts: dict[str, int] = field(default_factory=dict, repr=False)
    """How often each call was sent that its client named."""
    resuming_call_ids: set[str] = field(default_factory=set, repr=False)
    """Cancelled calls that somebody is going on from."""
    reserved_tokens: int = 0
    """What calls under way may still sample, where the session has a limit."""
    call_tasks: set[asyncio.Task[Any]] = field(default_factory=set, repr=False)
    """Calls under way, to be stopped when the session is closed."""
    message_cache: MessageCache = field(default_factory=MessageCache, repr=False)
    ended_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the session is completed, finalized or aborted."""

    @property
    def id(self) -> str:
        return self.session.id

    @property
    def is_closed(self) -> bool:
        return self.state in CLOSED_STATES

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

    def is_idle(self, idle_s: float) -> bool:
        """Whether it takes calls and has not been used for so long; 0 stands for ever."""
        unused_s = time.monotonic() - self.last_used
        return bool(idle_s) and not self.is_closed and not self.in_flight and unused_s > idle_s

    def require_open(self) -> None:
        """Raises where nothing may be added any more."""
        if self.is_closed:
            raise SessionError("closed", f"session {self.id} is {self.state} and takes no more calls")
        if self.journal is not None and self.journal.failure is not None:
            raise JournalError(f"session {self.id} can only be read: {self.journal.failure}")

    async def post_reward(self, given: object) -> None:
        """Pays: a number or an object with a score. It counts once the journal has it."""
        self.require_open()
        reward = validate_reward(given)
        self.last_used = time.monotonic()
        await self._append_record(SessionRewarded(reward))
        self.rewards.append(reward)

    async def set_state(self, state: SessionState, reason: str = "") -> None:
        """Moves on to a state; ending twice the same way is fine. What is being sampled then is stopped.

        From here on nothing is added; should the journal refuse, the session is what it was.
        """
        if self.state == state:
            return
        self.require_open()
        before = self.state, self.reason
        self.state, self.reason = state, reason
        self.last_used = time.monotonic()
        try:
            await self._append_record(SessionEnded(state, reason))
        except BaseException:
            self.state, self.reason = before
            raise
        self.ended_event.set()
        if self.is_closed:
            self.message_cache.clear()
            for task in self.call_tasks:
                task.cancel()
        log.info(
            "session %s",
            state,
            extra={
                "session": self.id,
                "group": self.options.group,
                "reason": reason,
                "reward": self.reward,
                "calls": len(self.session.tree.calls),
                "open_s": time.time() - self.created_at,
            },
        )

    def apply(self, record: SessionRewarded | SessionEnded | TreeDelta | Delivered) -> None:
        """What the journal says happened, again."""
        if isinstance(record, SessionRewarded):
            self.rewards.append(record.reward)
        elif isinstance(record, SessionEnded):
            self.state, self.reason = record.state, record.reason
            self.ended_event.set()
        else:
            self.session.tree.apply(record)

    def export(self) -> Export:
        """Exports the samples of the session as of now, with the report on every sampled token.

        Evaluation sessions export no samples. Reads a snapshot of the tree, so it may run in a thread.
        """
        policy = ExportPolicy(include_missing_logprobs=True)
        with self.session.snapshot() as tree:
            if self.options.eval or not tree.calls:
                return Export([], export_samples(tree, replace(policy, max_tokens=0)).report)
            return export_samples(tree, policy, session=self.id, reward=self.reward)

    async def _append_record(self, record: SessionRewarded | SessionEnded) -> None:
        if self.journal is not None:
            await asyncio.wrap_future(self.journal.append(self.id, encode_record(record)))


SessionObserver = Callable[[ManagedSession], None]
"""Called once when a session is finalized or aborted, or ends with its process because no journal has it."""


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def key_matches(given: str, expected: bytes) -> bool:
    return hmac.compare_digest(hash_key(given), expected)
