"""The gateway with a real vLLM: what the engine received and returned is exactly what is recorded.

`make test-vllm` starts the servers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import Engine, SamplingParams
from branchline.engines.replicas import Replicas
from tests.vllm.vllm_harness import (
    MODEL,
    TIMEOUT_S,
    URLS,
    RecordedGeneration,
    RecordingVllmEngine,
    SessionClient,
    VllmMetrics,
    connect,
    gateway_client,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not URLS, reason="needs BRANCHLINE_VLLM_URLS: make test-vllm"),
]
DEV, PLAIN = URLS or ("", "")
IM_END = 2
LONG_PROMPT = "Tell me a long story about a river."
Test = Callable[[], Coroutine[Any, Any, None]]


def run(test: Test) -> None:
    asyncio.run(asyncio.wait_for(test(), 3 * TIMEOUT_S))


async def assert_exact(agent: SessionClient, *engines: RecordingVllmEngine) -> None:
    """C1: the prompt and output of every generation are a path of the tree, and the tree has no other."""
    generations = [generation for engine in engines for generation in engine.generations]
    assert sorted(await agent.sampled_paths()) == sorted(
        generation.prompt + generation.ids for generation in generations
    )
    lines = {tuple(line["ids"]): line for line in (await agent.get("/timelines"))["timelines"]}
    for generation in generations:
        path = generation.prompt + generation.ids
        line = next(line for ids, line in lines.items() if list(ids[: len(path)]) == path)
        output = slice(len(generation.prompt), len(path))
        assert all(line["mask"][output])
        assert line["logprobs"][output] == generation.logprobs
        assert line["versions"][output] == generation.versions


def test_conversation_is_one_exact_timeline() -> None:
    async def main() -> None:
        engine = await connect(DEV)
        assert (engine.model, engine.max_context) == (MODEL.name, 512)
        async with gateway_client(engine) as agent:
            messages = ["What is the capital of France?"]
            for question in ("And of Italy?", "Say both again.\n\n1. ", "Thanks."):
                reply = await agent.chat_text(*messages, stream=len(messages) % 4 == 1)
                messages += [reply, question]
            last = await agent.post_chat(*messages, logprobs=True, return_token_ids=True)
            assert messages[1] == "The capital of France is Paris."
            assert len(engine.generations) == 4
            await assert_exact(agent, engine)
            (line,) = (await agent.get("/timelines"))["timelines"]
            assert len(line["calls"]) == 4
            sampled = [index for index, is_sampled in enumerate(line["mask"]) if is_sampled]
            assert all(line["logprobs"][index] <= 0 for index in sampled)
            assert {line["versions"][index] for index in sampled} == {0}
            choice = last.json()["choices"][0]
            assert choice["token_ids"] == engine.generations[-1].ids
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert logprobs == pytest.approx(engine.generations[-1].logprobs)
            report = (await agent.get("/samples"))["report"]
            assert report["trained_tokens"] == report["sampled_tokens"] == len(sampled)

    run(main)


def test_prompt_equals_the_one_the_server_would_render() -> None:
    async def main() -> None:
        engine = await connect(PLAIN)
        async with gateway_client(engine) as agent:
            messages = ["Count:\n\n1. one\n   22 two", "Sure: 1, 2", "Grüße, 日本 👍 \t 3"]
            body = agent.body(*messages, max_tokens=1)
            await agent.post_chat(*messages, max_tokens=1)
            theirs = await agent.http.post(
                f"{PLAIN}/tokenize",
                json={"messages": body["messages"], "add_generation_prompt": True, "model": MODEL.name},
            )
            assert theirs.json()["tokens"] == engine.generations[0].prompt

    run(main)


def test_streamed_and_buffered_calls_record_the_same_tree() -> None:
    async def main() -> None:
        engine = await connect(PLAIN)
        async with gateway_client(engine) as buffered:
            streamed = await buffered.open_session()
            trees = []
            for agent, stream in ((buffered, False), (streamed, True)):
                first = await agent.chat_text("Name three colors.", stream=stream)
                await agent.chat_text("Name three colors.", first, "And a fourth?", stream=stream)
                nodes = (await agent.get("/tree"))["nodes"]
                trees.append([{**node, "call": node["call"] is not None} for node in nodes])
            assert trees[0] == trees[1]
            half = len(engine.generations) // 2
            for one, other in zip(engine.generations[:half], engine.generations[half:], strict=True):
                assert one.chunks <= other.chunks
                # A prefix that the server had cached is computed by other kernels.
                assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)

    run(main)


def test_two_choices_are_siblings() -> None:
    async def main() -> None:
        engine = await connect(DEV)
        async with gateway_client(engine) as agent:
            answer = await agent.post_chat(
                "Pick a word.", n=2, temperature=1, max_tokens=8, return_token_ids=True
            )
            ids = [choice["token_ids"] for choice in answer.json()["choices"]]
            assert sorted(ids) == sorted(generation.ids for generation in engine.generations)
            assert ids[0] != ids[1]
            assert engine.generations[0].prompt == engine.generations[1].prompt
            await assert_exact(agent, engine)

    run(main)


def test_seed_gives_the_same_ids() -> None:
    async def main() -> None:
        engine = await connect(PLAIN)
        async with gateway_client(engine) as agent:
            for seed in (5, 5, 6):
                await agent.chat_text("Invent a name.", temperature=1, seed=seed, max_tokens=16)
            first, again, other = (generation.ids for generation in engine.generations)
            assert first == again
            assert first != other
            await assert_exact(agent, engine)

    run(main)


def test_stop_id_is_recorded_and_not_returned() -> None:
    async def main() -> None:
        engine = await connect(DEV)
        async with gateway_client(engine) as agent:
            answer = (await agent.post_chat("What is the capital of France?")).json()["choices"][0]
            assert answer["finish_reason"] == "stop"
            assert answer["message"]["content"] == "The capital of France is Paris."
            assert engine.generations[0].ids[-1] == IM_END
            assert IM_END not in engine.generations[0].ids[:-1]

    run(main)


def test_stop_text_ends_the_answer_before_it() -> None:
    async def main() -> None:
        engine = await connect(DEV)
        async with gateway_client(engine) as agent:
            answer = (await agent.post_chat("What is the capital of France?", stop=[" is"])).json()[
                "choices"
            ][0]
            assert (answer["finish_reason"], answer["message"]["content"]) == (
                "stop",
                "The capital of France",
            )
            await VllmMetrics(DEV, agent.http).wait_until_idle()

    run(main)


def test_max_tokens_is_limited_by_the_context_length() -> None:
    async def main() -> None:
        engine = await connect(PLAIN)
        async with gateway_client(engine) as agent:
            counting = "Go on counting: " + ", ".join(str(number) for number in range(115))
            answer = (await agent.post_chat(counting, max_tokens=100_000)).json()
            (generation,) = engine.generations
            assert 450 < len(generation.prompt) < 512
            assert len(generation.prompt) + len(generation.ids) == 512
            assert answer["choices"][0]["finish_reason"] == "length"
            await assert_exact(agent, engine)

    run(main)


def test_prompt_beyond_the_context_is_refused_with_the_servers_message() -> None:
    async def main() -> None:
        engine = RecordingVllmEngine(DEV, model=MODEL.name)  # Without `ready`, so without its context length.
        async with gateway_client(engine) as agent:
            answer = await agent.post_chat("river " * 600)
            assert answer.status_code == 400
            assert "512" in answer.json()["error"]["message"]
            with pytest.raises(EngineInputError, match=r"status 400.*512"):
                await anext(engine.generate(as_ids([5] * 600), SamplingParams(max_tokens=4)))
            assert (await agent.get("/tree"))["nodes"] == []
            assert (
                await agent.chat_text("What is the capital of France?") == "The capital of France is Paris."
            )

    run(main)


async def generate(engine: Engine, prompt: list[int], **params: Any) -> RecordedGeneration:
    """One generation, without a gateway."""
    generation = RecordedGeneration(prompt)
    async for chunk in engine.generate(as_ids(prompt), SamplingParams(stop_ids=(IM_END,), **params)):
        generation.add(chunk)
    return generation


def test_raw_logprobs_do_not_depend_on_sampling_parameters() -> None:
    async def main() -> None:
        engine = await connect(DEV)
        async with gateway_client(engine) as agent:
            await agent.chat_text("What is the capital of France?", max_tokens=8)
            (greedy,) = engine.generations
            cold = await generate(
                engine, greedy.prompt, max_tokens=8, temperature=0.05, top_k=5, top_p=0.9, seed=3
            )
            assert cold.ids == greedy.ids
            assert cold.logprobs == pytest.approx(greedy.logprobs, abs=1e-3)
            assert min(greedy.logprobs) < -1, "processed logprobs would be near 0 at this temperature"

    run(main)


def test_embedded_engine_gives_the_same_ids() -> None:
    pytest.importorskip("torch")
    from branchline.engines.hf.engine import HfEngine

    async def main() -> None:
        engine = await connect(PLAIN)
        async with gateway_client(engine) as agent:
            await agent.chat_text(LONG_PROMPT, max_tokens=32)
            (theirs,) = engine.generations
        ours = HfEngine.load(MODEL)
        generation = await generate(ours, theirs.prompt, max_tokens=32, temperature=0.0)
        await ours.close()
        assert generation.ids == theirs.ids
        assert generation.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)

    run(main)


def test_response_format_constrains_the_answer() -> None:
    async def main() -> None:
        engine = await connect(PLAIN)
        async with gateway_client(engine) as agent:
            schema = {
                "type": "object",
                "properties": {"color": {"enum": ["red", "blue"]}},
                "required": ["color"],
                "additionalProperties": False,
            }
            grammar = {"type": "json_schema", "json_schema": {"name": "color", "schema": schema}}
            text = await agent.chat_text("Which color is the sky?", response_format=grammar, max_tokens=64)
            assert json.loads(text)["color"] in ("red", "blue")
            await assert_exact(agent, engine)

    run(main)


async def first_event(agent: SessionClient, *messages: str, **more: Any) -> None:
    """Requests a stream and disconnects after its first text."""
    body = agent.body(*messages, stream=True, **more)
    async with agent.http.stream("POST", agent.url, json=body, headers=agent.headers) as response:
        async for line in response.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return


def test_disconnected_client_aborts_its_generation_at_the_server() -> None:
    async def main() -> None:
        engine = await connect(DEV)
        async with gateway_client(engine) as agent:
            metrics = VllmMetrics(DEV, agent.http)
            before = await metrics.generated_tokens()
            await first_event(agent, LONG_PROMPT, max_tokens=400)
            await metrics.wait_until_idle()
            (generation,) = engine.generations
            assert 0 < len(generation.ids) <= await metrics.generated_tokens() - before < 200
            await assert_exact(agent, engine)
            (node,) = [node for node in (await agent.get("/tree"))["nodes"] if node["call"]]
            assert node["finish"] == "cancelled"
            assert (
                await agent.chat_text("What is the capital of France?") == "The capital of France is Paris."
            )
            await assert_exact(agent, engine)

    run(main)


@pytest.mark.parametrize("url", [DEV, PLAIN], ids=["dev", "plain"])
def test_paused_generation_continues_after_its_ids(url: str) -> None:
    async def main() -> None:
        engine = await connect(url)
        async with gateway_client(engine) as agent, httpx.AsyncClient(timeout=TIMEOUT_S) as http:
            metrics = VllmMetrics(url, http)
            sampled = await metrics.generated_tokens()
            running = asyncio.create_task(agent.chat_text(LONG_PROMPT, stream=True, max_tokens=48))
            await engine.wait_for_tokens(5)
            await agent.post_admin("/policy/pause", {})
            paused_at = len(engine.generations[0].ids)
            await metrics.wait_until_idle()
            assert await metrics.generated_tokens() - sampled < 48
            late = asyncio.create_task(agent.chat_text("What is the capital of France?"))
            await engine.wait_for_requests(2)
            assert await metrics.running_requests() == 0
            if url == DEV:
                assert (await http.get(f"{url}/is_paused")).json() == {"is_paused": True}
            await agent.post_admin("/policy/resume", {"version": 7})
            if url == DEV:
                assert (await http.get(f"{url}/weight_info")).json() == {"weight_version": "7"}
            await running
            assert await late == "The capital of France is Paris."

            story = next(generation for generation in engine.generations if len(generation.ids) == 48)
            assert story.versions == [0] * story.versions.count(0) + [7] * story.versions.count(7)
            before = story.versions.count(0)
            assert paused_at <= before < 48
            await assert_exact(agent, engine)
            prefix = story.prompt + story.ids[:before]
            fresh = await generate(engine, prefix, max_tokens=48 - before, temperature=0.0)
            assert story.ids[before:] == fresh.ids

    run(main)


def test_generation_of_a_removed_replica_continues_on_another() -> None:
    async def main() -> None:
        engines = [await connect(url, name=name) for url, name in ((DEV, "a"), (PLAIN, "b"))]
        replicas = Replicas(engines)
        async with gateway_client(replicas) as agent:
            running = asyncio.create_task(agent.chat_text(LONG_PROMPT, stream=True, max_tokens=48))
            waits = [asyncio.create_task(engine.wait_for_tokens(5)) for engine in engines]
            _, waiting = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            used, other = engines if engines[0].generations else engines[::-1]
            await replicas.remove(used.name)
            await VllmMetrics(used.url, agent.http).wait_until_idle()
            await running
            (first,), (rest,) = used.generations, other.generations
            assert rest.prompt == first.prompt + first.ids
            assert len(first.ids) + len(rest.ids) == 48
            assert await agent.sampled_paths() == [first.prompt + first.ids + rest.ids]
            alone = await connect(used.url)
            full = await generate(alone, first.prompt, max_tokens=48, temperature=0.0)
            assert full.ids == first.ids + rest.ids
            await alone.close()

    run(main)


def test_concurrent_sessions_are_exact() -> None:
    async def main() -> None:
        engine = await connect(DEV)
        async with gateway_client(engine) as first:
            agents = [first] + [await first.open_session() for _ in range(7)]

            async def converse(agent: SessionClient, number: int) -> None:
                question = f"What is {number} plus {number}?"
                reply = await agent.chat_text(question, stream=bool(number % 2), max_tokens=12)
                await agent.chat_text(question, reply, "And plus one?", max_tokens=12)

            await asyncio.gather(*(converse(agent, number) for number, agent in enumerate(agents)))
            paths = [path for agent in agents for path in await agent.sampled_paths()]
            assert sorted(paths) == sorted(
                generation.prompt + generation.ids for generation in engine.generations
            )
            assert len(paths) == 16

    run(main)
