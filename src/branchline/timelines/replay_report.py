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

from branchline.chat.audit.checks import USE_RENDERERS
from branchline.chat.audit.findings import USE_VERBATIM, Finding, Severity
from branchline.chat.audit.template_audit import TemplateAudit
from branchline.chat.audit.template_probe import render_reply, template_error_message
from branchline.chat.base import HistoryPolicy
from branchline.chat.generic.codec import GenericCodec
from branchline.core.call import Generation
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids
from branchline.timelines.causes import classify_forks
from branchline.timelines.diagnosis import diagnose
from branchline.timelines.log import LoggedCall, LoggedOutput, group_by_session
from branchline.timelines.merge import merge
from branchline.tree.session import Session
from branchline.tree.tree import Turn

MAX_FORK_RATE = 0.25
"""The part of continuing calls that may fork before a policy counts as unsafe."""
_USER_TURN_FINDINGS = ("thinking", "system_text", "tool_list", "append_only.user_after_assistant")
"""Findings that cost a fork whenever the user speaks again."""
_EXCERPT_TOKENS = 12
"""Tokens of each side that an example of drift shows, and as many before them."""


@dataclass(frozen=True)
class PromptDrift:
    """A logged prompt whose ids are not those that we would have sent."""

    line: int
    first_divergent_token: int
    logged: str
    ours: str
    same_text: bool
    """Both sides spell one text: it was encoded again on the way."""


@dataclass(frozen=True)
class RefusedCall:
    """A call that the template refuses, in its own words."""

    line: int
    words: str


@dataclass
class ReplayReport:
    """A log under one history policy."""

    history: HistoryPolicy
    calls: int = 0
    continuing_calls: int = 0
    """Calls that go on from something the model said."""
    forked_calls: int = 0
    """Those of them whose prompt does not begin with the path they continue."""
    causes: Counter[str] = field(default_factory=Counter)
    """All forks by cause, those included that the agent wanted."""
    prompt_tokens: int = 0
    encoded_tokens: int = 0
    tokens_computed_again: int = 0
    timelines: int = 0
    compared_prompts: int = 0
    """Prompts that were logged with ids."""
    drifts: list[PromptDrift] = field(default_factory=list)
    refusals: list[RefusedCall] = field(default_factory=list)

    @property
    def fork_rate(self) -> float:
        return self.forked_calls / self.continuing_calls if self.continuing_calls else 0.0

    @property
    def exceeds_max_fork_rate(self) -> bool:
        return self.fork_rate > MAX_FORK_RATE


@dataclass(frozen=True)
class SafetyVerdict:
    """Safe or not, and the one sentence that says what to do."""

    safe: bool
    advice: str


# -- replaying ------------------------------------------------------------------------------------------


def replay_log(calls: Iterable[LoggedCall], codec: GenericCodec, history: HistoryPolicy) -> ReplayReport:
    """Plays the sessions of a log through the codec under one policy."""
    told = ReplayReport(history)
    for name, logged in group_by_session(calls).items():
        session = Session(name, codec, history=history)
        for call in _parents_first(logged):
            try:
                turn = session.prepare(call.request)
            except CodecError as error:
                words = template_error_message(error) if isinstance(error, TemplateError) else str(error)
                told.refusals.append(RefusedCall(call.line, words))
                continue
            _add_call(told, call, turn, codec)
            session.commit(
                turn, *(_logged_generation(codec, call, output) for output in call.outputs), call_id=call.id
            )
        tree = session.tree
        forks = classify_forks(tree).forks
        told.causes.update(fork.cause.value for fork in forks)
        told.tokens_computed_again += sum(diagnose(tree, fork).tokens_computed_again for fork in forks)
        told.timelines += len(tree.leaves())
    return told


def _parents_first(calls: Sequence[LoggedCall]) -> list[LoggedCall]:
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


def _add_call(told: ReplayReport, call: LoggedCall, turn: Turn, codec: GenericCodec) -> None:
    told.calls += 1
    told.prompt_tokens += len(turn.prompt_ids)
    told.encoded_tokens += turn.encoded_tokens
    forked = bool(turn.rewrite_reason)
    told.forked_calls += forked
    told.continuing_calls += forked or any(node.sampled_ids is not None for node in turn.parent.path())
    if call.prompt_ids is not None:
        told.compared_prompts += 1
        if not np.array_equal(call.prompt_ids, turn.prompt_ids):
            told.drifts.append(_compare_prompts(call.line, call.prompt_ids, turn.prompt_ids, codec))


def _compare_prompts(line: int, logged: Ids, ours: Ids, codec: GenericCodec) -> PromptDrift:
    length = min(len(logged), len(ours))
    different = np.flatnonzero(logged[:length] != ours[:length])
    place = int(different[0]) if len(different) else length
    same_text = codec.decode(logged) == codec.decode(ours)
    sides = [
        _decode_tokens(
            ids[max(0, place - _EXCERPT_TOKENS) : place + _EXCERPT_TOKENS], codec, separated=same_text
        )
        for ids in (logged, ours)
    ]
    return PromptDrift(line, place, sides[0], sides[1], same_text)


