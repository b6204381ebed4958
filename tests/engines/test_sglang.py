from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from branchline.core.errors import ContextLengthError, EngineBusyError, EngineError, EngineInputError
from branchline.engines.base import BUFFERED_FLUSH_S, Engine
from branchline.engines.http import STREAM_INTERVAL
from branchline.engines.sglang import SglangEngine
from tests.engines.fake_model import (
    EOS,
    PROMPT,
    collect,
    continuation,
    float32,
    ids_of,
    logprobs_of,
    params,
    take_tokens,
    versions_of,
)
from tests.engines.fake_servers import FakeSglang
from tests.engines.manual_clock import run_with_frozen_clock


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("write_size", [0, 1, 7, 4096])
@pytest.mark.parametrize("ids_per_event", [1, 3])
def test_ids_and_logprobs_are_exact_for_any_split_of_the_bytes(
    incremental: bool, write_size: int, ids_per_event: int
) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.incremental, server.write_size = incremental, write_size
            server.ids_per_event = ids_per_event
            engine: Engine = SglangEngine(server.url, version=3)
            chunks = await collect(engine.generate(PROMPT, params(8)))
            ids, logprobs = continuation(PROMPT, 8)
            assert ids_of(chunks) == ids
            assert logprobs_of(chunks) == float32(logprobs)
            assert versions_of(chunks) == [3] * 8
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            assert server.request_paths() == ["/generate"], "a finished request is not aborted"
            await engine.close()

    run_with_frozen_clock(main())


def test_request_sends_every_parameter() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            engine = SglangEngine(server.url, version=4)
            sampling = params(
                3,
                temperature=0.5,
                min_p=0.1,
                seed=10,
                stop_ids=(EOS,),
                extra={"priority": 1, "sampling_params": {"ignore_eos": True, "max_new_tokens": 999}},
            )
            await collect(engine.generate(PROMPT, sampling))
            (body,) = server.bodies
            assert body.pop("rid")
            assert body == {
                "input_ids": [5, 6, 7],
                "return_logprob": True,
                "stream": True,
                "extra_key": "v4",
                "priority": 1,
                "sampling_params": {
                    "max_new_tokens": 3,
                    "temperature": 0.5,
                    "top_p": 1.0,
                    "top_k": -1,
                    "min_p": 0.1,
                    "presence_penalty": 0.0,
                    "frequency_penalty": 0.0,
                    "repetition_penalty": 1.0,
                    "stop_token_ids": [EOS],
                    "sampling_seed": 10,
                    "ignore_eos": True,
                },
            }
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("supports_interval", [False, True])
def test_call_that_is_not_streamed_asks_for_larger_events(incremental: bool, supports_interval: bool) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.incremental, server.supports_stream_interval = incremental, supports_interval
            engine = SglangEngine(server.url)
            chunks = await collect(engine.generate(PROMPT, params(70, flush_s=BUFFERED_FLUSH_S)))
            ids, logprobs = continuation(PROMPT, 70)
            assert (ids_of(chunks), chunks[-1].finish_reason) == (ids, "length")
            assert logprobs_of(chunks) == float32(logprobs)
            assert server.bodies[0]["sampling_params"]["stream_interval"] == STREAM_INTERVAL
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_before_an_error_are_yielded_before_it(incremental: bool) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            reason = {"type": "abort", "message": "refused by the server", "status_code": 500}
            ids = continuation(PROMPT, 2)[0]
            meta = {
                "finish_reason": reason,
                "completion_tokens": 2,
                "output_token_logprobs": [[-1.0, id_, None] for id_ in ids],
            }
            server.incremental = incremental
            server.event_after = (2, {"output_ids": ids, "meta_info": meta})
            engine = SglangEngine(server.url)
            stream = engine.generate(PROMPT, params(flush_s=60))
            assert ids_of(await take_tokens(stream, 2)) == ids
            with pytest.raises(EngineError, match="refused by the server"):
                await anext(stream)
            await engine.close()

    run_with_frozen_clock(main())


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "sent"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, SCHEMA),
    ],
)
def test_response_format_becomes_sampling_parameters(grammar: Any, sent: Any) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            engine = SglangEngine(server.url)
            await collect(engine.generate(PROMPT, params(grammar=grammar)))
            schema = server.bodies[0]["sampling_params"].get("json_schema")
            assert (schema and json.loads(schema)) == sent
            with pytest.raises(EngineInputError, match="response_format"):
                await collect(engine.generate(PROMPT, params(grammar={"type": "haiku"})))
            await engine.close()

    run_with_frozen_clock(main())


