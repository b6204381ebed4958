"""An independent judge of prompts: the template rendered by jinja2 alone, as transformers renders it.

The codec's own code takes part in one thing only: it writes messages in the form that the template accepts
(arguments as object or text, the order of roles). Texts are compared without whitespace and without the style
of JSON, because a sampled reply keeps its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from branchline.chat.base import Tools
from branchline.chat.generic.codec import GenericCodec
from branchline.core.message import Message, ToolCall

_LITERAL = re.compile(r">(true|false|none|null)<", re.IGNORECASE)
_CALL_ID = re.compile(r',?"(?:tool_call_)?id":(?:"[^"]*"|\d+)')
"""The id of a call. Some templates number the calls of a conversation or add ids to earlier calls; a sampled
reply keeps what the model wrote."""
_TAG = re.compile(r"<[^<>]+>")
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
_JSON_LITERALS = {"none": "null"}


class _GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainRenderer:
    """Renders conversations with one template."""

    def __init__(self, codec: GenericCodec) -> None:
        self._codec = codec
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = codec.now.strftime
        self._templates = {
            tools: environment.from_string(codec.profile(tools=tools).template.source)
            for tools in (False, True)
        }

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> str:
        raw = self._codec.profile(tools=bool(tools)).traits.to_template_messages(messages)
        return self._templates[bool(tools)].render(
            **self._codec.tokenizer.special_tokens,
            **self._codec.default_chat_template_kwargs,
            messages=raw,
            tools=[dict(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )

    def accepts(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """Whether the template renders a conversation."""
        try:
            self.render(messages, tools)
        except _REFUSALS:
            return False
        return True

    def normalize(self, text: str) -> str:
        """Returns the text without whitespace, without the style of literals, and without a reasoning block
        that only the generation prompt has."""
        text = "".join(self._codec.segment_encoder.normalize(text).split())
        text = _LITERAL.sub(lambda found: f">{_JSON_LITERALS.get(found[1].lower(), found[1].lower())}<", text)
        text = _CALL_ID.sub("", text)
        for prompt, shown in self._reply_prefixes:
            text = text.replace(prompt, shown)
        return text

    @property
    def prompt_has_empty_reasoning(self) -> bool:
        """Whether a generation prompt has an empty block of reasoning that history does not show."""
        return bool(self._reply_prefixes)

    @cached_property
    def _reply_prefixes(self) -> list[tuple[str, str]]:
        """Returns generation prompts with a closed block of reasoning more than history shows in their place,
        and what it shows: after a user message, and after the result of a tool."""
        user, result = Message("user", "zqask"), Message("tool", "zqseen", tool_call_id="zqcall000")
        call = Message("assistant", tool_calls=(ToolCall("zqlook", "{}", "zqcall000"),))
        found = [self._find_reply_prefix([user]), self._find_reply_prefix([user, call, result])]
        return [pair for pair in dict.fromkeys(found) if pair is not None]

    def _find_reply_prefix(self, before: Sequence[Message]) -> tuple[str, str] | None:
        user, reply = Message("user", "zqmore"), Message("assistant", "zqsaid")
        try:
            body = self.render(before, add_generation_prompt=False)
            prompt = self.render(before).removeprefix(body)
            # Some templates write it whether requested or not.
            prompt = prompt or self._codec.profile().traits.generation_prompt
            body = body.removesuffix(prompt)
            text = self.render([*before, reply, user])
        except _REFUSALS:
            return None
        # The tag before it shows where it stands, if it has no tag of its own before the block.
        body = body[: body.rfind("<")] if before[-1].role == "tool" and "<" in body else body
        prompt = "".join(self.render(before).removeprefix(body).split())
        shown = "".join(text.removeprefix(body).partition(reply.content)[0].split())
        common = len(commonprefix([prompt, shown]))  # noqa: RUF071
        while common and shown[:common].count("<") > shown[:common].count(">"):
            common -= 1
        if len(_TAG.findall(prompt[common:])) < 2:
            return None
        # What else history shows before a reply, the model writes.
        return prompt, shown if shown[common:] in prompt else shown[:common]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