def _decode_tokens(ids: Ids, codec: GenericCodec, *, separated: bool) -> str:
    """Ids decoded; `apart` shows where each token ends, which is all that tells two spellings apart."""
    return (
        "|".join(codec.decode(ids[place : place + 1]) for place in range(len(ids)))
        if separated
        else codec.decode(ids)
    )


def _logged_generation(codec: GenericCodec, call: LoggedCall, output: LoggedOutput) -> Generation:
    ids, said = output.ids, output.message
    if ids is None:
        stop = output.finish_reason != "length"
        ids = render_reply(codec, said, tools=bool(call.request.tools), stop=stop)
        ids = codec.tokenizer.encode_reply(said) if ids is None else ids
        return Generation(ids, None, 0, output.finish_reason, said)
    parsed = codec.parse_output(ids, output.finish_reason, call.request.tools).message
    if parsed.key != said.key:
        # Somebody else's parser: the client will echo what that one read.
        return Generation(ids, None, 0, output.finish_reason, said)
    calls = tuple(
        ToolCall(ours.name, ours.arguments, theirs.id)
        for ours, theirs in zip(parsed.tool_calls, said.tool_calls, strict=True)
    )
    message = Message(
        "assistant", parsed.content, reasoning_content=parsed.reasoning_content, tool_calls=calls, id=said.id
    )
    return Generation(ids, None, 0, output.finish_reason, message)


# -- the verdict ----------------------------------------------------------------------------------------


def assess_safety(
    audit: TemplateAudit, history: HistoryPolicy, replays: Sequence[ReplayReport] = ()
) -> SafetyVerdict:
    """Whether a model is safe to serve under a policy; with replays, whether this log would have been."""
    name = audit.name
    bad = [
        finding
        for finding in audit.findings_with(Severity.UNSAFE)
        if not (history == "verbatim" and finding.remedy == USE_VERBATIM)
    ]
    beyond = [finding for finding in bad if finding.remedy != USE_VERBATIM]
    if beyond:
        return SafetyVerdict(False, f"{name}'s template {_describe_findings(beyond)}: {beyond[0].remedy}.")
    costly = [finding for finding in audit.findings_with(Severity.NOTE) if finding.behaviour]
    if bad:
        # A template that breaks its own calls is one that the renderers codec is for.
        also = f"{USE_RENDERERS} or " * any(finding.name == "call_end" for finding in bad)
        does = _describe_findings([*bad, *costly])
        return SafetyVerdict(
            False, f"{name}'s template {does}: {also}{USE_VERBATIM}, which keeps what was sampled."
        )
    chosen = next((told for told in replays if told.history == history), None)
    if chosen is not None and chosen.refusals:
        first, count = chosen.refusals[0], len(chosen.refusals)
        return SafetyVerdict(
            False,
            f"{name}'s template refuses {count} of {chosen.calls + count} calls (line {first.line}: "
            f"{first.words}): change those conversations or {USE_RENDERERS}.",
        )
    if chosen is not None and chosen.exceeds_max_fork_rate:
        return SafetyVerdict(False, _fork_rate_advice(audit, chosen, replays))
    if costly and history == "template":
        when = (
            "each new user message forks" if costly[0].name in _USER_TURN_FINDINGS else "prompts fork there"
        )
        return SafetyVerdict(
            True,
            f"This template {_describe_findings(costly)}, so {when}: keep history=template for fidelity (tree-packed "
            f"training makes it cheap) or {USE_VERBATIM} to keep one timeline.",
        )
    kept = "it keeps what the template would lose or move" if history == "verbatim" else "prompts only grow"
    return SafetyVerdict(True, f"Nothing to do: serve {name} with history={history}, {kept}.")


def _describe_findings(findings: Sequence[Finding]) -> str:
    """The first two things a template does; a third would not be read."""
    return ", and ".join(finding.behaviour for finding in findings[:2])


def _fork_rate_advice(audit: TemplateAudit, chosen: ReplayReport, replays: Sequence[ReplayReport]) -> str:
    share = (
        f"history={chosen.history} forks {chosen.forked_calls} of {chosen.continuing_calls} continuing calls"
    )
    why = next((finding.behaviour for finding in audit.findings_with(Severity.NOTE) if finding.behaviour), "")
    share += f" because the template {why}" if why else ""
    other = next((told for told in replays if told.history != chosen.history), None)
    if other is None or other.fork_rate >= chosen.fork_rate:
        return f"{share}: {USE_RENDERERS}."
    return (
        f"{share}: serve with history={other.history} ({other.forked_calls} forks), or keep history="
        f"{chosen.history} for fidelity and train tree-packed."
    )
