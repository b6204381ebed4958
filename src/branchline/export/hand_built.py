"""The tree of hand-built histories: their choices, joined by ids.

Each choice is a call of its own, and is exact if the server gave the ids of its prompt and of its answer: the
tree then has exactly these ids, whatever is known of other choices. What a choice lacks comes from a codec,
which renders the prompt and encodes the answer; such a choice is inexact. An answer that occurs in several
histories is one answer, with all that any of them tells. It is known by its ids, or by its conversation and
its text where nothing that was given tells two answers apart.
"""

from __future__ import annotations

import logging
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from branchline.chat.base import Codec, HistoryPolicy
from branchline.core.call import Generation
from branchline.core.errors import CodecError, ExportError, MessageError
from branchline.core.token_arrays import Floats, Ids, normalize_runs
from branchline.export.histories import History, SampledChoice
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput, find_miscounted
from branchline.timelines.merge import merge
from branchline.timelines.token_texts import fit_logprobs
from branchline.tree.session import Session
from branchline.tree.tree import Node, Tree

log = logging.getLogger("branchline.export")


@dataclass(frozen=True)
class _Answer:
    """A choice and all ids of it, of which some may have been rendered or encoded."""

    place: str
    choice: SampledChoice
    prompt_ids: Ids
    ids: Ids
    logprobs: Floats | None

    @property
    def key(self) -> tuple[bytes, ...]:
        return self.prompt_ids.tobytes(), self.ids.tobytes(), self.choice.output.message.key


@dataclass(frozen=True)
class HandBuiltTree:
    """The tree of hand-built histories."""

    tree: Tree
    main_leaf: Node | None
    """The end of a timeline with all choices of the main history; None if it has none."""
    main_answer: LoggedOutput | None = None
    """The last choice of the main history, with all that is known of it."""


def build_tree(
    histories: Sequence[History],
    codec: Codec | None = None,
    *,
    history: HistoryPolicy = "template",
    version: int = 0,
) -> HandBuiltTree:
    """Returns the tree of hand-built histories, the main one first; `version` is the policy version that
    sampled the choices. Raises ExportError if ids are missing and there is no codec."""
    placed = [
        (f"{prefix}messages_and_choices[{choice.index}]", choice)
        for number, entry in enumerate(histories)
        for prefix in ["" if number == 0 else f"additional_histories[{number - 1}]."]
        for choice in entry.choices
    ]
    if codec is not None and codec.vocab_size is not None:
        _check_vocabulary(placed, codec.vocab_size)
    _check_counts(placed)
    placed = _with_known_facts(placed)
    missing = next(((place, choice) for place, choice in placed if not choice.is_exact), None)
    if missing is not None and codec is None:
        name = "token_ids" if missing[1].output.ids is None else "prompt_token_ids"
        raise ExportError(f"{missing[0]}: has no {name}, expected them, or a codec that renders the prompts")
    if missing is None or codec is None:
        answers = [_exact_answer(place, choice) for place, choice in placed]
    else:
        answers = _complete(placed, codec, history)
    main_count = len(histories[0].choices) if histories else 0
    answers, position_of = _distinct(answers)
    calls = [
        LoggedCall(
            answer.choice.request,
            (replace(answer.choice.output, ids=answer.ids, logprobs=answer.logprobs),),
            answer.prompt_ids,
            line=number,
            id=call_id,
        )
        for number, (answer, call_id) in enumerate(zip(answers, _call_ids(answers), strict=True))
    ]
    merged = merge(calls, MergePolicy(compare="token", ignore_tools=False))
    for call in merged.tree.calls:
        choice = answers[merged.logged_call(call.index).line].choice
        for node_id in call.outputs:
            node = merged.tree.nodes[node_id]
            assert node.output is not None
            assert node.sampled_ids is not None
            node.output = msgspec.structs.replace(
                node.output,
                versions=normalize_runs(((len(node.sampled_ids), version),)),
                inexact=not choice.is_exact,
                estimated=choice.output.ids is None,
            )
    main_leaf: Node | None = None
    if main_count:
        last = position_of[main_count - 1]
        call = next(call for call in merged.tree.calls if merged.logged_call(call.index).line == last)
        main_leaf = merged.tree.nodes[call.outputs[0]]
        while main_leaf.children:
            main_leaf = main_leaf.all_children()[0]
    main_answer = answers[position_of[main_count - 1]].choice.output if main_count else None
    return HandBuiltTree(merged.tree, main_leaf, main_answer)


