"""Finds the output that each logged call continues.

By text, a call continues the deepest output whose messages it repeats, tool calls and roles included; by
token, the deepest output whose ids it repeats. Among several candidates ids decide, then echoed wire ids,
then the number of equivalences, then the order of the log.

A foreign prompt may encode an output with other ids than the sampled ones. To put the sampled ids back
("repair"), the end of the re-encoded output is located by the bytes of the tokens if a tokenizer is
available, else by the stop token, or by equal ids after a changed prefix. If none of these works, it is
estimated from text lengths, and the alignment says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.timelines.log import LoggedCall, LoggedOutput
from branchline.timelines.prefix_index import CallKeys, MessagePrefixIndex, TokenPrefixIndex, starts_with
from branchline.tree.match import match_echo

CompareLevel = Literal["text", "token"]
TokenBytes = Callable[[int], bytes]
_ANCHOR_TOKENS = 8


@dataclass(frozen=True)
class MergePolicy:
    """When one call counts as the continuation of another."""

    compare: CompareLevel = "text"
    """`text`: equal messages, tool calls included. `token`: equal ids, nothing else."""
    ignore_tools: bool = True
    """Merge calls with different tool lists."""
    repair: bool = True
    """If texts agree and ids do not, put the sampled ids back instead of forking."""
    estimate: bool = True
    """If the end of an output in a later prompt cannot be found, estimate it from text lengths. The context
    of the later output may then be wrong by some tokens; False keeps such calls apart."""
    deduplicate: bool = False
    """Keep one of several outputs with equal ids; by default each becomes a sample."""
    token_bytes: TokenBytes | None = None
    """Returns the bytes of a token, if a tokenizer is available; makes repairs certain."""


class AlignmentMethod(StrEnum):
    """How the end of an output was located in a prompt."""

    IDENTICAL = "identical"
    """The prompt starts with the ids of the earlier prompt and the sampled ids."""
    BYTES = "bytes"
    """Other ids with the same bytes."""
    STOP_TOKEN = "stop_token"
    """Other ids, up to the stop token of the output."""
    ANCHOR = "anchor"
    """The sampled ids after a prefix that changed (other tools, another date)."""
    ESTIMATE = "estimate"
    """Estimated from text lengths; a tokenizer makes it certain."""


@dataclass(frozen=True)
class Alignment:
    """The end of an output in a later prompt: `prompt[end:]` follows the output."""

    end: int
    method: AlignmentMethod


@dataclass(frozen=True)
class Link:
    """The output that a call continues: it is the last of messages[:depth]."""

    depth: int
    parent: int
    output: int
    alignment: Alignment | None
    """The end of that output in the call's prompt; None if ids are missing."""


def find_links(calls: Sequence[LoggedCall], scopes: Sequence[int], policy: MergePolicy) -> list[Link | None]:
    """Returns for each call the output it continues, or None. Calls of different scopes are never linked."""
    links = _token_links(calls, scopes) if policy.compare == "token" else _text_links(calls, scopes, policy)
    return list(links)


def _token_links(calls: Sequence[LoggedCall], scopes: Sequence[int]) -> Iterator[Link | None]:
    index = TokenPrefixIndex(
        scopes, [call.prompt_ids for call in calls], [[out.ids for out in call.outputs] for call in calls]
    )
    for call_index, call in enumerate(calls):
        best: Link | None = None
        best_agrees = False
        longest = 0
        for end, parent, choice in index.matches(call_index):
            if best is not None and end < longest:
                break
            earlier, output = calls[parent], calls[parent].outputs[choice]
            depth = min(len(earlier.request.messages) + 1, len(call.request.messages))
            agrees = (
                depth == len(earlier.request.messages) + 1
                and match_echo(output.message, call.request.messages[depth - 1]) is not None
            )
            if output.ids is not None and not len(output.ids) and not agrees:
                # An empty output matches by ids everywhere, so its text has to agree.
                continue
            if best is None or (agrees and not best_agrees):
                best = Link(depth, parent, choice, Alignment(end, AlignmentMethod.IDENTICAL))
                best_agrees, longest = agrees, end
        yield best


def _text_links(
    calls: Sequence[LoggedCall], scopes: Sequence[int], policy: MergePolicy
) -> Iterator[Link | None]:
    index = MessagePrefixIndex(
        [
            CallKeys(scope, call.request.message_keys, tuple(output.message.key for output in call.outputs))
            for scope, call in zip(scopes, calls, strict=True)
        ]
    )
    has_reasoning = any(output.message.reasoning_content for call in calls for output in call.outputs)
    for call_index, call in enumerate(calls):
        best: Link | None = None
        best_rank: tuple[int, ...] = ()
        for depth, parent, choice in index.matches(call_index):
            if best is not None and depth < best.depth:
                break
            earlier = calls[parent]
            output = earlier.outputs[choice]
            shown = call.request.messages[depth - 1]
            used = match_echo(output.message, shown)
            if used is None or (has_reasoning and not _same_reasoning(call, earlier)):
                continue
            alignment = align_output(call, earlier, output, depth, policy.token_bytes)
            if not _may_merge(alignment, output, policy):
                continue
            proof = 1 if alignment is None else 0 if alignment.method == AlignmentMethod.IDENTICAL else 2
            echoed = bool(output.message.id) and output.message.id == shown.id
            echoed_ids = echoed + _count_echoed_calls(output.message, call.request.messages[depth - 1 :])
            rank = (proof, -echoed_ids, len(used))
            if best is None or rank < best_rank:
                best, best_rank = Link(depth, parent, choice, alignment), rank
            if not used and proof == (call.prompt_ids is None) and _all_echoed(shown, echoed_ids):
                # No candidate can be better. Without this, many equal answers would take quadratic time.
                break
        yield best


