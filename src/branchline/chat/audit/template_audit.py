"""The audit of a tokenizer directory: what its chat template does, and whether we can speak and read it.

audit = audit_codec(GenericCodec.open("~/models/Qwen3-8B"))
audit["thinking"].sentence      # It leaves earlier thinking out once the user speaks again …
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.audit import template_probe as t
from branchline.chat.audit.checks import TEMPLATE_CHECKS, USE_RENDERERS, AuditCheck
from branchline.chat.audit.findings import Finding, Severity, fine, note, unsafe
from branchline.chat.audit.template_probe import (
    TemplateProbe,
    diff_excerpt,
    excerpt,
    render_reply,
    template_error_message,
)
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids

_ROUND_TRIP_TEXTS = (
    "Hello,  world\n\n",
    "\tdef f(x):\n    return x\n",
    "naïve café 中文 🙂\u200d",
    "e\u0301",
    '{"a": [1, 2]}',
)


@dataclass(frozen=True)
class TemplateAudit:
    """All that was found out about one tokenizer directory."""

    name: str
    findings: tuple[Finding, ...]
    parsers: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: Mapping[int, str] = field(default_factory=dict)
    """Ids that end an output, and what they say."""

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.name == name)

    def findings_with(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def audit_codec(codec: GenericCodec) -> TemplateAudit:
    """Tries a codec's chat template and tokenizer."""
    name = codec.tokenizer.path.resolve().name
    trial = TemplateProbe(codec)
    try:
        trial.render([t.USER], add_generation_prompt=True)
    except TemplateError as error:
        words = {"refusal": template_error_message(error)}
        return TemplateAudit(
            name, (unsafe("conversation", "refuses a single user message", words, USE_RENDERERS),)
        )
    findings: list[Finding] = []
    for check in (*TEMPLATE_CHECKS, *_CODEC_CHECKS):
        try:
            findings += check(trial)
        except TemplateError as error:
            sentence = "Not tried: the template refuses the conversation that would show it."
            findings.append(
                note(check.__name__.strip("_"), sentence, {"refusal": template_error_message(error)})
            )
    found = codec.output_format
    parsers = {
        "tool_calls": found.tool_format,
        "reasoning": found.reasoning_format,
        "starts_inside_reasoning": found.starts_in_reasoning,
    }
    return TemplateAudit(name, tuple(findings), parsers, _stop_token_texts(codec))


def _stop_token_texts(codec: GenericCodec) -> dict[int, str]:
    tokenizer = codec.tokenizer
    return {token: tokenizer.decode(as_ids([token])) for token in sorted(codec.stop_ids)}


# -- reading what the model says ------------------------------------------------------------------------


def _parsing(trial: TemplateProbe) -> Iterator[Finding]:
    codec, dialect = trial.codec, trial.traits
    found = codec.output_format
    yield _check_round_trip(trial, "parses_text", "text", t.ASSISTANT, "plain")
    if dialect.shows_tool_calls:
        yield _check_round_trip(
            trial, "parses_calls", "a tool call", t.ASSISTANT_WITH_CALL, found.tool_format
        )
    if dialect.shows_reasoning:
        yield _check_round_trip(
            trial, "parses_reasoning", "reasoning", t.ASSISTANT_WITH_REASONING, found.reasoning_format
        )


def _check_round_trip(trial: TemplateProbe, name: str, what: str, message: Message, parser: str) -> Finding:
    tools = bool(message.tool_calls)
    ids = render_reply(trial.codec, message, tools=tools)
    if ids is None:
        does = f"does not show a reply with {what} behind its own generation prompt"
        asked = trial.render([t.USER], tools=tools, add_generation_prompt=True)
        evidence = diff_excerpt(
            asked, trial.render([t.USER, message], tools=tools), names=("prompt", "history")
        )
        return unsafe(name, does, evidence, USE_RENDERERS)
    parsed = trial.codec.parse_output(ids, tools=t.TOOLS if tools else ())
    read = parsed.message
    if (read.key, read.reasoning_content) == (message.key, message.reasoning_content):
        return fine(name, f"A reply with {what} is read back as it was said ({parser}).")
    understood = f"text {read.content!r}, reasoning {read.reasoning_content!r}, {len(read.tool_calls)} calls"
    evidence = {"said": trial.codec.decode(ids), "read": f"{understood} {', '.join(parsed.problems)}".strip()}
    does = f"writes a reply with {what} that no parser of ours reads back (tried {parser})"
    return unsafe(name, does, evidence, USE_RENDERERS)


