"""The audit of a tokenizer directory: what its chat template does, and whether its outputs can be parsed.

audit = audit_codec(GenericCodec.open("~/models/Qwen3-8B"))
audit["thinking"].sentence      # It leaves earlier thinking out once a user message follows …
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.generic import template_probe as p
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.doctor.findings import (
    NAME_A_PARSER,
    USE_RENDERERS,
    AuditProbe,
    Finding,
    Severity,
    diff_excerpt,
    excerpt,
    fine,
    note,
    template_error_message,
    unsafe,
)
from branchline.doctor.template_checks import TEMPLATE_CHECKS, AuditCheck

_ROUND_TRIP_TEXTS = (
    "Hello,  world\n\n",
    "\tdef f(x):\n    return x\n",
    "naïve café 中文 🙂\u200d",
    "e\u0301",
    '{"a": [1, 2]}',
)


@dataclass(frozen=True)
class TemplateAudit:
    """All findings about one tokenizer directory."""

    name: str
    findings: tuple[Finding, ...]
    parsers: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: Mapping[int, str] = field(default_factory=dict)
    """The ids that end an output, and their text."""

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def findings_of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def audit_template(codec: GenericCodec) -> TemplateAudit:
    """Checks a codec's chat template and tokenizer."""
    name = codec.tokenizer.name
    probe = AuditProbe(codec)
    findings: list[Finding] = []
    if refusal := probe.user_refusal(tools=False):
        evidence = {"refusal": refusal}
        if probe.user_refusal(tools=True):
            finding = unsafe("conversation", "refuses a single user message", evidence, USE_RENDERERS)
            return TemplateAudit(name, (finding,))
        remedy = f"send tools with every request or {USE_RENDERERS}"
        findings.append(unsafe("conversation", "refuses prompts without tools", evidence, remedy))
    for check_name, check in {**TEMPLATE_CHECKS, **_CODEC_CHECKS}.items():
        try:
            findings += check(probe)
        except TemplateError as error:
            sentence = "Not checked: the template refuses the conversation of this check."
            findings.append(note(check_name, sentence, {"refusal": template_error_message(error)}))
    output_format = codec.profile(tools=True).reader.output_format
    parsers = {
        "tool_calls": output_format.tool_format,
        "reasoning": output_format.reasoning_format,
        "starts_inside_reasoning": output_format.starts_in_reasoning,
    }
    return TemplateAudit(name, tuple(findings), parsers, _stop_token_texts(codec))


def _stop_token_texts(codec: GenericCodec) -> dict[int, str]:
    return {token: codec.decode(as_ids([token])) for token in sorted(codec.stop_ids)}


# -- parsing outputs ------------------------------------------------------------------------------------


def _check_parsing(probe: AuditProbe) -> Iterator[Finding]:
    output_format = probe.codec.profile(tools=True).reader.output_format
    yield _check_reply(probe, "parses_text", "text", p.ASSISTANT, "plain")
    if probe.codec.unread_calls:
        evidence = {"written": probe.codec.unread_calls[0]}
        yield unsafe(
            "parses_calls", "shows tool calls in a form that no parser reads", evidence, NAME_A_PARSER
        )
    elif probe.traits.shows_tool_calls:
        parser = output_format.tool_format
        yield _check_reply(probe, "parses_calls", "a tool call", p.ASSISTANT_WITH_CALL, parser)
        for name, what, message in (
            ("parses_text_and_call", "text and a tool call", p.ASSISTANT_WITH_TEXT_AND_CALL),
            ("parses_two_calls", "two tool calls", p.ASSISTANT_WITH_TWO_CALLS),
        ):
            # Other checks report a template that does not show such a reply.
            if probe.player.encoder.shown_text(message) is not None:
                yield _check_reply(probe, name, what, message, parser)
    if probe.traits.shows_reasoning and not probe.player.encoder.prompt_closes_reasoning:
        # Some templates show reasoning only next to a call.
        replies = (p.ASSISTANT_WITH_REASONING, p.ASSISTANT_WITH_REASONING_AND_CALL)
        shown = [reply for reply in replies if probe.player.encoder.shown_text(reply) is not None]
        reply, parser = (shown or replies)[0], output_format.reasoning_format
        yield _check_reply(probe, "parses_reasoning", "reasoning", reply, parser)


