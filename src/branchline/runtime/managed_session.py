"""A managed session: the session with its keys, state, rewards and limits, and the records of their changes.

Every change of a session (opened, rewarded, ended) is a record in its journal, and takes effect when the
journal has it. Keys are kept as hashes and compared in constant time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec

from branchline.chat.base import HistoryPolicy
from branchline.core.errors import InputError, JournalError, MessageError, SessionError
from branchline.core.option_checks import check_count
from branchline.core.reader import replace_surrogates
from branchline.core.reward import PART_KEYS, Reward, read_recorded_reward
from branchline.export.rewards import RewardParts, session_reward
from branchline.export.samples import Export, ExportPolicy, SampleStream
from branchline.export.trajectory import Trajectory
from branchline.runtime.compaction import CompactedPrefix, CompactionOptions, SessionCompactions
from branchline.runtime.message_cache import MessageCache
from branchline.runtime.posted_rewards import PostedRewards
from branchline.runtime.request_fields import CONSTRAINT_FIELDS, SAMPLING_FIELDS
from branchline.runtime.session_snapshot import SessionSnapshot, count_answered_calls
from branchline.timelines.causes import Cause
from branchline.tree.journal import Journal
from branchline.tree.session import Session
from branchline.tree.tree import Delivered, TreeDelta, decode_array, encode_record

log = logging.getLogger("branchline.sessions")

SESSION_SAMPLING_FIELDS = CONSTRAINT_FIELDS | {*SAMPLING_FIELDS, "max_tokens", "n", "stop"}
"""The fields that a session's `sampling` and `sampling_defaults` may have."""
_INLINE_TOKENS = 10_000
"""Trees with more tokens are read in a thread."""
MAX_LARGE_BODIES = 2
"""How many large bodies of one session are received or parsed at the same time."""
SessionState = Literal["open", "completed", "finalized", "aborted"]
CLOSED_STATES: tuple[SessionState, ...] = ("finalized", "aborted")


class SessionLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a session may use; None is no limit."""

    calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Sampled tokens of all calls together."""

    def __post_init__(self) -> None:
        for name, value in (("calls", self.calls), ("tokens", self.tokens)):
            if value is not None:
                check_count(f"limits.{name}", value)


class SessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /sessions`; every field is optional."""

    id: str = ""
    agent: str = ""
    group: str = ""
    metadata: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """Overrides the fields of requests."""
    sampling_defaults: dict[str, Any] = {}
    """Used for fields that a request does not have."""
    limits: SessionLimits = SessionLimits()
    eval: bool = False
    """An evaluation session is never exported."""
    agent_reward: bool = False
    """The session's API key may post rewards too."""
    history: HistoryPolicy | None = None
    """How prompts show earlier turns, `template` or `verbatim`; None is the store's default."""
    restore_reasoning: bool = True
    """Prompts show recorded reasoning that a client did not send back; false lets clients drop it."""
    ignore_tools: bool = False
    """A call with other tools or template arguments continues the path, and counts as inexact."""
    dedupe: bool = False
    """Of several answers with equal ids to one prompt, samples have one."""
    compaction: CompactionOptions | None = None
    """Shortens long conversations, for agents that cannot do it themselves; None leaves them as they are."""

    def __post_init__(self) -> None:
        for name, sampling in (("sampling", self.sampling), ("sampling_defaults", self.sampling_defaults)):
            for key in sampling.keys() - SESSION_SAMPLING_FIELDS:
                expected = f"one of {', '.join(sorted(SESSION_SAMPLING_FIELDS))}"
                raise MessageError(f"{name}.{key}", sampling[key], expected)


def read_session_options(raw: object) -> SessionOptions:
    """Options from decoded JSON; None stands for all defaults. Raises InputError for an unknown field."""
    try:
        return msgspec.convert({} if raw is None else raw, SessionOptions)
    except msgspec.ValidationError as error:
        raise InputError(str(error)) from error


class SessionOpened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A session was opened."""

    options: SessionOptions
    api_key_hash: bytes
    control_key_hash: bytes
    opened_at: float


class SessionRewarded(msgspec.Struct, frozen=True, array_like=True, tag="rewarded"):
    """A reward was posted."""

    reward: dict[str, Any]
    request_key: str = ""
    """Identifies the request that posted it and its position there; empty if that had no idempotency key."""


class SessionEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A session changed its state."""

    state: SessionState
    reason: str = ""


class SessionCompacted(msgspec.Struct, frozen=True, array_like=True, tag="compacted"):
    """A conversation was compacted."""

    prefix: CompactedPrefix


SessionRecord = TreeDelta | Delivered | SessionOpened | SessionRewarded | SessionEnded | SessionCompacted
_decoder: msgspec.msgpack.Decoder[SessionRecord] = msgspec.msgpack.Decoder(
    SessionRecord, dec_hook=decode_array
)


def decode_session_record(data: bytes) -> SessionRecord:
    return _decoder.decode(data)


@dataclass
class ManagedSession:
    """One session that takes calls, in a gateway or in a program."""

    session: Session
    id: str = field(init=False)
    options: SessionOptions
    api_key_hash: bytes
    control_key_hash: bytes
    created_at: float
    journal: Journal | None
    state: SessionState = "open"
    reason: str = ""
    rewards: list[Reward] = field(default_factory=list)
    reward_request_keys: set[str] = field(default_factory=set, repr=False)
    """Requests whose rewards were added."""
    posted_rewards: PostedRewards = field(init=False, repr=False)
    reward_lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held while rewards are added, so that a repeated request waits for the first."""
    in_flight: int = 0
    last_used: float = field(default_factory=time.monotonic)
    running_calls: dict[str, asyncio.Event] = field(default_factory=dict, repr=False)
    """Running calls by id. The event is set when the call is sampled, or is cancelled and committed."""
    attempt_counts: dict[str, int] = field(default_factory=dict, repr=False)
    """How often each named call was sent."""
    resuming_call_ids: set[str] = field(default_factory=set, repr=False)
    """Cancelled calls that running calls resume."""
    reserved_tokens: int = 0
    """Tokens that running calls may still sample; 0 without a limit."""
    call_tasks: set[asyncio.Task[Any]] = field(default_factory=set, repr=False)
    """Tasks of running calls, cancelled when the session is closed."""
    prepare_lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held while a thread works for this session. Two would be slower, because they take the interpreter from
    each other, and would delay other sessions."""
    large_bodies: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_LARGE_BODIES), repr=False
    )
    """Limits the large request bodies of this session that are being received or parsed."""
    message_cache: MessageCache = field(default_factory=MessageCache, repr=False)
    compactions: SessionCompactions = field(default_factory=SessionCompactions, repr=False)
    """The edits of conversations that the session has compacted."""
    ended_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the session is completed, finalized or aborted."""
    on_closed: Callable[[ManagedSession], Awaitable[None]] | None = field(default=None, repr=False)
    """Called by `end` when the session is closed; its store sets it."""

    def __post_init__(self) -> None:
        self.id = self.session.id
        self.posted_rewards = PostedRewards(self.rewards)

    @property
    def is_closed(self) -> bool:
        return self.state in CLOSED_STATES

    @property
    def reward(self) -> float | None:
        """The last score that was posted for the session, not for a part of it."""
        return session_reward(self.rewards)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled by all calls; those of a resumed call count in the call that resumed it."""
        tree = self.session.tree
        return sum(
            len(node.sampled_ids)
            for node in tree.nodes
            if node.output and node.sampled_ids is not None and not tree.is_resumed(tree.call_of(node))
        )

    @property
    def answered_calls(self) -> int:
        return count_answered_calls(self.session.tree)

    def is_idle(self, idle_s: float) -> bool:
        """Whether the session takes calls and was not used for `idle_s` seconds; never with 0."""
        unused_s = time.monotonic() - self.last_used
        return bool(idle_s) and not self.is_closed and not self.in_flight and unused_s > idle_s

    def require_open(self) -> None:
        """Raises SessionError if the session is closed, JournalError if its journal has failed."""
        if self.state in CLOSED_STATES:
            raise SessionError("closed", f"session {self.id} is {self.state} and takes no more calls")
        self.require_journal()

    def require_journal(self) -> None:
        """Raises JournalError if the session's journal has failed."""
        if self.journal is not None and self.journal.failure is not None:
            raise JournalError(f"session {self.id} can only be read: {self.journal.failure}")

    @contextmanager
    def count_call(self, call_id: str, resumes: str = "") -> Iterator[None]:
        """Counts a call as running. `resumes` is the id of the cancelled call that it continues.

        A call counts from its start, so that concurrent calls together never exceed the session's limit.
        Raises SessionError if the session is closed, has made all its calls, or `resumes` is being resumed.
        """
        self.require_open()
        limit = self.options.limits.calls
        if limit is not None and self._count_other_calls(resumes) >= limit:
            raise SessionError("out_of_calls", f"session {self.id} may make {limit} calls and has made them")
        if resumes in self.resuming_call_ids:
            raise SessionError("conflict", f"resume: call {resumes} is being resumed already")
        if resumes:
            self.resuming_call_ids.add(resumes)
        ended = self.running_calls[call_id] = asyncio.Event()
        self.in_flight += 1
        self.last_used = time.monotonic()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.last_used = time.monotonic()
            self.resuming_call_ids.discard(resumes)
            del self.running_calls[call_id]
            ended.set()

    def _count_other_calls(self, resumes: str) -> int:
        """Calls that were made or are running. A cancelled call and the call that resumes it count as one."""
        tree, continued = self.session.tree, {*self.resuming_call_ids, resumes}
        made = [call for call in tree.calls if call.id not in continued and not tree.is_resumed(call)]
        return len(made) + self.in_flight - (resumes in self.running_calls)

    async def post_rewards(
        self, rewards: Sequence[Reward], idempotency_key: str = "", *, by_agent: bool = False
    ) -> None:
        """Adds rewards when the journal has them. Raises MessageError if the session does not have the part
        that one is for (`export/rewards.py`).

        A finalized session takes rewards, because its agent may have finalized it; not from the agent
        itself. A reward that equals the latest one with its `id` for its part is not added again, nor is one
        of a request with the same idempotency key: a client that does not know whether its request arrived
        can repeat it.
        """
        async with self.reward_lock:
            records = [
                SessionRewarded(dict(reward), f"{idempotency_key}/{index}" if idempotency_key else "")
                for index, reward in enumerate(rewards)
            ]
            records = [record for record in records if record.request_key not in self.reward_request_keys]
            rewards = [read_recorded_reward(record.reward) for record in records]
            may_post = self.require_open if by_agent or self.state != "finalized" else self.require_journal
            try:
                new = await self._find_new_rewards(rewards)
            except MessageError:
                may_post()
                raise
            if not new:
                return
            may_post()
            self.last_used = time.monotonic()
            for position, reward in new:
                record = msgspec.structs.replace(records[position], reward=dict(reward))
                await self._append_record(record)
                self.apply(record)

    async def _find_new_rewards(self, rewards: Sequence[Reward]) -> list[tuple[int, Reward]]:
        """Returns those that repeat none, with their positions."""
        tree, find_new = self.session.tree, self.posted_rewards.find_new
        if all(reward.keys().isdisjoint(PART_KEYS) for reward in rewards):
            return find_new(rewards, RewardParts(tree))
        if tree.token_count <= _INLINE_TOKENS:
            return find_new(rewards, RewardParts(self.session.snapshot()))
        # finding the main conversation of a large tree takes a while
        return await asyncio.to_thread(lambda: find_new(rewards, RewardParts(self.session.snapshot())))

    async def add_compaction(self, prefix: CompactedPrefix) -> None:
        """Applies an edit to all calls that begin with its messages, once the journal has it."""
        self.require_open()
        await self._append_record(SessionCompacted(prefix))
        self.compactions.prefixes.append(prefix)

    async def end(self, state: SessionState, reason: str = "") -> None:
        """Sets the state. When that closes the session, its store calls the observers."""
        was_closed = self.is_closed
        await self.set_state(state, reason)
        if self.is_closed and not was_closed and self.on_closed is not None:
            await self.on_closed(self)

    async def set_state(self, state: SessionState, reason: str = "") -> None:
        """Changes the state and, if the session is closed by that, cancels its running calls.

        Setting the same state twice is allowed. If the journal fails, the session keeps its old state.
        """
        if self.state == state:
            return
        self.require_open()
        reason = replace_surrogates(reason)  # An exception may quote half an emoji; the journal is UTF-8.
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

    def apply(
        self, record: SessionRewarded | SessionEnded | SessionCompacted | TreeDelta | Delivered
    ) -> None:
        """Applies a record that was read from the journal."""
        if isinstance(record, SessionRewarded):
            self.rewards.append(read_recorded_reward(record.reward))
            if record.request_key:
                self.reward_request_keys.add(record.request_key)
        elif isinstance(record, SessionEnded):
            self.state, self.reason = record.state, record.reason
            self.ended_event.set()
        elif isinstance(record, SessionCompacted):
            self.compactions.prefixes.append(record.prefix)
        else:
            self.session.apply_record(record)

    @property
    def default_export_policy(self) -> ExportPolicy:
        """The policy of `export` if the caller gives none."""
        policy = ExportPolicy(
            include_missing_logprobs=True, include_inexact="context" if self.options.ignore_tools else False
        )
        return replace(policy, drop=policy.drop | {Cause.DUPLICATE}) if self.options.dedupe else policy

    def snapshot(self) -> SessionSnapshot:
        """Returns the session as of now. Copies the tree, so it may run in a thread."""
        rewards = tuple(self.rewards)
        return SessionSnapshot(
            self.id,
            self.session.snapshot(),
            self.state,
            self.reason,
            rewards,
            self.options.agent,
            self.options.group,
            self.options.metadata,
            self.options.eval,
            self.default_export_policy,
        )

    def export(
        self,
        policy: ExportPolicy | None = None,
        *,
        include_aborted: bool = False,
        keep_calls: Iterable[str] = (),
    ) -> Export:
        """Exports the samples of the session as of now, with the report on every sampled token."""
        return self.snapshot().export(policy, include_aborted=include_aborted, keep_calls=keep_calls)

    def export_stream(
        self,
        policy: ExportPolicy | None = None,
        *,
        include_aborted: bool = False,
        keep_calls: Iterable[str] = (),
    ) -> SampleStream | Export:
        """Does what `export` does, one sample at a time; an Export if there are none."""
        return self.snapshot().export_stream(policy, include_aborted=include_aborted, keep_calls=keep_calls)

    def trajectory(
        self, policy: ExportPolicy | None = None, *, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Returns the trajectory as of now; it has failed if it is aborted or no call was answered."""
        return self.snapshot().trajectory(policy, metrics=metrics)

    async def _append_record(self, record: SessionRewarded | SessionEnded | SessionCompacted) -> None:
        if self.journal is not None:
            await asyncio.wrap_future(self.journal.append(self.id, encode_record(record)))


SessionObserver = Callable[[ManagedSession], None]
"""Called once when a session is finalized or aborted, or ends with its process because no journal has it."""


def hash_key(key: str) -> bytes:
    """The hash under which a key is stored. Compare hashes in constant time."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
