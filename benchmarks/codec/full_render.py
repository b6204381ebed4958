"""The reference: render the whole conversation and encode all of it at every turn.

Uses transformers' `apply_chat_template` if it can be imported, otherwise its two steps, jinja2 and
`tokenizers`. The tokenizer is a separate one, so that no side fills the other's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tokenizers import Tokenizer

from branchline import Message
from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.template_probe import probe_template_traits
from branchline.chat.template_traits import TemplateMessage, TemplateTraits
from branchline.chat.tokenizer import TokenizerDir


class FullRender:
    """Renders and encodes whole conversations."""

    def __init__(self, tokenizer: TokenizerDir) -> None:
        self.template = ChatTemplate(
            tokenizer.template_source(tools=True), tokenizer.special_tokens, use_minijinja=False
        )
        self._traits: TemplateTraits = probe_template_traits(self.template)
        self._tokenizer: Any = None
        self._encoder: Any = None
        if find_spec("transformers") is not None:
            self._tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(tokenizer.path)
        else:
            self._encoder = Tokenizer.from_file(str(tokenizer.path / "tokenizer.json"))

    @property
    def name(self) -> str:
        if self._tokenizer is not None:
            return "transformers' apply_chat_template(tokenize=True)"
        return "jinja2 render + tokenizers encode_batch (transformers is not installed)"

    def to_template_messages(self, messages: Sequence[Message]) -> list[TemplateMessage]:
        """Returns the messages in the template's form; called before the measurement."""
        return self._traits.to_template_messages(messages)

    def encode(self, messages: Sequence[TemplateMessage], tools: Sequence[TemplateMessage]) -> list[int]:
        if self._tokenizer is not None:
            found = self._tokenizer.apply_chat_template(
                messages, tools=list(tools), add_generation_prompt=True, tokenize=True
            )
            ids: list[int] = found["input_ids"] if hasattr(found, "keys") else found
            return ids
        text = self.template.render(messages, tools)
        # The same call as in transformers.
        encoded: list[int] = self._encoder.encode_batch([text], add_special_tokens=False)[0].ids
        return encoded
