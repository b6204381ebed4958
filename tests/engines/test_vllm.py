from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from branchline.core.errors import EngineError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import Engine, SamplingParams
from branchline.engines.client import ServerConfig
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import (
    EOS,
    PROMPT,
    collect,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    params,
    round_trip,
    take_tokens,
    versions_of,
)
from tests.engines.fake_servers import FakeVllm
from tests.engines.manual_clock import run_with_frozen_clock


@pytest.mark.parametrize("write_size", [0, 1, 7, 100, 4096])
@pytest.mark.parametrize("ids_per_event", [1, 3])
def test_ids_and_logprobs_are_exact_for_any_split_of_the_bytes(write_size: int, ids_per_event: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.write_size, server.ids_per_event = write_size, ids_per_event
            engine: Engine = VllmEngine(server.url, version=3)
            chunks = await collect(engine.generate(PROMPT, params(8)))
            ids, logprobs = continuation(PROMPT, 8)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == float32(logprobs)
            assert versions_of(chunks) == [3] * 8
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            await engine.close()

    run_with_frozen_clock(main())


def test_request_sends_every_parameter() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(ServerConfig(server.url + "/v1", api_key="k"), model="m", version=4)
            sampling = params(
                3,
                temperature=0.5,
                top_p=0.9,
                top_k=20,
                min_p=0.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                repetition_penalty=1.1,
                seed=10,
                stop_ids=(EOS,),
                grammar={"type": "json_object"},
                extra={"priority": 1, "max_tokens": 999},
            )
            await collect(engine.generate(PROMPT, sampling))
            assert server.bodies == [
                {
                    "prompt": [5, 6, 7],
                    "stream": True,
                    "return_token_ids": True,
                    "logprobs": 0,
                    "max_tokens": 3,
                    "temperature": 0.5,
                    "top_p": 0.9,
                    "top_k": 20,
                    "min_p": 0.1,
                    "presence_penalty": 0.2,
                    "frequency_penalty": 0.3,
                    "repetition_penalty": 1.1,
                    "seed": 13,
                    "stop_token_ids": [EOS],
                    "include_stop_str_in_output": True,
                    "response_format": {"type": "json_object"},
                    "cache_salt": "v4",
                    "model": "m",
                    "priority": 1,
                }
            ]
            await engine.close()

    run_with_frozen_clock(main())


def test_the_tokenizer_is_that_of_the_model_that_the_server_was_started_with() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url)
            models = [{"id": "alias", "root": "acme/tiny-chat"}, {"id": "lora", "root": "/loras/1"}]
            server.json_by_path = {"/v1/models": {"data": models}}
            assert await engine.tokenizer_name() == "acme/tiny-chat"
            incomplete: list[list[dict[str, str]]] = [[], [{"id": "alias"}], [{"id": "alias", "root": ""}]]
            for models in incomplete:
                server.json_by_path = {"/v1/models": {"data": models}}
                with pytest.raises(EngineError, match="expected the root of a model"):
                    await engine.tokenizer_name()
            await engine.close()

    run_with_frozen_clock(main())


def test_ready_samples_nothing_and_sets_model_and_context() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.json_by_path = {
                "/health": None,
                "/v1/models": {"data": [{"id": "tiny", "max_model_len": 64}]},
            }
            server.stop_at = 2
            engine = VllmEngine(server.url)
            await engine.ready()
            assert (engine.model, engine.max_context) == ("tiny", 64)
            await collect(engine.generate(PROMPT, SamplingParams()))
            assert server.request_paths() == ["/health", "/v1/models", "/v1/completions"]
            assert server.bodies[0]["max_tokens"] == SamplingParams().max_tokens
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("stop_id", [EOS, 777])
def test_stop_id_is_the_last_id(stop_id: int) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            ids, _ = continuation(PROMPT, 4)
            server.stop_at = 4 if stop_id == EOS else None
            stop_ids = (EOS,) if stop_id == EOS else (ids[-1],)
            engine = VllmEngine(server.url)
            chunks = await collect(engine.generate(PROMPT, params(9, stop_ids=stop_ids)))
            assert ids_of(chunks) == ([*ids, EOS] if stop_id == EOS else ids)
            assert chunks[-1].finish_reason == "stop"
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("flush_s", [0, 60])
def test_events_without_tokens_are_ignored(flush_s: float) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            usage = {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
            server.event_after = (3, usage)
            server.stop_at = 2
            engine = VllmEngine(server.url)
            chunks = await collect(engine.generate(PROMPT, params(9, stop_ids=(EOS,), flush_s=flush_s)))
            assert ids_of(chunks) == [*continuation(PROMPT, 2)[0], EOS]
            assert chunks[-1].finish_reason == "stop"
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"token_ids": None}, "no token_ids in the stream"),
        ({"token_ids": [1]}, "1 ids with 0 logprobs, expected one each"),
        ({"token_ids": [1], "logprobs": {"token_logprobs": [None]}}, "1 ids with 1 logprobs"),
        ({"token_ids": [2**31]}, r"`int` .* in b'"),
        ({"token_ids": [], "finish_reason": "abort"}, "ended a generation with 'abort'"),
    ],
)
@pytest.mark.parametrize("flush_s", [0, 60])
def test_invalid_event_is_an_error_after_the_tokens_before_it(
    choice: Any, message: str, flush_s: float
) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.event_after = (2, {"choices": [choice]})
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params(flush_s=flush_s))
            assert ids_of(await take_tokens(stream, 2)) == continuation(PROMPT, 2)[0]
            with pytest.raises(EngineError, match=message):
                await anext(stream)
            await engine.close()

    run_with_frozen_clock(main())