def _stop_ids(trial: TemplateProbe) -> Iterator[Finding]:
    codec = trial.codec
    spelled = ", ".join(f"{token} {name!r}" for token, name in _stop_token_texts(codec).items())
    extra = codec.terminator_ids - codec.tokenizer.stop_ids
    if not codec.terminator_ids:
        does = "puts no token behind a reply, so nobody sees where it ends"
        yield unsafe(
            "stop_ids",
            does,
            {"written": excerpt(trial.render([t.USER, t.ASSISTANT, t.NEXT_USER]), 0)},
            USE_RENDERERS,
        )
    elif extra and codec.tokenizer.stop_ids:
        named = ", ".join(repr(codec.decode(as_ids([token]))) for token in sorted(extra))
        sentence = f"Replies end in {named}, which the tokenizer's config does not name: give the engine all."
        yield note("stop_ids", sentence, {"stop ids": spelled})
    else:
        yield fine("stop_ids", f"Replies end in {spelled}.")


# -- engines and tokens ---------------------------------------------------------------------------------


def _engine(trial: TemplateProbe) -> Iterator[Finding]:
    """Asked last of the template: by now both engines have written everything above."""
    templates = [trial.codec.tokenizer.chat_template(tools=tools) for tools in (False, True)]
    mismatch = next((template.fallback_reason for template in templates if template.fallback_reason), "")
    if trial.minijinja_differences or mismatch:
        evidence = trial.minijinja_differences[0] if trial.minijinja_differences else {"problem": mismatch}
        yield note(
            "minijinja", "minijinja does not write what jinja2 writes: jinja2 is used, and slower.", evidence
        )
    elif not templates[0].uses_minijinja:
        yield note("minijinja", "minijinja is not used: install it for faster prompts.", {})
    else:
        yield fine("minijinja", "minijinja writes the same as jinja2.")


def _segments(trial: TemplateProbe) -> Iterator[Finding]:
    encoder, tokenizer = trial.codec.segment_encoder, trial.codec.tokenizer
    texts = [
        trial.render([t.SYSTEM, t.USER, t.ASSISTANT, Message("user", text)], add_generation_prompt=True)
        for text in _ROUND_TRIP_TEXTS
    ]
    bad = [text for text in texts if encoder.encode(text).tolist() != tokenizer.encode(text).tolist()]
    if bad:
        evidence = {
            "text": bad[0],
            "whole": str(tokenizer.encode(bad[0])),
            "pieces": str(encoder.encode(bad[0])),
        }
        does = "is encoded otherwise in pieces than as a whole"
        yield unsafe("segments", does, evidence, "report it: prompts would have wrong ids")
    elif not encoder.encodes_by_segment:
        yield note("segments", "Text cannot be encoded in pieces: prompts are encoded whole, and slower.", {})
    else:
        yield fine("segments", "Text encoded in pieces gives the ids of the whole.")


def _round_trip(trial: TemplateProbe) -> Iterator[Finding]:
    tokenizer = trial.codec.tokenizer
    for text in _ROUND_TRIP_TEXTS:
        back = tokenizer.decode(tokenizer.encode(text))
        same = unicodedata.normalize("NFC", text) if tokenizer.normalizes_nfc else text
        if back != same:
            sentence = "Text that is encoded and decoded comes back changed: never encode a reply again."
            yield note("round_trip", sentence, diff_excerpt(text, back))
            return
    composed = ", accents composed" if tokenizer.normalizes_nfc else ""
    yield fine("round_trip", f"Text that is encoded and decoded comes back as it was{composed}.")


_CODEC_CHECKS: tuple[AuditCheck, ...] = (_parsing, _stop_ids, _engine, _segments, _round_trip)
