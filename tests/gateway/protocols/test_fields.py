"""Every field of a request has an effect, is recorded, is known to be harmless, or is refused by its name."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ScriptedEngine, ToyCodec
from branchline.engines.base import SamplingParams
from branchline.engines.scripted import ScriptedRequest
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway
from branchline.runtime.request_fields import (
    CONSTRAINT_FIELDS,
    COUNTED_FIELDS,
    HINT_FIELDS,
    NEUTRAL_VALUES,
    READ_FIELDS,
)
from tests.gateway.harness import Agent, agent, run
from tests.gateway.protocols.protocol_clients import BODIES, PROTOCOLS, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CONSTRAINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "logit_bias": ({"5": -100}, {"logit_bias": {5: -100.0}}),
    "min_tokens": (3, {"min_tokens": 3}),
    "bad_words": (["no"], {"bad_words": ("no",)}),
    "allowed_token_ids": ([1, 2], {"allowed_token_ids": (1, 2)}),
    "stop_token_ids": ([7], {"stop_token_ids": (7,)}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "response_format": (JSON_SCHEMA, {"grammar": JSON_SCHEMA}),
    "structured_outputs": ({"regex": "a+"}, {"grammar": {"type": "regex", "regex": "a+"}}),
    "guided_json": (SCHEMA, {"grammar": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    "guided_regex": ("a+", {"grammar": {"type": "regex", "regex": "a+"}}),
    "guided_choice": (["a", "b"], {"grammar": {"type": "choice", "choice": ["a", "b"]}}),
    "guided_grammar": ("root ::= x", {"grammar": {"type": "grammar", "grammar": "root ::= x"}}),
    "regex": ("a+", {"grammar": {"type": "regex", "regex": "a+"}}),
    "ebnf": ("root ::= x", {"grammar": {"type": "grammar", "grammar": "root ::= x"}}),
    "vllm_xargs": ({"a": 1}, {"extra": {"vllm_xargs": {"a": 1}}}),
    "custom_params": ({"a": 1}, {"extra": {"custom_params": {"a": 1}}}),
    "custom_logit_processor": ("code", {"extra": {"custom_logit_processor": "code"}}),
}
"""A value of each field that changes sampling, and the parameters that an engine gets for it."""
STOPS = {"stop_token_ids", "ignore_eos"}
"""Fields that end an answer and leave the distribution of its tokens as it is."""


@asynccontextmanager
async def _agent(
    *, supported: frozenset[str] = CONSTRAINT_FIELDS, **options: Any
) -> AsyncIterator[tuple[Agent, list[SamplingParams]]]:
    """A gateway whose engine accepts these fields, and the parameters that it gets."""
    received: list[SamplingParams] = []

    def rule(request: ScriptedRequest) -> str:
        received.append(request.params)
        return "ok"

    codec = ToyCodec.chatml()
    engine = ScriptedEngine(codec, rule, supported_fields=supported)
    async with agent(engine=engine, codec=codec, **options) as a:
        yield a, received


def _recorded(a: Agent) -> dict[str, Any]:
    return dict(a.session.managed.session.tree.calls[-1].sampling)


def test_the_table_has_each_field_that_changes_sampling() -> None:
    assert CONSTRAINTS.keys() == CONSTRAINT_FIELDS


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_field_that_changes_sampling_reaches_the_engine_and_is_recorded(protocol: str) -> None:
    async def test() -> None:
        async with _agent() as (a, received):
            for name, (value, expected) in CONSTRAINTS.items():
                response = await post(a, protocol, "p", **{name: value})
                assert response.status_code == 200, (name, response.text)
                for parameter, wanted in expected.items():
                    assert getattr(received[-1], parameter) == wanted, name
                record = _recorded(a)
                assert record.get("constraints", []) == ([] if name in STOPS else [name])
                (parameter,) = expected
                assert record[parameter], name

    run(test)


def test_a_request_adds_ids_that_end_its_answer_and_may_remove_those_of_the_model() -> None:
    own = ToyCodec.chatml().stop_ids
    cases: list[tuple[dict[str, Any], frozenset[int]]] = [
        ({}, own),
        ({"stop_token_ids": [7]}, own | {7}),
        ({"ignore_eos": True}, frozenset()),
        ({"ignore_eos": True, "stop_token_ids": [7]}, frozenset({7})),
    ]

    async def test() -> None:
        async with _agent() as (a, received):
            for fields, expected in cases:
                assert (await post(a, "chat/completions", "p", **fields)).status_code == 200
                assert frozenset(received[-1].stop_ids) == expected

    assert own - {7}
    run(test)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_engine_without_a_field_refuses_it_by_the_clients_name(protocol: str) -> None:
    async def test() -> None:
        async with _agent(supported=frozenset()) as (a, received):
            for name, (value, _) in CONSTRAINTS.items():
                response = await post(a, protocol, "p", **{name: value})
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert error["message"].startswith(f"{name}: got "), error
                if protocol != "messages":
                    assert error["param"] == name
            assert not received
            assert not a.session.managed.session.tree.calls

    run(test)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_unknown_field_is_refused_by_name_and_ignored_only_on_request(
    protocol: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchline.runtime.request_fields._logged_names", set())

    async def test() -> None:
        async with _agent() as (a, _):
            response = await post(a, protocol, "p", temprature=0.3)
            assert response.status_code == 400
            assert "temprature: got 0.3" in response.json()["error"]["message"]
            assert (await post(a, protocol, "p", temprature=None)).status_code == 200
        lenient = GatewayConfig(ignore_unknown_fields=True)
        async with _agent(config=lenient, supported=frozenset()) as (a, received):
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="branchline.gateway"):
                for _ in range(2):
                    body = {"temprature": 0.3, "use_beam_search": True, "logit_bias": {"5": 1}}
                    assert (await post(a, protocol, "p", **body)).status_code == 200
            assert received[-1].logit_bias == {}
            record = _recorded(a)
            assert record["ignored_fields"] == body
            assert not {"constraints", "logit_bias"} & record.keys()
            for name in body:
                assert sum(entry.getMessage().startswith(f"{name!r}:") for entry in caplog.records) == 1, name

    run(test)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_field_without_effect_here_is_refused_unless_it_asks_for_nothing(protocol: str) -> None:
    async def test() -> None:
        async with _agent() as (a, _):
            for name, neutral in NEUTRAL_VALUES.items():
                if name in READ_FIELDS[protocol]:
                    continue
                for value in neutral:
                    response = await post(a, protocol, "p", **{name: value})
                    assert response.status_code == 200, (name, response.text)
                response = await post(a, protocol, "p", **{name: {"some": "value"}})
                assert response.status_code == 400, name
                assert response.json()["error"]["message"].startswith(f"{name}: got "), name

    run(test)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_wish_that_no_engine_here_knows_is_recorded(protocol: str) -> None:
    async def test() -> None:
        async with _agent() as (a, _):
            for name in COUNTED_FIELDS - READ_FIELDS[protocol]:
                assert (await post(a, protocol, "p", **{name: {"effort": "low"}})).status_code == 200
                assert _recorded(a)["requested"] == {name: {"effort": "low"}}
            await post(a, protocol, "p")
            assert not {"requested", "constraints", "ignored_fields"} & _recorded(a).keys()

    run(test)


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("chat/completions", {"reasoning_effort": "low", "verbosity": "low", "tool_choice": "required"}),
        ("responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}),
        ("messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}),
    ],
)
def test_what_clients_ask_of_a_vendors_model_is_recorded(protocol: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with _agent() as (a, _):
            question = BODIES[protocol]("p")
            url = f"{a.session.base_url}/{protocol}"
            response = await a.http.post(url, json={**question, **body}, headers=a.api_headers)
            assert response.status_code == 200, response.text
            assert _recorded(a)["requested"] == body

    run(test)


VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 200),
    st.floats(-3, 3),
    st.sampled_from(["", "x", "auto", "none", "low"]),
    st.lists(st.integers(0, 9), max_size=2),
    st.lists(st.sampled_from(["a", "b"]), max_size=2),
    st.dictionaries(st.sampled_from(["type", "5", "regex"]), st.sampled_from(["text", 1, "a+"]), max_size=2),
)


def test_no_field_is_answered_without_effect_or_record() -> None:
    """A field that is neither read by the protocol nor harmless gives 400 with its name, or is in the record,
    or has a value that asks for nothing."""

    async def check(a: Agent, protocol: str, name: str, value: Any) -> None:
        response = await post(a, protocol, "p", **{name: value})
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["message"].startswith(name), response.text
            return
        record = _recorded(a)
        is_recorded = name in record.get("requested", {}) or name in record.get("constraints", ())
        if name in STOPS:
            is_recorded = name in record
        is_default = value in ("", [], {}, False, 0, {"type": "text"}) and name in CONSTRAINT_FIELDS
        is_flag = isinstance(value, bool)  # True equals 1, but does not mean it.
        is_neutral = any(
            isinstance(neutral, bool) == is_flag and value == neutral for neutral in neutrals(name)
        )
        assert is_recorded or is_default or is_neutral, (protocol, name, value)

    def neutrals(name: str) -> tuple[Any, ...]:
        return NEUTRAL_VALUES.get(name, ())

    names = sorted({*CONSTRAINT_FIELDS, *COUNTED_FIELDS, *NEUTRAL_VALUES, "tempature", "x_new"})

    @given(st.sampled_from(PROTOCOLS), st.sampled_from(names), VALUES)
    @settings(max_examples=150, deadline=None, database=None)
    def property_test(protocol: str, name: str, value: Any) -> None:
        if name not in READ_FIELDS[protocol]:
            cases.append((protocol, name, value))

    cases: list[tuple[str, str, Any]] = []
    property_test()

    async def test() -> None:
        async with _agent() as (a, _):
            for case in cases:
                await check(a, *case)

    run(test)


def test_each_field_has_one_use() -> None:
    tables = (CONSTRAINT_FIELDS, COUNTED_FIELDS, HINT_FIELDS, NEUTRAL_VALUES.keys())
    names = [name for table in tables for name in table]
    assert len(names) == len({*names})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"bad_words": [1]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"haiku": True}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"response_format": {"type": "haiku"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_an_invalid_value_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    async def test() -> None:
        async with _agent() as (a, _):
            response = await a.ask("p", **body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == field

    run(test)


def test_a_sample_says_what_constrained_its_answers() -> None:
    async def test() -> None:
        async with _agent() as (a, _):
            await a.ask("p", logit_bias={"5": -100}, min_tokens=1, stop_token_ids=[7])
            (sample,) = (await a.get("/samples"))["samples"]
            (answer,) = sample["answers"]
            assert answer["logprobs"]["constraints"] == ["logit_bias", "min_tokens"]
            (exported,) = a.session.managed.export().samples
            assert exported.answers[0].logprobs.constraints == ("logit_bias", "min_tokens")

    run(test)


def test_what_a_call_records_survives_a_restart_and_is_in_the_tree_view(tmp_path: Path) -> None:
    grammars = {name for name in CONSTRAINTS if "grammar" in CONSTRAINTS[name][1]}
    body = {name: value for name, (value, _) in CONSTRAINTS.items() if name not in grammars}
    body |= {"guided_choice": ["a"], "reasoning_effort": "low"}
    shown: list[Any] = []

    async def test() -> None:
        async with _agent(journal=tmp_path / "journal", id="s") as (a, _):
            response = await a.ask("p", **body)
            assert response.status_code == 200, response.text
            (call,) = (await a.get("/tree"))["calls"]
            shown.append(call["sampling"])
        engine = ScriptedEngine(ToyCodec.chatml())
        async with Gateway(engine=engine, codec=engine.codec, journal=tmp_path / "journal") as gateway:
            (recorded,) = gateway.sessions.get("s").session.tree.calls
            assert json.loads(json.dumps(recorded.sampling)) == shown[0]
        assert shown[0]["requested"] == {"reasoning_effort": "low"}
        assert shown[0]["logit_bias"] == {"5": -100.0}
        assert shown[0]["grammar"] == {"type": "choice", "choice": ["a"]}

    run(test)