def test_server_that_saw_another_prompt_is_an_error() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.add_to_prompt = (1,)
            engine = VllmEngine(server.url)
            with pytest.raises(EngineError, match="another prompt"):
                await collect(engine.generate(PROMPT, params()))
            await engine.close()

    run_with_frozen_clock(main())


def completion_event(prompt: str, text: str = "…", **more: Any) -> bytes:
    """An event in compact JSON, with the prompt as given."""
    choice = {
        "text": text,
        **more,
        "token_ids": [1],
        "logprobs": {"token_logprobs": [-0.5]},
        "prompt_token_ids": Raw(prompt.encode()),
    }
    return msgspec.json.encode({"id": "cmpl-1", "choices": [choice]})


@pytest.mark.parametrize("prompt", ["[5,6,7]", "[5, 6, 7]", " [5,6,7]", "[5,6,7 ]", "\n[ 5,\n6,7]", "null"])
def test_prompt_may_be_formatted_differently(prompt: str) -> None:
    request = VllmEngine("http://host", name="e").build_request(PROMPT, params())
    request.read([completion_event(prompt)])
    assert (request.ids, request.logprobs) == ([1], [-0.5])


@pytest.mark.parametrize(
    "prompt", ["[5,6,7,8]", "[5,6]", "[]", "[15,6,7]", "[5,6,77]", "[[5,6,7]]", '"[5,6,7]"', "{}", "0"]
)
@pytest.mark.parametrize("before", [0, 1])
def test_prompt_that_differs_in_any_id_is_an_error(prompt: str, before: int) -> None:
    request = VllmEngine("http://host", name="e").build_request(PROMPT, params())
    with pytest.raises(EngineError, match="e: the server saw another prompt"):
        request.read([completion_event("[5,6,7]")] * before + [completion_event(prompt)])
    assert request.ids == [1] * before


def test_prompt_may_come_after_the_first_event() -> None:
    request = VllmEngine("http://host", name="e").build_request(PROMPT, params())
    request.read([b'{"choices":[]}'])
    with pytest.raises(EngineError, match="another prompt"):
        request.read([completion_event("[5,6]")])
    request = VllmEngine("http://host", name="e").build_request(PROMPT, params())
    request.read([b'{"choices":[]}', completion_event("[5,6,7]"), completion_event("null")])
    assert request.ids == [1, 1]


@pytest.mark.parametrize("server_can_pause", [False, True])
def test_paused_generation_continues_after_its_own_ids_under_the_new_version(server_can_pause: bool) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            if server_can_pause:
                for path in ("/pause?mode=abort&clear_cache=true", "/resume", "/update_weight_version"):
                    server.json_by_path[path] = {}
            server.hold_after = 3
            engine = VllmEngine(server.url, version=4)
            stream = engine.generate(PROMPT, params(8, seed=1))
            chunks = await take_tokens(stream, 3)
            paused = asyncio.create_task(collect(stream))
            await engine.pause()
            await server.aborted.wait()
            late = asyncio.create_task(collect(engine.generate(PROMPT, params(2))))
            await round_trip(engine)
            assert len(server.bodies) == 1, "a request that arrives while paused waits"

            server.weights, server.hold_after = 1, None
            await engine.resume(5)
            chunks += await paused
            late_chunks = await late

            before, _ = continuation(PROMPT, 3, weights=0)
            after, logprobs = continuation([*PROMPT, *before], 5, weights=1)
            assert ids_of(chunks) == before + after
            assert logprobs_of(chunks)[3:] == float32(logprobs)
            assert versions_of(chunks) == [4] * 3 + [5] * 5
            assert chunks[-1].finish_reason == "length"
            assert ids_of(late_chunks) == continuation(PROMPT, 2, weights=1)[0]
            assert versions_of(late_chunks) == [5, 5]
            continued = next(body for body in server.bodies if len(body["prompt"]) == 6)
            assert (continued["max_tokens"], continued["seed"], continued["cache_salt"]) == (5, 7, "v5")
            controls = [path for path in server.request_paths() if path in server.json_by_path]
            assert controls == list(server.json_by_path)[:1] + list(server.json_by_path)[:0:-1]
            await engine.close()

    run_with_frozen_clock(main())


