"""The stop tokens that real models declare, by template of the corpus.

The corpus has templates without config files. This table was written by hand and not read from the files of
the models. The first token of an entry is the `eos_token`; all of them are the `eos_token_id` list of
`generation_config.json`. A template without an entry gets an invented `eos_token`.
"""

from __future__ import annotations

import re

_STOP_TOKENS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("rwkv", ()),
    ("Hermes", ("<|im_end|>",)),
    ("Apertus", ("<|assistant_end|>", "<|tools_suffix|>")),
    ("Apriel", ("<|end|>",)),
    ("Seed-OSS", ("<seed:eos>",)),
    ("cohere|command_a|aya", ("<|END_OF_TURN_TOKEN|>",)),
    ("GigaChat3-", ("</s>",)),
    ("GLM", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    ("Kimi-K3", ("<|end_of_msg|>",)),
    ("MiniMax-M1", ("<end_of_sentence>",)),
    ("MiniMax-M", ("[e~[",)),
    ("Nemotron-Nano-v2", ("<SPECIAL_12>",)),
    ("Reka", ("<sep>",)),
    ("R1-Distill|deepseek|Spark", ("<｜end▁of▁sentence｜>",)),
    ("firefunction", ("<|eot_id|>",)),
    ("gemma.?4|diffusion_gemma", ("<eos>", "<turn|>", "<|tool_response>")),
    ("gemma", ("<eos>", "<end_of_turn>")),
    ("granite", ("<|end_of_text|>",)),
    ("ling", ("<|role_end|>",)),
    ("functionary|Llama-3.1|Llama-3.3", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    ("Llama", ("<|eot_id|>", "<|end_of_text|>")),
    ("phi", ("<|endoftext|>", "<|end|>")),
    ("stral|llava", ("</s>",)),
    ("muse", ("<|eot|>",)),
    ("gpt-?oss", ("<|return|>", "<|endoftext|>", "<|call|>")),
    ("Laguna", ("</assistant>",)),
    ("Hy3", ("<｜hy_eos:opensource｜>",)),
    ("idefics|smolvlm", ("<end_of_utterance>",)),
    ("Qwen|QwQ|MiMo", ("<|im_end|>", "<|endoftext|>")),
    ("Bielik|SmolLM3|Kimi|LFM|Nemotron|Step|MiniCPM", ("<|im_end|>",)),
)
"""The first matching entry applies."""


def declared_stop_tokens(name: str) -> tuple[str, ...]:
    """Returns the stop tokens of the model of a template, or nothing if they are not known."""
    name = name.partition("/")[2]
    return next((tokens for pattern, tokens in _STOP_TOKENS if re.search(pattern, name, re.IGNORECASE)), ())
