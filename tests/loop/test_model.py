from __future__ import annotations

from typing import Any

import pytest

from branchline import ToyCodec, timelines_of
from branchline.core.errors import MessageError, SessionError
from branchline.core.message import Message, ToolCall
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.loop.model import SessionModel
from branchline.runtime.managed_session import ManagedSession, SessionOptions
from branchline.runtime.session_store import SessionStore
from tests.loop.clock_runner import run

ASK = (Message("user", "p"),)


def scripted_model(
    *said: Any, agent: str = "", **options: Any
) -> tuple[SessionModel, ManagedSession, ScriptedEngine]:
    codec = ToyCodec.chatml()
    live, _, _ = SessionStore(codec).open(SessionOptions(**options))
    engine = ScriptedEngine(codec, replies(*said), version=3)
    return SessionModel(live, engine, agent=agent), live, engine


def test_a_reply_is_what_the_tree_has_of_its_call() -> None:
    async def test() -> None:
        model, live, _ = scripted_model(
            Message("assistant", "a", reasoning_content="r", tool_calls=(ToolCall("f", "{}"),))
        )
        reply = await model.ask(ASK)
        (call,) = live.session.tree.calls
        node = live.session.tree.nodes[call.outputs[0]]
        assert reply.call_id == call.id
        assert reply.message == node.message
        assert reply.message.id == call.id
        assert reply.finish_reason == "tool_calls"
        assert [*reply.prompt_ids, *reply.ids] == live.session.tree.path_ids(node).tolist()
        assert reply.logprobs is not None
        assert node.output is not None
        assert reply.logprobs.tolist() == node.output.logprobs.tolist()  # type: ignore[union-attr]
        assert reply.answers[0].versions == (3,)
        assert live.session.tree.delivery(call) == "delivered"
        assert not live.in_flight

    run(test)


def test_a_count_is_the_length_of_the_prompt_that_would_be_asked_and_leaves_nothing() -> None:
    async def test() -> None:
        model, live, engine = scripted_model("ok")
        tools = [{"type": "function", "function": {"name": "f"}}]
        params = {"chat_template_kwargs": {"deep": True}}
        counted = await model.count_tokens(ASK, tools=tools, params=params)
        assert (live.session.tree.calls, engine.received_prompts) == ([], [])
        assert counted == len((await model.ask(ASK, tools=tools, params=params)).prompt_ids)
        assert counted != await model.count_tokens(ASK)

    run(test)


def test_what_the_session_says_of_sampling_goes_before_what_the_loop_says() -> None:
    async def test() -> None:
        model, live, _ = scripted_model(
            "a long answer", sampling={"temperature": 0.5, "max_tokens": 4}, sampling_defaults={"top_p": 0.9}
        )
        reply = await model.ask(ASK, params={"temperature": 1.0, "max_tokens": 100, "seed": 7})
        assert (reply.message.content, reply.finish_reason) == ("a lo", "length")
        sampling = live.session.tree.calls[0].sampling
        assert {name: sampling[name] for name in ("temperature", "top_p", "seed", "max_tokens")} == {
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "max_tokens": 4,
        }

    run(test)


def test_stop_texts_and_single_calls_work_as_over_http() -> None:
    async def test() -> None:
        two = Message("assistant", tool_calls=(ToolCall("f", "{}"), ToolCall("g", "{}")))
        model, _, _ = scripted_model("one two three", two)
        assert (await model.ask(ASK, params={"stop": [" three"]})).message.content == "one two"
        reply = await model.ask((*ASK, Message("user", "q")), params={"parallel_tool_calls": False})
        assert [call.name for call in reply.message.tool_calls] == ["f"]

    run(test)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_wrong_params_are_refused_by_name_before_anything_is_asked(params: Any, field: str) -> None:
    async def test() -> None:
        model, live, engine = scripted_model("ok")
        with pytest.raises(MessageError, match=f"^{field}: got"):
            await model.ask(ASK, params=params)
        assert (live.session.tree.calls, engine.received_prompts) == ([], [])

    run(test)


def test_agents_of_one_session_are_told_apart() -> None:
    async def test() -> None:
        model, live, engine = scripted_model("ok", agent="")
        critic = SessionModel(live, engine, agent="critic")
        await model.ask(ASK)
        await critic.ask((Message("system", "s"), *ASK))
        assert [line.agent for line in timelines_of(live.session.tree)] == ["", "critic"]
        named, _, _ = scripted_model("ok", agent="")
        assert named.agent == ""
        assert scripted_model("ok", agent="x")[0].agent == "x"
        codec = ToyCodec.chatml()
        live, _, _ = SessionStore(codec).open(SessionOptions(agent="main"))
        assert SessionModel(live, engine).agent == "main"

    run(test)


def test_a_closed_session_takes_no_call_and_a_name_stands_for_one_prompt() -> None:
    async def test() -> None:
        model, live, _ = scripted_model("ok")
        await model.ask(ASK, call_name="mine")
        with pytest.raises(SessionError) as refused:
            await model.ask((Message("user", "q"),), call_name="mine")
        assert refused.value.kind == "conflict"
        await live.set_state("finalized")
        with pytest.raises(SessionError) as closed:
            await model.ask(ASK)
        assert closed.value.kind == "closed"

    run(test)


def test_samples_are_read_with_the_reward_of_the_session() -> None:
    async def test() -> None:
        model, live, _ = scripted_model("ok")
        assert await model.samples() == []
        await model.ask(ASK)
        await live.post_reward({"score": 0.5})
        (sample,) = await model.samples()
        assert (sample.reward, sample.session, sample.trained_tokens) == (0.5, live.id, 3)

    run(test)
