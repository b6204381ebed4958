"""A session: the tree of one episode, its codec and its journal.

    turn = session.prepare(request)
    generation = await engine.generate(turn.prompt_ids, params)
    call = session.commit(turn, generation).call

A failed generation changes nothing. A commit is planned, written to the journal in commit order and applied;
`durable` resolves once the record is durable, and a reply must not be sent before that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from branchline.chat.base import Codec, HistoryPolicy, MessageTokens, NewMessage
from branchline.chat.vision import ImageSpan
from branchline.core.call import AppliedEquivalence, Call, Delivery, Equivalence, Generation, Request
from branchline.core.errors import TreeError
from branchline.core.message import Message
from branchline.core.token_arrays import NO_IDS, Ids, Origin, as_ids, normalize_runs
from branchline.tree.argument_defaults import restore_sampled_arguments
from branchline.tree.journal import Journal
from branchline.tree.match import PathMatcher, longest_raw_path, match_echo, reorder_tool_results
from branchline.tree.media import detach_payloads, restore_payloads, share_payloads
from branchline.tree.tree import (
    NO_NODE,
    Delivered,
    Tree,
    TreeDelta,
    TreeRecord,
    Turn,
    check_record,
    decode_record,
    encode_record,
    first_message_key,
)


@dataclass(frozen=True)
class CommitResult:
    """A committed call and its durability."""

    call: Call
    durable: Future[int] | None
    """Resolves once the call is in the journal; None if the session has no journal."""


class Session:
    """One episode of one task by one or more agents.

    `history` decides whether the next prompt is built as the chat template renders the conversation or as it
    was sampled. `restore_reasoning` decides whether reasoning that a client drops is restored. With
    `ignore_tools` a call with other tools continues the path, if the prompt differs only before the first
    output: the model gets the prompt that the call asked for, and its output is recorded as inexact.
    """

    def __init__(
        self,
        id: str,
        codec: Codec,
        *,
        history: HistoryPolicy = "template",
        restore_reasoning: bool = True,
        ignore_tools: bool = False,
        journal: Journal | None = None,
        tree: Tree | None = None,
        started_at: datetime | None = None,
    ) -> None:
        self.id = id
        self.started_at = started_at or datetime.now()
        """The time that templates show during the whole session; stored with every call for restarts."""
        self.codec = codec.with_clock(self.started_at)
        self.history: HistoryPolicy = history
        self.ignore_tools = ignore_tools
        self.tree = tree or Tree()
        self._matcher = PathMatcher(self.tree, restore_reasoning=restore_reasoning)
        self._journal = journal
        self._payloads: dict[str, bytes] = {}
        """The bytes of every image in the tree, by digest."""
        if journal is not None and tree is None and next(journal.read(id), None) is not None:
            raise TreeError(f"session {id} is in the journal already: reopen it with Session.reopen")
        # Makes plan, journal and apply atomic; prepare only reads an append-only tree and needs no lock.
        self._commit_lock = threading.Lock()

    @classmethod
    def reopen(
        cls,
        id: str,
        codec: Codec,
        journal: Journal,
        *,
        history: HistoryPolicy = "template",
        restore_reasoning: bool = True,
        ignore_tools: bool = False,
    ) -> Session:
        """Restores a session from its journal; an unknown id gives an empty session."""
        tree = Tree()
        records = [decode_record(data) for data in journal.read(id)]
        first = next((record.call for record in records if isinstance(record, TreeDelta)), None)
        session = cls(
            id,
            codec,
            history=history,
            restore_reasoning=restore_reasoning,
            ignore_tools=ignore_tools,
            journal=journal,
            tree=tree,
            started_at=None if first is None else datetime.fromtimestamp(first.template_time),
        )
        for record in records:
            session.apply_record(record)
        return session

    # -- prepare -------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> Turn:
        """Builds the prompt for a request. Does not change the tree."""
        match = self._matcher.find(request)
        filled: tuple[AppliedEquivalence, ...] = ()
        if len(match.path) < len(request.messages) and request.messages[len(match.path)].tool_calls:
            # The mismatch may only be defaults of the tool's schema that the client filled in.
            restored, filled = restore_sampled_arguments(
                request.messages, len(match.path), request.tools, self.tree.sampled_tool_calls
            )
            match = self._matcher.find(replace(request, messages=restored)) if filled else match
        path = match.path
        new, source_ids, applied = self._new_messages(match.messages, len(path), request.agent)
        extension = self.codec.extend(
            path,
            new,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            history=self.history,
        )
        kept = extension.kept
        rewritten = path[kept:]
        parts = [node.ids for node in path[:kept]]
        parts += [tokens.ids for tokens in extension.message_tokens]
        parts.append(extension.generation_prompt_ids)
        prompt_ids = np.concatenate(parts)
        prompt_ids.flags.writeable = False
        messages = (*(node.message for node in rewritten), *(message.message for message in new))
        images: tuple[ImageSpan, ...] = ()
        with_parts = [node.message for node in path if node.message.parts]
        with_parts += [message for message in messages if message.parts]
        if any(message.media for message in with_parts):
            shown = [*(node.message for node in path[:kept]), *messages]
            sampled_ids = [node.sampled_ids if node.ends_sampled else None for node in path[:kept]]
            sampled_ids += [node.sampled_ids for node in rewritten]
            sampled_ids += [message.sampled_ids for message in new]
            images = self.codec.image_spans(shown, prompt_ids, _sampled_mask(parts, sampled_ids))
        turn = Turn(
            request=request,
            parent=path[kept - 1] if kept else self.tree.root,
            messages=messages,
            message_tokens=extension.message_tokens,
            source_ids=(*(node.id if node.output else node.source_id for node in rewritten), *source_ids),
            generation_prompt_ids=extension.generation_prompt_ids,
            prompt_ids=prompt_ids,
            applied_equivalences=(
                *(AppliedEquivalence(-1, used) for used in request.equivalences),
                *match.applied_equivalences,
                *filled,
                *applied,
            ),
            ambiguous_match=match.ambiguous,
            encoded_tokens=extension.encoded_tokens,
            rewrite_reason=extension.rewrite_reason,
            images=images,
        )
        return self._continue_other_tools(turn, len(path)) if self.ignore_tools else turn

    def _continue_other_tools(self, turn: Turn, matched: int) -> Turn:
        """Returns a turn that continues a longer path with other tools, if there is one; else the same turn.

        From the path's first output on, the prompt must have exactly the ids of the path. Then only the
        beginning differs, where templates put the tools; any other difference is a fork.
        """
        other = self._matcher.find(turn.request, ignore_tools=True)
        path = other.path
        first = next((node for node in path if node.is_sampled), None)
        if first is None or len(path) <= matched:
            return turn
        count = len(path) - turn.parent.depth
        ids_after_path = [tokens.ids for tokens in turn.message_tokens[count:]] + [turn.generation_prompt_ids]
        end = len(turn.prompt_ids) - sum(map(len, ids_after_path))
        path_ids = self.tree.path_ids(path[-1])
        recorded = path_ids[first.sampled_start :]
        if end < len(recorded) or not np.array_equal(turn.prompt_ids[end - len(recorded) : end], recorded):
            return turn
        path_ids = as_ids(np.concatenate((path_ids, *ids_after_path)))
        return replace(
            turn,
            parent=path[-1],
            messages=turn.messages[count:],
            # Copies: a codec remembers the prompt of an array of ids, which is not the prompt of this path.
            message_tokens=tuple(
                MessageTokens(as_ids(tokens.ids), tokens.spans) for tokens in turn.message_tokens[count:]
            ),
            source_ids=turn.source_ids[count:],
            applied_equivalences=(
                *(AppliedEquivalence(-1, used) for used in turn.request.equivalences),
                *other.applied_equivalences,
            ),
            ambiguous_match=other.ambiguous,
            # A template that shows no tools renders the same prompt.
            path_ids=None if np.array_equal(path_ids, turn.prompt_ids) else path_ids,
        )

    def _new_messages(
        self, messages: tuple[Message, ...], start: int, agent: str
    ) -> tuple[list[NewMessage], list[int], list[AppliedEquivalence]]:
        """Returns the messages after the path, their source nodes, and the equivalences applied to them.

        A message that was sampled elsewhere in the tree is replaced by the sampled message and its ids.
        """
        new: list[NewMessage] = []
        source_ids: list[int] = []
        applied: list[AppliedEquivalence] = []
        pending = list(messages)
        for index in range(start, len(pending)):
            message = pending[index]
            source = None
            if message.role == "assistant":
                source = self._matcher.find_sampled_elsewhere(message, agent)
            if source is None:
                new.append(NewMessage(message))
                source_ids.append(NO_NODE)
                continue
            used = match_echo(source.message, message) or ()
            applied += [AppliedEquivalence(index, equivalence) for equivalence in used]
            moved = reorder_tool_results(source.message, message, pending, index)
            if moved and Equivalence.REORDERED_CALLS not in used:
                applied.append(AppliedEquivalence(index, Equivalence.REORDERED_RESULTS))
            for position, result in moved.items():
                pending[position] = result
            new.append(NewMessage(source.message, source.sampled_ids))
            source_ids.append(source.id)
        return new, source_ids, applied

    def count_new_characters(self, request: Request) -> int:
        """About how much text of a request the tree does not have: where paths fork, the last is followed."""
        messages, children = request.messages, self.tree.root.children
        key = first_message_key(request.prompt_config_digest, messages[0].key)
        for index, message in enumerate(messages):
            group = children.get(message.key if index else key) if children else None
            if group is None:
                return sum([len(new.content) for new in messages[index:]])
            children = group[-1].children
        return 0

    def prepare_ids(self, request: Request, prompt_ids: Ids) -> Turn:
        """Builds a turn for a raw prompt, which continues the longest path whose ids it starts with."""
        path = longest_raw_path(self.tree.root, prompt_ids)
        rest = as_ids(prompt_ids[path[-1].end if path else 0 :])
        tokens = MessageTokens(rest, normalize_runs(((len(rest), Origin.CONTEXT),)))
        return Turn(
            request=request,
            parent=path[-1] if path else self.tree.root,
            messages=(Message("user", self.codec.decode(rest)),) if len(rest) else (),
            message_tokens=(tokens,) if len(rest) else (),
            source_ids=(NO_NODE,) if len(rest) else (),
            generation_prompt_ids=NO_IDS,
            prompt_ids=prompt_ids,
            applied_equivalences=(),
            ambiguous_match=False,
            encoded_tokens=len(rest),
            rewrite_reason="",
        )

    # -- commit --------------------------------------------------------------------------------------

    def commit(self, turn: Turn, *generations: Generation, call_id: str = "") -> CommitResult:
        """Adds the outputs of a turn, one generation per choice."""
        with self._commit_lock:
            delta = self.tree.plan(turn, generations, call_id, self.codec, self.started_at.timestamp())
            if any(node.message.parts for node in delta.nodes):
                delta = share_payloads(delta, self._payloads)
            durable = self._append_record(delta)
            return CommitResult(self.tree.apply(delta), durable)

    def record_delivery(self, call: Call, delivery: Delivery = Delivery.DELIVERED) -> Future[int] | None:
        """Records the delivery of a call's outputs."""
        record = Delivered(call.index, delivery)
        with self._commit_lock:
            # Lazy: if a successful delivery is lost in a crash, the call is pending until a call continues
            # it. Also while the journal has failed: then it takes a record only if it need not be durable.
            has_failed = self._journal is not None and self._journal.failure is not None
            durable = self._append_record(record, lazy=has_failed or delivery is Delivery.DELIVERED)
            self.tree.apply(record)
            return durable

    def apply_record(self, record: TreeRecord) -> None:
        """Applies a record that was read from the journal, whose media have no payloads. Raises TreeError if
        it is invalid."""
        check_record(record)

        def read(digest: str) -> bytes | None:
            return self._payloads.get(digest) or (self._journal.read_media(digest) if self._journal else None)

        self.tree.apply(share_payloads(restore_payloads(record, read), self._payloads))

    def snapshot(self) -> Tree:
        """Returns a copy of the current tree, to be read while other threads commit."""
        return self.tree.copy(self._commit_lock)

    def _append_record(self, record: TreeRecord, *, lazy: bool = False) -> Future[int] | None:
        """Appends a record that is applied next. Raises JournalError if the journal will never hold it."""
        if self._journal is None:
            return None
        payloads: dict[str, bytes] = {}
        if isinstance(record, TreeDelta) and any(node.message.parts for node in record.nodes):
            record, payloads = detach_payloads(record)
        return self._journal.append(self.id, encode_record(record), lazy=lazy, media=payloads, retain=True)


def _sampled_mask(pieces: Sequence[Ids], sampled_ids: Sequence[Ids | None]) -> NDArray[np.bool_]:
    """Returns which ids of a prompt were sampled: the end of each piece that ends with its sampled ids."""
    masks = [np.zeros(len(piece), np.bool_) for piece in pieces]
    for mask, piece, sampled in zip(masks, pieces, sampled_ids, strict=False):
        if sampled is not None and np.array_equal(piece[len(piece) - len(sampled) :], sampled):
            mask[len(piece) - len(sampled) :] = True
    return np.concatenate(masks)
