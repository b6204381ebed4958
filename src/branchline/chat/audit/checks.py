"""What a chat template does to conversations, found by trying it: what it loses, moves and writes anew.

Every check yields a finding whether it is good or bad, and none where the question makes no sense (calls of
a template that knows no tools). A template that refuses a check's conversation raises, in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from branchline.chat.audit import template_probe as t
from branchline.chat.audit.findings import USE_VERBATIM, Finding, fine, note, unsafe
from branchline.chat.audit.template_probe import TemplateProbe, diff_excerpt, excerpt, excerpt_around
from branchline.chat.generic.role_rules import UNRESTRICTED_ROLES
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall

AuditCheck = Callable[[TemplateProbe], Iterator[Finding]]
USE_RENDERERS = "use the renderers codec"

# -- does it lose anything ------------------------------------------------------------------------------


def _tools(trial: TemplateProbe) -> Iterator[Finding]:
    dialect = trial.traits
    if dialect.shows_tool_calls and dialect.shows_tools:
        yield fine("tools", "It shows tools, calls and results.")
    elif dialect.shows_tool_calls:
        sentence = "It shows calls and results but not the tools: say in the system message what they are."
        yield note("tools", sentence, {"with tools": excerpt(trial.render([t.USER], tools=True), 0)})
    else:
        talk = dialect.to_template_messages([t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT])
        words = trial.refusal_message(talk, tools=True)
        evidence = (
            {"refusal": words}
            if words
            else {"written": excerpt_around(trial.render_template_messages(talk, tools=True), t.USER.content)}
        )
        if dialect.shows_tools:
            does = f"shows tools and then {'refuses' if words else 'leaves out'} their calls or results"
            yield unsafe("tools", does, evidence, USE_RENDERERS)
        else:
            yield note("tools", "It knows no tools: it is for talk only.", evidence)


def _call_end(trial: TemplateProbe) -> Iterator[Finding]:
    if not trial.traits.shows_tool_calls:
        return
    text = trial.render([t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT], tools=True)
    start, end = text.find(t.ARGUMENT_WORD), text.find(t.TOOL_RESULT.content)
    if trial.has_stop_between(text, start, end):
        yield fine("call_end", "A tool call ends with a stop token.")
    else:
        yield unsafe(
            "call_end", "loses the end of a single tool call", {"written": excerpt(text, start)}, USE_VERBATIM
        )


def _text_beside_call(trial: TemplateProbe) -> Iterator[Finding]:
    if not trial.traits.shows_tool_calls:
        return
    both = Message("assistant", t.ASSISTANT.content, tool_calls=(t.TOOL_CALL,))
    text = trial.render([t.USER, both, t.TOOL_RESULT], tools=True)
    if t.ASSISTANT.content in text and t.ARGUMENT_WORD in text:
        yield fine("text_beside_call", "Text beside a tool call is shown with it.")
        return
    lost = "the text beside a tool call" if t.ARGUMENT_WORD in text else "a tool call that has text beside it"
    evidence = {
        "said": f"{both.content} + {t.TOOL_NAME}({t.TOOL_CALL.arguments})",
        "written": excerpt_around(text, t.USER.content),
    }
    yield unsafe("text_beside_call", f"leaves out {lost}", evidence, USE_VERBATIM)


_REASONING_AND_CALL = Message("assistant", reasoning_content=t.REASONING_WORD, tool_calls=(t.TOOL_CALL,))


def _thinking(trial: TemplateProbe) -> Iterator[Finding]:
    thinks = t.ASSISTANT_WITH_REASONING
    if not trial.traits.shows_reasoning:
        thinks = Message("assistant", f"<think>\n{t.REASONING_WORD}\n</think>\n\n{t.ASSISTANT.content}")
    before, after = trial.render([t.USER, thinks]), trial.render([t.USER, thinks, t.NEXT_USER])
    if t.REASONING_WORD in after:
        how = "and later" if trial.traits.shows_reasoning else "as part of the text: it has no field for it"
        yield fine("thinking", f"Thinking is shown, {how}.")
    else:
        does = "leaves earlier thinking out"
        when = "once the user speaks again"
        if t.REASONING_WORD not in before:
            when = "always"
        elif trial.traits.shows_tool_calls and t.REASONING_WORD not in trial.render(
            [t.USER, _REASONING_AND_CALL, t.TOOL_RESULT]
        ):
            when = "even between tool steps"
        sentence = f"It {does} {when}: prompts fork there."
        yield note("thinking", sentence, diff_excerpt(before, after), does)


# -- does it only append --------------------------------------------------------------------------------

_LATE_SYSTEM = Message("system", "zqlater")
_STEPS: tuple[tuple[str, tuple[Message, ...], Message], ...] = (
    ("user_after_assistant", (t.USER, t.ASSISTANT), t.NEXT_USER),
    ("tool_after_call", (t.USER, t.ASSISTANT_WITH_CALL), t.TOOL_RESULT),
    ("assistant_after_tool", (t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT), t.ASSISTANT),
    (
        "call_after_tool",
        (t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT),
        Message("assistant", tool_calls=(t.OTHER_TOOL_CALL,)),
    ),
    ("user_after_tool", (t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT), t.NEXT_USER),
    ("system_in_the_middle", (t.USER, t.ASSISTANT), _LATE_SYSTEM),
    ("user_after_user", (t.USER,), t.NEXT_USER),
)
_FALLBACKS = {
    "user_after_tool": "it is shown inside the tool's result",
    "system_in_the_middle": "it is shown as the user's words",
    "user_after_user": "both are shown as one message",
}
_CONTEXTS: tuple[tuple[str, tuple[Message, ...], bool], ...] = (
    ("", (), False),
    (" with a system message", (t.SYSTEM,), False),
    (" with a system message and tools", (t.SYSTEM,), True),
)


def _append_only(trial: TemplateProbe) -> Iterator[Finding]:
    for name, before, then in _STEPS:
        if trial.traits.shows_tool_calls or not any(message.tool_calls for message in before):
            yield _check_step(trial, name, before, then)


def _check_step(trial: TemplateProbe, step: str, before: tuple[Message, ...], then: Message) -> Finding:
    name, words = f"append_only.{step}", step.replace("_", " ")
    said = then.content or "zqother"
    dialect = trial.codec.template_traits(trial.codec.tokenizer.chat_template(tools=False))
    plain, ordered = (
        replace(dialect, role_rules=UNRESTRICTED_ROLES).to_template_messages([*before, then]),
        dialect.to_template_messages([*before, then]),
    )
    refusal = trial.refusal_message(plain)
    if refusal or said not in trial.render_template_messages(plain):
        is_shown = (
            step in _FALLBACKS
            and not trial.refusal_message(ordered)
            and said in trial.render_template_messages(ordered)
        )
        stand_in = f"; {_FALLBACKS[step]}" if is_shown else ""
        if refusal:
            return note(name, f"It refuses this: {words}{stand_in}.", {"refusal": refusal})
        if is_shown:
            written = {"written": trial.render_template_messages(plain)[-120:]}
            return note(name, f"It leaves this out: {words}{stand_in}.", written)
    for frame, lead, tools in _CONTEXTS:
        try:
            earlier, later = trial.render_growth([*lead, *before], then, tools=tools, check_every_prompt=True)
        except TemplateError:
            continue
        if said not in later:
            return note(name, f"It leaves this out{frame}: {words}.", {"written": later[-120:]})
        if not later.startswith(earlier):
            does = f"writes earlier text anew ({words})"
            sentence = f"{words.capitalize()}{frame}: earlier text is written anew, prompts fork there."
            return note(name, sentence, diff_excerpt(earlier, later), does)
    return fine(name, f"{words.capitalize()}: the text only grows.")


def _frame_stays(trial: TemplateProbe) -> Iterator[Finding]:
    """Whether the system text and the tools stay where they were as the conversation grows."""
    yield _check_position(trial, "system_text", "the system text", t.SYSTEM.content, tools=False)
    if trial.traits.shows_tools:
        yield _check_position(trial, "tool_list", "the tools", t.TOOL_DESCRIPTION, tools=True)


def _check_position(trial: TemplateProbe, name: str, what: str, word: str, *, tools: bool) -> Finding:
    first = trial.render([t.SYSTEM, t.USER], tools=tools)
    if word not in first:
        return note(name, f"It leaves out {what}.", {"written": excerpt(first, 0)})
    later = trial.render([t.SYSTEM, t.USER, t.ASSISTANT, t.NEXT_USER], tools=tools)
    does = ""
    if later[: later.find(word)] != first[: first.find(word)]:
        does = f"moves {what} to the last user message"
    elif later.count(word) > first.count(word):
        does = f"repeats {what} with every user message"
    if trial.traits.shows_tool_calls:
        between = trial.render([t.SYSTEM, t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT], tools=tools)
        if word not in between:
            later = later if does else between
            does = f"{does} and hides it between tool steps" if does else f"hides {what} between tool steps"
    if does:
        return note(name, f"It {does}: prompts fork there.", diff_excerpt(first, later), does)
    return fine(name, f"{what.capitalize()} stay{'' if tools else 's'} in one place.")


# -- how it writes --------------------------------------------------------------------------------------


def _tool_results(trial: TemplateProbe) -> Iterator[Finding]:
    if not trial.traits.shows_tool_calls:
        return
    parallel = not trial.refusal_message(
        trial.traits.to_template_messages([t.USER, t.ASSISTANT_WITH_TWO_CALLS]), tools=True
    )
    talk = [t.USER, t.ASSISTANT_WITH_TWO_CALLS if parallel else t.ASSISTANT_WITH_CALL, t.TOOL_RESULT]
    one, two = trial.render_growth(talk, t.OTHER_TOOL_RESULT, tools=True)
    if two.startswith(one):
        yield fine("tool_results", "Consecutive tool results stay messages of their own.")
    else:
        sentence = "It folds consecutive tool results into one message: send them together."
        yield note("tool_results", sentence, diff_excerpt(one, two))


def _arguments(trial: TemplateProbe) -> Iterator[Finding]:
    if not trial.traits.shows_tool_calls:
        return
    given = '{"zqb":1,"zqa":[1,2]}'
    text = trial.render(
        [t.USER, Message("assistant", tool_calls=(ToolCall(t.TOOL_NAME, given, t.TOOL_CALL.id),))], tools=True
    )
    if given in text:
        yield fine("arguments", "Arguments of calls are written as they were said.")
    else:
        sentence = "It writes arguments anew: whoever encodes them again gets other ids than were sampled."
        yield note("arguments", sentence, {"said": given, "written": excerpt_around(text, "zqb")})


def _dates(trial: TemplateProbe) -> Iterator[Finding]:
    for tools in (False, True):
        talk = [t.USER, t.ASSISTANT, t.NEXT_USER]
        one, other = (trial.render(talk, tools=tools, now=now) for now in (t.NOW, t.OTHER_NOW))
        if one != other:
            sentence = "It prints the date: prompts of another day differ, so a session's clock is stopped."
            yield note("dates", sentence, diff_excerpt(one, other, names=("one clock", "another")))
            return
    yield fine("dates", "It prints no date.")


def _trimming(trial: TemplateProbe) -> Iterator[Finding]:
    asks, says = Message("user", " \n zqask \n "), Message("assistant", " \n zqsaid \n ")
    text = trial.render([asks, says, t.NEXT_USER])
    trimmed = [message for message in (asks, says) if message.content not in text]
    if not trimmed:
        yield fine("trimming", "Space around messages is kept.")
        return
    whose = " and ".join(message.role for message in trimmed)
    evidence = {"said": trimmed[0].content, "written": excerpt_around(text, trimmed[0].content.strip())}
    yield note("trimming", f"It trims space around {whose} messages.", evidence)


def _generation_prompt(trial: TemplateProbe) -> Iterator[Finding]:
    asked, unasked = trial.render([t.USER], add_generation_prompt=True), trial.render([t.USER])
    name = "generation_prompt"
    if asked != unasked:
        yield fine(
            name,
            f"A generation prompt is written when asked for, and only then: {trial.generation_prompt!r}.",
        )
    elif trial.generation_prompt:
        sentence = "It writes a generation prompt whether asked for or not."
        yield note(name, sentence, {"written": excerpt(unasked, unasked.rfind(trial.generation_prompt))})
    else:
        yield fine(name, "It needs no generation prompt.")


# -- what it refuses ------------------------------------------------------------------------------------


def _refusals(trial: TemplateProbe) -> Iterator[Finding]:
    if not trial.traits.shows_tool_calls:
        return
    write = trial.traits.to_template_messages
    twice = write([t.USER, t.ASSISTANT_WITH_TWO_CALLS, t.TOOL_RESULT, t.OTHER_TOOL_RESULT])
    words = trial.refusal_message(twice, tools=True)
    text = "" if words else trial.render_template_messages(twice, tools=True)
    if text and not (t.ARGUMENT_WORD in text and "zqother" in text):
        evidence = {"written": excerpt_around(text, t.USER.content)}
        yield unsafe("parallel_calls", "leaves out all but one of several calls", evidence, USE_VERBATIM)
    elif words:
        sentence = "It refuses several calls in one reply: ask for one at a time (parallel_tool_calls=false)."
        yield note("parallel_calls", sentence, {"refusal": words})
    else:
        yield fine("parallel_calls", "It takes several calls in one reply.")
    raw = write([t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT])
    raw[1]["content"] = None
    words = trial.refusal_message(raw, tools=True)
    if words:
        yield note(
            "null_content", "It refuses null content beside a call; we send empty text.", {"refusal": words}
        )
    elif trial.traits.requires_null_content:
        yield fine("null_content", "It wants null content beside a call, and gets it.")
    else:
        yield fine("null_content", "It takes null content beside a call.")
    if trial.traits.call_id_length:
        raw = write([t.USER, t.ASSISTANT_WITH_CALL, t.TOOL_RESULT])
        raw[1]["tool_calls"][0]["id"] = raw[2]["tool_call_id"] = "call_1"
        sentence = "It refuses ids of calls that are not nine letters; we rename them."
        yield note("call_ids", sentence, {"refusal": trial.refusal_message(raw, tools=True)})
    else:
        yield fine("call_ids", "It takes any ids of calls.")


TEMPLATE_CHECKS: tuple[AuditCheck, ...] = (
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
