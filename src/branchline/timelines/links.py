"""Finds the output that each logged call continues.

A call continues the deepest output whose messages it repeats, tool calls and roles included, if its logged
prompt begins with the ids of that output's prompt and the sampled ids; by token, the deepest output whose ids
it repeats. Such a link is exact. A `MergePolicy` can allow links that are not: each permission allows one
thing, and a call that is kept apart because a permission is missing is reported with it.

Among several candidates ids decide, then bytes, then echoed wire ids, then whether the output was complete,
then the number of ids that agree, then the number of equivalences, then the order of the log. Where only
texts tell, an output that differs by white space is no candidate beside one of the same prompt that does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import numpy as np

from branchline.core.call import Equivalence
from branchline.core.choices import CompareLevel
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.core.option_checks import check_flag
from branchline.core.token_arrays import NO_IDS, Ids
from branchline.timelines.alignment import (
    NOTHING,
    UNCERTAIN_METHODS,
    Aligner,
    Alignment,
    AlignmentMethod,
    EarlierPath,
    PathReasoning,
    Permission,
    Permissions,
    TokenBytes,
    has_reasoning,
)
from branchline.timelines.log import LoggedCall
from branchline.timelines.prefix_index import CallKeys, MessagePrefixIndex, TokenPrefixIndex, starts_with
from branchline.tree.match import match_echo

_TOOLS: Permissions = frozenset((Permission.IGNORE_TOOLS,))
_MAX_COMPARED = 16
"""Candidates of one length that are compared; without a limit, common answers take quadratic time."""


@dataclass(frozen=True)
class MergePolicy:
    """When one call counts as the continuation of another. By default only if its context stays exactly what
    was logged for it."""

    compare: CompareLevel = "text"
    """`text`: equal messages, tool calls included, and equal ids. `token`: equal ids, nothing else."""
    repair: bool = False
    """If texts agree and ids do not, put the sampled ids back, where the end of the output is known: by the
    bytes of tokens or by its stop token."""
    ignore_tools: bool = False
    """Continue calls with other tools or template arguments, whose prompts begin with other ids."""
    inexact: bool = False
    """Merge by text: continue every call whose messages agree, also where the end of an output in the later
    prompt is only estimated. Includes `repair`."""
    deduplicate: bool = False
    """Keep one of several equal outputs of equal prompts; by default each becomes a sample. Outputs are equal
    if their ids are; with `inexact`, if their texts are."""
    token_bytes: TokenBytes | None = None
    """Returns the bytes of a token, if a tokenizer is available; makes repairs certain."""
    stop_ids: frozenset[int] = frozenset()
    """The ids that are known to end an output."""

    def __post_init__(self) -> None:
        if self.compare not in get_args(CompareLevel):
            raise InputError(f"compare: got {self.compare!r}, expected text or token")
        for name in (*Permission, "deduplicate"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.stop_ids, Set) or not all(type(stop) is int for stop in self.stop_ids):
            raise InputError(f"stop_ids: got {self.stop_ids!r}, expected a set of ids")
        if self.repair and not self.inexact and self.token_bytes is None and not self.stop_ids:
            raise InputError(
                "repair: got no token_bytes and no stop_ids, expected one of them: without, it is not known "
                "where an output ends"
            )
        if self.compare == "token":
            for permission in Permission:
                if getattr(self, permission):
                    raise InputError(
                        f"{permission}: got True, expected False with compare='token': that compares ids only"
                    )

    def missing(self, needs: Permissions) -> tuple[Permission, ...]:
        """Returns the permissions of `needs` that the policy does not give."""
        return tuple(
            permission
            for permission in Permission
            if permission in needs
            and not getattr(self, permission)
            and not (permission == Permission.REPAIR and (self.inexact or Permission.INEXACT in needs))
        )


@dataclass(frozen=True)
class Link:
    """The output that a call continues: it is the last of messages[:depth]."""

    depth: int
    parent: int
    output: int
    alignment: Alignment | None
    """The end of that output in the call's prompt; None if ids are missing."""


@dataclass(frozen=True)
class KeptApart:
    """A call that would continue a longer path if the policy gave these permissions."""

    line: int
    missing: tuple[Permission, ...]


@dataclass
class Links:
    """For each call the output it continues, and the calls that were kept apart."""

    links: list[Link | None]
    kept_apart: list[KeptApart] = field(default_factory=list)


def find_links(calls: Sequence[LoggedCall], scopes: Sequence[int], policy: MergePolicy) -> Links:
    """Returns for each call the output it continues. Calls of different scopes are never linked."""
    if policy.compare == "token":
        return Links(list(_token_links(calls, scopes)))
    return _TextLinker(calls, scopes, policy).run()


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