def _may_merge(alignment: Alignment | None, output: LoggedOutput, policy: MergePolicy) -> bool:
    """Whether the sampled ids may replace the ids of the later prompt."""
    if alignment is None or alignment.method == AlignmentMethod.IDENTICAL:
        return True
    if alignment.method == AlignmentMethod.ESTIMATE and not policy.estimate:
        return False
    if not output.ids_were_sampled:
        # Ids encoded from text must not replace logged ids.
        return False
    if output.message.reasoning_content and alignment.method in (
        AlignmentMethod.STOP_TOKEN,
        AlignmentMethod.ESTIMATE,
    ):
        # Other ids and possibly another text: the template has probably dropped the reasoning.
        return False
    return policy.repair


def _same_reasoning(call: LoggedCall, earlier: LoggedCall) -> bool:
    """Whether the messages common to both calls have equal reasoning wherever both include it."""
    for mine, theirs in zip(call.request.messages, earlier.request.messages, strict=False):
        if (
            mine.reasoning_content
            and theirs.reasoning_content
            and mine.reasoning_content.strip() != theirs.reasoning_content.strip()
        ):
            return False
    return True


def _all_echoed(shown: Message, echoed: int) -> bool:
    """Whether every id that the client sent with a message is an id of the output."""
    return echoed == bool(shown.id) + len({call.id for call in shown.tool_calls if call.id})


def _count_echoed_calls(output: Message, shown: Sequence[Message]) -> int:
    known = {call.id for call in output.tool_calls if call.id}
    if not known:
        return 0
    echoed = {call.id for call in shown[0].tool_calls}
    echoed.update(message.tool_call_id for message in shown[1:] if message.role == "tool")
    return len(known & echoed)


# -- alignment -----------------------------------------------------------------------------------------


def align_output(
    call: LoggedCall, earlier: LoggedCall, output: LoggedOutput, depth: int, token_bytes: TokenBytes | None
) -> Alignment | None:
    """Locates the end of an earlier call's output in the prompt of a call whose messages[:depth] end in it.

    Returns None if ids are missing.
    """
    prompt, before, sampled = call.prompt_ids, earlier.prompt_ids, output.ids
    if prompt is None or before is None or sampled is None:
        return None
    following = call.request.messages[depth:]
    start = len(before)
    if not starts_with(prompt, before):
        end = _end_by_anchor(prompt, before, sampled)
        if end is not None:
            return Alignment(end, AlignmentMethod.ANCHOR)
        start = min(start, len(prompt))
    elif starts_with(prompt[start:], sampled):
        return Alignment(start + len(sampled), AlignmentMethod.IDENTICAL)
    else:
        end = _end_by_bytes(prompt, start, sampled, token_bytes) if token_bytes is not None else None
        if end is not None:
            return Alignment(end, AlignmentMethod.BYTES)
        # A stop token occurs at the end of an output only.
        if output.finish_reason != "length" and len(sampled) and sampled[-1] not in sampled[:-1]:
            stops = np.flatnonzero(prompt[start:] == sampled[-1])
            if len(stops):
                return Alignment(start + int(stops[0]) + 1, AlignmentMethod.STOP_TOKEN)
    return Alignment(_end_by_estimate(prompt, start, output.message, following), AlignmentMethod.ESTIMATE)


def _end_by_bytes(prompt: Ids, start: int, output: Ids, token_bytes: TokenBytes) -> int | None:
    expected = b"".join(map(token_bytes, output.tolist()))
    read = b""
    for position, token in enumerate(prompt[start:].tolist(), start=start):
        if len(read) >= len(expected):
            return position if read == expected else None
        read += token_bytes(token)
        if not expected.startswith(read[: len(expected)]):
            return None
    return len(prompt) if read == expected else None


def _end_by_anchor(prompt: Ids, before: Ids, output: Ids) -> int | None:
    """Locates the sampled ids by the last ids before them; None if they do not occur."""
    anchor = np.concatenate((before[-_ANCHOR_TOKENS:], output))
    if not len(output) or len(anchor) > len(prompt):
        return None
    # The same ids may occur earlier in the conversation: take the occurrence with the same number before it.
    earlier = len(_occurrences(np.concatenate((before, output)), anchor)) - 1
    starts = _occurrences(prompt, anchor)
    return starts[earlier] + len(anchor) if earlier < len(starts) else None


def _occurrences(ids: Ids, anchor: Ids) -> list[int]:
    starts = np.flatnonzero(ids[: max(0, len(ids) - len(anchor) + 1)] == anchor[0]).tolist()
    return [start for start in starts if np.array_equal(ids[start : start + len(anchor)], anchor)]


def _end_by_estimate(prompt: Ids, start: int, message: Message, following: Sequence[Message]) -> int:
    tail = len(prompt) - start
    length = _text_length(message)
    share = length / max(1, length + sum(_text_length(message) for message in following))
    # Each side gets at least one token if there are enough.
    most = tail - 1 if following and tail > 1 else tail
    return start + min(most, max(1 if tail else 0, round(tail * share)))


def _text_length(message: Message) -> int:
    return (
        len(message.content)
        + len(message.reasoning_content)
        + sum(len(call.arguments) for call in message.tool_calls)
    )
