"""Over real HTTP: a token that is heard and one that is told reach client and tree as the same thing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline import Message, ToolCall, ToyCodec
from tests.gateway.hearing import (
    END,
    Heard,
    Mouth,
    engine_of,
    recorded,
    said_in,
    speaking,
    streaming,
    timeless,
    until,
    watch,
)
from tests.gateway.protocols.every import PROTOCOLS, post
from tests.gateway.running import Agent, run

CODEC = ToyCodec.chatml()
WORDS = "one two"
RICH = Message(
    "assistant", "Grüße 🙂", reasoning="hm, é", calls=(ToolCall("look", '{"at": "ü"}'), ToolCall("go", "{}"))
)
TOOLS: dict[str, Any] = {
    "chat/completions": [{"type": "function", "function": {"name": name}} for name in ("look", "go")],
    "responses": [{"type": "function", "name": name, "parameters": {}} for name in ("look", "go")],
    "messages": [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "go")],
}
WISHES: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {},
        {"logprobs": True, "top_logprobs": 1},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
    ],
    "completions": [{}, {"logprobs": 1}, {"return_token_ids": True}],
    "responses": [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}],
    "messages": [{"max_tokens": 100}],
}
protocols = pytest.mark.parametrize("protocol", PROTOCOLS)


@protocols
def test_tokens_that_come_one_by_one_arrive_one_by_one(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking(sampling_defaults={"max_tokens": 100}) as (a, mouth):
            async with streaming(a, mouth, protocol) as client:
                pieces = await client.hear(WORDS)
                mouth.say(END, "stop")
                await client.rest()
            assert said_in(protocol, client.events) == WORDS
            # The first begins the answer and the last ends it: both wait. Nobody waits for the others.
            assert [piece.encode() for piece in pieces[1:]] == noted.direct
            assert bytes(noted.heard).decode() == WORDS[1:]
            assert noted.taken == [*WORDS[:1].encode(), *END]
            streamed = recorded(a)
        async with speaking(sampling_defaults={"max_tokens": 100}) as (a, mouth):
            assert await _whole(a, mouth, protocol) == streamed

    run(test)


async def _whole(a: Agent, mouth: Mouth, protocol: str) -> list[Any]:
    """What is recorded of the same answer when it is asked for, and comes, as a whole."""
    asking = asyncio.ensure_future(post(a, protocol, "q"))
    await until(lambda: bool(mouth.requests))
    mouth.say([*WORDS.encode(), *END], "stop")
    assert (await asking).status_code == 200
    return recorded(a)


async def _told(
    protocol: str, wish: dict[str, Any], noted: Heard
) -> tuple[list[dict[str, Any]], list[Any], list[bytes]]:
    """The events of a rich answer, what is recorded of it, and what of it took the short way."""
    if protocol in TOOLS:
        wish = {**wish, "tools": TOOLS[protocol]}
    async with speaking() as (a, mouth):
        async with streaming(a, mouth, protocol, {"x-branchline-call": "turn"}, **wish) as client:
            for token in CODEC.spell(RICH, stop=False).tolist():
                before = noted.count
                mouth.say([token])
                # Not every token says something; each is read before the next one comes.
                await until(lambda before=before: noted.count > before)  # type: ignore[misc]
            mouth.say(END, "stop")
            await client.rest()
        return timeless(client.events), recorded(a), noted.direct


@pytest.mark.parametrize(
    ("protocol", "wish"), [(protocol, wish) for protocol in PROTOCOLS for wish in WISHES[protocol]]
)
def test_a_client_cannot_tell_which_way_its_tokens_came(protocol: str, wish: dict[str, Any]) -> None:
    async def test() -> None:
        with pytest.MonkeyPatch.context() as patched:
            events, record, direct = await _told(protocol, wish, watch(patched))
            assert direct
        with pytest.MonkeyPatch.context() as patched:
            other_events, other_record, none = await _told(protocol, wish, watch(patched, by_task=True))
            assert not none
        assert events == other_events
        assert record == other_record
        ((ids, _, versions, said, finish),) = record
        assert ids == CODEC.spell(RICH).tolist()
        assert versions == [(len(ids), 0)]
        assert said == (RICH.text, RICH.reasoning, [(call.name, call.arguments) for call in RICH.calls])
        assert finish == "stop"

    run(test)


def test_weights_may_change_between_heard_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            engine = engine_of(a)
            async with streaming(a, mouth) as client:
                await client.hear("abc")
                await engine.resume(5)
                await client.hear("de")
                await engine.pause()
                await engine.resume(6)
                await until(lambda: len(mouth.requests) == 2)
                await client.hear("fg")
                mouth.say(END, "stop")
                await client.rest()
            assert said_in("chat/completions", client.events) == "abcdefg"
            ((ids, logprobs, versions, _, _),) = recorded(a)
            assert ids == [*b"abcdefg", *END]
            assert versions == [(3, 0), (2, 5), (3, 6)]
            first = len(mouth.bodies[0]["prompt"])
            assert logprobs == [-(first + place + 1) / 8 for place in range(8)]
            assert mouth.bodies[1]["prompt"][first:] == [*b"abcde"]
            assert bytes(noted.heard) == b"bcdefg"

    run(test)


@pytest.mark.parametrize(
    ("wish", "said", "kept"),
    [
        ({"stop": ["wo"]}, "one t", [*b"one two"]),
        ({"parallel_tool_calls": False, "tools": TOOLS["chat/completions"]}, WORDS, [*b"one two", *END]),
    ],
)
def test_an_answer_that_may_end_before_its_engine_ends_it_is_not_heard(
    wish: dict[str, Any], said: str, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            async with streaming(a, mouth, **wish) as client:
                for token in WORDS.encode():
                    before = noted.count
                    mouth.say([token])
                    await until(lambda before=before: noted.count > before)  # type: ignore[misc]
                mouth.say(END, "stop")
                await client.rest()
            assert said_in("chat/completions", client.events) == said
            assert client.text.endswith("data: [DONE]\n\n")
            assert recorded(a)[0][0] == kept
            assert (noted.heard, noted.direct) == ([], [])

    run(test)


def test_a_single_tool_call_ends_an_answer_though_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            wish = {"parallel_tool_calls": False, "tools": TOOLS["chat/completions"]}
            async with streaming(a, mouth, **wish) as client:
                mouth.say(CODEC.spell(RICH, stop=False).tolist())
                await client.rest()
            assert client.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
            assert [name for name, _ in recorded(a)[0][3][2]] == ["look"]
            assert not noted.heard

    run(test)


def test_several_answers_at_once_are_told_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            async with streaming(a, mouth, n=2) as client:
                for first, second in zip(b"ab", b"xy", strict=True):
                    for of, token in enumerate((first, second)):
                        mouth.say([token], of=of)
                        await client.piece()
                for of in range(2):
                    mouth.say(END, "stop", of=of)
                await client.rest()
            told = [(choice["index"], choice["delta"].get("content")) for choice in _choices(client.events)]
            said = [(index, text) for index, text in told if text]
            assert [text for _, text in said] == ["a", "x", "b", "y"]
            # Which of the two the server was asked for first is nobody's promise.
            first, second = said[0][0], said[1][0]
            assert [index for index, _ in said] == [first, second, first, second]
            assert {first, second} == {0, 1}
            assert sorted(answer[0] for answer in recorded(a)) == [[*b"ab", *END], [*b"xy", *END]]
            assert not noted.heard

    run(test)


def _choices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"]]


def test_tokens_that_come_together_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch(monkeypatch)

    async def test() -> None:
        async with speaking() as (a, mouth):
            async with streaming(a, mouth) as client:
                await client.hear("ab")
                mouth.say(b"cde")
                piece = await client.piece()
                mouth.say(END, "stop")
                await client.rest()
            assert said_in("chat/completions", client.events) == "abcde"
            assert noted.direct[-1].decode() == piece
            assert piece.count('"content":') == 3  # the toy's parser says letter by letter

    run(test)