def test_stop_id_is_the_last_id() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.stop_at = 3
            engine = SglangEngine(server.url)
            chunks = await collect(engine.generate(PROMPT, params(9, stop_ids=(EOS,))))
            assert ids_of(chunks) == [*continuation(PROMPT, 3)[0], EOS]
            assert chunks[-1].finish_reason == "stop"
            await engine.close()

    run_with_frozen_clock(main())


def test_the_tokenizer_is_the_one_that_the_server_was_started_with() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            engine = SglangEngine(server.url)
            for info in (
                {"model_path": "acme/model", "tokenizer_path": "acme/tokenizer"},
                {"model_path": "acme/tokenizer", "tokenizer_path": None},
                {"model_path": "acme/tokenizer"},
            ):
                server.json_by_path = {"/get_model_info": info}
                assert await engine.tokenizer_name() == "acme/tokenizer"
            server.json_by_path = {"/get_model_info": {"model_path": ""}}
            with pytest.raises(EngineError, match="expected a tokenizer_path"):
                await engine.tokenizer_name()
            await engine.close()

    run_with_frozen_clock(main())


def test_ready_samples_nothing_and_sets_the_context_length() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            engine = SglangEngine(server.url)
            with pytest.raises(EngineError):
                await engine.ready()
            server.json_by_path = {"/v1/models": {"data": [{"id": "tiny", "max_model_len": 64}]}}
            await engine.ready()
            assert engine.max_context == 64
            assert set(server.request_paths()) == {"/v1/models", "/server_info", "/get_server_info"}
            await engine.close()

    run_with_frozen_clock(main())


def test_closed_generation_is_aborted_by_its_request_id() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.hold_after = 2
            server.json_by_path = {"/abort_request": None}
            engine = SglangEngine(server.url)
            stream = engine.generate(PROMPT, params())
            await anext(stream)
            await stream.aclose()
            await server.aborted.wait()
            assert server.requests[-1] == ("/abort_request", {"rid": server.bodies[0]["rid"]})
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("code", [400, 500])
@pytest.mark.parametrize("how", ["error", "abort", "status"])
def test_error_has_the_servers_message(how: str, code: int) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            error = {"error": {"message": "refused by the server", "type": "x", "code": code}}
            reason = {
                "type": "abort",
                "message": "refused by the server",
                "status_code": code,
                "err_type": "X",
            }
            if how == "status":
                server.refusal = (code, json.dumps(error).encode())
            elif how == "error":
                server.event_after = (2, error)
            else:
                meta = {"finish_reason": reason, "completion_tokens": 2, "output_token_logprobs": []}
                server.event_after = (2, {"text": "", "output_ids": [1], "meta_info": meta})
            engine = SglangEngine(server.url)
            with pytest.raises(EngineError, match="refused by the server") as raised:
                await collect(engine.generate(PROMPT, params()))
            assert isinstance(raised.value, EngineInputError) == (code == 400)
            await engine.close()

    run_with_frozen_clock(main())


def test_broken_stream_yields_what_arrived_and_then_an_error() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.die_after = 2
            engine = SglangEngine(server.url)
            stream = engine.generate(PROMPT, params())
            chunks = await take_tokens(stream, 2)
            with pytest.raises(EngineError):
                await anext(stream)
            assert ids_of(chunks) == continuation(PROMPT, 2)[0]
            await engine.close()

    run_with_frozen_clock(main())


