"""The families that `renderers` can render, by name, and the tokenizer interface that it expects.

The list is explicit: no family is guessed, and no name is looked up on a hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from branchline.chat.parsing.output_parser import OutputFormat
from branchline.chat.segment_encoder import SegmentEncoder
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.token_arrays import as_ids

_IMAGE_PAD = "<|image_pad|>"


@dataclass(frozen=True, slots=True)
class RendererFamily:
    """A family: its name in `renderers`, and how its outputs are parsed."""

    class_prefix: str
    """Its classes are `{class_prefix}Renderer` and `{class_prefix}RendererConfig`."""
    output_format: OutputFormat
    image_pad_token: str = ""
    """The placeholder token of images; empty if the family reads text only."""


FAMILIES: dict[str, RendererFamily] = {
    "deepseek_r1": RendererFamily("DeepSeekR1", OutputFormat("deepseek", "think")),
    "deepseek_v3": RendererFamily("DeepSeekV3", OutputFormat("deepseek")),
    "glm_4_5": RendererFamily("GLM45", OutputFormat("glm", "think")),
    "glm_5": RendererFamily("GLM5", OutputFormat("glm", "think")),
    "glm_5_1": RendererFamily("GLM51", OutputFormat("glm", "think")),
    "glm_5_3": RendererFamily("GLM53", OutputFormat("glm", "think")),
    "kimi_k2": RendererFamily("KimiK2", OutputFormat("kimi")),
    "kimi_k2_5": RendererFamily("KimiK25", OutputFormat("kimi", "think")),
    "llama_3": RendererFamily("Llama3", OutputFormat("llama3")),
    "minimax_m2": RendererFamily("MiniMaxM2", OutputFormat("minimax", "think")),
    "nemotron_3": RendererFamily("Nemotron3", OutputFormat("qwen3_coder", "think")),
    "qwen3": RendererFamily("Qwen3", OutputFormat("hermes", "think")),
    "qwen3_5": RendererFamily("Qwen35", OutputFormat("qwen3_coder", "think"), _IMAGE_PAD),
    "qwen3_6": RendererFamily("Qwen36", OutputFormat("qwen3_coder", "think"), _IMAGE_PAD),
    "qwen3_8": RendererFamily("Qwen38", OutputFormat("qwen3_coder", "think"), _IMAGE_PAD),
    # Its template shows no reasoning, so none is parsed out.
    "qwen3_vl": RendererFamily("Qwen3VL", OutputFormat("hermes"), _IMAGE_PAD),
}
"""gpt-oss is missing: its renderer downloads a vocabulary."""


class RendererTokenizer:
    """A tokenizer with the interface that `renderers` expects."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: TokenizerDir, segment_encoder: SegmentEncoder) -> None:
        self._tokenizer = tokenizer
        self._segment_encoder = segment_encoder
        self._added = tokenizer.added_tokens
        self.name_or_path = str(tokenizer.path)
        self.eos_token_id = self._added.get(tokenizer.special_tokens.get("eos_token", ""))

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        ids: list[int] = self._segment_encoder.encode(text).tolist()
        return ids

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode(as_ids(np.asarray(token_ids, np.int64)))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._added.get(tokens)
        return [self._added.get(token) for token in tokens]
