"""The record of a call says how its logprobs were measured, which a trainer must know to use them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline import Replicas, ScriptedEngine, SglangEngine, VllmEngine
from branchline.core.sample import LogprobMeasurement
from branchline.engines.base import SamplingParams
from branchline.runtime.sampling import sampling_record

URL = "http://127.0.0.1:1"
TRUNCATED = SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, presence_penalty=0.5)
GREEDY = SamplingParams(temperature=0.0)


def measured(engine: Any, params: SamplingParams) -> tuple[str, float | None, bool | None]:
    measurement = LogprobMeasurement.from_sampling(sampling_record(engine, params))
    return measurement.kind, measurement.measured_temperature, measurement.is_truncated


@pytest.mark.parametrize(
    ("engine", "truncated", "greedy"),
    [
        (VllmEngine(URL), ("raw", 1.0, False), ("raw", 1.0, False)),
        (VllmEngine(URL, logprob_kind="processed"), ("processed", 0.7, True), ("processed", 1.0, True)),
        (SglangEngine(URL), ("processed", 0.7, False), ("processed", 1.0, False)),
        (SglangEngine(URL, logprob_kind="raw"), ("raw", 1.0, False), ("raw", 1.0, False)),
        (ScriptedEngine(), ("processed", 0.7, True), ("processed", 1.0, True)),
    ],
    ids=["vllm", "vllm-processed", "sglang", "sglang-raw", "scripted"],
)
def test_the_record_says_at_which_temperature_and_truncation_an_engine_measures(
    engine: Any, truncated: tuple[str, float, bool], greedy: tuple[str, float, bool]
) -> None:
    assert measured(engine, TRUNCATED) == truncated
    assert measured(engine, GREEDY) == greedy


def test_a_measurement_has_the_parameters_of_sampling() -> None:
    record = sampling_record(VllmEngine(URL), TRUNCATED)
    assert LogprobMeasurement.from_sampling(record) == LogprobMeasurement(
        kind="raw",
        measured_temperature=1.0,
        is_truncated=False,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )
    assert LogprobMeasurement.from_sampling({}) == LogprobMeasurement("unknown")


def test_logprobs_under_a_grammar_are_processed() -> None:
    params = SamplingParams(temperature=0.5, grammar={"type": "json_object"})
    assert measured(VllmEngine(URL), params) == ("processed", 1.0, False)


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        (VllmEngine(URL), "raw"),
        (VllmEngine(URL, logprob_kind="processed"), "processed"),
        (SglangEngine(URL), "processed"),
        # SGLang adds the bias before it takes the logprobs that are raw otherwise.
        (SglangEngine(URL, logprob_kind="raw"), "processed"),
    ],
    ids=["vllm", "vllm-processed", "sglang", "sglang-raw"],
)
def test_the_record_says_what_constrained_an_answer_and_whether_logprobs_include_it(
    engine: Any, kind: str
) -> None:
    params = SamplingParams(logit_bias={5: 1.0}, requested_fields=("logit_bias",))
    measurement = LogprobMeasurement.from_sampling(sampling_record(engine, params))
    assert (measurement.kind, measurement.constraints) == (kind, ("logit_bias",))
    stops = SamplingParams(ignore_eos=True, requested_fields=("ignore_eos",))
    record = sampling_record(engine, stops)
    assert record["logprobs"] == engine.logprob_kind
    assert (record["ignore_eos"], LogprobMeasurement.from_sampling(record).constraints) == (True, ())


def test_what_differs_between_replicas_is_not_known() -> None:
    async def test() -> None:
        vllm, sglang = VllmEngine(URL, logprob_kind="processed"), SglangEngine("http://127.0.0.1:2")
        replicas = Replicas([vllm, sglang])
        assert measured(replicas, TRUNCATED) == ("processed", 0.7, None)
        assert measured(replicas, GREEDY) == ("processed", 1.0, None)
        await replicas.close()

    asyncio.run(test())