def test_events_that_the_last_one_repeats_are_not_parsed() -> None:
    meta = {"completion_tokens": 2, "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]]}
    last = json.dumps({"output_ids": [7, 8], "meta_info": meta}).encode()
    request = SglangEngine("http://host").build_request(PROMPT, params())
    request.read([b"anything", last])
    assert (request.ids, request.logprobs, request.finish_reason) == ([7, 8], [-1.0, -2.0], None)


def test_ids_that_do_not_match_their_logprobs_are_an_error() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            meta = {"finish_reason": None, "completion_tokens": 4, "output_token_logprobs": [[-1.0, 9, None]]}
            server.event_after = (0, {"output_ids": [8], "meta_info": meta})
            engine = SglangEngine(server.url)
            with pytest.raises(EngineError, match="1 ids and 1 logprobs in an event that counts 4 after 0"):
                await collect(engine.generate(PROMPT, params()))
            await engine.close()

    run_with_frozen_clock(main())


def test_paused_generation_continues_after_its_own_ids_under_the_new_version() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            paths = ("/pause_generation", "/update_weight_version", "/continue_generation")
            server.json_by_path = dict.fromkeys(paths, True)
            server.hold_after = 3
            engine = SglangEngine(server.url, version=4)
            stream = engine.generate(PROMPT, params(8))
            chunks = await take_tokens(stream, 3)
            paused = asyncio.create_task(collect(stream))
            await engine.pause()
            server.weights, server.hold_after = 1, None
            await engine.resume(5)
            chunks += await paused
            before, _ = continuation(PROMPT, 3, weights=0)
            assert ids_of(chunks) == before + continuation([*PROMPT, *before], 5, weights=1)[0]
            assert versions_of(chunks) == [4] * 3 + [5] * 5
            assert [path for path in server.request_paths() if path in paths] == list(paths)
            assert dict(server.requests)["/update_weight_version"]["new_version"] == "5"
            await engine.close()

    run_with_frozen_clock(main())


EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 4,
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 8,
}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
@pytest.mark.parametrize(
    ("info", "reserved"),
    [
        (EAGLE, 12),
        (EAGLE | {"speculative_num_draft_tokens": 16}, 16),
        (EAGLE | {"speculative_adaptive": True}, 32),
        (EAGLE | {"speculative_algorithm": None}, 0),
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": None}, 0),
        (None, 0),
    ],
)
def test_tokens_that_speculative_decoding_reserves_are_not_asked_for(
    path: str, info: Any, reserved: int
) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            models = {"data": [{"id": "tiny", "max_model_len": 64}]}
            server.json_by_path = {"/v1/models": models, path: info}
            engine = SglangEngine(server.url)
            for _ in range(2):
                await engine.ready()
                assert engine.max_context == 64 - reserved
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("flush_s", [0, 60])
def test_tokens_have_the_version_of_the_weights_that_the_server_reports(
    incremental: bool, flush_s: float
) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.incremental, server.weight_versions = incremental, {0: "default", 3: "5", 6: "7"}
            engine = SglangEngine(server.url, version=4)
            chunks = await collect(engine.generate(PROMPT, params(8, flush_s=flush_s)))
            assert ids_of(chunks) == continuation(PROMPT, 8)[0]
            assert versions_of(chunks) == [4] * 2 + [5] * 3 + [7] * 3
            assert engine.version == 7
            server.weight_versions = {0: "7"}
            await collect(engine.generate(PROMPT, params(1)))
            assert server.bodies[-1]["extra_key"] == "v7", "no KV cache of older weights is reused"
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({0: "3"}, "got '3', expected 4 or later"),
        ({0: "5", 2: "default"}, "got 'default' after '5', expected a number"),
        ({0: "default", 2: "step-9"}, "got 'step-9' after 'default', expected a number"),
    ],
)
def test_weights_of_unknown_or_older_version_are_an_error(labels: dict[int, str], message: str) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.weight_versions = labels
            engine = SglangEngine(server.url, version=4)
            with pytest.raises(EngineError, match=f"weight_version: {message}"):
                await collect(engine.generate(PROMPT, params(8)))
            await engine.close()

    run_with_frozen_clock(main())


