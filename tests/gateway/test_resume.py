"""A cancelled call goes on behind its own ids, and its tokens count once."""

from __future__ import annotations

import asyncio
import json
from itertools import accumulate
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Delivery, ToyCodec
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run

ANSWER = "a long answer about many things"


def _rest_of_answer(ask: ScriptedRequest) -> str:
    """The same answer always, and behind a part of it the rest."""
    _, _, begun = ask.prompt_text.rpartition("assistant:")
    return ANSWER.removeprefix(begun) if ANSWER.startswith(begun) else ANSWER


class HeldEngine(ScriptedEngine):
    """Waits behind so many ids of each request."""

    hold_after: list[int]
    held: asyncio.Event

    async def generate(self, *args: Any, **options: Any) -> Any:
        left = self.hold_after.pop(0) if self.hold_after else None
        async for chunk in super().generate(*args, **options):
            if left is not None and left < len(chunk.ids):
                self.held.set()
                await asyncio.Event().wait()
            left = None if left is None else left - len(chunk.ids)
            yield chunk


def _engine(*holds: int) -> HeldEngine:
    engine = HeldEngine(ToyCodec.chatml(), _rest_of_answer, chunk_size=1)
    engine.hold_after = list(holds)
    engine.held = asyncio.Event()
    return engine


async def _cancelled(a: Agent, resume: str = "") -> str:
    """Streams until the engine holds, hangs up, and gives the id of the call."""
    headers = {"authorization": f"Bearer {a.session.api_key}", "x-branchline-resume": resume}
    body = {"messages": [{"role": "user", "content": "p"}], "stream": True}
    url = f"{a.session.base_url}/chat/completions"
    a.engine.held.clear()  # type: ignore[attr-defined]
    async with httpx.AsyncClient() as http, http.stream("POST", url, json=body, headers=headers) as response:
        line = await anext(response.aiter_lines())
        await a.engine.held.wait()  # type: ignore[attr-defined]
        return str(json.loads(line[6:])["id"])


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans())
def test_however_often_it_was_cancelled_the_answer_is_the_whole_one_and_counts_once(
    holds: list[int], stream: bool
) -> None:
    async def test() -> None:
        async with agent(engine=_engine(*holds)) as a:
            call = ""
            for _ in holds:
                call = await _cancelled(a, call)
            again = {"x-branchline-resume": call}
            if stream:
                response = await a.ask("p", headers=again, stream=True)
                assert response.text.endswith("data: [DONE]\n\n")
            else:
                answer = (await a.ask("p", headers=again)).json()["choices"][0]
                assert (answer["message"]["content"], answer["finish_reason"]) == (ANSWER, "stop")
            told = await a.get("/samples")
            assert told["report"]["sampled_tokens"] == told["report"]["trained_tokens"] == len(ANSWER) + 1
            assert not told["report"]["dropped"]
            (sample,) = told["samples"]
            assert bytes(sample["response_ids"][:-1]).decode() == ANSWER
            assert all(sample["response_mask"])
            # Each request went on behind the ids before it, and nothing was sampled twice.
            for ids, done in zip(a.engine.received_prompts[1:], accumulate(holds), strict=True):
                assert bytes(ids.tolist()[-done:]).decode() == ANSWER[:done]
            assert (await a.get(""))["sampled_tokens"] == len(ANSWER) + 1

    run(test)


def test_a_call_that_left_nothing_is_begun_again() -> None:
    async def test() -> None:
        async with agent(engine=_engine()) as a:
            answer = await a.ask("p", headers={"x-branchline-resume": "chatcmpl-unknown"})
            assert answer.json()["choices"][0]["message"]["content"] == ANSWER

    run(test)


def test_only_a_cancelled_call_goes_on_with_its_own_prompt_and_once() -> None:
    async def test() -> None:
        async with agent(engine=_engine(5)) as a:
            call = await _cancelled(a)
            resume = {"x-branchline-resume": call}
            assert (await a.ask("another", headers=resume)).status_code == 409
            assert (await a.ask("p", headers=resume, n=2)).status_code == 400
            done = await a.ask("p", headers=resume)
            assert done.status_code == 200
            refused = await a.ask("p", headers=resume)
            assert refused.status_code == 409
            assert "resumed already" in refused.text
            assert (await a.ask("p", headers={"x-branchline-resume": done.json()["id"]})).status_code == 409

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_server_had_sent_when_the_client_left_is_kept(stream: bool) -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.hold_after = 5
            async with agent(fleet=VllmEngine(server.url), sampling={"max_tokens": 9}) as a:
                asking = asyncio.create_task(a.ask("p", stream=stream))
                await server.is_held.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                tree = a.session.managed.session.tree
                while not tree.calls or tree.delivery(tree.calls[0]) != Delivery.CANCELLED:
                    await asyncio.sleep(0.001)
                ids = tree.nodes[-1].sampled_ids
                assert ids is not None
                assert 0 < len(ids) <= 5

    run(test)


