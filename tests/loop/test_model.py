from __future__ import annotations

import asyncio
from typing import Any

import pytest

from branchline import ToyCodec, timelines_of
from branchline.core.errors import EngineInputError, MessageError, SessionError
from branchline.core.message import Message, ToolCall
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.loop.model import SessionModel
from branchline.runtime.managed_session import ManagedSession, SessionLimits, SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.loop.harness import run

ASK = (Message("user", "p"),)


def scripted_model(
    *answers: Any, agent: str = "", **options: Any
) -> tuple[SessionModel, ManagedSession, ScriptedEngine]:
    codec = ToyCodec.chatml()
    managed, _, _ = SessionStore(codec).open(SessionOptions(**options))
    engine = ScriptedEngine(codec, replies(*answers), version=3)
    return SessionModel(managed, engine, agent=agent), managed, engine


def test_a_result_has_the_tokens_of_the_tree() -> None:
    async def test() -> None:
        model, managed, _ = scripted_model(
            Message("assistant", "a", reasoning_content="r", tool_calls=(ToolCall("f", "{}"),))
        )
        result = await model.ask(ASK)
        (call,) = managed.session.tree.calls
        node = managed.session.tree.nodes[call.outputs[0]]
        assert result.call_id == call.id
        assert result.message == node.message
        assert result.message.id == call.id
        assert result.finish_reason == "tool_calls"
        assert [*result.prompt_ids, *result.ids] == managed.session.tree.path_ids(node).tolist()
        assert result.logprobs is not None
        assert node.output is not None
        assert result.logprobs.tolist() == node.output.logprobs.tolist()  # type: ignore[union-attr]
        assert result.answers[0].versions == (3,)
        assert managed.session.tree.delivery(call) == "delivered"
        assert not managed.in_flight

    run(test)


def test_count_tokens_is_the_length_of_the_prompt_and_records_nothing() -> None:
    async def test() -> None:
        model, managed, engine = scripted_model("ok")
        tools = [{"type": "function", "function": {"name": "f"}}]
        params = {"chat_template_kwargs": {"deep": True}}
        counted = await model.count_tokens(ASK, tools=tools, params=params)
        assert (managed.session.tree.calls, engine.received_prompts) == ([], [])
        assert counted == len((await model.ask(ASK, tools=tools, params=params)).prompt_ids)
        assert counted != await model.count_tokens(ASK)

    run(test)


def test_the_sessions_sampling_overrides_the_params() -> None:
    async def test() -> None:
        model, managed, _ = scripted_model(
            "a long answer", sampling={"temperature": 0.5, "max_tokens": 4}, sampling_defaults={"top_p": 0.9}
        )
        result = await model.ask(ASK, params={"temperature": 1.0, "max_tokens": 100, "seed": 7})
        assert (result.message.content, result.finish_reason) == ("a lo", "length")
        sampling = managed.session.tree.calls[0].sampling
        assert {name: sampling[name] for name in ("temperature", "top_p", "seed", "max_tokens")} == {
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "max_tokens": 4,
        }

    run(test)


def test_params_are_followed_recorded_or_refused_as_in_a_request() -> None:
    async def test() -> None:
        model, managed, engine = scripted_model("ok")
        with pytest.raises(MessageError, match=r"temprature: got 0\.3, expected no such field"):
            await model.ask(ASK, params={"temprature": 0.3})
        with pytest.raises(EngineInputError, match=r"logit_bias: got \{.5.: 1\}, expected no such field"):
            await model.ask(ASK, params={"logit_bias": {"5": 1}})
        assert not managed.session.tree.calls
        engine.supported_fields = frozenset({"logit_bias"})
        await model.ask(ASK, params={"logit_bias": {"5": 1}, "reasoning_effort": "low", "user": "u"})
        sampling = managed.session.tree.calls[0].sampling
        assert (sampling["constraints"], sampling["logit_bias"]) == (["logit_bias"], {"5": 1.0})
        assert sampling["requested"] == {"reasoning_effort": "low"}

    run(test)


def test_stop_texts_and_single_tool_calls() -> None:
    async def test() -> None:
        two = Message("assistant", tool_calls=(ToolCall("f", "{}"), ToolCall("g", "{}")))
        model, _, _ = scripted_model("one two three", two)
        assert (await model.ask(ASK, params={"stop": [" three"]})).message.content == "one two"
        result = await model.ask((*ASK, Message("user", "q")), params={"parallel_tool_calls": False})
        assert [call.name for call in result.message.tool_calls] == ["f"]

    run(test)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_invalid_params_are_refused_with_their_name(params: Any, field: str) -> None:
    async def test() -> None:
        model, managed, engine = scripted_model("ok")
        with pytest.raises(MessageError, match=f"^{field}: got"):
            await model.ask(ASK, params=params)
        assert (managed.session.tree.calls, engine.received_prompts) == ([], [])

    run(test)


def test_agents_of_one_session_are_separate() -> None:
    async def test() -> None:
        model, managed, engine = scripted_model("ok", agent="")
        critic = SessionModel(managed, engine, agent="critic")
        await model.ask(ASK)
        await critic.ask((Message("system", "s"), *ASK))
        assert [line.agent for line in timelines_of(managed.session.tree)] == ["", "critic"]
        named, _, _ = scripted_model("ok", agent="")
        assert named.agent == ""
        assert scripted_model("ok", agent="x")[0].agent == "x"
        codec = ToyCodec.chatml()
        managed, _, _ = SessionStore(codec).open(SessionOptions(agent="main"))
        assert SessionModel(managed, engine).agent == "main"

    run(test)


def test_a_closed_session_and_a_name_with_another_prompt_are_refused() -> None:
    async def test() -> None:
        model, managed, _ = scripted_model("ok")
        await model.ask(ASK, call_name="mine")
        with pytest.raises(SessionError) as refused:
            await model.ask((Message("user", "q"),), call_name="mine")
        assert refused.value.kind == "conflict"
        await managed.set_state("finalized")
        with pytest.raises(SessionError) as closed:
            await model.ask(ASK)
        assert closed.value.kind == "closed"

    run(test)


def test_samples_have_the_reward_of_the_session() -> None:
    async def test() -> None:
        model, managed, _ = scripted_model("ok")
        assert await model.samples() == []
        await model.ask(ASK)
        await managed.post_rewards([{"score": 0.5}])
        (sample,) = await model.samples()
        assert (sample.reward, sample.session, sample.trained_tokens) == (0.5, managed.id, 3)

    run(test)


def test_concurrent_calls_wait_for_reserved_tokens() -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        engine = ScriptedEngine(codec, lambda _: "hello", chunk_size=1)
        managed, _, _ = SessionStore(codec).open(SessionOptions(limits=SessionLimits(tokens=200)))
        model = SessionModel(managed, engine)
        calls = [
            model.ask([Message("user", f"ask {number}")], params={"max_tokens": 150}) for number in range(6)
        ]
        results = await asyncio.gather(*calls)
        assert [result.message.content for result in results] == ["hello"] * 6

    asyncio.run(test())
