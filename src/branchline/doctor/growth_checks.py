"""Checks of whether prompts only grow: what a chat template strips, moves and rewrites as a conversation
continues.

Conversations are played through a session, so a finding says that prompts fork exactly if the codec forks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from branchline.chat.base import RewriteReason
from branchline.chat.generic import template_probe as p
from branchline.chat.template_traits import UNRESTRICTED_ROLES
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.doctor.findings import (
    AuditProbe,
    Finding,
    diff_excerpt,
    excerpt,
    fine,
    note,
)


def check_thinking(probe: AuditProbe) -> Iterator[Finding]:
    reply, call = p.ASSISTANT_WITH_REASONING, p.ASSISTANT_WITH_REASONING_AND_CALL
    cycle = [p.USER, call, p.TOOL_RESULT]
    reads_reply, reads_call = (probe.player.natural_reply(message) is not None for message in (reply, call))
    if not reads_reply and not reads_call:
        reply = Message("assistant", f"<think>\n{p.REASONING_WORD}\n</think>\n\n{p.ASSISTANT.content}")
    after_user = [*cycle, p.NEXT_USER] if reads_call and not reads_reply else [p.USER, reply, p.NEXT_USER]
    # Some templates leave thinking out only in conversations without tools.
    played = [
        ("user", "without tools", probe.player.play_or_none(after_user, tools=False)),
        ("user", "with tools", probe.player.play_or_none(after_user, tools=True)),
        ("tool", "with tools", probe.player.play_or_none(cycle, tools=True) if reads_call else None),
    ]
    strips = [
        (role, where, prompt, prompt.forks and p.REASONING_WORD not in prompt.text)
        for role, where, prompt in played
        if prompt is not None
    ]
    stripped = {role: prompt for role, _, prompt, is_stripped in strips if is_stripped}
    has_field = reads_reply or reads_call
    if not stripped:
        how = "also later" if has_field else "as part of the text: it has no field for it"
        yield fine("thinking", f"Thinking is shown, {how}.")
        return
    last_reply = probe.render(after_user[:-2] if reads_call and not reads_reply else after_user[:-1])
    if p.REASONING_WORD not in last_reply:
        when = "always"
    elif "tool" in stripped:
        when = "even between tool steps"
    else:
        when = "once a user message follows"
        kept = [where for role, where, _, is_stripped in strips if role == "user" and not is_stripped]
        if kept:
            when += ", but not " + kept[0]
    prompt = next(iter(stripped.values()))
    evidence = diff_excerpt(prompt.sampled_text, prompt.text)
    behaviour = "leaves earlier thinking out"
    # Without a parser for it, replies have no thinking in the first place.
    roles = stripped if has_field else ()
    yield note("thinking", f"It {behaviour} {when}: prompts fork there.", evidence, behaviour, roles)


# -- does it only append --------------------------------------------------------------------------------

_STEPS: tuple[tuple[str, tuple[Message, ...]], ...] = (
    ("user_after_assistant", (p.USER, p.ASSISTANT, p.NEXT_USER)),
    ("tool_after_call", (p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT)),
    ("tool_after_text_and_call", (p.USER, p.ASSISTANT_WITH_TEXT_AND_CALL, p.TOOL_RESULT)),
    (
        "assistant_after_tool",
        (p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT, p.ASSISTANT, p.NEXT_USER),
    ),
    (
        "call_after_tool",
        (p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT, p.ASSISTANT_WITH_OTHER_CALL, p.OTHER_TOOL_RESULT),
    ),
    ("user_after_tool", (p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT, p.NEXT_USER)),
    ("system_in_the_middle", (p.USER, p.ASSISTANT, p.LATE_SYSTEM)),
    ("user_after_user", (p.USER, p.NEXT_USER)),
)
"""Conversations whose last prompt must continue the one before it."""
_FALLBACKS = {
    "user_after_tool": "it is shown inside the tool's result",
    "system_in_the_middle": "it is shown as a user message",
    "user_after_user": "both are shown as one message",
}
_CONTEXTS: tuple[tuple[str, tuple[Message, ...], bool], ...] = (
    ("", (), False),
    (" with a system message", (p.SYSTEM,), False),
    (" with tools", (), True),
    (" with a system message and tools", (p.SYSTEM,), True),
)


def check_append_only(probe: AuditProbe) -> Iterator[Finding]:
    reads_calls = probe.player.natural_reply(p.ASSISTANT_WITH_CALL) is not None
    for step, messages in _STEPS:
        if reads_calls or not any(message.tool_calls for message in messages):
            yield _check_step(probe, step, messages)


def _check_step(probe: AuditProbe, step: str, messages: tuple[Message, ...]) -> Finding:
    name, words = f"append_only.{step}", step.replace("_", " ")
    has_calls = any(message.tool_calls for message in messages)
    with_tools = has_calls or bool(probe.user_refusal(tools=False))
    content = messages[-1].content
    traits = probe.codec.profile(tools=with_tools).traits
    plain = replace(traits, role_rules=UNRESTRICTED_ROLES).to_template_messages(messages)
    refusal = probe.refusal_message(plain, tools=with_tools)
    if refusal or content not in probe.render_raw(plain, tools=with_tools):
        adapted = traits.to_template_messages(messages)
        is_shown = (
            step in _FALLBACKS
            and not probe.refusal_message(adapted, tools=with_tools)
            and content in probe.render_raw(adapted, tools=with_tools)
        )
        fallback = f"; {_FALLBACKS[step]}" if is_shown else ""
        if refusal:
            return note(name, f"It refuses this: {words}{fallback}.", {"refusal": refusal})
        if is_shown:
            written = {"written": probe.render_raw(plain, tools=with_tools)[-120:]}
            return note(name, f"It leaves this out: {words}{fallback}.", written)
    for context, prefix, tools in _CONTEXTS:
        if has_calls and not tools:
            continue
        try:
            prompt = probe.player.play([*prefix, *messages], tools=tools)
        except TemplateError:
            continue
        if prompt is None:
            continue
        if content not in prompt.text:
            return note(name, f"It leaves this out{context}: {words}.", {"written": prompt.text[-120:]})
        if prompt.rewrite_reason not in (RewriteReason.NONE, RewriteReason.THINK_STRIP):
            sentence = f"{words.capitalize()}{context}: earlier text is rewritten, prompts fork there."
            evidence = diff_excerpt(prompt.sampled_text, prompt.text)
            # The text of a conversation without replies is no path that an agent continues.
            roles = [messages[-1].role] if any(m.role == "assistant" for m in messages) else []
            return note(name, sentence, evidence, f"rewrites earlier text ({words})", roles)
    return fine(name, f"{words.capitalize()}: the text only grows.")


def check_fixed_text(probe: AuditProbe) -> Iterator[Finding]:
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
    if not behaviour:
        return fine(name, f"{what.capitalize()} stay{'' if tools else 's'} in one place.")
    evidence = diff_excerpt(first, later)
    roles = [
        messages[-1].role
        for messages in (
            (p.SYSTEM, p.USER, p.ASSISTANT, p.NEXT_USER),
            (p.SYSTEM, p.USER, p.ASSISTANT_WITH_CALL, p.TOOL_RESULT),
        )
        if (prompt := probe.player.play_or_none(messages, tools=tools)) is not None and prompt.forks
    ]
    if not roles:
        return note(name, f"It {behaviour}: prompts only grow.", evidence)
    return note(name, f"It {behaviour}: prompts fork there.", evidence, behaviour, roles)