class _TextLinker:
    """Links calls whose messages agree. A call follows the calls that it may continue, because the path of an
    earlier call decides what its continuations need."""

    def __init__(self, calls: Sequence[LoggedCall], scopes: Sequence[int], policy: MergePolicy) -> None:
        self._calls = calls
        self._policy = policy
        self._aligner = Aligner(policy.token_bytes, policy.stop_ids)
        self._index = MessagePrefixIndex(
            [
                CallKeys(
                    scope, call.request.message_keys, tuple(output.message.key for output in call.outputs)
                )
                for scope, call in zip(scopes, calls, strict=True)
            ]
        )
        self._links: list[Link | None] = [None] * len(calls)
        self._first_outputs: list[int | None] = [None] * len(calls)
        """Where the first output of a call's path begins in its prompt."""
        self._allows_any = any(getattr(policy, permission) for permission in Permission)
        self._reasoning: dict[int, PathReasoning] = {}
        self._outputs_reason = any(out.message.reasoning_content for call in calls for out in call.outputs)

    def run(self) -> Links:
        kept_apart: dict[int, KeptApart] = {}
        calls = self._calls
        for index in sorted(range(len(calls)), key=lambda index: len(calls[index].request.messages)):
            link, apart = self._find_link(index)
            self._links[index] = link
            self._first_outputs[index] = self._find_first_output(index, link)
            if apart is not None:
                kept_apart[index] = apart
        return Links(self._links, [kept_apart[index] for index in sorted(kept_apart)])

    def _find_link(self, call_index: int) -> tuple[Link | None, KeptApart | None]:
        """Returns the best link that the policy allows, and what it lacks for a longer path."""
        call = self._calls[call_index]
        best: Link | None = None
        best_rank: tuple[int, ...] = ()
        apart: tuple[int, KeptApart] | None = None
        current_depth = seen = aligned = 0
        for depth, parent, choice in self._index.matches(call_index):
            if best is not None and depth < best.depth:
                break
            if depth != current_depth:
                current_depth, seen, aligned = depth, 0, 0
            output, shown = self._calls[parent].outputs[choice], call.request.messages[depth - 1]
            used = match_echo(output.message, shown)
            if used is None:
                continue
            seen += 1
            found = self._link_by_ids(call, depth, parent, choice)
            if found is None and aligned < _MAX_COMPARED and (self._allows_any or apart is None):
                aligned += 1
                found = self._link_by_text(call, depth, parent, choice)
            if found is None:
                continue
            link, needs = found
            echoed_ids = _count_echoed_ids(output.message, call.request.messages[depth - 1 :])
            proof, length = _proof(link.alignment)
            shows_text_only = link.alignment is None or link.alignment.method in UNCERTAIN_METHODS
            if (
                shows_text_only
                and Equivalence.TRIMMED_WHITESPACE in used
                and self._has_verbatim(call_index, depth, echoed_ids)
            ):
                continue
            if missing := self._policy.missing(needs):
                apart = apart or (depth, KeptApart(call.line, missing))
                continue
            is_cancelled = output.is_cut
            rank = (proof, -echoed_ids, is_cancelled, -length, len(used))
            if best is None or rank < best_rank:
                best, best_rank = link, rank
            is_good = (
                not used
                and not is_cancelled
                and proof == (call.prompt_ids is None)
                and _all_echoed(shown, echoed_ids)
            )
            if is_good and seen >= _MAX_COMPARED:
                break
        is_longer = apart is not None and (best is None or apart[0] > best.depth)
        return best, apart[1] if apart is not None and is_longer else None

    def _has_verbatim(self, call_index: int, depth: int, echoed_ids: int) -> bool:
        """Whether an output of the same prompt has the text that a call shows, white space included, and as
        many wire ids. Then the call continues none that differs, even if it cannot continue this one."""
        messages = self._calls[call_index].request.messages
        for other_depth, parent, choice in self._index.matches(call_index):
            if other_depth < depth:
                break
            message = self._calls[parent].outputs[choice].message
            used = match_echo(message, messages[depth - 1]) if other_depth == depth else None
            is_verbatim = used is not None and Equivalence.TRIMMED_WHITESPACE not in used
            if is_verbatim and _count_echoed_ids(message, messages[depth - 1 :]) >= echoed_ids:
                return True
        return False

    def _link_by_ids(
        self, call: LoggedCall, depth: int, parent: int, choice: int
    ) -> tuple[Link, Permissions] | None:
        """Returns a link that changes no logged context, or None."""
        earlier, prompt = self._calls[parent], call.prompt_ids
        before, sampled = earlier.prompt_ids, earlier.outputs[choice].ids
        if prompt is not None and before is not None and sampled is not None:
            # The output first: it is short, and drift is there.
            if not starts_with(prompt[len(before) :], sampled) or not starts_with(prompt, before):
                return None
            end, first_output = len(before) + len(sampled), self._first_outputs[parent]
            alignment = Alignment(end, AlignmentMethod.IDENTICAL, first_output)
            return Link(depth, parent, choice, alignment), NOTHING
        if prompt is not None and not starts_with(prompt, self._path_ids(parent, choice)):
            # The ids of this prompt cannot follow that path.
            return None
        if not self._has_same_reasoning(call, earlier):
            return None
        other_tools = call.request.prompt_config_digest != earlier.request.prompt_config_digest
        return Link(depth, parent, choice, None), _TOOLS if other_tools else NOTHING

    def _link_by_text(
        self, call: LoggedCall, depth: int, parent: int, choice: int
    ) -> tuple[Link, Permissions] | None:
        """Returns a link that replaces ids of a logged prompt by the sampled ones, or None."""
        earlier, prompt = self._calls[parent], call.prompt_ids
        output = earlier.outputs[choice]
        if prompt is None or earlier.prompt_ids is None or output.ids is None:
            return None
        if not output.ids_were_sampled or not self._has_same_reasoning(call, earlier):
            # Ids encoded from text must not replace logged ids.
            return None
        path = EarlierPath(
            earlier.prompt_ids,
            output,
            output.ids,
            self._first_outputs[parent],
            replace(self._path_reasoning(parent), in_output=self._has_reasoning(output.message)),
        )
        other_tools = call.request.prompt_config_digest != earlier.request.prompt_config_digest
        alignment = self._aligner.align(prompt, path, call.request.messages[depth:], other_tools=other_tools)
        return None if alignment is None else (Link(depth, parent, choice, alignment), alignment.needs)

    def _has_reasoning(self, message: Message) -> bool:
        """Whether a message may have been rendered with reasoning: it has some, or an output with equal text
        has, which a server may have restored."""
        return message.key in self._keys_with_reasoning or has_reasoning(message)

    @cached_property
    def _keys_with_reasoning(self) -> frozenset[bytes]:
        outputs = (output.message for call in self._calls for output in call.outputs)
        return frozenset(message.key for message in outputs if has_reasoning(message))

    def _has_same_reasoning(self, call: LoggedCall, earlier: LoggedCall) -> bool:
        """Whether the messages common to both calls have equal reasoning wherever both include it."""
        if not self._outputs_reason:
            return True
        for mine, theirs in zip(call.request.messages, earlier.request.messages, strict=False):
            if (
                mine.reasoning_content
                and theirs.reasoning_content
                and mine.reasoning_content.strip() != theirs.reasoning_content.strip()
            ):
                return False
        return True

    def _find_first_output(self, call_index: int, link: Link | None) -> int | None:
        prompt = self._calls[call_index].prompt_ids
        if prompt is None:
            return None
        if link is None:
            return len(prompt)
        # Without an alignment the prompt begins with the ids of the path.
        return self._first_outputs[link.parent] if link.alignment is None else link.alignment.first_output

    def _path_ids(self, call_index: int, choice: int) -> Ids:
        """Returns the known ids from the root to an output."""
        parts: list[Ids] = []
        end: tuple[int, int] | None = (call_index, choice)
        while end is not None:
            call, link = self._calls[end[0]], self._links[end[0]]
            sampled, prompt = call.outputs[end[1]].ids, call.prompt_ids
            parts.append(NO_IDS if sampled is None else sampled)
            if prompt is not None and (link is None or link.alignment is None):
                parts.append(prompt)
                break
            if prompt is not None and link is not None and link.alignment is not None:
                parts.append(prompt[link.alignment.end :])
            end = None if link is None else (link.parent, link.output)
        return np.concatenate(parts[::-1])

    def _path_reasoning(self, call_index: int) -> PathReasoning:
        """Returns where the prompt of a call, which is linked, has reasoning."""
        unknown: list[int] = []
        index: int | None = call_index
        while index is not None and index not in self._reasoning:
            unknown.append(index)
            link = self._links[index]
            index = link.parent if link is not None else None
        for index in reversed(unknown):
            messages, link = self._calls[index].request.messages, self._links[index]
            if link is None:
                self._reasoning[index] = PathReasoning(any(map(self._has_reasoning, messages)))
                continue
            earlier = self._reasoning[link.parent]
            added = (self._calls[link.parent].outputs[link.output].message, *messages[link.depth :])
            in_outputs = earlier.in_outputs or any(map(self._has_reasoning, added))
            self._reasoning[index] = PathReasoning(earlier.in_context, in_outputs)
        return self._reasoning[call_index]


def _all_echoed(shown: Message, echoed: int) -> bool:
    """Whether every id that the client sent with a message is an id of the output."""
    return echoed == bool(shown.id) + len({call.id for call in shown.tool_calls if call.id})


def _proof(alignment: Alignment | None) -> tuple[int, int]:
    """Returns how well ids prove a link, 0 best, and how many are equal: all ids, no ids known, bytes or the
    ids after another beginning, text only."""
    if alignment is None:
        return 1, 0
    if alignment.method == AlignmentMethod.IDENTICAL:
        return 0, alignment.end
    return (3 if alignment.method in UNCERTAIN_METHODS else 2), 0


def _count_echoed_ids(output: Message, shown: Sequence[Message]) -> int:
    """Returns how many wire ids of an output the client sent back, in the message or in tool results."""
    echoed_message = bool(output.id) and output.id == shown[0].id
    known = {call.id for call in output.tool_calls if call.id}
    if not known:
        return int(echoed_message)
    echoed = {call.id for call in shown[0].tool_calls}
    echoed.update(message.tool_call_id for message in shown[1:] if message.role == "tool")
    return echoed_message + len(known & echoed)
