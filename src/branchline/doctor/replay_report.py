"""Replays a log under a history policy, and judges whether a model is safe to serve with it.

The calls of a log run through sessions as if the gateway had served them: the codec prepares every prompt,
and every output is committed with its logged ids (or, if it has none, with its text as the template writes
it). A call that the template refuses is skipped and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from branchline.chat.base import HistoryPolicy
from branchline.chat.generic.codec import GenericCodec
from branchline.core.call import Generation
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Ids
from branchline.doctor.findings import USE_RENDERERS, USE_VERBATIM, Finding, Severity, template_error_message
from branchline.doctor.template_audit import TemplateAudit
from branchline.timelines.causes import classify_forks
from branchline.timelines.diagnosis import diagnose
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LoggedOutput, group_by_session
from branchline.timelines.merge import merge
from branchline.tree.session import Session
from branchline.tree.tree import Turn

MAX_FORK_RATE = 0.25
"""The fraction of continuing calls that may fork before a policy counts as unsafe."""
_USER_TURN_FINDINGS = ("thinking", "system_text", "tool_list", "append_only.user_after_assistant")
"""Findings that cost a fork at every new user message."""
_EXCERPT_TOKENS = 12
"""Tokens before and after the first difference that a drift shows."""


@dataclass(frozen=True)
class PromptDrift:
    """A logged prompt whose ids differ from those that the codec prepares."""

    line: int
    first_divergent_token: int
    logged: str
    ours: str
    same_text: bool
    """Both prompts have the same text: it was encoded again on the way."""


@dataclass(frozen=True)
class RefusedCall:
    """A call that the template refuses, with its own error message."""

    line: int
    message: str


@dataclass
class ReplayReport:
    """A log under one history policy."""

    history: HistoryPolicy
    calls: int = 0
    continuing_calls: int = 0
    """Calls that continue something the model generated."""
    forked_calls: int = 0
    """The continuing calls whose prompt does not start with the path they continue."""
    causes: Counter[str] = field(default_factory=Counter)
    """All forks by cause, including those that the agent intended."""
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

    def add_call(self, call: LoggedCall, turn: Turn, codec: GenericCodec) -> None:
        """Counts a call that was prepared."""
        self.calls += 1
        self.prompt_tokens += len(turn.prompt_ids)
        self.encoded_tokens += turn.encoded_tokens
        forked = bool(turn.rewrite_reason)
        self.forked_calls += forked
        self.continuing_calls += forked or any(node.sampled_ids is not None for node in turn.parent.path())
        if call.prompt_ids is not None:
            self.compared_prompts += 1
            if not np.array_equal(call.prompt_ids, turn.prompt_ids):
                self.drifts.append(_compare_prompts(call.line, call.prompt_ids, turn.prompt_ids, codec))

    def add_tree(self, session: Session) -> None:
        """Counts the forks and timelines of a replayed session."""
        tree = session.tree
        forks = classify_forks(tree).forks
        self.causes.update(fork.cause.value for fork in forks)
        self.tokens_computed_again += sum(diagnose(tree, fork).tokens_computed_again for fork in forks)
        self.timelines += len(tree.leaves())


@dataclass(frozen=True)
class SafetyVerdict:
    """Whether a model is safe to serve, and one sentence of advice."""

    safe: bool
    advice: str


# -- replaying ------------------------------------------------------------------------------------------


def replay_log(calls: Iterable[LoggedCall], codec: GenericCodec, history: HistoryPolicy) -> ReplayReport:
    """Replays the sessions of a log under one policy."""
    report = ReplayReport(history)
    for name, logged in group_by_session(calls).items():
        session = Session(name, codec, history=history)
        for call in _parents_first(logged):
            try:
                turn = session.prepare(call.request)
            except CodecError as error:
                message = template_error_message(error) if isinstance(error, TemplateError) else str(error)
                report.refusals.append(RefusedCall(call.line, message))
                continue
            report.add_call(call, turn, codec)
            generations = [_logged_generation(codec, call, output) for output in call.outputs]
            session.commit(turn, *generations, call_id=call.id)
        report.add_tree(session)
    return report


def _parents_first(calls: Sequence[LoggedCall]) -> list[LoggedCall]:
    """Returns the calls in the order of the log, except that a call follows the one it continues."""
    merged = merge(calls, MergePolicy(ignore_tools=True, inexact=True))
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
    return order + merged.repeated


def _compare_prompts(line: int, logged: Ids, ours: Ids, codec: GenericCodec) -> PromptDrift:
    length = min(len(logged), len(ours))
    different = np.flatnonzero(logged[:length] != ours[:length])
    first = int(different[0]) if len(different) else length
    same_text = codec.decode(logged) == codec.decode(ours)
    sides = [
        _decode_tokens(
            ids[max(0, first - _EXCERPT_TOKENS) : first + _EXCERPT_TOKENS], codec, separated=same_text
        )
        for ids in (logged, ours)
    ]
    return PromptDrift(line, first, sides[0], sides[1], same_text)


def _decode_tokens(ids: Ids, codec: GenericCodec, *, separated: bool) -> str:
    """Returns the text of ids; `separated` shows the token boundaries, which differ between equal texts."""
    if separated:
        return "|".join(codec.decode(ids[index : index + 1]) for index in range(len(ids)))
    return codec.decode(ids)


def _logged_generation(codec: GenericCodec, call: LoggedCall, output: LoggedOutput) -> Generation:
    ids, logged = output.ids, output.message
    if ids is None:
        ids = codec.encode_reply(logged, stop=output.finish_reason != "length")
        return Generation(ids, None, 0, output.finish_reason, logged)
    parsed = codec.parse(ids, output.finish_reason, call.request.tools)
    if parsed.key != logged.key:
        # Another parser read the output, and the client echoes what that parser returned.
        return Generation(ids, None, 0, output.finish_reason, logged)
    tool_calls = tuple(
        ToolCall(ours.name, ours.arguments, theirs.id)
        for ours, theirs in zip(parsed.tool_calls, logged.tool_calls, strict=True)
    )
    message = Message(
        "assistant",
        parsed.content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=tool_calls,
        id=logged.id,
    )
    return Generation(ids, None, 0, output.finish_reason, message)


# -- the verdict ----------------------------------------------------------------------------------------


def assess_safety(
    audit: TemplateAudit, history: HistoryPolicy, replays: Sequence[ReplayReport] = ()
) -> SafetyVerdict:
    """Returns whether a model is safe to serve under a policy; with replays, whether this log would be."""
    name = audit.name
    bad = [
        finding
        for finding in audit.findings_of(Severity.UNSAFE)
        if not (history == "verbatim" and finding.remedy == USE_VERBATIM)
    ]
    beyond_verbatim = [finding for finding in bad if finding.remedy != USE_VERBATIM]
    if beyond_verbatim:
        behaviour, remedy = _describe_findings(beyond_verbatim), beyond_verbatim[0].remedy
        return SafetyVerdict(False, f"{name}'s template {behaviour}: {remedy}.")
    costly = [finding for finding in audit.findings_of(Severity.NOTE) if finding.behaviour]
    if bad:
        # The renderers codec exists for templates that break their own calls.
        also = f"{USE_RENDERERS} or " * any(finding.name == "call_end" for finding in bad)
        behaviour = _describe_findings([*bad, *costly])
        advice = f"{name}'s template {behaviour}: {also}{USE_VERBATIM}, which keeps what was sampled."
        return SafetyVerdict(False, advice)
    replay = next((report for report in replays if report.history == history), None)
    if replay is not None and replay.refusals:
        first, count = replay.refusals[0], len(replay.refusals)
        return SafetyVerdict(
            False,
            f"{name}'s template refuses {count} of {replay.calls + count} calls (line {first.line}: "
            f"{first.message}): change those conversations or {USE_RENDERERS}.",
        )
    if replay is not None and replay.exceeds_max_fork_rate:
        return SafetyVerdict(False, _fork_rate_advice(audit, replay, replays))
    lost = next((finding.with_tools for finding in audit.findings if finding.with_tools), "")
    with_tools = f"; with tools {lost}" if lost else ""
    if costly and history == "template":
        at_user_turns = costly[0].name in _USER_TURN_FINDINGS
        when = "each new user message forks" if at_user_turns else "prompts fork there"
        return SafetyVerdict(
            True,
            f"This template {_describe_findings(costly)}, so {when}: keep history=template for fidelity "
            f"(tree-packed training makes it cheap) or {USE_VERBATIM} to keep one timeline{with_tools}.",
        )
    effect = "it keeps what the template would drop or move" if history == "verbatim" else "prompts only grow"
    return SafetyVerdict(True, f"Nothing to do: serve {name} with history={history}, {effect}{with_tools}.")


def _describe_findings(findings: Sequence[Finding]) -> str:
    """Returns the behaviour of the first two findings, to keep the sentence short."""
    return ", and ".join(finding.behaviour for finding in findings[:2])


def _fork_rate_advice(audit: TemplateAudit, replay: ReplayReport, replays: Sequence[ReplayReport]) -> str:
    rate = (
        f"history={replay.history} forks {replay.forked_calls} of {replay.continuing_calls} continuing calls"
    )
    notes = audit.findings_of(Severity.NOTE)
    behaviour = next((finding.behaviour for finding in notes if finding.behaviour), "")
    rate += f" because the template {behaviour}" if behaviour else ""
    other = next((report for report in replays if report.history != replay.history), None)
    if other is None or other.fork_rate >= replay.fork_rate:
        return f"{rate}: {USE_RENDERERS}."
    return (
        f"{rate}: serve with history={other.history} ({other.forked_calls} forks), or keep history="
        f"{replay.history} for fidelity and train tree-packed."
    )
