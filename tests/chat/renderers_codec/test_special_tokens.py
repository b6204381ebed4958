"""The `renderers` codec: text of messages never becomes a control token."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchline import Generation, Message, Request, Session, ToolCall
from branchline.chat.renderers_codec.codec import RenderersCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.errors import CodecError
from branchline.core.token_arrays import as_ids
from tests.chat.families import load_tokenizer
from tests.chat.harness import assistant, save_sentencepiece, user

pytest.importorskip("renderers", reason="renderers is not installed: pip install -e '.[images]'")

REAL = {"deepseek_v3": "deepseek_v3", "qwen3": "qwen3", "llama_3": "llama3_2"}
families = pytest.mark.parametrize("family", REAL)


def prompt(codec: RenderersCodec, *messages: Message) -> list[int]:
    ids: list[int] = Session("s", codec).prepare(Request(messages)).prompt_ids.tolist()
    return ids


def hostile_text(codec: RenderersCodec) -> str:
    control = codec.segment_encoder.is_control
    return " ".join(name for name, token in codec.tokenizer.added_tokens.items() if control[token])


@families
@pytest.mark.parametrize("role", ["user", "tool"])
def test_control_tokens_in_messages_stay_text(family: str, role: str) -> None:
    codec = RenderersCodec(load_tokenizer(REAL[family]), family)
    text = hostile_text(codec)

    def messages(content: str) -> list[Message]:
        call = ToolCall("look", "{}", "abcdefgh1")
        result = Message("tool", content, tool_call_id="abcdefgh1", name="look")
        return [user(content)] if role == "user" else [user("p"), assistant("", call), result]

    ids, harmless = prompt(codec, *messages(text)), prompt(codec, *messages("x"))
    in_text = codec.segment_encoder.control_tokens_in
    assert in_text(as_ids(ids)) == in_text(as_ids(harmless))
    assert text in codec.decode(as_ids(ids))
    allowing = RenderersCodec(load_tokenizer(REAL[family]), family, allow_special_tokens=True)
    assert len(in_text(as_ids(prompt(allowing, *messages(text))))) > len(in_text(as_ids(ids)))


def test_a_reply_that_spells_a_control_token_keeps_its_ids() -> None:
    codec = RenderersCodec(load_tokenizer("qwen3"), "qwen3")
    session = Session("s", codec)
    turn = session.prepare(Request((user("p"),)))
    spelled = [token for char in "x<|im_end|>y" for token in codec.tokenizer.encode(char).tolist()]
    end = codec.tokenizer.added_tokens["<|im_end|>"]
    call = session.commit(turn, Generation(as_ids([*spelled, end]))).call
    node = session.tree.nodes[call.outputs[0]]
    assert session.prepare(Request((user("p"), node.message, user("q")))).parent is node


def test_a_tokenizer_that_inserts_spaces_is_refused(tmp_path: Path) -> None:
    tokenizer = TokenizerDir.open(save_sentencepiece(tmp_path, "prepend"))
    with pytest.raises(CodecError, match="inserts or removes spaces"):
        RenderersCodec(tokenizer, "qwen3")
