"""Which output does each logged call continue?

By text, the deepest output whose messages the call repeats, tool calls and role included; by token, the
deepest whose ids it repeats. Where several fit, ids decide, then echoed ids on the wire, then how little
had to be tolerated, then the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from branchline.core.echo import match_echo
from branchline.core.message import Message
from branchline.timelines.alignment import Alignment, AlignmentMethod, TokenBytes, align_output
from branchline.timelines.log import LoggedCall, LoggedOutput
from branchline.timelines.prefix_index import CallKeys, MessagePrefixIndex, TokenPrefixIndex

CompareLevel = Literal["text", "token"]


@dataclass(frozen=True)
class MergePolicy:
    """How alike two calls must be for one to continue the other."""

    compare: CompareLevel = "text"
    """`text`: the same messages, tool calls included. `token`: the same ids, nothing else."""
    ignore_tools: bool = True
    """Merge across different tool lists."""
    repair: bool = True
    """Where texts agree and ids do not, put the sampled ids back instead of forking."""
    deduplicate: bool = False
    """Keep one of several outputs that are equal in every id; by default each is a sample."""
    token_bytes: TokenBytes | None = None
    """The bytes of a token, where a tokenizer is at hand: makes repairs certain."""


@dataclass(frozen=True)
class Link:
    """The output a call continues: messages[:depth] end in it."""

    depth: int
    parent: int
    output: int
    alignment: Alignment | None
    """Where that output ends in the call's prompt; None where there are no ids to say."""


@dataclass(frozen=True)
class Links:
    """For each call what it continues, or None."""

    by_call: list[Link | None]
    drifted: list[tuple[int, int]]
    """(call, depth): left apart at that message because ids disagree where texts agree."""


def find_links(calls: Sequence[LoggedCall], scopes: Sequence[int], policy: MergePolicy) -> Links:
    if policy.compare == "token":
        return Links(list(_token_links(calls, scopes)), [])
    drifted: list[tuple[int, int]] = []
    return Links(list(_text_links(calls, scopes, policy, drifted)), drifted)


def _token_links(calls: Sequence[LoggedCall], scopes: Sequence[int]) -> Iterator[Link | None]:
    found = TokenPrefixIndex(
        scopes, [call.prompt_ids for call in calls], [[out.ids for out in call.outputs] for call in calls]
    )
    for index, call in enumerate(calls):
        best: Link | None = None
        rank: tuple[int, ...] = ()
        longest = 0
        for end, parent, output in found.matches(index):
            if best is not None and end < longest:
                break
            earlier, said = calls[parent], calls[parent].outputs[output]
            depth = min(len(earlier.request.messages) + 1, len(call.request.messages))
            agrees = (
                depth == len(earlier.request.messages) + 1
                and match_echo(said.message, call.request.messages[depth - 1]) is not None
            )
            if said.ids is not None and not len(said.ids) and not agrees:
                # No ids say that this output is there, and no text does.
                continue
            now = (not agrees,)
            if best is None or now < rank:
                best, rank, longest = (
                    Link(depth, parent, output, Alignment(end, AlignmentMethod.IDENTICAL)),
                    now,
                    end,
                )
        yield best


def _text_links(
    calls: Sequence[LoggedCall], scopes: Sequence[int], policy: MergePolicy, drifted: list[tuple[int, int]]
) -> Iterator[Link | None]:
    found = MessagePrefixIndex(
        [
            CallKeys(
                scope,
                call.request.message_keys,
                tuple(output.message.key for output in call.outputs),
            )
            for scope, call in zip(scopes, calls, strict=True)
        ]
    )
    reasoned = any(output.message.reasoning_content for call in calls for output in call.outputs)
    for index, call in enumerate(calls):
        best: Link | None = None
        rank: tuple[int, ...] = ()
        for depth, parent, output in found.matches(index):
            if best is not None and depth < best.depth:
                break
            earlier = calls[parent]
            said = earlier.outputs[output]
            shown = call.request.messages[depth - 1]
            used = match_echo(said.message, shown)
            if used is None or (reasoned and not _same_reasoning(call, earlier)):
                continue
            cut = _align(call, earlier, said, depth, policy)
            if not _may_merge(cut, said, policy):
                drifted.append((index, depth))
                continue
            proof = 1 if cut is None else 0 if cut.method == AlignmentMethod.IDENTICAL else 2
            echoed = bool(said.message.id) and said.message.id == shown.id
            echoed_calls = _count_echoed_calls(said.message, call.request.messages[depth - 1 :])
            now = (proof, -(echoed + echoed_calls), len(used))
            if best is None or now < rank:
                best, rank = Link(depth, parent, output, cut), now
            if not used and proof == (call.prompt_ids is None) and _all_echoed(shown, echoed + echoed_calls):
                # Nothing can fit better, and a thousand equal answers must not take a million looks.
                break
        yield best


def _align(
    call: LoggedCall, earlier: LoggedCall, said: LoggedOutput, depth: int, policy: MergePolicy
) -> Alignment | None:
    if call.prompt_ids is None or earlier.prompt_ids is None or said.ids is None:
        return None
    return align_output(
        call.prompt_ids,
        earlier.prompt_ids,
        said.ids,
        finish_reason=said.finish_reason,
        following_messages=call.request.messages[depth:],
        message=said.message,
        token_bytes=policy.token_bytes,
    )


def _may_merge(cut: Alignment | None, said: LoggedOutput, policy: MergePolicy) -> bool:
    """Ids decide: what they show to be missing from the later prompt must not be put back into it."""
    if cut is None or cut.method == AlignmentMethod.IDENTICAL:
        return True
    if not said.ids_were_sampled:
        # Ids made from text must not take the place of ids that were logged.
        return False
    if said.message.reasoning_content and cut.method in (
        AlignmentMethod.STOP_TOKEN,
        AlignmentMethod.ESTIMATE,
    ):
        # Other ids and not provably the same text: the template left the thinking out.
        return False
    return policy.repair


def _same_reasoning(call: LoggedCall, earlier: LoggedCall) -> bool:
    """Whether both calls show the same reasoning for what they have in common, as far as they show any."""
    for mine, theirs in zip(call.request.messages, earlier.request.messages, strict=False):
        if (
            mine.reasoning_content
            and theirs.reasoning_content
            and mine.reasoning_content.strip() != theirs.reasoning_content.strip()
        ):
            return False
    return True


def _all_echoed(shown: Message, echoed: int) -> bool:
    """Whether every id the client sent with a message is one of ours."""
    return echoed == bool(shown.id) + len({call.id for call in shown.tool_calls if call.id})


def _count_echoed_calls(said: Message, shown: Sequence[Message]) -> int:
    known = {call.id for call in said.tool_calls if call.id}
    if not known:
        return 0
    wire = {call.id for call in shown[0].tool_calls}
    wire.update(message.tool_call_id for message in shown[1:] if message.role == "tool")
    return len(known & wire)