def test_prompt_that_the_server_cut_is_an_error() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.max_prompt = 2
            engine = SglangEngine(server.url)
            with pytest.raises(ContextLengthError, match="prompt is too long: 3 tokens > 2 maximum"):
                await collect(engine.generate(PROMPT, params()))
            await engine.close()

    run_with_frozen_clock(main())


def test_prompt_that_the_server_extended_is_an_error() -> None:
    meta = {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 7, None]], "prompt_tokens": 4}
    request = SglangEngine("http://host", name="e").build_request(PROMPT, params())
    with pytest.raises(EngineError, match="e: the server saw a prompt of 4 ids, expected 3"):
        request.read([json.dumps({"output_ids": [7], "meta_info": meta}).encode()])


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("sampling_seed must be an integer", EngineInputError),
        ("The input (70 tokens) is longer than the model's context length (64 tokens).", ContextLengthError),
    ],
)
def test_error_event_without_a_code_is_an_error_of_the_request(message: str, kind: type[EngineError]) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            server.event_after = (0, {"error": {"message": message}})
            engine = SglangEngine(server.url)
            with pytest.raises(kind):
                await collect(engine.generate(PROMPT, params()))
            await engine.close()

    run_with_frozen_clock(main())


def test_aborted_generation_of_a_server_without_room_is_busy() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
            server.event_after = (0, {"output_ids": [], "meta_info": {"finish_reason": reason}})
            engine = SglangEngine(server.url)
            with pytest.raises(EngineBusyError, match="abort: The request queue is full") as raised:
                await collect(engine.generate(PROMPT, params()))
            assert raised.value.is_overloaded
            await engine.close()

    run_with_frozen_clock(main())


def test_requests_without_a_seed_have_different_seeds() -> None:
    """SGLang's deterministic mode gives all requests without a seed the same one."""

    async def main() -> None:
        async with FakeSglang() as server:
            engine = SglangEngine(server.url)
            for seed in (None, None, 7, 7):
                await collect(engine.generate(PROMPT, params(1, seed=seed)))
            seeds = [body["sampling_params"].get("sampling_seed") for body in server.bodies]
            assert len(set(seeds)) == 3
            assert seeds[2:] == [7, 7]
            assert all(0 <= seed < 2**63 for seed in seeds)
            await engine.close()

    run_with_frozen_clock(main())


def test_constraints_have_sglangs_names() -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            engine = SglangEngine(server.url)
            asked = params(
                requested_fields=("x",),
                ignore_eos=True,
                min_tokens=2,
                logit_bias={5: -1.0},
                extra={"custom_params": {"a": 1}, "custom_logit_processor": "code"},
            )
            await collect(engine.generate(PROMPT, asked))
            body = server.bodies[0]
            sampling = body["sampling_params"]
            assert (sampling["ignore_eos"], sampling["min_new_tokens"]) == (True, 2)
            assert (sampling["logit_bias"], sampling["custom_params"]) == ({"5": -1.0}, {"a": 1})
            assert body["custom_logit_processor"] == "code"
            assert "custom_params" not in body
            await collect(engine.generate(PROMPT, params()))
            plain = server.bodies[1]["sampling_params"]
            assert not {"ignore_eos", "min_new_tokens", "logit_bias", "custom_params"} & plain.keys()
            await engine.close()

    run_with_frozen_clock(main())


@pytest.mark.parametrize(
    ("grammar", "sent"),
    [
        ({"type": "regex", "regex": "a+"}, {"regex": "a+"}),
        ({"type": "choice", "choice": ["yes", 'a "b"']}, {"ebnf": r'root ::= "yes" | "a \"b\""'}),
        ({"type": "grammar", "grammar": "root ::= x"}, {"ebnf": "root ::= x"}),
    ],
)
def test_grammar_becomes_a_sampling_parameter(grammar: Any, sent: dict[str, str]) -> None:
    async def main() -> None:
        async with FakeSglang() as server:
            engine = SglangEngine(server.url)
            await collect(engine.generate(PROMPT, params(grammar=grammar)))
            assert sent.items() <= server.bodies[0]["sampling_params"].items()
            await engine.close()

    run_with_frozen_clock(main())
