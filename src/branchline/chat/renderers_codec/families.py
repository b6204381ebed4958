"""The families that `renderers` may render for us, by name, and a tokenizer in the shape it asks for.

The list is explicit: a family that is not on it is not guessed, and no name is ever looked up on a hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from branchline.chat.generic.segment_encoder import SegmentEncoder
from branchline.chat.parsing.registry import NO_REASONING
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.token_arrays import as_ids


@dataclass(frozen=True, slots=True)
class RendererFamily:
    """One of the families we offer: its name in `renderers`, and how its outputs are read."""

    class_prefix: str
    """`{stem}Renderer` and `{stem}RendererConfig` are its classes."""
    tool_format: str
    reasoning_format: str = NO_REASONING
    image_pad_token: str = ""
    """The id that stands for a bit of an image; empty where the family reads text only."""


FAMILIES: dict[str, RendererFamily] = {
    "deepseek_r1": RendererFamily("DeepSeekR1", "deepseek", "think"),
    "deepseek_v3": RendererFamily("DeepSeekV3", "deepseek"),
    "glm_4_5": RendererFamily("GLM45", "glm", "think"),
    "glm_5": RendererFamily("GLM5", "glm", "think"),
    "glm_5_1": RendererFamily("GLM51", "glm", "think"),
    "glm_5_3": RendererFamily("GLM53", "glm", "think"),
    "kimi_k2": RendererFamily("KimiK2", "kimi"),
    "kimi_k2_5": RendererFamily("KimiK25", "kimi", "think"),
    "llama_3": RendererFamily("Llama3", "llama3"),
    "minimax_m2": RendererFamily("MiniMaxM2", "minimax", "think"),
    "nemotron_3": RendererFamily("Nemotron3", "qwen3_coder", "think"),
    "qwen3": RendererFamily("Qwen3", "hermes", "think"),
    "qwen3_5": RendererFamily("Qwen35", "qwen3_coder", "think", "<|image_pad|>"),
    "qwen3_6": RendererFamily("Qwen36", "qwen3_coder", "think", "<|image_pad|>"),
    "qwen3_8": RendererFamily("Qwen38", "qwen3_coder", "think", "<|image_pad|>"),
    # Its template shows no reasoning, so none is parsed out.
    "qwen3_vl": RendererFamily("Qwen3VL", "hermes", image_pad_token="<|image_pad|>"),
}
"""gpt-oss is not among them: its renderer downloads a vocabulary."""


class RendererTokenizer:
    """A tokenizer in the shape that `renderers` asks for."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: TokenizerDir, encoder: SegmentEncoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._added = tokenizer.added_tokens
        self.name_or_path = str(tokenizer.path)
        self.eos_token_id = self._added.get(tokenizer.special_tokens.get("eos_token", ""))

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        ids: list[int] = self._encoder.encode(text).tolist()
        return ids

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode(as_ids(np.asarray(token_ids, np.int64)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._added.get(tokens)
        return [self._added.get(token) for token in tokens]
