"""What a chat template does to conversations, found by trying it: what it loses, moves and writes anew.

Every check yields a finding whether it is good or bad, and none where the question makes no sense (calls of
a template that knows no tools). A template that refuses a check's conversation raises, in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from branchline.chat.audit import trial as t
from branchline.chat.audit.findings import VERBATIM, Finding, fine, note, unsafe
from branchline.chat.audit.trial import Trial, around, excerpt, sides
from branchline.chat.generic.turns import ANY_TURNS
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall

Check = Callable[[Trial], Iterator[Finding]]
RENDERERS = "use the renderers codec"

# -- does it lose anything ------------------------------------------------------------------------------


def _tools(trial: Trial) -> Iterator[Finding]:
    dialect = trial.dialect
    if dialect.shows_calls and dialect.shows_tools:
        yield fine("tools", "It shows tools, calls and results.")
    elif dialect.shows_calls:
        sentence = "It shows calls and results but not the tools: say in the system message what they are."
        yield note("tools", sentence, {"with tools": excerpt(trial.show([t.ASKS], tools=True), 0)})
    else:
        talk = dialect.write([t.ASKS, t.CALLS, t.RESULT])
        words = trial.refusal(talk, tools=True)
        evidence = (
            {"refusal": words} if words else {"written": around(trial.write(talk, tools=True), t.ASKS.text)}
        )
        if dialect.shows_tools:
            does = f"shows tools and then {'refuses' if words else 'leaves out'} their calls or results"
            yield unsafe("tools", does, evidence, RENDERERS)
        else:
            yield note("tools", "It knows no tools: it is for talk only.", evidence)


def _call_end(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    text = trial.show([t.ASKS, t.CALLS, t.RESULT], tools=True)
    start, end = text.find(t.ARGUMENT), text.find(t.RESULT.text)
    if trial.stops_between(text, start, end):
        yield fine("call_end", "A tool call ends with a stop token.")
    else:
        yield unsafe(
            "call_end", "loses the end of a single tool call", {"written": excerpt(text, start)}, VERBATIM
        )


def _text_beside_call(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    both = Message("assistant", t.SAYS.text, calls=(t.CALL,))
    text = trial.show([t.ASKS, both, t.RESULT], tools=True)
    if t.SAYS.text in text and t.ARGUMENT in text:
        yield fine("text_beside_call", "Text beside a tool call is shown with it.")
        return
    lost = "the text beside a tool call" if t.ARGUMENT in text else "a tool call that has text beside it"
    evidence = {"said": f"{both.text} + {t.TOOL}({t.CALL.arguments})", "written": around(text, t.ASKS.text)}
    yield unsafe("text_beside_call", f"leaves out {lost}", evidence, VERBATIM)


_THINKS_AND_CALLS = Message("assistant", reasoning=t.THOUGHT, calls=(t.CALL,))


def _thinking(trial: Trial) -> Iterator[Finding]:
    thinks = t.THINKS
    if not trial.dialect.shows_reasoning:
        thinks = Message("assistant", f"<think>\n{t.THOUGHT}\n</think>\n\n{t.SAYS.text}")
    before, after = trial.show([t.ASKS, thinks]), trial.show([t.ASKS, thinks, t.ASKS_MORE])
    if t.THOUGHT in after:
        how = "and later" if trial.dialect.shows_reasoning else "as part of the text: it has no field for it"
        yield fine("thinking", f"Thinking is shown, {how}.")
    else:
        does = "leaves earlier thinking out"
        when = "once the user speaks again"
        if t.THOUGHT not in before:
            when = "always"
        elif trial.dialect.shows_calls and t.THOUGHT not in trial.show([t.ASKS, _THINKS_AND_CALLS, t.RESULT]):
            when = "even between tool steps"
        sentence = f"It {does} {when}: prompts fork there."
        yield note("thinking", sentence, sides(before, after), does)


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
_STAND_INS = {
    "user_after_tool": "it is shown inside the tool's result",
    "system_in_the_middle": "it is shown as the user's words",
    "user_after_user": "both are shown as one message",
}
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
    dialect = trial.codec.dialect(trial.codec.tokenizer.template(tools=False))
    plain, ordered = replace(dialect, turns=ANY_TURNS).write([*before, then]), dialect.write([*before, then])
    refusal = trial.refusal(plain)
    if refusal or said not in trial.write(plain):
        is_shown = step in _STAND_INS and not trial.refusal(ordered) and said in trial.write(ordered)
        stand_in = f"; {_STAND_INS[step]}" if is_shown else ""
        if refusal:
            return note(name, f"It refuses this: {words}{stand_in}.", {"refusal": refusal})
        if is_shown:
            written = {"written": trial.write(plain)[-120:]}
            return note(name, f"It leaves this out: {words}{stand_in}.", written)
    for frame, lead, tools in _FRAMES:
        try:
            earlier, later = trial.grow([*lead, *before], then, tools=tools, every=True)
        except TemplateError:
            continue
        if said not in later:
            return note(name, f"It leaves this out{frame}: {words}.", {"written": later[-120:]})
        if not later.startswith(earlier):
            does = f"writes earlier text anew ({words})"
            sentence = f"{words.capitalize()}{frame}: earlier text is written anew, prompts fork there."
            return note(name, sentence, sides(earlier, later), does)
    return fine(name, f"{words.capitalize()}: the text only grows.")


def _frame_stays(trial: Trial) -> Iterator[Finding]:
    """Whether the system text and the tools stay where they were as the conversation grows."""
    yield _stays(trial, "system_text", "the system text", t.SYSTEM.text, tools=False)
    if trial.dialect.shows_tools:
        yield _stays(trial, "tool_list", "the tools", t.PURPOSE, tools=True)


def _stays(trial: Trial, name: str, what: str, word: str, *, tools: bool) -> Finding:
    first = trial.show([t.SYSTEM, t.ASKS], tools=tools)
    if word not in first:
        return note(name, f"It leaves out {what}.", {"written": excerpt(first, 0)})
    later = trial.show([t.SYSTEM, t.ASKS, t.SAYS, t.ASKS_MORE], tools=tools)
    does = ""
    if later[: later.find(word)] != first[: first.find(word)]:
        does = f"moves {what} to the last user message"
    elif later.count(word) > first.count(word):
        does = f"repeats {what} with every user message"
    if trial.dialect.shows_calls:
        between = trial.show([t.SYSTEM, t.ASKS, t.CALLS, t.RESULT], tools=tools)
        if word not in between:
            later = later if does else between
            does = f"{does} and hides it between tool steps" if does else f"hides {what} between tool steps"
    if does:
        return note(name, f"It {does}: prompts fork there.", sides(first, later), does)
    return fine(name, f"{what.capitalize()} stay{'' if tools else 's'} in one place.")


# -- how it writes --------------------------------------------------------------------------------------


def _tool_results(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    parallel = not trial.refusal(trial.dialect.write([t.ASKS, t.CALLS_TWICE]), tools=True)
    talk = [t.ASKS, t.CALLS_TWICE if parallel else t.CALLS, t.RESULT]
    one, two = trial.grow(talk, t.OTHER_RESULT, tools=True)
    if two.startswith(one):
        yield fine("tool_results", "Consecutive tool results stay messages of their own.")
    else:
        sentence = "It folds consecutive tool results into one message: send them together."
        yield note("tool_results", sentence, sides(one, two))


def _arguments(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    given = '{"zqb":1,"zqa":[1,2]}'
    text = trial.show([t.ASKS, Message("assistant", calls=(ToolCall(t.TOOL, given, t.CALL.id),))], tools=True)
    if given in text:
        yield fine("arguments", "Arguments of calls are written as they were said.")
    else:
        sentence = "It writes arguments anew: whoever encodes them again gets other ids than were sampled."
        yield note("arguments", sentence, {"said": given, "written": around(text, "zqb")})


def _dates(trial: Trial) -> Iterator[Finding]:
    for tools in (False, True):
        talk = [t.ASKS, t.SAYS, t.ASKS_MORE]
        one, other = (trial.show(talk, tools=tools, now=now) for now in (t.CLOCK, t.OTHER_CLOCK))
        if one != other:
            sentence = "It prints the date: prompts of another day differ, so a session's clock is stopped."
            yield note("dates", sentence, sides(one, other, names=("one clock", "another")))
            return
    yield fine("dates", "It prints no date.")


def _trimming(trial: Trial) -> Iterator[Finding]:
    asks, says = Message("user", " \n zqask \n "), Message("assistant", " \n zqsaid \n ")
    text = trial.show([asks, says, t.ASKS_MORE])
    trimmed = [message for message in (asks, says) if message.text not in text]
    if not trimmed:
        yield fine("trimming", "Space around messages is kept.")
        return
    whose = " and ".join(message.role for message in trimmed)
    evidence = {"said": trimmed[0].text, "written": around(text, trimmed[0].text.strip())}
    yield note("trimming", f"It trims space around {whose} messages.", evidence)


def _generation_prompt(trial: Trial) -> Iterator[Finding]:
    asked, unasked = trial.show([t.ASKS], asked=True), trial.show([t.ASKS])
    name = "generation_prompt"
    if asked != unasked:
        yield fine(name, f"A generation prompt is written when asked for, and only then: {trial.opener!r}.")
    elif trial.opener:
        sentence = "It writes a generation prompt whether asked for or not."
        yield note(name, sentence, {"written": excerpt(unasked, unasked.rfind(trial.opener))})
    else:
        yield fine(name, "It needs no generation prompt.")


# -- what it refuses ------------------------------------------------------------------------------------


def _refusals(trial: Trial) -> Iterator[Finding]:
    if not trial.dialect.shows_calls:
        return
    write = trial.dialect.write
    twice = write([t.ASKS, t.CALLS_TWICE, t.RESULT, t.OTHER_RESULT])
    words = trial.refusal(twice, tools=True)
    text = "" if words else trial.write(twice, tools=True)
    if text and not (t.ARGUMENT in text and "zqother" in text):
        evidence = {"written": around(text, t.ASKS.text)}
        yield unsafe("parallel_calls", "leaves out all but one of several calls", evidence, VERBATIM)
    elif words:
        sentence = "It refuses several calls in one reply: ask for one at a time (parallel_tool_calls=false)."
        yield note("parallel_calls", sentence, {"refusal": words})
    else:
        yield fine("parallel_calls", "It takes several calls in one reply.")
    raw = write([t.ASKS, t.CALLS, t.RESULT])
    raw[1]["content"] = None
    words = trial.refusal(raw, tools=True)
    if words:
        yield note(
            "null_content", "It refuses null content beside a call; we send empty text.", {"refusal": words}
        )
    elif trial.dialect.null_content:
        yield fine("null_content", "It wants null content beside a call, and gets it.")
    else:
        yield fine("null_content", "It takes null content beside a call.")
    if trial.dialect.id_length:
        raw = write([t.ASKS, t.CALLS, t.RESULT])
        raw[1]["tool_calls"][0]["id"] = raw[2]["tool_call_id"] = "call_1"
        sentence = "It refuses ids of calls that are not nine letters; we rename them."
        yield note("call_ids", sentence, {"refusal": trial.refusal(raw, tools=True)})
    else:
        yield fine("call_ids", "It takes any ids of calls.")


TEMPLATE_CHECKS: tuple[Check, ...] = (
    _tools,
    _call_end,
    _text_beside_call,
    _thinking,
    _frame_stays,
    _append_only,
    _tool_results,
    _arguments,
    _dates,
    _trimming,
    _generation_prompt,
    _refusals,
)