def test_nothing_is_kept_behind_a_stop_text_though_the_server_had_sent_more() -> None:
    async def test() -> None:
        async with FakeVllm() as server:
            server.ids_per_event = 3
            async with agent(fleet=VllmEngine(server.url), sampling={"max_tokens": 12}) as a:
                whole = (await a.ask("p")).json()["choices"][0]["message"]["content"]
                answer = (await a.ask("p", stop=whole[1], return_token_ids=True)).json()["choices"][0]
                assert answer["message"]["content"] == whole[: whole.index(whole[1])]
                assert len(a.session.managed.session.tree.nodes[-1].sampled_ids or ()) == len(
                    answer["token_ids"]
                )

    run(test)


@pytest.mark.parametrize("most", [3, 5])
def test_what_is_left_of_the_tokens_is_all_that_is_sampled(most: int) -> None:
    async def test() -> None:
        async with agent(engine=_engine(3)) as a:
            call = await _cancelled(a)
            answer = (await a.ask("p", headers={"x-branchline-resume": call}, max_tokens=most)).json()
            choice = answer["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER[:most], "length")
            assert answer["usage"]["completion_tokens"] == most
            assert len(a.engine.received_prompts) == (1 if most == 3 else 2)

    run(test)


@pytest.mark.parametrize(("tokens", "said", "finish"), [(45, ANSWER, "stop"), (25, ANSWER[:25], "length")])
@pytest.mark.parametrize("holds", [(20,), (20, 3)])
def test_what_was_sampled_before_counts_once_against_a_sessions_limit(
    holds: tuple[int, ...], tokens: int, said: str, finish: str
) -> None:
    async def test() -> None:
        async with agent(engine=_engine(*holds), limits={"tokens": tokens}) as a:
            call = ""
            for _ in holds:
                call = await _cancelled(a, call)
            answer = (await a.ask("p", headers={"x-branchline-resume": call})).json()["choices"][0]
            assert (answer["message"]["content"], answer["finish_reason"]) == (said, finish)
            live = a.session.managed
            assert live.sampled_tokens == min(tokens, len(ANSWER) + 1)
            assert live.reserved_tokens == 0
            assert (await a.ask("q")).status_code == (409 if finish == "length" else 200)

    run(test)


def test_an_answer_that_nobody_heard_is_told_again_though_its_session_has_no_tokens_left() -> None:
    async def test() -> None:
        async with agent(engine=_engine(), limits={"tokens": 10}) as a:
            name = {"x-branchline-call": "turn"}
            first = (await a.ask("p", headers=name)).json()["choices"][0]
            again = (await a.ask("p", headers=name)).json()["choices"][0]
            assert (first["message"]["content"], first["finish_reason"]) == (ANSWER[:10], "length")
            assert again == first
            assert a.session.managed.sampled_tokens == 10
            assert len(a.engine.received_prompts) == 1

    run(test)


def test_a_call_that_goes_on_reserves_only_what_it_has_not_sampled_yet() -> None:
    async def test() -> None:
        async with agent(engine=_engine(20, 4), limits={"tokens": 40}) as a:
            call = await _cancelled(a)
            live = a.session.managed
            headers = {"x-branchline-resume": call}
            a.engine.held.clear()  # type: ignore[attr-defined]
            going_on = asyncio.create_task(a.ask("p", headers=headers, max_tokens=32))
            await a.engine.held.wait()  # type: ignore[attr-defined]
            assert (live.sampled_tokens, live.reserved_tokens) == (20, 12)
            beside = (await a.ask("q", max_tokens=30)).json()["usage"]
            assert beside["completion_tokens"] == 8
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)

    run(test)


@pytest.mark.parametrize("times", [1, 3])
def test_a_call_and_those_that_go_on_from_it_count_as_one_against_a_sessions_limit(times: int) -> None:
    async def test() -> None:
        async with agent(engine=_engine(*[3] * times), limits={"calls": 2}) as a:
            call = ""
            for _ in range(times):
                call = await _cancelled(a, call)
            done = await a.ask("p", headers={"x-branchline-resume": call})
            assert done.json()["choices"][0]["message"]["content"] == ANSWER
            assert (await a.ask("another")).status_code == 200
            refused = await a.ask("a third")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "out_of_calls")

    run(test)


def test_a_cancelled_call_that_nobody_goes_on_from_counts() -> None:
    async def test() -> None:
        async with agent(engine=_engine(3), limits={"calls": 1}) as a:
            call = await _cancelled(a)
            while a.session.managed.running_calls:
                await next(iter(a.session.managed.running_calls.values())).wait()
            assert (await a.ask("p")).status_code == 409
            assert (await a.ask("p", headers={"x-branchline-resume": call})).status_code == 200

    run(test)
