"""VllmEngine with recorded responses of a real vLLM, made by `scripts/record_vllm.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from branchline.core.errors import ContextLengthError, EngineError, EngineInputError
from branchline.core.token_arrays import as_ids
from branchline.engines.base import BUFFERED_FLUSH_S, Chunk, SamplingParams
from branchline.engines.vllm import VllmEngine
from tests.engines.fake_model import collect, float32, ids_of, logprobs_of, take_tokens, versions_of
from tests.engines.manual_clock import run_with_frozen_clock
from tests.engines.recorded_server import RecordedServer

FOLDER = Path(__file__).parent / "recorded" / "vllm-0.32.0"
MODEL = "SmolLM2-135M-Instruct"
PROMPT = as_ids(json.loads((FOLDER / "stop.request").read_bytes())["prompt"])
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
"""The capital of France is Paris.<|im_end|>"""


def recorded_params(name: str, **more: Any) -> SamplingParams:
    """The parameters of a recorded request."""
    body = json.loads((FOLDER / f"{name}.request").read_bytes())
    seed = body.get("seed")
    return SamplingParams(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        top_p=body["top_p"],
        top_k=body["top_k"],
        seed=None if seed is None else seed - len(PROMPT),
        stop_ids=tuple(body["stop_token_ids"]),
        grammar=body.get("response_format"),
        **more,
    )


def recorded_output(name: str) -> tuple[list[int], list[float]]:
    """The ids and logprobs of a recording, read without the engine."""
    ids: list[int] = []
    logprobs: list[float] = []
    for data in re.findall(rb"data: (\{.*\})", (FOLDER / f"{name}.reply").read_bytes()):
        (choice,) = json.loads(data)["choices"]
        ids += choice["token_ids"]
        logprobs += choice["logprobs"]["token_logprobs"]
    return ids, logprobs


def replay(name: str, write_size: int = 0, **more: Any) -> list[Chunk]:
    """The chunks that the engine yields for a recording."""
    chunks: list[Chunk] = []

    async def main() -> None:
        async with RecordedServer(FOLDER, name, write_size=write_size) as server:
            engine = VllmEngine(server.url, model=MODEL, version=0)
            chunks.extend(await collect(engine.generate(PROMPT, recorded_params(name, **more))))
            await engine.close()

    run_with_frozen_clock(main())
    return chunks


@pytest.mark.parametrize("write_size", [0, 1, 13, 512])
@pytest.mark.parametrize("name", ["stop", "length", "stop_id", "seeded", "grammar"])
def test_ids_and_logprobs_are_those_of_the_server(name: str, write_size: int) -> None:
    chunks = replay(name, write_size)
    ids, logprobs = recorded_output(name)
    assert ids_of(chunks) == ids
    assert logprobs_of(chunks) == float32(logprobs)
    assert versions_of(chunks) == [0] * len(ids)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize(
    ("name", "ids", "finish"),
    [
        ("stop", PARIS, "stop"),
        ("length", PARIS[:4], "length"),
        ("stop_id", PARIS[:5], "stop"),
    ],
)
def test_stop_id_is_the_last_id(name: str, ids: list[int], finish: str) -> None:
    chunks = replay(name)
    assert ids_of(chunks) == ids
    assert chunks[-1].finish_reason == finish


@pytest.mark.parametrize("write_size", [0, 100])
def test_call_that_is_not_streamed_gets_larger_events(write_size: int) -> None:
    chunks = replay("buffered", write_size, flush_s=BUFFERED_FLUSH_S)
    ids, logprobs = recorded_output("buffered")
    assert ids_of(chunks) == ids
    assert logprobs_of(chunks) == float32(logprobs)
    assert len(re.findall(rb"data: \{", (FOLDER / "buffered.reply").read_bytes())) == 2
    assert len(ids) > 30


def test_logprobs_under_a_grammar_are_masked() -> None:
    """vLLM masks before it takes even its raw logprobs: a forced token has logprob 0."""
    chunks = replay("grammar")
    forced = {85, 2}  # The e of "blue", and the end.
    logprobs = dict(zip(ids_of(chunks), logprobs_of(chunks), strict=True))
    assert {token for token, logprob in logprobs.items() if logprob == 0.0} == forced


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("too_long", ContextLengthError, "status 400: This model's maximum context length is 512 tokens"),
        ("bad_request", EngineInputError, "status 400: temperature must be non-negative, got -1.0"),
        ("unknown_model", EngineError, "status 404: The model `nope` does not exist"),
    ],
)
@pytest.mark.parametrize("write_size", [0, 7])
def test_refusal_has_the_servers_message(
    name: str, kind: type[EngineError], message: str, write_size: int
) -> None:
    async def main() -> None:
        prompt = as_ids(json.loads((FOLDER / f"{name}.request").read_bytes())["prompt"])
        async with RecordedServer(FOLDER, name, write_size=write_size) as server:
            engine = VllmEngine(server.url, model="nope" if name == "unknown_model" else MODEL)
            with pytest.raises(kind, match=re.escape(message)) as raised:
                await collect(engine.generate(prompt, recorded_params(name)))
            assert type(raised.value) is kind
            await engine.close()

    run_with_frozen_clock(main())


def test_generation_aborted_at_the_server_fails_after_its_tokens() -> None:
    async def main() -> None:
        async with RecordedServer(FOLDER, "aborted") as server:
            engine = VllmEngine(server.url, model=MODEL)
            stream = engine.generate(PROMPT, recorded_params("aborted"))
            assert ids_of(await take_tokens(stream, 1)) == [504]
            with pytest.raises(EngineError, match="ended a generation with 'abort'"):
                await anext(stream)
            await engine.close()

    run_with_frozen_clock(main())


def test_ready_reads_the_servers_model_and_context_length() -> None:
    async def main() -> None:
        async with RecordedServer(FOLDER, "health", "models") as server:
            engine = VllmEngine(server.url)
            await engine.ready()
            assert (engine.model, engine.max_context) == (MODEL, 512)
            await engine.close()

    run_with_frozen_clock(main())


def test_pause_and_resume_use_the_development_endpoints() -> None:
    async def main() -> None:
        async with RecordedServer(FOLDER, "pause", "weight_version", "resume") as server:
            engine = VllmEngine(server.url)
            await engine.pause()
            await engine.resume(5)
            assert engine.version == 5
            await engine.close()

    run_with_frozen_clock(main())


def test_pause_and_resume_work_without_the_development_endpoints() -> None:
    async def main() -> None:
        async with RecordedServer(FOLDER, "pause_absent") as server:
            engine = VllmEngine(server.url)
            await engine.pause()
            await engine.resume()
            await engine.close()

    run_with_frozen_clock(main())


def test_recordings_are_of_the_version_in_their_folder_name() -> None:
    async def main() -> None:
        async with RecordedServer(FOLDER, "version") as server:
            engine = VllmEngine(server.url)
            assert await engine.client.get_json("/version") == {"version": "0.32.0"}
            await engine.close()

    run_with_frozen_clock(main())
