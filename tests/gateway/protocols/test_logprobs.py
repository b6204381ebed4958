"""Logprobs in OpenAI's protocols: bytes, text offsets, and the assignment of tokens to texts."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import Message, ToolCall, ToyCodec
from branchline.core.token_arrays import as_ids
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.protocols.logprobs import LogprobAligner, logprob_entries
from branchline.testing.reply_encoder import TemplateReplyEncoder
from tests.chat.families import load_codec
from tests.gateway.harness import agent, run
from tests.gateway.protocols.protocol_clients import TOOLS, events_in, post

ODD = "naïve 🫠 ᚠ done"
INCLUDE = ["message.output_text.logprobs"]
streamed = pytest.mark.parametrize("stream", [False, True])


def engine_of(family: str, reply: Any) -> tuple[ScriptedEngine, Any]:
    codec: Any = ToyCodec.chatml() if family == "toy" else load_codec(family)
    is_plain = family == "toy" or isinstance(reply, str)
    encoder = codec if is_plain else TemplateReplyEncoder(codec, Random(7))

    class ReplyCodec:
        encode_reply = staticmethod(encoder.encode_reply)
        decode = staticmethod(codec.decode)

    return ScriptedEngine(ReplyCodec(), replies(reply), chunk_size=3), codec  # type: ignore[arg-type]


def decoded(entries: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


@pytest.mark.parametrize("family", ["toy", "qwen3"])
@streamed
def test_bytes_of_tokens_are_the_text_even_inside_a_character(family: str, stream: bool) -> None:
    async def test() -> None:
        engine, codec = engine_of(family, ODD)
        async with agent(engine=engine, codec=codec) as a:
            entries = await _chat(a, stream, logprobs=True)
            assert decoded(entries).removesuffix("<end>").removesuffix("<|im_end|>") == ODD
            assert any(entry["token"] == "�" for entry in entries) or family == "toy"
            assert all(entry["top_logprobs"] == [] for entry in entries)

    run(test)


async def _chat(a: Any, stream: bool, **body: Any) -> list[dict[str, Any]]:
    if not stream:
        entries: list[dict[str, Any]] = (await a.ask("q", **body)).json()["choices"][0]["logprobs"]["content"]
        return entries
    events = [event["choices"][0].get("logprobs") for event in await a.stream("q", **body)]
    return [entry for event in events if event for entry in event["content"]]


@streamed
def test_top_logprobs_list_the_sampled_token(stream: bool) -> None:
    async def test() -> None:
        async with agent("yes") as a:
            for entry in await _chat(a, stream, logprobs=True, top_logprobs=5):
                plain = {name: entry[name] for name in ("token", "logprob", "bytes")}
                assert entry["top_logprobs"] == [plain]
            assert (await _chat(a, stream, logprobs=True, top_logprobs=0))[0]["top_logprobs"] == []

    run(test)


@pytest.mark.parametrize("family", ["toy", "qwen3"])
def test_text_offsets_continue_across_stream_events(family: str) -> None:
    async def test() -> None:
        engine, codec = engine_of(family, ODD)
        async with agent(engine=engine, codec=codec) as a:
            body = {"logprobs": 1, "n": 2}
            whole = [
                choice["logprobs"] for choice in (await post(a, "completions", "q", **body)).json()["choices"]
            ]
            events = events_in((await post(a, "completions", "q", stream=True, **body)).text)
            for index, expected in enumerate(whole):
                choices = [event["choices"][0] for event in events]
                parts = [choice["logprobs"] for choice in choices if choice["index"] == index]
                for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
                    assert [value for part in parts if part for value in part[name]] == expected[name]
                assert expected["top_logprobs"][0] == {expected["tokens"][0]: expected["token_logprobs"][0]}
                assert expected["text_offset"] == sorted(expected["text_offset"])
                assert expected["text_offset"][-1] < len(ODD) + 1
            plain = (await post(a, "completions", "q", logprobs=0)).json()["choices"][0]["logprobs"]
            assert plain["top_logprobs"] is None

    run(test)


# -- Responses ---------------------------------------------------------------------------------------

THOUGHT = Message("assistant", ODD, reasoning_content="think yes: " + ODD)
CALLS = Message("assistant", "t", reasoning_content="hm", tool_calls=(ToolCall("look", '{"at": "t"}'),))


@pytest.mark.parametrize("family", ["toy", "qwen3"])
@pytest.mark.parametrize("reply", [ODD, THOUGHT, CALLS], ids=["text", "thought", "calls"])
@streamed
def test_response_has_logprobs_of_its_text_only(family: str, reply: Any, stream: bool) -> None:
    async def test() -> None:
        engine, codec = engine_of(family, reply)
        text = reply if isinstance(reply, str) else reply.content
        async with agent(engine=engine, codec=codec) as a:
            response = await post(
                a, "responses", "q", include=INCLUDE, top_logprobs=2, tools=TOOLS, stream=stream
            )
            if stream:
                events = events_in(response.text)
                item = next(item for item in events[-1]["response"]["output"] if item["type"] == "message")
                deltas = [event for event in events if event["type"] == "response.output_text.delta"]
                entries = [entry for event in deltas for entry in event["logprobs"]]
                assert entries == item["content"][0]["logprobs"]
                (done,) = (event for event in events if event["type"] == "response.output_text.done")
                assert done["logprobs"] == entries
            else:
                item = next(item for item in response.json()["output"] if item["type"] == "message")
            entries = item["content"][0]["logprobs"]
            # A token may hold more than the text, such as a space before it.
            assert decoded(entries).strip() == text
            assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 1 for entry in entries)

    run(test)


@streamed
def test_response_has_no_logprobs_by_default(stream: bool) -> None:
    async def test() -> None:
        async with agent(ODD) as a:
            response = await post(a, "responses", "q", stream=stream)
            whole = events_in(response.text)[-1]["response"] if stream else response.json()
            assert whole["output"][0]["content"][0]["logprobs"] == []

    run(test)


@given(st.lists(st.text(min_size=1, max_size=8)), st.integers(0, 2**32))
def test_every_token_of_a_text_is_assigned_once(texts: list[str], seed: int) -> None:
    codec, random = ToyCodec.chatml(), Random(seed)
    aligner = LogprobAligner(codec, with_top_logprobs=False)
    ids = as_ids([258, *codec.encode("mark"), 259, *codec.encode("".join(texts))])
    logprobs = -np.arange(len(ids), dtype=np.float32)
    cut = random.randint(0, len(ids))
    aligner.add_tokens(ids[:cut], logprobs[:cut])
    aligner.add_tokens(ids[cut:], logprobs[cut:])
    # The first text must not match inside the mark before it.
    aligner.entries_for_text("mark")
    entries = [entry for text in texts for entry in aligner.entries_for_text(text)]
    assert entries == logprob_entries(ids[6:], logprobs[6:], codec, with_top_logprobs=False)


def test_text_that_is_not_in_the_tokens_has_no_entries() -> None:
    aligner = LogprobAligner(ToyCodec.chatml(), with_top_logprobs=False)
    aligner.add_tokens(as_ids(list(b"abc")), np.zeros(3, np.float32))
    assert aligner.entries_for_text("x") == []
    assert [entry["token"] for entry in aligner.entries_for_text("bc")] == ["b", "c"]
    aligner.add_tokens(as_ids(list(b"de")), None)
    assert aligner.entries_for_text("d") == []
