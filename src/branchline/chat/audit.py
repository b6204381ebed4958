"""What a chat template does to conversations, found by trying it.

A finding is one question asked of the template, answered in a sentence, with the texts that show it. `fine`
asks for nothing; a `note` is worth knowing (most notes cost forks, none costs exactness); `unsafe` means that
something the model said would be lost, changed or not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from branchline.chat import trial as t
from branchline.chat.generic import GenericCodec
from branchline.chat.trial import Evidence, Trial, around, excerpt, sides, speak, words_of
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall

VERBATIM = "serve with history=verbatim"


class Severity(StrEnum):
    """How much a finding matters."""

    FINE = "fine"
    NOTE = "note"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Finding:
    """One question, answered."""

    name: str
    severity: Severity
    sentence: str
    evidence: Evidence = field(default_factory=dict)
    does: str = ""
    """What the template does, to go on with "This template …", where somebody should act on it."""
    remedy: str = ""
    """How to act on it; `VERBATIM` where keeping the path as it was sampled is enough."""

    @property
    def ok(self) -> bool:
        return self.severity == Severity.FINE


@dataclass(frozen=True)
class Audit:
    """All that was found out about one tokenizer directory."""

    name: str
    findings: tuple[Finding, ...]
    parsers: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: Mapping[int, str] = field(default_factory=dict)
    """Ids that end an output, and what they say."""

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def worst(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def audit(codec: GenericCodec) -> Audit:
    """Tries a codec's chat template and tokenizer."""
    name = codec.tokenizer.path.resolve().name
    trial = Trial(codec)
    try:
        trial.show([t.ASKS], asked=True)
    except TemplateError as error:
        sentence = "refuses a single user message"
        found = _unsafe("conversation", f"It {sentence}.", {"refusal": words_of(error)}, sentence, "fix it")
        return Audit(name, (found,))
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings += check(trial)
        except TemplateError as error:
            sentence = "It could not be tried: the template refuses the conversation that would show it."
            findings.append(_note(check.__name__.strip("_"), sentence, {"refusal": words_of(error)}))
    detection = codec.detection
    parsers = {
        "tool_calls": detection.tool_format,
        "reasoning": detection.reasoning_format,
        "starts_inside_reasoning": detection.starts_inside,
    }
    stops = {token: codec.tokenizer.token_bytes(token).decode() for token in sorted(codec.stop_ids)}
    return Audit(name, tuple(findings), parsers, stops)


def _fine(name: str, sentence: str) -> Finding:
    return Finding(name, Severity.FINE, sentence)


def _note(name: str, sentence: str, evidence: Evidence, does: str = "", remedy: str = "") -> Finding:
    return Finding(name, Severity.NOTE, sentence, evidence, does, remedy)


def _unsafe(name: str, sentence: str, evidence: Evidence, does: str, remedy: str) -> Finding:
    return Finding(name, Severity.UNSAFE, sentence, evidence, does, remedy)


# -- does it lose anything ------------------------------------------------------------------------------


def _tools(trial: Trial) -> Iterator[Finding]:
    dialect = trial.dialect
    if dialect.shows_calls and dialect.shows_tools:
        yield _fine("tools", "It shows tools, calls and results.")
    elif dialect.shows_calls:
        sentence = "It shows calls and results but not the list of tools: say in the system message what they are."
        yield _note("tools", sentence, {"with tools": trial.show([t.ASKS], tools=True)})
    else:
        talk = trial.codec.dialect(trial.codec.tokenizer.template(tools=True)).write([t.ASKS, t.CALLS, t.RESULT])
        words = trial.refusal(talk, tools=True)
        evidence = {"refusal": words} if words else {"written": trial.write(talk, tools=True)}
        if dialect.shows_tools:
            does = f"shows tools and then {'refuses' if words else 'leaves out'} their calls or results"
            yield _unsafe("tools", f"It {does}.", evidence, does, "use the renderers codec")
        else:
            yield _note("tools", "It knows no tools: it is for talk only.", evidence)


