"""Checks of what a chat template does to conversations: what it drops, how it renders, what it refuses.

Every check yields a finding, good or bad, and none if its question does not apply (calls of a template
without tools). If the template refuses a check's conversation, the check raises TemplateError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from branchline.chat.generic import template_probe as p
from branchline.core.message import Message, ToolCall
from branchline.doctor.findings import (
    USE_RENDERERS,
    USE_VERBATIM,
    AuditProbe,
    Finding,
    Severity,
    diff_excerpt,
    excerpt,
    excerpt_around,
    fine,
    note,
    unsafe,
)
from branchline.doctor.growth_checks import check_append_only, check_fixed_text, check_thinking

AuditCheck = Callable[[AuditProbe], Iterator[Finding]]
_OTHER_TIME = datetime(2019, 11, 28, 17, 46, 39)

# -- does it drop anything ------------------------------------------------------------------------------


def _check_tools(probe: AuditProbe) -> Iterator[Finding]:
    traits = probe.traits
    cycle = probe.player.play_or_none([p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT], tools=True)
    shows_result = cycle is not None and p.TOOL_RESULT.content in cycle.text
    shows_calls = traits.shows_tool_calls or shows_result
    if shows_calls and traits.shows_tools:
        yield fine("tools", "It shows tools, calls and results.")
    elif shows_calls:
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
            if refusal:
                lost = "it refuses calls and their results"
            elif p.TOOL_RESULT.content in probe.render_raw(raw, tools=True):
                lost = "the model sees results, but neither tools nor calls"
            else:
                lost = "it leaves out the results without an error"
            sentence = f"It does not support tools: {lost}."
            yield Finding("tools", Severity.NOTE, sentence, evidence, with_tools=lost)


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


def _check_user_text(probe: AuditProbe) -> Iterator[Finding]:
    for tools in (False, True):
        if probe.user_refusal(tools=tools):
            continue
        text = probe.render([p.USER], tools=tools)
        if p.USER.content not in text:
            written = {"written": excerpt(text, 0)}
            yield unsafe("user_text", "leaves out the user's text", written, USE_RENDERERS)
            return
    yield fine("user_text", "The user's text is shown.")


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
    "user_text": _check_user_text,
    "tools": _check_tools,
    "call_end": _check_call_end,
    "text_beside_call": _check_text_beside_call,
    "thinking": check_thinking,
    "frame_stays": check_fixed_text,
    "append_only": check_append_only,
    "tool_results": _check_tool_results,
    "arguments": _check_arguments,
    "dates": _check_dates,
    "trimming": _check_trimming,
    "generation_prompt": _check_generation_prompt,
    "refusals": _check_refusals,
}
"""Checks by the name of the finding that reports a refused conversation."""
