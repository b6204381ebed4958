"""Well-formed outputs parsed by the `renderers` package too: both must find the same message."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.chat.parsing.samples import WITH_CALLS, Writer, call, parse_text

renderers = pytest.importorskip(
    "renderers.parsing", reason="renderers is not installed: nothing to compare with"
)

SPECIAL = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|start|>", "<|channel|>", "<|message|>",
    "<|end|>", "<|call|>", "<|return|>", "<|constrain|>",
]  # fmt: skip
IDS = {token: 256 + place for place, token in enumerate(SPECIAL)}
SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


class ByteTokenizer:
    """Bytes, and the markers of every family as single ids."""

    unk_token_id = -1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [
            i for part in SPECIAL_PATTERN.split(text) for i in ([IDS[part]] if part in IDS else part.encode())
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        decoded = [bytes([i]) if i < 256 else SPECIAL[i - 256].encode() for i in ids]
        return b"".join(decoded).decode("utf-8", "replace")

    def convert_tokens_to_ids(self, token: str) -> int:
        return IDS.get(token, -1)


def ids_of(**names: str) -> dict[str, int]:
    return {name: IDS[token] for name, token in names.items()}


THINK = ids_of(think_id="<think>", think_end_id="</think>")
TOOL_CALL = ids_of(tool_call_id="<tool_call>", tool_call_end_id="</tool_call>")
REFERENCE_PARSERS = {
    "hermes": partial(renderers.parse_qwen3, reasoning_end_id=IDS["</think>"], stop_ids=set(), **TOOL_CALL),
    "qwen3_coder": partial(renderers.parse_qwen35, stop_ids=set(), **THINK, **TOOL_CALL),
    "glm": partial(
        renderers.parse_glm,
        stop_ids=set(),
        **THINK,
        **TOOL_CALL,
        **ids_of(arg_key_id="<arg_key>", arg_key_end_id="</arg_key>"),
        **ids_of(arg_value_id="<arg_value>", arg_value_end_id="</arg_value>"),
    ),
    "minimax": partial(
        renderers.parse_minimax,
        stop_ids=set(),
        **THINK,
        **ids_of(tool_call_id="<minimax:tool_call>", tool_call_end_id="</minimax:tool_call>"),
    ),
    "deepseek": partial(
        renderers.parse_deepseek_v3,
        stop_ids=set(),
        **ids_of(tool_calls_begin_id="<｜tool▁calls▁begin｜>", tool_calls_end_id="<｜tool▁calls▁end｜>"),
        **ids_of(tool_call_begin_id="<｜tool▁call▁begin｜>", tool_call_end_id="<｜tool▁call▁end｜>"),
        **ids_of(tool_sep_id="<｜tool▁sep｜>"),
    ),
    "kimi": partial(
        renderers.parse_kimi_k2,
        stop_ids=set(),
        **ids_of(tool_calls_section_begin_id="<|tool_calls_section_begin|>"),
        **ids_of(tool_calls_section_end_id="<|tool_calls_section_end|>"),
        **ids_of(tool_call_begin_id="<|tool_call_begin|>", tool_call_end_id="<|tool_call_end|>"),
        **ids_of(tool_call_argument_begin_id="<|tool_call_argument_begin|>"),
    ),
    "llama3": partial(renderers.parse_llama_3, stop_ids=set()),
    "harmony": partial(
        renderers.parse_gpt_oss,
        **ids_of(return_id="<|return|>", call_id="<|call|>", start_id="<|start|>", end_id="<|end|>"),
        **ids_of(channel_id="<|channel|>", message_id="<|message|>", constrain_id="<|constrain|>"),
    ),
}
"""It has no parser for Mistral, and its DeepSeek parser does not read V3.1's calls."""
COMPARED = [
    (name, write) for name, write in WITH_CALLS if name in REFERENCE_PARSERS and "v31" not in write.__name__
]
TEXTS = ["", "Hello, wörld.", "Two\n\nlines, 漢字."]
ARGUMENTS = ['{"a": 1}', '{"city": "Ulm", "deep": {"x": [1, null, "é"]}, "b": true}', "{}"]


@pytest.mark.parametrize(("name", "write"), COMPARED, ids=[write.__name__ for _, write in COMPARED])
@pytest.mark.parametrize("reasoning", ["", "Hm,\nwell."])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_both_find_the_same_message(name: str, write: Writer, reasoning: str, text: str, count: int) -> None:
    if name == "llama3":
        # Its parser reads one call and no reasoning.
        reasoning, count = "", min(count, 1)
    for arguments in ARGUMENTS:
        output = write(text, [call(f"tool{n}", arguments, n, format=name) for n in range(count)])
        header = ""
        if name == "harmony":
            # Its parser needs the header with which the prompt ends.
            header = "<|start|>assistant"
            thought = f"<|channel|>analysis<|message|>{reasoning}<|end|>" + (
                "<|start|>assistant" if output else ""
            )
            output = (thought if reasoning else "") + output
        elif reasoning:
            output = f"<think>\n{reasoning}\n</think>\n\n{output}"
        tokenizer = ByteTokenizer()
        theirs: Any = REFERENCE_PARSERS[name](tokenizer, tokenizer.encode(header + output))
        ours = parse_text(
            name, output, reasoning="none" if name in ("harmony", "llama3") else "think"
        ).message
        assert ours.content.strip() == (theirs.content or "").strip()
        assert ours.reasoning_content.strip() == (theirs.reasoning_content or "").strip()
        found = [(made.name, json.loads(made.arguments)) for made in ours.tool_calls]
        assert found == [(made.name, made.arguments) for made in theirs.tool_calls]
        if name == "kimi":
            assert [made.id for made in ours.tool_calls] == [made.id for made in theirs.tool_calls]
