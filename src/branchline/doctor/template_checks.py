"""Checks of what a chat template does to conversations: what it drops, moves and rewrites.

Every check yields a finding, good or bad, and none if its question does not apply (calls of a template
without tools). If the template refuses a check's conversation, the check raises TemplateError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime

from branchline.chat.generic import template_probe as p
from branchline.chat.template_traits import UNRESTRICTED_ROLES
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall
from branchline.doctor.findings import (
    USE_RENDERERS,
    USE_VERBATIM,
    AuditProbe,
    Finding,
    diff_excerpt,
    excerpt,
    excerpt_around,
    fine,
    note,
    unsafe,
)

AuditCheck = Callable[[AuditProbe], Iterator[Finding]]
_OTHER_TIME = datetime(2019, 11, 28, 17, 46, 39)

# -- does it drop anything ------------------------------------------------------------------------------


def _check_tools(probe: AuditProbe) -> Iterator[Finding]:
    traits = probe.traits
    if traits.shows_tool_calls and traits.shows_tools:
        yield fine("tools", "It shows tools, calls and results.")
    elif traits.shows_tool_calls:
        sentence = "It shows calls and results but not the tools: describe them in the system message."
        yield note("tools", sentence, {"with tools": excerpt(probe.render([p.USER], tools=True), 0)})
    else:
        raw = traits.to_template_messages([p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT])
        refusal = probe.refusal_message(raw, tools=True)
        evidence = (
            {"refusal": refusal}
            if refusal
            else {"written": excerpt_around(probe.render_raw(raw, tools=True), p.USER.content)}
        )
        if traits.shows_tools:
            behaviour = (
                f"shows tools and then {'refuses' if refusal else 'leaves out'} their calls or results"
            )
            yield unsafe("tools", behaviour, evidence, USE_RENDERERS)
        else:
            yield note("tools", "It does not support tools.", evidence)


def _check_call_end(probe: AuditProbe) -> Iterator[Finding]:
    if not probe.traits.shows_tool_calls:
        return
    text = probe.render([p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT], tools=True)
    start, end = text.find(p.ARGUMENT_WORD), text.find(p.TOOL_RESULT.content)
    if probe.has_stop_between(text, start, end):
        yield fine("call_end", "A tool call ends with a stop token.")
    else:
        evidence = {"written": excerpt(text, start)}
        yield unsafe("call_end", "loses the end of a single tool call", evidence, USE_VERBATIM)


def _check_text_beside_call(probe: AuditProbe) -> Iterator[Finding]:
    if not probe.traits.shows_tool_calls:
        return
    message = p.ASSISTANT_WITH_TEXT_AND_CALL
    text = probe.render([p.USER, message, p.TOOL_RESULT], tools=True)
    if message.content in text and p.ARGUMENT_WORD in text:
        yield fine("text_beside_call", "Text next to a tool call is shown with it.")
        return
    dropped = "the text next to a tool call" if p.ARGUMENT_WORD in text else "a tool call that has text"
    evidence = {
        "said": f"{message.content} + {p.TOOL_NAME}({p.TOOL_CALL.arguments})",
        "written": excerpt_around(text, p.USER.content),
    }
    yield unsafe("text_beside_call", f"leaves out {dropped}", evidence, USE_VERBATIM)


def _check_thinking(probe: AuditProbe) -> Iterator[Finding]:
    reply = p.ASSISTANT_WITH_REASONING
    if not probe.traits.shows_reasoning:
        reply = Message("assistant", f"<think>\n{p.REASONING_WORD}\n</think>\n\n{p.ASSISTANT.content}")
    before, after = probe.render([p.USER, reply]), probe.render([p.USER, reply, p.NEXT_USER])
    if p.REASONING_WORD in after:
        how = "also later" if probe.traits.shows_reasoning else "as part of the text: it has no field for it"
        yield fine("thinking", f"Thinking is shown, {how}.")
        return
    cycle = [p.USER, p.ASSISTANT_WITH_REASONING_AND_CALL, p.TOOL_RESULT]
    if p.REASONING_WORD not in before:
        when = "always"
    elif probe.traits.shows_tool_calls and p.REASONING_WORD not in probe.render(cycle):
        when = "even between tool steps"
    else:
        when = "once a user message follows"
    behaviour = "leaves earlier thinking out"
    sentence = f"It {behaviour} {when}: prompts fork there."
    yield note("thinking", sentence, diff_excerpt(before, after), behaviour)


# -- does it only append --------------------------------------------------------------------------------

_STEPS: tuple[tuple[str, tuple[Message, ...], Message], ...] = (
    ("user_after_assistant", (p.USER, p.ASSISTANT), p.NEXT_USER),
    ("tool_after_call", (p.USER, p.ASSISTANT_WITH_CALL), p.TOOL_RESULT),
    ("assistant_after_tool", (p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT), p.ASSISTANT),
    ("call_after_tool", (p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT), p.ASSISTANT_WITH_OTHER_CALL),
    ("user_after_tool", (p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT), p.NEXT_USER),
    ("system_in_the_middle", (p.USER, p.ASSISTANT), p.LATE_SYSTEM),
    ("user_after_user", (p.USER,), p.NEXT_USER),
)
_FALLBACKS = {
    "user_after_tool": "it is shown inside the tool's result",
    "system_in_the_middle": "it is shown as a user message",
    "user_after_user": "both are shown as one message",
}
_CONTEXTS: tuple[tuple[str, tuple[Message, ...], bool], ...] = (
    ("", (), False),
    (" with a system message", (p.SYSTEM,), False),
    (" with a system message and tools", (p.SYSTEM,), True),
)


def _check_append_only(probe: AuditProbe) -> Iterator[Finding]:
    for step, before, added in _STEPS:
        if probe.traits.shows_tool_calls or not any(message.tool_calls for message in before):
            yield _check_step(probe, step, before, added)


def _check_step(probe: AuditProbe, step: str, before: tuple[Message, ...], added: Message) -> Finding:
    name, words = f"append_only.{step}", step.replace("_", " ")
    content = added.content or "zqother"
    traits = probe.codec.profile().traits
    plain = replace(traits, role_rules=UNRESTRICTED_ROLES).to_template_messages([*before, added])
    refusal = probe.refusal_message(plain)
    if refusal or content not in probe.render_raw(plain):
        adapted = traits.to_template_messages([*before, added])
        is_shown = (
            step in _FALLBACKS and not probe.refusal_message(adapted) and content in probe.render_raw(adapted)
        )
        fallback = f"; {_FALLBACKS[step]}" if is_shown else ""
        if refusal:
            return note(name, f"It refuses this: {words}{fallback}.", {"refusal": refusal})
        if is_shown:
            written = {"written": probe.render_raw(plain)[-120:]}
            return note(name, f"It leaves this out: {words}{fallback}.", written)
    for context, prefix, tools in _CONTEXTS:
        try:
            earlier, later = probe.render_growth(
                [*prefix, *before], added, tools=tools, check_every_prompt=True
            )
        except TemplateError:
            continue
        if content not in later:
            return note(name, f"It leaves this out{context}: {words}.", {"written": later[-120:]})
        if not later.startswith(earlier):
            sentence = f"{words.capitalize()}{context}: earlier text is rewritten, prompts fork there."
            return note(name, sentence, diff_excerpt(earlier, later), f"rewrites earlier text ({words})")
    return fine(name, f"{words.capitalize()}: the text only grows.")


def _check_fixed_text(probe: AuditProbe) -> Iterator[Finding]:
    """Checks whether the system text and the tools stay in their place as the conversation grows."""
    yield _check_position(probe, "system_text", "the system text", p.SYSTEM.content, tools=False)
    if probe.traits.shows_tools:
        yield _check_position(probe, "tool_list", "the tools", p.TOOL_DESCRIPTION, tools=True)


def _check_position(probe: AuditProbe, name: str, what: str, word: str, *, tools: bool) -> Finding:
    first = probe.render([p.SYSTEM, p.USER], tools=tools)
    if word not in first:
        return note(name, f"It leaves out {what}.", {"written": excerpt(first, 0)})
    later = probe.render([p.SYSTEM, p.USER, p.ASSISTANT, p.NEXT_USER], tools=tools)
    behaviour = ""
    if later[: later.find(word)] != first[: first.find(word)]:
        behaviour = f"moves {what} to the last user message"
    elif later.count(word) > first.count(word):
        behaviour = f"repeats {what} with every user message"
    if probe.traits.shows_tool_calls:
        between = probe.render([p.SYSTEM, p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT], tools=tools)
        if word not in between:
            later = later if behaviour else between
            hides = "hides it between tool steps" if behaviour else f"hides {what} between tool steps"
            behaviour = f"{behaviour} and {hides}" if behaviour else hides
    if behaviour:
        return note(name, f"It {behaviour}: prompts fork there.", diff_excerpt(first, later), behaviour)
    return fine(name, f"{what.capitalize()} stay{'' if tools else 's'} in one place.")


# -- how it renders -------------------------------------------------------------------------------------


def _check_tool_results(probe: AuditProbe) -> Iterator[Finding]:
    if not probe.traits.shows_tool_calls:
        return
    two_calls = probe.traits.to_template_messages([p.USER, p.ASSISTANT_WITH_TWO_CALLS])
    refused = probe.refusal_message(two_calls, tools=True)
    calls = p.ASSISTANT_WITH_CALL if refused else p.ASSISTANT_WITH_TWO_CALLS
    one, two = probe.render_growth([p.USER, calls, p.TOOL_RESULT], p.OTHER_TOOL_RESULT, tools=True)
    if two.startswith(one):
        yield fine("tool_results", "Consecutive tool results stay separate messages.")
    else:
        sentence = "It folds consecutive tool results into one message: send them together."
        yield note("tool_results", sentence, diff_excerpt(one, two))


def _check_arguments(probe: AuditProbe) -> Iterator[Finding]:
    if not probe.traits.shows_tool_calls:
        return
    arguments = '{"zqb":1,"zqa":[1,2]}'
    call = ToolCall(p.TOOL_NAME, arguments, p.TOOL_CALL.id)
    text = probe.render([p.USER, Message("assistant", tool_calls=(call,))], tools=True)
    if arguments in text:
        yield fine("arguments", "Arguments of calls are written as they were generated.")
    else:
        sentence = "It re-serialises arguments: encoding them again gives other ids than were sampled."
        yield note("arguments", sentence, {"said": arguments, "written": excerpt_around(text, "zqb")})


def _check_dates(probe: AuditProbe) -> Iterator[Finding]:
    messages = [p.USER, p.ASSISTANT, p.NEXT_USER]
    for tools in (False, True):
        one, other = (probe.render(messages, tools=tools, now=now) for now in (p.PROBE_TIME, _OTHER_TIME))
        if one != other:
            sentence = "It prints the date: prompts of another day differ, so a session's clock is fixed."
            yield note("dates", sentence, diff_excerpt(one, other, names=("one clock", "another")))
            return
    yield fine("dates", "It prints no date.")


def _check_trimming(probe: AuditProbe) -> Iterator[Finding]:
    user, reply = Message("user", " \n zqask \n "), Message("assistant", " \n zqsaid \n ")
    text = probe.render([user, reply, p.NEXT_USER])
    trimmed = [message for message in (user, reply) if message.content not in text]
    if not trimmed:
        yield fine("trimming", "Whitespace around messages is kept.")
        return
    roles = " and ".join(message.role for message in trimmed)
    evidence = {"said": trimmed[0].content, "written": excerpt_around(text, trimmed[0].content.strip())}
    yield note("trimming", f"It trims whitespace around {roles} messages.", evidence)


def _check_generation_prompt(probe: AuditProbe) -> Iterator[Finding]:
    requested, unrequested = probe.render([p.USER], add_generation_prompt=True), probe.render([p.USER])
    name, prompt = "generation_prompt", probe.generation_prompt
    if requested != unrequested:
        yield fine(name, f"A generation prompt is written only when requested: {prompt!r}.")
    elif prompt:
        sentence = "It writes a generation prompt whether requested or not."
        yield note(name, sentence, {"written": excerpt(unrequested, unrequested.rfind(prompt))})
    else:
        yield fine(name, "It needs no generation prompt.")


# -- what it refuses ------------------------------------------------------------------------------------


def _check_refusals(probe: AuditProbe) -> Iterator[Finding]:
    if probe.traits.shows_tool_calls:
        yield _check_parallel_calls(probe)
        yield _check_null_content(probe)
        yield _check_call_ids(probe)


def _check_parallel_calls(probe: AuditProbe) -> Finding:
    raw = probe.traits.to_template_messages(
        [p.USER, p.ASSISTANT_WITH_TWO_CALLS, p.TOOL_RESULT, p.OTHER_TOOL_RESULT]
    )
    refusal = probe.refusal_message(raw, tools=True)
    if refusal:
        sentence = "It refuses several calls in one reply: request one at a time (parallel_tool_calls=false)."
        return note("parallel_calls", sentence, {"refusal": refusal})
    text = probe.render_raw(raw, tools=True)
    if text and not (p.ARGUMENT_WORD in text and "zqother" in text):
        evidence = {"written": excerpt_around(text, p.USER.content)}
        return unsafe("parallel_calls", "leaves out all but one of several calls", evidence, USE_VERBATIM)
    return fine("parallel_calls", "It accepts several calls in one reply.")


def _check_null_content(probe: AuditProbe) -> Finding:
    raw = probe.traits.to_template_messages([p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT])
    raw[1]["content"] = None
    refusal = probe.refusal_message(raw, tools=True)
    if refusal:
        sentence = "It refuses null content next to a call; empty text is sent."
        return note("null_content", sentence, {"refusal": refusal})
    if probe.traits.requires_null_content:
        return fine("null_content", "It requires null content next to a call, which is sent.")
    return fine("null_content", "It accepts null content next to a call.")


def _check_call_ids(probe: AuditProbe) -> Finding:
    if not probe.traits.call_id_length:
        return fine("call_ids", "It accepts any call ids.")
    raw = probe.traits.to_template_messages([p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT])
    raw[1]["tool_calls"][0]["id"] = raw[2]["tool_call_id"] = "call_1"
    sentence = "It refuses call ids that do not have nine characters; they are replaced."
    return note("call_ids", sentence, {"refusal": probe.refusal_message(raw, tools=True)})


TEMPLATE_CHECKS: dict[str, AuditCheck] = {
    "tools": _check_tools,
    "call_end": _check_call_end,
    "text_beside_call": _check_text_beside_call,
    "thinking": _check_thinking,
    "frame_stays": _check_fixed_text,
    "append_only": _check_append_only,
    "tool_results": _check_tool_results,
    "arguments": _check_arguments,
    "dates": _check_dates,
    "trimming": _check_trimming,
    "generation_prompt": _check_generation_prompt,
    "refusals": _check_refusals,
}
"""Checks by the name of the finding that reports a refused conversation."""