def _call_end(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    text = trial.show([t.ASKS, t.CALLS, t.RESULT], tools=True)
    start, end = text.find(t.ARGUMENT), text.find(t.RESULT.text)
    if trial.stops_between(text, start, end):
        yield _fine("call_end", "A tool call ends with a stop token.")
    else:
        does = "loses the end of a single tool call"
        remedy = VERBATIM
        yield _unsafe("call_end", f"It {does}: no stop token stands behind it.", {"written": excerpt(text, start)}, does, remedy)


def _text_beside_call(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    both = Message("assistant", t.SAYS.text, calls=(t.CALL,))
    text = trial.show([t.ASKS, both, t.RESULT], tools=True)
    if t.SAYS.text in text and t.ARGUMENT in text:
        yield _fine("text_beside_call", "Text beside a tool call is shown with it.")
        return
    lost = "the text beside a tool call" if t.ARGUMENT in text else "a tool call that has text beside it"
    does = f"leaves out {lost}"
    evidence = {"said": f"{both.text} + {t.TOOL}({t.CALL.arguments})", "written": around(text, t.ASKS.text)}
    yield _unsafe("text_beside_call", f"It {does}.", evidence, does, VERBATIM)


def _thinking(trial: Trial) -> Iterator[Finding]:
    thinks = t.THINKS
    if not trial.dialect.shows_reasoning:
        thinks = Message("assistant", f"<think>\n{t.THOUGHT}\n</think>\n\n{t.SAYS.text}")
    before, after = trial.show([t.ASKS, thinks]), trial.show([t.ASKS, thinks, t.ASKS_MORE])
    if t.THOUGHT in after:
        how = "and later" if trial.dialect.shows_reasoning else "as part of the text: it has no field for it"
        yield _fine("thinking", f"Thinking is shown, {how}.")
    else:
        does = "leaves earlier thinking out"
        sentence = f"It {does} once the user speaks again: prompts fork there."
        yield _note("thinking", sentence, sides(before, after), does, VERBATIM)


# -- does it only append --------------------------------------------------------------------------------

_SYSTEM_LATER = Message("system", "zqlater")
_STEPS: tuple[tuple[str, tuple[Message, ...], Message], ...] = (
    ("user_after_assistant", (t.ASKS, t.SAYS), t.ASKS_MORE),
    ("tool_after_call", (t.ASKS, t.CALLS), t.RESULT),
    ("assistant_after_tool", (t.ASKS, t.CALLS, t.RESULT), t.SAYS),
    ("call_after_tool", (t.ASKS, t.CALLS, t.RESULT), Message("assistant", calls=(t.OTHER_CALL,))),
    ("user_after_tool", (t.ASKS, t.CALLS, t.RESULT), t.ASKS_MORE),
    ("system_in_the_middle", (t.ASKS, t.SAYS), _SYSTEM_LATER),
    ("user_after_user", (t.ASKS,), t.ASKS_MORE),
)
_FRAMES: tuple[tuple[str, tuple[Message, ...], bool], ...] = (
    ("", (), False),
    (" with a system message", (t.SYSTEM,), False),
    (" with a system message and tools", (t.SYSTEM,), True),
)


def _append_only(trial: Trial) -> Iterator[Finding]:
    for name, before, then in _STEPS:
        if trial.dialect.shows_calls or not any(message.calls for message in before):
            yield _step(trial, name, before, then)


def _step(trial: Trial, step: str, before: tuple[Message, ...], then: Message) -> Finding:
    name, words = f"append_only.{step}", step.replace("_", " ")
    said = then.text or "zqother"
    for frame, lead, tools in _FRAMES:
        try:
            earlier, later = trial.grow([*lead, *before], then, tools=tools)
        except TemplateError as error:
            if lead:
                continue
            return _note(name, f"It refuses this: {words}.", {"refusal": words_of(error)})
        if said not in later:
            return _note(name, f"It leaves this out{frame}: {words}.", {"written": later[-120:]})
        if not later.startswith(earlier):
            does = f"writes earlier text anew for {words.split()[0]} messages"
            sentence = f"{words.capitalize()}{frame}: earlier text is written anew, prompts fork there."
            return _note(name, sentence, sides(earlier, later), does, VERBATIM)
    return _fine(name, f"{words.capitalize()}: the text only grows.")


def _frame_stays(trial: Trial) -> Iterator[Finding]:
    """Whether the system text and the tools stay where they were as the conversation grows."""
    yield _stays(trial, "system_text", "the system text", t.SYSTEM.text, tools=False)
    if trial.dialect.shows_tools:
        yield _stays(trial, "tool_list", "the tools", f'"{t.TOOL}"', tools=True)


def _stays(trial: Trial, name: str, what: str, word: str, *, tools: bool) -> Finding:
    first = trial.show([t.SYSTEM, t.ASKS], tools=tools)
    if word not in first:
        return _note(name, f"It leaves out {what}.", {"written": excerpt(first, 0)})
    for middle in ((t.SAYS, t.ASKS_MORE), (t.CALLS, t.RESULT)):
        if middle[0].calls and not trial.dialect.shows_calls:
            continue
        text = trial.show([t.SYSTEM, t.ASKS, *middle], tools=tools)
        place = text.find(word)
        # The call itself names the tool: only what stands before it counts.
        end = text.find(t.ARGUMENT) if middle[0].calls else len(text)
        evidence = sides(first, text)
        if place < 0 or place > end:
            does = f"drops {what} during tool steps"
            return _note(name, f"It {does}: prompts fork there.", evidence, does, VERBATIM)
        if text[:place] != first[: first.find(word)]:
            does = f"moves {what} to the last user message"
            return _note(name, f"It {does}: prompts fork there.", evidence, does, VERBATIM)
        if not middle[0].calls and text.count(word) > first.count(word):
            does = f"repeats {what}"
            return _note(name, f"It {does} with every user message.", evidence, does, VERBATIM)
    return _fine(name, f"{what.capitalize()} stay{'' if tools else 's'} in one place.")


# -- how it writes --------------------------------------------------------------------------------------


def _tool_results(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    parallel = not trial.refusal(trial.dialect.write([t.ASKS, t.CALLS_TWICE]), tools=True)
    talk = [t.ASKS, t.CALLS_TWICE if parallel else t.CALLS, t.RESULT]
    one, two = trial.grow(talk, t.OTHER_RESULT, tools=True)
    if two.startswith(one):
        yield _fine("tool_results", "Consecutive tool results stay messages of their own.")
    else:
        sentence = "It folds consecutive tool results into one message: send them together."
        yield _note("tool_results", sentence, sides(one, two))


def _arguments(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    given = '{"zqb":1,"zqa":[1,2]}'
    text = trial.show([t.ASKS, Message("assistant", calls=(ToolCall(t.TOOL, given, t.CALL.id),))], tools=True)
    if given in text:
        yield _fine("arguments", "Arguments of calls are written as they were said.")
    else:
        sentence = "It writes arguments of calls anew: who encodes them again gets other ids (we reuse the sampled ones)."
        yield _note("arguments", sentence, {"said": given, "written": around(text, '"zqb"')})


def _dates(trial: Trial) -> Iterator[Finding]:
    texts = [trial.show([t.SYSTEM, t.ASKS], tools=tools, now=now) for tools in (False, True) for now in (t.CLOCK, t.OTHER_CLOCK)]
    if texts[0] == texts[1] and texts[2] == texts[3]:
        yield _fine("dates", "It prints no date.")
    else:
        sentence = "It prints the date: prompts of another day differ, so a session's clock is stopped."
        yield _note("dates", sentence, sides(*(texts[:2] if texts[0] != texts[1] else texts[2:])))