def _check_reply(probe: AuditProbe, name: str, what: str, message: Message, parser: str) -> Finding:
    """Checks that the parser reads a reply back; it has reasoning if the generation prompt opens it."""
    codec, tools = probe.codec, bool(message.tool_calls)
    if probe.player.natural_reply(message) is not None:
        return fine(name, f"A reply with {what} is parsed back unchanged ({parser}).")
    shown = probe.player.encoder.shown_text(message)
    if shown is None:
        behaviour = f"does not show a reply with {what} after its own generation prompt"
        prompt = probe.render([p.USER], tools=tools, add_generation_prompt=True)
        history = probe.render([p.USER, message], tools=tools)
        evidence = diff_excerpt(prompt, history, names=("prompt", "history"))
        return unsafe(name, behaviour, evidence, USE_RENDERERS)
    output = codec.parser(p.TOOLS if tools else ()).parse(
        codec.segment_encoder.encode(shown).tolist(), "stop"
    )
    parsed = output.message
    result = (
        f"text {parsed.content!r}, reasoning {parsed.reasoning_content!r}, {len(parsed.tool_calls)} calls"
    )
    evidence = {"said": shown, "read": f"{result} {', '.join(output.problems)}".strip()}
    behaviour = f"writes a reply with {what} that no parser reads back (tried {parser})"
    return unsafe(name, behaviour, evidence, USE_RENDERERS)


def _check_stop_ids(probe: AuditProbe) -> Iterator[Finding]:
    codec = probe.codec
    endings = codec.profile(tools=True).endings
    texts = ", ".join(f"{token} {text!r}" for token, text in _stop_token_texts(codec).items())
    unnamed = endings.stop_ids & codec.stop_ids
    unstopped = endings.unstopped_shapes
    if not endings.terminator_ids:
        evidence = {"written": excerpt(probe.render([p.USER, p.ASSISTANT, p.NEXT_USER]), 0)}
        behaviour = "writes no token after a reply, so its end cannot be recognised"
        yield unsafe("stop_ids", behaviour, evidence, USE_RENDERERS)
    elif unstopped:
        sentence = (
            f"No stop id ends a reply with {unstopped[0]} in the template: if outputs do not end, name the "
            "model's own with --stop-id."
        )
        yield note("stop_ids", sentence, {"stop ids": texts, "replies": "; ".join(unstopped)})
    elif unnamed and codec.tokenizer.stop_ids:
        names = ", ".join(repr(codec.decode(as_ids([token]))) for token in sorted(unnamed))
        sentence = (
            f"Replies end with {names}, which the tokenizer's config does not name: give the engine all."
        )
        yield note("stop_ids", sentence, {"stop ids": texts})
    else:
        yield fine("stop_ids", f"Replies end with {texts}.")


# -- template engines and tokens ------------------------------------------------------------------------


def _check_engine(probe: AuditProbe) -> Iterator[Finding]:
    """Runs after all template checks: they have rendered with both engines."""
    templates = [probe.codec.profile(tools=tools).template for tools in (False, True)]
    reason = next((template.fallback_reason for template in templates if template.fallback_reason), "")
    if reason:
        sentence = "minijinja does not render what jinja2 renders: jinja2 is used, which is slower."
        yield note("minijinja", sentence, {"problem": reason})
    elif not templates[0].uses_minijinja:
        yield note("minijinja", "minijinja is not used: install it for faster prompts.", {})
    else:
        yield fine("minijinja", "minijinja renders the same as jinja2.")


def _check_segments(probe: AuditProbe) -> Iterator[Finding]:
    encoder, tokenizer = probe.codec.segment_encoder, probe.codec.tokenizer
    for content in _ROUND_TRIP_TEXTS:
        messages = [p.SYSTEM, p.USER, p.ASSISTANT, Message("user", content)]
        text = probe.render(messages, add_generation_prompt=True)
        whole, segments = tokenizer.encode(text), encoder.encode(text)
        if whole.tolist() != segments.tolist():
            evidence = {"text": text, "whole": str(whole), "pieces": str(segments)}
            behaviour = "encodes differently in segments than as a whole"
            yield unsafe("segments", behaviour, evidence, "report it: prompts would have wrong ids")
            return
    if encoder.encodes_by_segment:
        yield fine("segments", "Text encoded in segments gives the ids of the whole.")
    else:
        sentence = "Text cannot be encoded in segments: prompts are encoded as a whole, which is slower."
        yield note("segments", sentence, {})


def _check_round_trip(probe: AuditProbe) -> Iterator[Finding]:
    tokenizer = probe.codec.tokenizer
    for text in _ROUND_TRIP_TEXTS:
        decoded = tokenizer.decode(tokenizer.encode(text))
        expected = unicodedata.normalize("NFC", text) if tokenizer.normalizes_nfc else text
        if decoded != expected:
            sentence = "Text changes when it is encoded and decoded: never encode a reply again."
            yield note("round_trip", sentence, diff_excerpt(text, decoded))
            return
    composed = " apart from Unicode composition" if tokenizer.normalizes_nfc else ""
    yield fine("round_trip", f"Text that is encoded and decoded stays unchanged{composed}.")


_CODEC_CHECKS: dict[str, AuditCheck] = {
    "parsing": _check_parsing,
    "stop_ids": _check_stop_ids,
    "engine": _check_engine,
    "segments": _check_segments,
    "round_trip": _check_round_trip,
}
