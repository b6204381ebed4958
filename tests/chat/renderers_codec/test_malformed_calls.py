"""Calls whose arguments are not a JSON object, in the next prompt of every family: no renderer loses them.

Some renderers silently drop such arguments and some refuse them; both get an object that contains them.
Sampled calls keep their ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from branchline import Session
from branchline.chat.renderers_codec.codec import RenderersCodec
from branchline.chat.renderers_codec.families import FAMILIES
from branchline.core.call import Generation, Request
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import as_ids
from tests.chat.parsing import samples
from tests.chat.renderers_codec.test_codec import TOOLS, codec_of, markers

__all__ = ["markers"]

PLAIN_TEXT = "<so> it is"
FORMATTED_CALLS: dict[str, samples.Writer] = {
    "hermes": samples.hermes,
    "kimi": samples.kimi,
    "deepseek": samples.deepseek,
    "llama3": samples.llama3,
    "glm": lambda _, calls: f"<tool_call>{calls[0].name}\n{calls[0].arguments}\n</tool_call>",
    "qwen3_coder": lambda _, calls: (
        f"<tool_call>\n<function={calls[0].name}>\n{calls[0].arguments}\n</function>\n</tool_call>"
    ),
    "minimax": lambda _, calls: (
        f'<minimax:tool_call>\n<invoke name="{calls[0].name}">\n{calls[0].arguments}\n</invoke>\n'
        "</minimax:tool_call>"
    ),
}
"""A call in each format."""
MALFORMED = {
    "llama3": ["[1]", "null"],
    "glm": [PLAIN_TEXT, "<arg_key>at</arg_key>", "<arg_key>at</arg_key>\n<arg_value>1</arg_value>so"],
    "qwen3_coder": [PLAIN_TEXT, "[1]", "<parameter=at>\n1", "<parameter=at>\n1\n</parameter>so"],
    "minimax": [PLAIN_TEXT, "[1]", '<parameter name="at">1', '<parameter name="at">1</parameter>so'],
}
"""The malformed arguments of formats in which other text is not a call."""
ALL_ARGUMENTS = ["{at: 1", '{"at": 1,}', "[1]", '"{}"', "null", "3", '{"at": 1}}', '{"at": "\n"}', PLAIN_TEXT]
CASES = [
    (family, arguments)
    for family in sorted(FAMILIES)
    for arguments in MALFORMED.get(FAMILIES[family].output_format.tool_format, ALL_ARGUMENTS)
]


def rewrite_reasons_after(codec: RenderersCodec, call: ToolCall, text: str, history: Any) -> dict[int, str]:
    """Returns for each stop id why the call does not keep its ids in the next prompt; empty: it does."""
    question, reasons = Message("user", "q"), {}
    for stop in codec.stop_ids:
        session = Session("s", codec, history=history)
        turn = session.prepare(Request((question,), TOOLS))
        output = as_ids([*codec.tokenizer.encode(text).tolist(), stop])
        message = codec.parse(output)
        assert [(made.name, made.arguments) for made in message.tool_calls] == [(call.name, call.arguments)]
        node = session.tree.nodes[session.commit(turn, Generation(output)).call.outputs[0]]
        echoed = Message(
            "assistant", message.content, tool_calls=(ToolCall(call.name, call.arguments, "renamed"),)
        )
        answer = Message("tool", "Invalid JSON", tool_call_id="renamed")
        next_turn = session.prepare(Request((question, echoed, answer), TOOLS))
        kept = [*turn.prompt_ids.tolist(), *output.tolist()]
        extends = next_turn.prompt_ids[: len(kept)].tolist() == kept
        assert extends == (next_turn.parent is node) == (not next_turn.rewrite_reason)
        assert "Invalid JSON" in codec.decode(next_turn.prompt_ids[len(kept) if extends else 0 :])
        reasons[stop] = next_turn.rewrite_reason
    return reasons


def reasoning_variants(codec: RenderersCodec) -> list[str]:
    """Returns texts before a call: without reasoning (some families show an empty block), and with."""
    if codec._family_config.output_format.reasoning_format != "think":
        return [""]
    return (
        ["</think>", "hm\n</think>\n\n"]
        if codec.output_format({}).starts_in_reasoning
        else ["", "<think>\nhm\n</think>\n\n"]
    )


@pytest.mark.parametrize("history", ["template", "verbatim"])
@pytest.mark.parametrize(("family", "arguments"), CASES)
def test_a_malformed_call_keeps_its_ids_like_a_well_formed_one(
    markers: Path, family: str, arguments: str, history: Any
) -> None:
    codec = codec_of(family, markers)
    format = codec._family_config.output_format.tool_format
    malformed, good = (ToolCall("work", text, "functions.work:0") for text in (arguments, '{"at": 1}'))
    well_formed = getattr(samples, format)("", [good]).lstrip("\n")
    for reasoning in reasoning_variants(codec):
        reasons = rewrite_reasons_after(
            codec, malformed, reasoning + FORMATTED_CALLS[format]("", [malformed]), history
        )
        assert reasons == rewrite_reasons_after(codec, good, reasoning + well_formed, history)
    if history == "template" and family == "deepseek_r1":
        # It shows no reasoning of earlier turns.
        assert "think_strip" in reasons.values()
    else:
        assert "" in reasons.values()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("arguments", ["{at: 1", "[1]", '"x"', "null", PLAIN_TEXT])
def test_a_client_call_is_shown_with_all_of_its_text(markers: Path, family: str, arguments: str) -> None:
    codec = codec_of(family, markers)
    unsampled = Message("assistant", "", tool_calls=(ToolCall("work", arguments, "functions.work:0"),))
    messages = [Message("user", "q"), unsampled, Message("tool", "r", tool_call_id="functions.work:0")]
    turn = Session("s", codec).prepare(Request(tuple(messages), TOOLS))
    assert arguments in codec.decode(turn.prompt_ids)
