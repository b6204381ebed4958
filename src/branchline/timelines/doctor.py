"""What a history policy would have cost a log, and whether a model is safe to serve with it.

A log's calls are replayed through sessions as if our gateway had served them: every prompt is prepared by the
codec, every output committed with the ids it was logged with (or, where it has none, with its text as the
template writes it). A call that the template refuses is left out and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from branchline.chat.audit.audit import Audit
from branchline.chat.audit.checks import RENDERERS
from branchline.chat.audit.findings import VERBATIM, Finding, Severity
from branchline.chat.audit.trial import speak, words_of
from branchline.chat.base import History
from branchline.chat.generic.codec import GenericCodec
from branchline.core.call import Generation
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Message, ToolCall
from branchline.core.runs import Ids
from branchline.timelines.causes import judge
from branchline.timelines.diagnosis import diagnose
from branchline.timelines.log import LoggedCall, LoggedOutput, by_session
from branchline.timelines.merge import merge
from branchline.tree.session import Session
from branchline.tree.tree import Turn

MOST_FORKS = 0.25
"""The part of continuing calls that may fork before a policy counts as unsafe."""
_AT_USER_TURNS = ("thinking", "system_text", "tool_list", "append_only.user_after_assistant")
"""Findings that cost a fork whenever the user speaks again."""
_WINDOW = 12
"""Tokens of each side that an example of drift shows, and as many before them."""


@dataclass(frozen=True)
class Drift:
    """A logged prompt whose ids are not those that we would have sent."""

    line: int
    first_divergent_token: int
    logged: str
    ours: str
    same_text: bool
    """Both sides spell one text: it was encoded again on the way."""


@dataclass(frozen=True)
class Refusal:
    """A call that the template refuses, in its own words."""

    line: int
    words: str


@dataclass
class Replay:
    """A log under one history policy."""

    history: History
    calls: int = 0
    continuing: int = 0
    """Calls that go on from something the model said."""
    forked: int = 0
    """Those of them whose prompt does not begin with the path they continue."""
    causes: Counter[str] = field(default_factory=Counter)
    """All forks by cause, those included that the agent wanted."""
    prompt_tokens: int = 0
    encoded_tokens: int = 0
    tokens_computed_again: int = 0
    timelines: int = 0
    compared: int = 0
    """Prompts that were logged with ids."""
    drifts: list[Drift] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def fork_rate(self) -> float:
        return self.forked / self.continuing if self.continuing else 0.0

    @property
    def forks_too_often(self) -> bool:
        return self.fork_rate > MOST_FORKS


@dataclass(frozen=True)
class Verdict:
    """Safe or not, and the one sentence that says what to do."""

    safe: bool
    advice: str


# -- replaying ------------------------------------------------------------------------------------------


def replay(calls: Iterable[LoggedCall], codec: GenericCodec, history: History) -> Replay:
    """Plays the sessions of a log through the codec under one policy."""
    told = Replay(history)
    for name, logged in by_session(calls).items():
        session = Session(name, codec, history=history)
        for call in _in_order(logged):
            try:
                turn = session.prepare(call.request)
            except CodecError as error:
                words = words_of(error) if isinstance(error, TemplateError) else str(error)
                told.refusals.append(Refusal(call.line, words))
                continue
            _count(told, call, turn, codec)
            session.commit(
                turn, *(_generation(codec, call, output) for output in call.outputs), call_id=call.id
            )
        tree = session.tree
        forks = judge(tree).forks
        told.causes.update(fork.cause.value for fork in forks)
        told.tokens_computed_again += sum(diagnose(tree, fork).tokens_computed_again for fork in forks)
        told.timelines += len(tree.leaves())
    return told


def _in_order(calls: Sequence[LoggedCall]) -> list[LoggedCall]:
    """The order of the log, except that a call comes after the one it continues."""
    merged = merge(calls)
    calls, links = merged.calls, merged.links
    order: list[LoggedCall] = []
    done: set[int] = set()
    for index in range(len(calls)):
        waiting = [index]
        while (link := links[waiting[-1]]) is not None and link.parent not in done:
            waiting.append(link.parent)
        for ready in reversed(waiting):
            if ready not in done:
                done.add(ready)
                order.append(calls[ready])
    return order


def _count(told: Replay, call: LoggedCall, turn: Turn, codec: GenericCodec) -> None:
    told.calls += 1
    told.prompt_tokens += len(turn.prompt_ids)
    told.encoded_tokens += turn.encoded
    forked = bool(turn.rewritten)
    told.forked += forked
    told.continuing += forked or any(node.sampled_ids is not None for node in turn.parent.path())
    if call.prompt_ids is not None:
        told.compared += 1
        if not np.array_equal(call.prompt_ids, turn.prompt_ids):
            told.drifts.append(_drift(call.line, call.prompt_ids, turn.prompt_ids, codec))


def _drift(line: int, logged: Ids, ours: Ids, codec: GenericCodec) -> Drift:
    length = min(len(logged), len(ours))
    different = np.flatnonzero(logged[:length] != ours[:length])
    place = int(different[0]) if len(different) else length
    same_text = codec.decode(logged) == codec.decode(ours)
    sides = [
        _tokens(ids[max(0, place - _WINDOW) : place + _WINDOW], codec, apart=same_text)
        for ids in (logged, ours)
    ]
    return Drift(line, place, sides[0], sides[1], same_text)


def _tokens(ids: Ids, codec: GenericCodec, *, apart: bool) -> str:
    """Ids decoded; `apart` shows where each token ends, which is all that tells two spellings apart."""
    return (
        "|".join(codec.decode(ids[place : place + 1]) for place in range(len(ids)))
        if apart
        else codec.decode(ids)
    )


def _generation(codec: GenericCodec, call: LoggedCall, output: LoggedOutput) -> Generation:
    ids, said = output.ids, output.message
    if ids is None:
        stop = output.finish != "length"
        ids = speak(codec, said, tools=bool(call.request.tools), stop=stop)
        ids = codec.tokenizer.encode_output(said) if ids is None else ids
        return Generation(ids, None, 0, output.finish, said)
    parsed = codec.parse_whole(ids, output.finish, call.request.tools).message
    if parsed.key != said.key:
        # Somebody else's parser: the client will echo what that one read.
        return Generation(ids, None, 0, output.finish, said)
    calls = tuple(
        ToolCall(ours.name, ours.arguments, theirs.id)
        for ours, theirs in zip(parsed.calls, said.calls, strict=True)
    )
    message = Message("assistant", parsed.text, reasoning=parsed.reasoning, calls=calls, id=said.id)
    return Generation(ids, None, 0, output.finish, message)


# -- the verdict ----------------------------------------------------------------------------------------


def judge_safety(audit: Audit, history: History, replays: Sequence[Replay] = ()) -> Verdict:
    """Whether a model is safe to serve under a policy; with replays, whether this log would have been."""
    name = audit.name
    bad = [
        finding
        for finding in audit.of(Severity.UNSAFE)
        if not (history == "verbatim" and finding.remedy == VERBATIM)
    ]
    beyond = [finding for finding in bad if finding.remedy != VERBATIM]
    if beyond:
        return Verdict(False, f"{name}'s template {_both(beyond)}: {beyond[0].remedy}.")
    costly = [finding for finding in audit.of(Severity.NOTE) if finding.does]
    if bad:
        # A template that breaks its own calls is one that the renderers codec is for.
        also = f"{RENDERERS} or " * any(finding.name == "call_end" for finding in bad)
        does = _both([*bad, *costly])
        return Verdict(False, f"{name}'s template {does}: {also}{VERBATIM}, which keeps what was sampled.")
    chosen = next((told for told in replays if told.history == history), None)
    if chosen is not None and chosen.refusals:
        first, count = chosen.refusals[0], len(chosen.refusals)
        return Verdict(
            False,
            f"{name}'s template refuses {count} of {chosen.calls + count} calls (line {first.line}: "
            f"{first.words}): change those conversations or {RENDERERS}.",
        )
    if chosen is not None and chosen.forks_too_often:
        return Verdict(False, _too_many_forks(audit, chosen, replays))
    if costly and history == "template":
        when = "each new user message forks" if costly[0].name in _AT_USER_TURNS else "prompts fork there"
        return Verdict(
            True,
            f"This template {_both(costly)}, so {when}: keep history=template for fidelity (tree-packed "
            f"training makes it cheap) or {VERBATIM} to keep one timeline.",
        )
    kept = "it keeps what the template would lose or move" if history == "verbatim" else "prompts only grow"
    return Verdict(True, f"Nothing to do: serve {name} with history={history}, {kept}.")


def _both(findings: Sequence[Finding]) -> str:
    """The first two things a template does; a third would not be read."""
    return ", and ".join(finding.does for finding in findings[:2])


def _too_many_forks(audit: Audit, chosen: Replay, replays: Sequence[Replay]) -> str:
    share = f"history={chosen.history} forks {chosen.forked} of {chosen.continuing} continuing calls"
    why = next((finding.does for finding in audit.of(Severity.NOTE) if finding.does), "")
    share += f" because the template {why}" if why else ""
    other = next((told for told in replays if told.history != chosen.history), None)
    if other is None or other.fork_rate >= chosen.fork_rate:
        return f"{share}: {RENDERERS}."
    return (
        f"{share}: serve with history={other.history} ({other.forked} forks), or keep history="
        f"{chosen.history} for fidelity and train tree-packed."
    )