def test_generation_that_is_not_read_during_a_pause_continues_after_it() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 3
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params())
            chunks = await take_tokens(stream, 3)
            await engine.pause()
            await engine.resume(1)
            server.hold_after = None
            chunks += await collect(stream)
            assert ids_of(chunks) == continuation(PROMPT, 5)[0]
            assert versions_of(chunks) == [0, 0, 0, 1, 1]
            await engine.close()

    run_with_frozen_clock(main())


def test_generation_with_a_grammar_is_not_continued() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            server.hold_after = 1
            engine = VllmEngine(server.url)
            stream = engine.generate(PROMPT, params(grammar={"type": "json_object"}))
            await anext(stream)
            await engine.pause()
            await engine.resume()
            with pytest.raises(EngineError, match="cannot continue after 1 ids"):
                await anext(stream)
            await engine.close()

    run_with_frozen_clock(main())


def test_max_tokens_of_zero_sends_no_request() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url, version=2)
            (chunk,) = await collect(engine.generate(PROMPT, params(0)))
            assert (len(chunk.ids), chunk.finish_reason, chunk.version) == (0, "length", 2)
            assert not server.requests
            await engine.close()

    run_with_frozen_clock(main())


def test_long_prompt_is_sent_completely() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            prompt = as_ids(list(range(40_000)))
            engine = VllmEngine(server.url)
            assert ids_of(await collect(engine.generate(prompt, params(2)))) == continuation(prompt, 2)[0]
            await engine.close()

    run_with_frozen_clock(main())


def test_resume_waits_for_the_pause_before_it() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            paths = ["/pause?mode=abort&clear_cache=true", "/resume"]
            server.json_by_path = dict.fromkeys(paths, True)
            engine = VllmEngine(server.url)
            await asyncio.gather(engine.pause(), engine.resume())
            assert server.request_paths() == paths
            assert ids_of(await collect(engine.generate(PROMPT, params(2)))) == continuation(PROMPT, 2)[0]
            await engine.close()

    run_with_frozen_clock(main())


def test_constraints_have_vllms_names() -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url, model="m")
            asked = params(
                requested_fields=("x",),
                ignore_eos=True,
                min_tokens=2,
                logit_bias={5: -1.0},
                allowed_token_ids=(1, 2),
                bad_words=("no",),
                extra={"vllm_xargs": {"a": 1}},
            )
            sent = {
                "ignore_eos": True,
                "min_tokens": 2,
                "logit_bias": {"5": -1.0},
                "allowed_token_ids": [1, 2],
                "bad_words": ["no"],
                "vllm_xargs": {"a": 1},
            }
            await collect(engine.generate(PROMPT, asked))
            assert sent.items() <= server.bodies[0].items()
            await collect(engine.generate(PROMPT, params()))
            assert not sent.keys() & server.bodies[1].keys()
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("kind", "value"), [("regex", "a+"), ("choice", ["a", "b"]), ("grammar", "root ::= x")]
)
def test_grammar_that_is_no_response_format_is_a_structured_output(kind: str, value: Any) -> None:
    async def main() -> None:
        async with FakeVllm() as server:
            engine = VllmEngine(server.url, model="m")
            await collect(engine.generate(PROMPT, params(grammar={"type": kind, kind: value})))
            assert server.bodies[0]["structured_outputs"] == {kind: value}
            assert "response_format" not in server.bodies[0]
            await engine.close()

    run_with_frozen_clock(main())


def test_continuation_asks_for_the_rest_of_the_minimum() -> None:
    asked = params(9, min_tokens=4)
    assert [asked.for_continuation(produced).min_tokens for produced in (1, 4, 7)] == [3, 0, 0]
