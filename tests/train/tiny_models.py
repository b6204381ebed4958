"""Tiny decoders with random weights, of the shapes that training must support."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 50
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "attention_dropout": 0.0,
}
SHAPES = ("qwen3", "llama", "gemma3", "mistral")


def tiny_model(name: str, dtype: Any = None, attention: str = "sdpa", vocabulary: int = VOCABULARY) -> Any:
    """Returns a decoder with three layers; Gemma 3 and Mistral have sliding windows of 5 tokens."""
    torch.manual_seed(0)
    shape = {**_SHAPE, "vocab_size": vocabulary}
    if name == "qwen3":
        config = transformers.Qwen3Config(**shape, tie_word_embeddings=True)
    elif name == "llama":
        config = transformers.LlamaConfig(**shape)
    elif name == "mistral":
        config = transformers.MistralConfig(**shape, sliding_window=5)
    else:
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(
            **shape, sliding_window=5, layer_types=types, final_logit_softcapping=4.0
        )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    # Larger weights than a fresh model's, so that the tokens before a token really matter.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    if dtype is None:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                # Norms are computed in single precision whatever the model's, which hides small errors.
                module.forward = partial(_exact_norm, module)
    return model.to(dtype or torch.float64).eval()


def _exact_norm(module: Any, hidden: Any) -> Any:
    is_gemma = type(module).__name__.startswith("Gemma")
    epsilon = module.eps if is_gemma else module.variance_epsilon
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    return hidden * scale * (1.0 + module.weight if is_gemma else module.weight)