def _check_counts(placed: Sequence[tuple[str, SampledChoice]]) -> None:
    """Raises MessageError for a response with another number of ids than its server counted."""
    calls = [
        LoggedCall(
            choice.request,
            (choice.output,),
            line=number,
            id=choice.response_id,
            counted_tokens=choice.counted_tokens,
        )
        for number, (_, choice) in enumerate(placed)
    ]
    for number, error in find_miscounted(calls):
        raise MessageError(f"{placed[number][0]}.usage.completion_tokens", error.value, error.expected)


def _check_vocabulary(placed: Sequence[tuple[str, SampledChoice]], vocab_size: int) -> None:
    """Raises MessageError for ids that are those of another tokenizer."""
    for place, choice in placed:
        for name, ids in (("prompt_token_ids", choice.prompt_ids), ("token_ids", choice.output.ids)):
            if ids is not None and len(ids) and int(ids.max()) >= vocab_size:
                raise MessageError(f"{place}.{name}", int(ids.max()), f"ids below {vocab_size}, the codec's")


def _with_known_facts(placed: Sequence[tuple[str, SampledChoice]]) -> list[tuple[str, SampledChoice]]:
    """Returns the choices, each with all that the histories tell of it. Choices with the same conversation
    and the same text are one, unless something that was given (ids, logprobs, how it ended) tells them apart.
    A choice that may be several others tells nothing of them."""
    choices = [choice for _, choice in placed]
    if all(
        choice.is_exact and choice.output.logprobs is not None and not choice.output.is_cut
        for choice in choices
    ):
        return list(placed)

    def order(number: int) -> tuple[bool, bool, bool, int]:
        output = choices[number].output
        return output.ids is None, choices[number].prompt_ids is None, output.logprobs is None, number

    same_text: dict[tuple[bytes, bytes, bytes], list[SampledChoice]] = {}
    found: dict[int, tuple[list[SampledChoice], int]] = {}
    for number in sorted(range(len(choices)), key=order):
        choice, request = choices[number], choices[number].request
        conversation = request.message_keys, request.prompt_config_digest, choice.output.message.key
        known = same_text.setdefault(conversation, [])
        fitting = [index for index, other in enumerate(known) if choice.may_be(other)]
        named = [index for index in fitting if known[index].response_id == choice.response_id]
        fitting = named if choice.response_id and named else fitting
        found[number] = known, fitting[0] if fitting else len(known)
        if not fitting:
            known.append(choice)
        elif len(fitting) == 1:
            known[fitting[0]] = _filled(known[fitting[0]], choice)

    def joined(number: int) -> SampledChoice:
        choice, (known, index) = choices[number], found[number]
        name = choice.response_id or known[index].response_id
        return replace(known[index], request=choice.request, index=choice.index, response_id=name)

    return [(place, joined(number)) for number, (place, _) in enumerate(placed)]


def _filled(choice: SampledChoice, other: SampledChoice) -> SampledChoice:
    """Returns a choice with what `other`, which knows no more of its ids, tells besides."""
    mine, theirs = choice.output, other.output
    output = replace(mine, finish_reason=(theirs if mine.is_cut else mine).finish_reason)
    if not mine.message.reasoning_content and theirs.message.reasoning_content:
        output = replace(output, message=theirs.message)
    fits = mine.ids is None or theirs.logprobs is None or len(theirs.logprobs) == len(mine.ids)
    if mine.logprobs is None and fits:
        output = replace(output, logprobs=theirs.logprobs, token_texts=theirs.token_texts)
    return replace(
        choice,
        output=output,
        prompt_ids=other.prompt_ids if choice.prompt_ids is None else choice.prompt_ids,
        response_id=choice.response_id or other.response_id,
        choice_index=other.choice_index if choice.choice_index is None else choice.choice_index,
    )


def _exact_answer(place: str, choice: SampledChoice) -> _Answer:
    assert choice.prompt_ids is not None
    assert choice.output.ids is not None
    return _Answer(place, choice, choice.prompt_ids, choice.output.ids, choice.output.logprobs)


def _call_ids(answers: Sequence[_Answer]) -> Iterator[str]:
    """Yields the id of the response of each answer; several choices of one response get a number too."""
    used: Counter[str] = Counter()
    for number, answer in enumerate(answers):
        name = answer.choice.response_id or f"call-{number}"
        used[name] += 1
        yield name if used[name] == 1 else f"{name}#{used[name]}"


