"""Replies in the format of any template, as a model would sample them.

Templates differ in which replies they can express: with reasoning, with text next to a call, with several
calls. This is found by probing and not listed: a reply can be expressed if a text that the template shows for
it parses back to the same message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random

from branchline.chat.base import Tools
from branchline.chat.generic.chat_template import first_difference
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.generic.template_probe import TOOLS as PROBE_TOOLS
from branchline.core.message import Message, ToolCall
from branchline.testing.reply_encoder import TemplateReplyEncoder

_OPEN_REASONING, _CLOSE_REASONING = "<think>", "</think>"
_TAG = re.compile(r"\s*<[^<>]+>")
ReplyText = tuple[str, int | None]
"""The text of a reply, and the id that ends it."""


class ProbedReplyEncoder(TemplateReplyEncoder):
    """A model that writes every reply in the first way in which its own parser reads it back."""

    def __init__(
        self, codec: GenericCodec, rng: Random, *, tools: Tools, vary_tokenization: bool = True
    ) -> None:
        super().__init__(codec, rng, vary_tokenization=vary_tokenization)
        self._tools = tools

    def can_express(self, message: Message) -> bool:
        """Whether the template's format has a text for the reply that is read back unchanged. If the
        generation prompt opens reasoning, only replies with reasoning count; if it closes reasoning, only
        those without."""
        if message.reasoning_content:
            is_possible = not self.prompt_closes_reasoning
        else:
            profile = self._codec.profile(tools=bool(message.tool_calls))
            is_possible = not profile.reader.output_format.starts_in_reasoning
        return is_possible and self._find_text(message) is not None

    @property
    def prompt_closes_reasoning(self) -> bool:
        """Whether the generation prompt ends with an empty block of reasoning, or with the end of one."""
        traits = self._codec.profile().traits
        ends_with_closer = traits.generation_prompt.rstrip().endswith(_CLOSE_REASONING)
        return bool(traits.empty_reasoning_block) or ends_with_closer

    def shown_text(self, message: Message) -> str | None:
        """Returns the text in which the template itself shows all fields of the reply, readable or not; None
        if it does not."""
        texts = (text for text, _ in self._shown_texts(message, None))
        return next((text for text in texts if _shows_fields(text, message)), None)

    def _render(self, message: Message) -> ReplyText:
        found = self._find_text(message)
        assert found is not None, f"the template cannot express {message}"
        return found

    def _find_text(self, message: Message) -> ReplyText | None:
        for text, terminator in self._candidates(message):
            last_id = self._codec.last_prompt_id(tools=bool(message.tool_calls))
            ids = self._codec.segment_encoder.encode(text, last_id).tolist()
            ids += [] if terminator is None else [terminator]
            parsed = self._codec.parser(self._tools).parse(ids, "stop").message
            same_reasoning = parsed.reasoning_content.strip() == message.reasoning_content.strip()
            if parsed.key == message.key and same_reasoning:
                return text, terminator
        return None

    def _candidates(self, message: Message) -> Iterator[ReplyText]:
        """Yields texts of a reply after the generation prompt: as the template shows the last message, as it
        shows a message without reasoning after reasoning in tags, and as plain text if it shows nothing."""
        has_calls = bool(message.tool_calls)
        profile = self._codec.profile(tools=has_calls)
        terminator = self._find_terminator(message)
        named = _with_generated_ids(message)
        is_shown = False
        for variant in (message, named) if has_calls else (message,):
            for candidate in self._shown_texts(variant, terminator):
                is_shown = True
                yield candidate
        if message.reasoning_content:
            plain = Message("assistant", message.content, tool_calls=named.tool_calls)
            is_open = profile.traits.generation_prompt.rstrip().endswith(_OPEN_REASONING)
            opening = "" if is_open else f"{_OPEN_REASONING}\n"
            reasoning = f"{opening}{message.reasoning_content}\n{_CLOSE_REASONING}\n\n"
            if has_calls:
                for text, end in self._shown_texts(plain, terminator):
                    # Some templates show the end of reasoning before every call.
                    yield reasoning + text.removeprefix(_CLOSE_REASONING), end
            else:
                yield reasoning + message.content, terminator
        if not (is_shown or message.reasoning_content or has_calls):
            yield message.content, terminator

    def _shown_texts(self, message: Message, terminator: int | None) -> Iterator[ReplyText]:
        """Yields the text of the reply up to each stop token, up to the token that ends it in a prompt if the
        model does not stop there, and the whole text."""
        endings = self._codec.profile(tools=bool(message.tool_calls)).endings
        for text in self._last_reply_texts(message):
            for start, end, token in self._codec.segment_encoder.find_added_tokens(text):
                if token in self._codec.stop_ids:
                    yield text[:start], token
                elif token in endings.terminator_ids and not text[end:].strip():
                    yield text[:start], terminator
            yield text, terminator

    def _last_reply_texts(self, message: Message) -> Iterator[str]:
        """Yields the text after the generation prompt if the reply is the last message. If history does not
        show the generation prompt, what it shows in its place is written by the model, apart from tags that
        the generation prompt has too."""
        tools = PROBE_TOOLS if message.tool_calls else ()
        probe = self._codec.probe(tools=bool(message.tool_calls))
        text = probe.render_reply(message, tools)
        if text is not None:
            yield text
            return
        user, prompt = Message("user", "."), probe.traits.generation_prompt
        body, text = (
            probe.render_or_empty(messages, tools, add_generation_prompt=False).removesuffix(prompt)
            for messages in ([user], [user, message])
        )
        shown = text.removeprefix(body)
        common = first_difference(prompt, shown)
        while common and shown[:common].count("<") > shown[:common].count(">"):
            common -= 1
        if not text.startswith(body) or not common:
            return
        if message.reasoning_content and _TAG.search(prompt[common:]):
            # The generation prompt has closed the reasoning.
            return
        rest = shown[common:]
        while (tag := _TAG.match(rest)) is not None and tag[0].strip() in prompt[common:]:
            rest = rest[tag.end() :]
        yield rest
        yield shown[common:]

    def _find_terminator(self, message: Message) -> int | None:
        """Returns the first stop token after the reply if its results or a user message follow: GLM's replies
        end with the opener of the next message."""
        has_calls = bool(message.tool_calls)
        results = [
            Message("tool", "zqresult", tool_call_id=call.id, name=call.name) for call in message.tool_calls
        ]
        probe = self._codec.probe(tools=has_calls)
        following = results or [Message("user", "zqmore")]
        text = probe.render_or_empty(
            [Message("user", "."), message, *following], PROBE_TOOLS if has_calls else ()
        )
        end = text.find(following[0].content)
        last = message.tool_calls[-1].name if has_calls else message.content
        start = text.rfind(last, 0, end)
        for _, _, token in self._codec.segment_encoder.find_added_tokens(text, max(0, start)):
            if token in self._codec.stop_ids:
                return token
        return min(self._codec.stop_ids, default=None)


def _with_generated_ids(message: Message) -> Message:
    """Returns the reply with ids of calls as Kimi's models generate them."""
    calls = tuple(
        ToolCall(call.name, call.arguments, f"functions.{call.name}:{place}")
        for place, call in enumerate(message.tool_calls)
    )
    return Message(
        "assistant", message.content, reasoning_content=message.reasoning_content, tool_calls=calls
    )


def _shows_fields(text: str, message: Message) -> bool:
    """Whether a text contains every field of a reply, with the texts in the arguments of its calls."""
    fields = [message.content, message.reasoning_content]
    for call in message.tool_calls:
        values = json.loads(call.arguments).values()
        fields += [call.name, *(value for value in values if isinstance(value, str))]
    return all(field in text for field in fields)
