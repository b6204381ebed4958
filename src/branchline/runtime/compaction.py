"""Compaction policies: which messages of a conversation make room when its prompt becomes too long.

A policy is a pure function of messages and their lengths. It returns the messages to replace by stubs, or by
a summary that the model writes. Agents of the loop use policies (`loop/context`), and sessions apply them for
agents that cannot compact themselves. The system message, the first user message and the latest messages
stay. What was sampled before stays in the tree: a compaction starts a new branch.

    class DropSearchResults:
        def plan(self, messages, tokens, excess):
            found = [i for i, one in enumerate(messages[:-2]) if one.name == "search"]
            return Compaction(tuple(found)) if found else None

A policy that raises, or whose plan cannot be applied, is a CompactionError.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, get_args

import msgspec
import xxhash

from branchline.chat.base import Codec
from branchline.core.choices import CompactionName
from branchline.core.context_edits import (
    ContextEdit,
    ContextView,
    build_view,
    expand_summaries,
    is_deletion_stub,
    stub_message,
)
from branchline.core.errors import CompactionError, InputError
from branchline.core.message import Message
from branchline.core.option_checks import check_count, check_number

SUMMARY_INSTRUCTION = (
    "Summarize the conversation so far for yourself: it will be removed to save space, and you will continue "
    "from the summary alone. Keep facts, decisions, open questions, and names and ids that you still need. "
    "Answer with the summary only, and call no tool."
)
DEFAULT_KEPT_MESSAGES = 4


@dataclass(frozen=True)
class Compaction:
    """The messages to replace, by their position among those that the policy was given."""

    positions: tuple[int, ...]
    summary_instruction: str = ""
    """If given, the model is asked for a summary of the conversation up to the last position, and the summary
    replaces the messages; otherwise each becomes a stub."""

    def check(self, messages: Sequence[Message]) -> None:
        """Raises InputError if the messages cannot be replaced."""
        positions: object = self.positions
        if not isinstance(positions, tuple) or not all(type(position) is int for position in positions):
            raise InputError(f"positions: got {positions!r}, expected a tuple of whole numbers")
        if not isinstance(self.summary_instruction, str):
            raise InputError(f"summary_instruction: got {self.summary_instruction!r}, expected a text")
        if not positions or list(positions) != sorted(set(positions)):
            raise InputError(f"positions: got {positions}, expected distinct positions in order")
        if positions[0] < 0 or positions[-1] >= len(messages):
            raise InputError(f"positions: got {positions}, expected positions of {len(messages)} messages")
        for position in positions:
            if messages[position].role not in ("assistant", "tool", "function") and (
                not self.summary_instruction or messages[position].role != "user"
            ):
                role = messages[position].role
                raise InputError(f"positions: {position} is a {role} message, which cannot be replaced")
        if self.summary_instruction and not _is_range_of_turns(messages, positions):
            raise InputError(
                f"positions: got {positions}, expected a range that separates no call from its results"
            )


class CompactionPolicy(Protocol):
    """Decides what is replaced. It must return the same for the same arguments, so that a call which was
    interrupted can be resumed."""

    def plan(self, messages: Sequence[Message], tokens: Sequence[int], excess: int) -> Compaction | None:
        """What to replace so that the prompt becomes `excess` tokens shorter; None if nothing can be.

        `tokens` are the approximate lengths of the messages.
        """


@dataclass(frozen=True)
class DropOldest:
    """Replaces the oldest messages by stubs."""

    keep_last: int = DEFAULT_KEPT_MESSAGES
    """The latest messages, which are never replaced."""

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last)

    def plan(self, messages: Sequence[Message], tokens: Sequence[int], excess: int) -> Compaction | None:
        return _drop_until(messages, _droppable(messages, self.keep_last), tokens, excess)


def score_by_overlap(messages: Sequence[Message], position: int) -> float:
    """The importance of a message, from 0 to 2: the words of the task it contains, and how late it is."""
    task = next((message.content for message in messages if message.role == "user"), "")
    wanted = set(_WORD.findall(task.lower()))
    found = wanted & set(_WORD.findall(messages[position].content.lower()))
    return len(found) / max(1, len(wanted)) + position / len(messages)


@dataclass(frozen=True)
class DropLeastImportant:
    """Replaces the messages with the lowest scores by stubs."""

    score: Callable[[Sequence[Message], int], float] = score_by_overlap
    """The importance of the message at a position: a finite number, numpy's and torch's included."""
    keep_last: int = DEFAULT_KEPT_MESSAGES

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last)
        if not callable(self.score) or inspect.iscoroutinefunction(self.score):
            raise InputError(f"score: got {self.score!r}, expected a function of messages and a position")

    def plan(self, messages: Sequence[Message], tokens: Sequence[int], excess: int) -> Compaction | None:
        positions = _droppable(messages, self.keep_last)
        scores: dict[int, float] = {}
        for position in positions:
            score: Any = self.score(messages, position)
            scores[position] = score.item() if hasattr(score, "item") else score
            check_number(f"score of message {position}", scores[position])
        ordered = sorted(positions, key=lambda position: (scores[position], position))
        return _drop_until(messages, ordered, tokens, excess)


@dataclass(frozen=True)
class Summarize:
    """Replaces everything between the task and the latest messages by a summary that the model writes."""

    instruction: str = SUMMARY_INSTRUCTION
    keep_last: int = DEFAULT_KEPT_MESSAGES

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last)
        _check_instruction("instruction", self.instruction)

    def plan(self, messages: Sequence[Message], tokens: Sequence[int], excess: int) -> Compaction | None:
        first = _task_end(messages)
        last = max(first, len(messages) - self.keep_last)
        while last > first and messages[last].role in ("tool", "function"):
            last -= 1
        # A single message is at most an earlier summary.
        return Compaction(tuple(range(first, last)), self.instruction) if last > first + 1 else None


def make_policy(
    name: CompactionName, keep_last: int = DEFAULT_KEPT_MESSAGES, instruction: str = SUMMARY_INSTRUCTION
) -> CompactionPolicy:
    """Returns a built-in policy."""
    if name == "summarize":
        return Summarize(instruction, keep_last)
    if name == "drop_least_important":
        return DropLeastImportant(keep_last=keep_last)
    return DropOldest(keep_last)


_WORD = re.compile(r"\w{3,}")


def _task_end(messages: Sequence[Message]) -> int:
    """The position after the system messages and the first user message."""
    position = 0
    while position < len(messages) and messages[position].role in ("system", "developer"):
        position += 1
    return position + (position < len(messages) and messages[position].role == "user")


def _droppable(messages: Sequence[Message], keep_last: int) -> list[int]:
    """The positions of messages that a stub would shorten."""
    return [
        position
        for position in range(_task_end(messages), max(0, len(messages) - keep_last))
        if messages[position].role in ("assistant", "tool", "function")
        and not is_deletion_stub(messages[position])
        and _text_length(messages[position]) > _text_length(stub_message(messages[position]))
    ]


def _drop_until(
    messages: Sequence[Message], positions: Sequence[int], tokens: Sequence[int], excess: int
) -> Compaction | None:
    """Drops in this order until the prompt is short enough, or everything that can be dropped is."""
    dropped: list[int] = []
    saved = 0.0
    for position in positions:
        if saved >= excess:
            break
        dropped.append(position)
        message = messages[position]
        saved += tokens[position] * (1 - _text_length(stub_message(message)) / _text_length(message))
    return Compaction(tuple(sorted(dropped))) if dropped else None


def _is_range_of_turns(messages: Sequence[Message], positions: Sequence[int]) -> bool:
    first, after = positions[0], positions[-1] + 1
    return (
        list(positions) == list(range(first, after))
        and messages[first].role not in ("tool", "function")
        and (after == len(messages) or messages[after].role not in ("tool", "function"))
    )


def message_text(message: Message) -> str:
    """All text of a message, for an estimate of its length."""
    return "".join(
        (
            message.content,
            message.reasoning_content,
            *(call.name + call.arguments for call in message.tool_calls),
        )
    )


def _text_length(message: Message) -> int:
    return len(message_text(message))


def estimate_tokens(messages: Sequence[Message], codec: Codec | None) -> list[int]:
    """The approximate length of each message; without a codec, four characters are a token."""
    if codec is None:
        return [1 + _text_length(message) // 4 for message in messages]
    return [len(codec.encode(message_text(message))) for message in messages]


def check_policy(name: str, policy: object) -> None:
    """Raises InputError if a policy can be seen to be none: no instance, or without a usable `plan`."""
    plan = getattr(policy, "plan", None)
    if isinstance(policy, type) or not callable(plan):
        raise InputError(f"{name}: got {policy!r}, expected a policy, an instance with a method plan")
    if inspect.iscoroutinefunction(plan):
        raise InputError(f"{name}: got {policy!r} with an async plan, expected a plain method")
    try:
        inspect.signature(plan).bind((), (), 0)
    except TypeError as error:
        raise InputError(
            f"{name}: plan of {policy!r}: {error}, expected plan(messages, tokens, excess)"
        ) from error
    except ValueError:
        return  # its signature is not known


def plan_edit(
    policy: CompactionPolicy, view: ContextView, codec: Codec | None, excess: int
) -> Compaction | None:
    """What a policy replaces in a view. Raises CompactionError if it raises or its plan is invalid."""
    tokens = estimate_tokens(view.messages, codec)
    try:
        compaction: object = policy.plan(view.messages, tokens, excess)
        if compaction is None:
            return None
        if not isinstance(compaction, Compaction):
            raise InputError(f"plan: got {compaction!r}, expected a Compaction or None")
        compaction.check(view.messages)
    except InputError as error:
        raise CompactionError(type(policy).__name__, str(error)) from error
    except BaseException as error:  # it runs in a thread, where nothing but the policy can exit or cancel
        # The name and the text, also of an error whose text cannot be read.
        problem = traceback.format_exception_only(error)[-1].strip()
        raise CompactionError(type(policy).__name__, problem) from error
    return compaction


def summary_prompt(view: ContextView, compaction: Compaction) -> tuple[Message, ...]:
    """The conversation that asks the model for a summary."""
    shown = view.messages[: compaction.positions[-1] + 1]
    return (*shown, Message("user", compaction.summary_instruction))


def build_edit(
    view: ContextView, edits: Sequence[ContextEdit], compaction: Compaction, summary: str = ""
) -> ContextEdit:
    """The edit of the history. If the model wrote no summary, the messages become stubs."""
    if compaction.summary_instruction and summary.strip():
        message_ids = [view.message_ids[position] for position in compaction.positions]
        return ContextEdit(expand_summaries(message_ids, edits), summary.strip())
    return ContextEdit(
        tuple(
            view.message_ids[position]
            for position in compaction.positions
            if view.messages[position].role != "user"
        )
    )


def _check_instruction(name: str, instruction: object) -> None:
    if not isinstance(instruction, str) or not instruction.strip():
        raise InputError(f"{name}: got {instruction!r}, expected a text that asks for a summary")


# -- sessions ----------------------------------------------------------------------------------------


class CompactionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When and how a session compacts the conversations of its agents: `compaction` of `POST /sessions`."""

    trigger_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """A longer prompt is compacted."""
    target_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The length to reach; None is 60 % of `trigger_tokens`."""
    policy: CompactionName = "drop_oldest"
    keep_last: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_KEPT_MESSAGES
    summary_instruction: str = SUMMARY_INSTRUCTION

    def __post_init__(self) -> None:
        check_count("compaction.trigger_tokens", self.trigger_tokens)
        check_count("compaction.keep_last", self.keep_last)
        _check_instruction("compaction.summary_instruction", self.summary_instruction)
        if self.policy not in get_args(CompactionName):
            expected = ", ".join(get_args(CompactionName))
            raise InputError(f"compaction.policy: got {self.policy!r}, expected one of {expected}")
        if self.target_tokens is not None:
            check_count("compaction.target_tokens", self.target_tokens)
        if self.target_tokens is not None and self.target_tokens > self.trigger_tokens:
            raise InputError(
                f"compaction.target_tokens: got {self.target_tokens}, expected at most trigger_tokens, "
                f"{self.trigger_tokens}"
            )

    @property
    def target(self) -> int:
        return self.trigger_tokens * 6 // 10 if self.target_tokens is None else self.target_tokens

    def build_policy(self) -> CompactionPolicy:
        return make_policy(self.policy, self.keep_last, self.summary_instruction)


class CompactedPrefix(msgspec.Struct, frozen=True):
    """An edit of all conversations that begin with the same messages."""

    digest: bytes
    """Identifies the agent and the messages up to the last one that the edit replaces."""
    edit: ContextEdit


@dataclass
class SessionCompactions:
    """The edits of a session. Agents send their whole history again with each call; the edits made for an
    earlier call are applied to the next, so that its prompt continues the compacted conversation."""

    prefixes: list[CompactedPrefix] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a conversation is compacted, so that concurrent calls do not compact it twice."""

    def view(self, messages: Sequence[Message], agent: str) -> tuple[ContextView, list[ContextEdit]]:
        """The compacted conversation, and the edits that apply to it."""
        if not self.prefixes:
            return build_view(messages, ()), []
        digests = _prefix_digests(messages, agent)
        edits = [
            prefix.edit
            for prefix in self.prefixes
            if prefix.edit.message_ids[-1] < len(messages)
            and digests[prefix.edit.message_ids[-1]] == prefix.digest
        ]
        return build_view(messages, edits), edits


def compacted_prefix(messages: Sequence[Message], agent: str, edit: ContextEdit) -> CompactedPrefix:
    """The edit with the messages that it applies to."""
    return CompactedPrefix(_prefix_digests(messages, agent)[edit.message_ids[-1]], edit)


def _prefix_digests(messages: Sequence[Message], agent: str) -> list[bytes]:
    """For each message, a digest of the agent and of the conversation up to it."""
    digest = xxhash.xxh3_128(agent.encode("utf-8", "surrogatepass"))
    digests: list[bytes] = []
    for message in messages:
        digest.update(message.key)
        digests.append(digest.digest())
    return digests