def _distinct(answers: Sequence[_Answer]) -> tuple[list[_Answer], list[int]]:
    """Returns each answer once, as the choice that is exact if one is, and where each of the given ones is
    among them. Equal answers of different responses were sampled twice. Raises MessageError for one choice of
    one response that has two answers."""
    kept: list[_Answer] = []
    named: dict[tuple[object, ...], int] = {}
    position_of: list[int] = []
    positions: dict[tuple[bytes, ...], list[int]] = {}
    for answer in answers:
        same = positions.setdefault(answer.key, [])
        found = next((index for index in same if answer.choice.may_be(kept[index].choice)), None)
        if found is None:
            found = len(kept)
            same.append(found)
            kept.append(answer)
        else:
            one, other = sorted((kept[found], answer), key=_unknown)
            ended = other.choice.output if one.choice.output.is_cut else one.choice.output
            choice = replace(
                one.choice,
                response_id=one.choice.response_id or other.choice.response_id,
                output=replace(one.choice.output, finish_reason=ended.finish_reason),
            )
            kept[found] = replace(one, choice=choice)
        position_of.append(found)
        request, index = answer.choice.request, answer.choice.choice_index
        if answer.choice.response_id and index is not None:
            prompt = request.message_keys, request.prompt_config_digest, answer.prompt_ids.tobytes()
            first = named.setdefault((answer.choice.response_id, index, *prompt), found)
            if first != found:
                raise _contradiction(answer, kept[first])
    return kept, position_of


def _contradiction(answer: _Answer, first: _Answer) -> MessageError:
    """Returns the error for a choice that has another answer in an earlier history."""
    mine, theirs = answer.choice.output, first.choice.output
    given = mine.ids is not None and theirs.ids is not None  # not encoded
    facts: list[tuple[str, object, object]] = [
        *([("token_ids", answer.ids.tolist(), first.ids.tolist())] if given else []),
        ("message", mine.message.content, theirs.message.content),
        ("logprobs", _to_list(answer.logprobs), _to_list(first.logprobs)),
        ("finish_reason", mine.finish_reason, theirs.finish_reason),
    ]
    field, got, expected = next((fact for fact in facts if fact[1] != fact[2]), facts[-3])
    source = f"{first.place}, which is choice {answer.choice.choice_index} of {answer.choice.response_id!r}"
    return MessageError(f"{answer.place}.{field}", got, f"{reprlib.repr(expected)}, as {source}")


def _to_list(logprobs: Floats | None) -> list[float] | None:
    return None if logprobs is None else logprobs.tolist()


def _unknown(answer: _Answer) -> tuple[bool, bool, bool]:
    """Returns what is not known of an answer; the one with less is kept."""
    return not answer.choice.is_exact, answer.choice.output.ids is None, answer.logprobs is None


# -- what a codec adds ---------------------------------------------------------------------------------


def _complete(
    placed: Sequence[tuple[str, SampledChoice]], codec: Codec, history: HistoryPolicy
) -> list[_Answer]:
    """Returns all ids of each choice. Prompts are rendered in one session, so that they repeat the ids of the
    answers before them."""
    session = Session("", codec, history=history)
    seen: set[tuple[bytes, ...]] = set()
    answers: list[_Answer] = []
    for place, choice in placed:
        output = choice.output
        try:
            if output.ids is None:
                ids = codec.encode_reply(output.message, stop=output.finish_reason != "length")
                logprobs = _logprobs_of_texts(place, choice, ids, codec)
            else:
                ids, logprobs = output.ids, output.logprobs
            turn = session.prepare(choice.request)
        except CodecError as error:
            if choice.is_exact:  # a template that the server does not use
                answers.append(_exact_answer(place, choice))
                continue
            raise ExportError(f"{place}: cannot be rendered: {error}") from error
        prompt_ids = turn.prompt_ids if choice.prompt_ids is None else choice.prompt_ids
        answers.append(_Answer(place, choice, prompt_ids, ids, logprobs))
        key = replace(answers[-1], prompt_ids=turn.prompt_ids).key
        if key not in seen:
            seen.add(key)
            generation = Generation(ids, finish_reason=output.finish_reason, message=output.message)
            session.record_delivery(session.commit(turn, generation, call_id=f"call-{len(answers)}").call)
    return answers


def _logprobs_of_texts(place: str, choice: SampledChoice, ids: Ids, codec: Codec) -> Floats | None:
    """Returns the logprobs of an answer whose ids are not known, if the texts of its tokens are those of the
    encoded ids; NaN for a stop token that the server left out. None, with a warning, if they are not."""
    if choice.output.logprobs is None:
        return None
    fitted = fit_logprobs(
        choice.output.token_texts, choice.output.logprobs, ids, codec.token_bytes, codec.stop_ids
    )
    if isinstance(fitted, str):
        problem = f"{place}.logprobs: left out, because they do not fit the encoded answer: got"
        log.warning("%s %s", problem, fitted)
        return None
    return fitted
