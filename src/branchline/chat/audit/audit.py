"""The audit of a tokenizer directory: what its chat template does, and whether we can speak and read it.

audit = audit_codec(GenericCodec.open("~/models/Qwen3-8B"))
audit["thinking"].sentence      # It leaves earlier thinking out once the user speaks again …
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from branchline.chat.audit import trial as t
from branchline.chat.audit.checks import RENDERERS, TEMPLATE_CHECKS, Check
from branchline.chat.audit.findings import Finding, Severity, fine, note, unsafe
from branchline.chat.audit.trial import Trial, excerpt, sides, speak, words_of
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import TemplateError
from branchline.core.message import Message
from branchline.core.runs import as_ids

_SPELLINGS = (
    "Hello,  world\n\n",
    "\tdef f(x):\n    return x\n",
    "naïve café 中文 🙂\u200d",
    "e\u0301",
    '{"a": [1, 2]}',
)


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

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]


def audit_codec(codec: GenericCodec) -> Audit:
    """Tries a codec's chat template and tokenizer."""
    name = codec.tokenizer.path.resolve().name
    trial = Trial(codec)
    try:
        trial.show([t.ASKS], asked=True)
    except TemplateError as error:
        words = {"refusal": words_of(error)}
        return Audit(name, (unsafe("conversation", "refuses a single user message", words, RENDERERS),))
    findings: list[Finding] = []
    for check in (*TEMPLATE_CHECKS, *_CODEC_CHECKS):
        try:
            findings += check(trial)
        except TemplateError as error:
            sentence = "Not tried: the template refuses the conversation that would show it."
            findings.append(note(check.__name__.strip("_"), sentence, {"refusal": words_of(error)}))
    found = codec.detection
    parsers = {
        "tool_calls": found.tool_format,
        "reasoning": found.reasoning_format,
        "starts_inside_reasoning": found.starts_inside,
    }
    return Audit(name, tuple(findings), parsers, _spelled_stops(codec))


def _spelled_stops(codec: GenericCodec) -> dict[int, str]:
    tokenizer = codec.tokenizer
    return {token: tokenizer.decode(as_ids([token])) for token in sorted(codec.stop_ids)}


# -- reading what the model says ------------------------------------------------------------------------


def _parsing(trial: Trial) -> Iterator[Finding]:
    codec, dialect = trial.codec, trial.dialect
    found = codec.detection
    yield _reads_back(trial, "parses_text", "text", t.SAYS, "plain")
    if dialect.shows_calls:
        yield _reads_back(trial, "parses_calls", "a tool call", t.CALLS, found.tool_format)
    if dialect.shows_reasoning:
        yield _reads_back(trial, "parses_reasoning", "reasoning", t.THINKS, found.reasoning_format)


def _reads_back(trial: Trial, name: str, what: str, message: Message, parser: str) -> Finding:
    tools = bool(message.calls)
    ids = speak(trial.codec, message, tools=tools)
    if ids is None:
        does = f"does not show a reply with {what} behind its own generation prompt"
        asked = trial.show([t.ASKS], tools=tools, asked=True)
        evidence = sides(asked, trial.show([t.ASKS, message], tools=tools), names=("prompt", "history"))
        return unsafe(name, does, evidence, RENDERERS)
    parsed = trial.codec.parse_whole(ids, tools=t.TOOLS if tools else ())
    read = parsed.message
    if (read.key, read.reasoning) == (message.key, message.reasoning):
        return fine(name, f"A reply with {what} is read back as it was said ({parser}).")
    understood = f"text {read.text!r}, reasoning {read.reasoning!r}, {len(read.calls)} calls"
    evidence = {"said": trial.codec.decode(ids), "read": f"{understood} {', '.join(parsed.problems)}".strip()}
    does = f"writes a reply with {what} that no parser of ours reads back (tried {parser})"
    return unsafe(name, does, evidence, RENDERERS)


def _stop_ids(trial: Trial) -> Iterator[Finding]:
    codec = trial.codec
    spelled = ", ".join(f"{token} {name!r}" for token, name in _spelled_stops(codec).items())
    extra = codec.terminators - codec.tokenizer.stop_ids
    if not codec.terminators:
        does = "puts no token behind a reply, so nobody sees where it ends"
        yield unsafe(
            "stop_ids", does, {"written": excerpt(trial.show([t.ASKS, t.SAYS, t.ASKS_MORE]), 0)}, RENDERERS
        )
    elif extra and codec.tokenizer.stop_ids:
        named = ", ".join(repr(codec.decode(as_ids([token]))) for token in sorted(extra))
        sentence = f"Replies end in {named}, which the tokenizer's config does not name: give the engine all."
        yield note("stop_ids", sentence, {"stop ids": spelled})
    else:
        yield fine("stop_ids", f"Replies end in {spelled}.")


# -- engines and tokens ---------------------------------------------------------------------------------


def _engine(trial: Trial) -> Iterator[Finding]:
    """Asked last of the template: by now both engines have written everything above."""
    templates = [trial.codec.tokenizer.template(tools=tools) for tools in (False, True)]
    mismatch = next((template.mismatch for template in templates if template.mismatch), "")
    if trial.differences or mismatch:
        evidence = trial.differences[0] if trial.differences else {"problem": mismatch}
        yield note(
            "minijinja", "minijinja does not write what jinja2 writes: jinja2 is used, and slower.", evidence
        )
    elif not templates[0].is_fast:
        yield note("minijinja", "minijinja is not used: install it for faster prompts.", {})
    else:
        yield fine("minijinja", "minijinja writes the same as jinja2.")


def _segments(trial: Trial) -> Iterator[Finding]:
    encoder, tokenizer = trial.codec.encoder, trial.codec.tokenizer
    texts = [trial.show([t.SYSTEM, t.ASKS, t.SAYS, Message("user", text)], asked=True) for text in _SPELLINGS]
    bad = [text for text in texts if encoder.encode(text).tolist() != tokenizer.encode(text).tolist()]
    if bad:
        evidence = {
            "text": bad[0],
            "whole": str(tokenizer.encode(bad[0])),
            "pieces": str(encoder.encode(bad[0])),
        }
        does = "is encoded otherwise in pieces than as a whole"
        yield unsafe("segments", does, evidence, "report it: prompts would have wrong ids")
    elif not encoder.is_segmentwise:
        yield note("segments", "Text cannot be encoded in pieces: prompts are encoded whole, and slower.", {})
    else:
        yield fine("segments", "Text encoded in pieces gives the ids of the whole.")


def _round_trip(trial: Trial) -> Iterator[Finding]:
    tokenizer = trial.codec.tokenizer
    for text in _SPELLINGS:
        back = tokenizer.decode(tokenizer.encode(text))
        same = unicodedata.normalize("NFC", text) if tokenizer.composes else text
        if back != same:
            sentence = "Text that is encoded and decoded comes back changed: never encode a reply again."
            yield note("round_trip", sentence, sides(text, back))
            return
    composed = ", accents composed" if tokenizer.composes else ""
    yield fine("round_trip", f"Text that is encoded and decoded comes back as it was{composed}.")


_CODEC_CHECKS: tuple[Check, ...] = (_parsing, _stop_ids, _engine, _segments, _round_trip)
