from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from branchline import ToyCodec, timelines_of
from branchline.core.errors import (
    BranchlineError,
    ContextLengthError,
    EngineError,
    InputError,
    JournalError,
    SessionError,
)
from branchline.core.message import Message, ToolCall
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.gateway.config import GatewayConfig
from branchline.loop.remote import HttpModel
from tests.gateway.running import agent
from tests.loop.running import move_clock, run

ASK = (Message("user", "p"),)


@asynccontextmanager
async def asking(*said: Any, **options: Any) -> Any:
    codec = ToyCodec.chatml()
    engine = ScriptedEngine(codec, replies(*said))
    async with (
        agent(engine=engine, **options) as a,
        HttpModel(a.session.base_url, a.session.api_key, a.session.control_key) as model,
    ):
        yield a, model


def test_a_reply_is_put_together_from_its_stream() -> None:
    async def test() -> None:
        said = Message(
            "assistant", "text é", reasoning="r", calls=(ToolCall("f", '{"a":1}'), ToolCall("g", "{}"))
        )
        async with asking(said) as (a, model):
            reply = await model.ask(ASK, name="mine")
            tree = a.session.live.session.tree
            node = tree.nodes[tree.calls[0].outputs[0]]
            assert reply.call_id == tree.calls[0].id == "mine"
            assert reply.message == node.message
            assert reply.finish == "tool_calls"
            assert [*reply.prompt_ids, *reply.ids] == tree.path_ids(node).tolist()
            assert reply.logprobs is not None
            assert node.output is not None
            assert reply.logprobs.tolist() == node.output.logprobs.tolist()

    run(test)


def test_a_count_is_the_length_of_the_prompt_that_would_be_asked_and_leaves_nothing() -> None:
    async def test() -> None:
        async with asking("ok") as (a, model):
            options = {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "params": {"chat_template_kwargs": {"deep": True}},
            }
            counted = await model.count(ASK, **options)
            assert not a.session.live.session.tree.calls
            assert counted == len((await model.ask(ASK, **options)).prompt_ids)
            assert counted != await model.count(ASK)

    run(test)


def test_the_agent_and_the_id_of_what_was_said_travel_along() -> None:
    async def test() -> None:
        async with asking("same") as (a, model):
            live = a.session.live
            first, second = [await model.ask(ASK) for _ in range(2)]
            critic = HttpModel(a.session.base_url, a.session.api_key, agent="critic")
            async with critic:
                await critic.ask((Message("system", "s"), *ASK))
            await model.ask((*ASK, second.message, Message("user", "q")))
            tree = live.session.tree
            assert [call.agent for call in tree.calls] == ["", "", "critic", ""]
            parent = tree.nodes[tree.calls[3].prompt_node].parent
            assert parent is not None
            assert tree.call_of(parent).id == second.call_id != first.call_id
            assert not tree.calls[3].ambiguous_echo
            assert len(timelines_of(tree)) == 3

    run(test)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(EngineError("gone"), EngineError), (ValueError("bad"), EngineError)],
)
def test_an_error_before_the_first_word_is_the_error_it_was(error: Exception, kind: Any) -> None:
    async def test() -> None:
        async with asking(error) as (_, model):
            with pytest.raises(kind, match=str(error)):
                await model.ask(ASK)

    run(test)


def test_an_error_in_the_middle_is_the_error_it_was() -> None:
    class Breaking(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            async for chunk in super().generate(*args, **options):
                yield chunk
                raise EngineError("broke in the middle")

    async def test() -> None:
        engine = Breaking(ToyCodec.chatml(), replies("a long answer"))
        async with (
            agent(engine=engine) as a,
            HttpModel(a.session.base_url, a.session.api_key) as model,
        ):
            with pytest.raises(EngineError, match="broke in the middle"):
                await model.ask(ASK)
            assert not a.session.live.session.tree.calls

    run(test)


def test_refusals_are_the_errors_they_were() -> None:
    async def test() -> None:
        async with asking("ok") as (a, model):
            url, key = a.session.base_url, a.session.api_key

            async def refused(model: HttpModel, **options: Any) -> BranchlineError:
                async with model:
                    with pytest.raises(BranchlineError) as caught:
                        await model.ask(ASK, **options)
                    return caught.value

            no_key = await refused(HttpModel(url, ""))
            wrong_key = await refused(HttpModel(url, "sk-wrong"))
            no_session = await refused(HttpModel(a.gateway.url + "/sessions/nobody/v1", key))
            assert isinstance(no_key, SessionError)
            assert isinstance(wrong_key, SessionError)
            assert isinstance(no_session, SessionError)
            assert (no_key.kind, wrong_key.kind, no_session.kind) == ("no_key", "forbidden", "unknown")
            wrong = await refused(HttpModel(url, key), params={"temperature": "hot"})
            assert isinstance(wrong, InputError)
            assert "temperature: got 'hot'" in str(wrong)
            a.engine.max_context = 3
            assert isinstance(await refused(HttpModel(url, key)), ContextLengthError)
            a.engine.max_context = None
            await model.ask(ASK, name="mine")
            with pytest.raises(SessionError) as conflict:
                await model.ask((Message("user", "q"),), name="mine")
            assert conflict.value.kind == "conflict"

    run(test)


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (503, b'{"error": {"message": "disk full"}}', JournalError, "disk full"),
        (502, b'{"error": {"message": "gone"}}', EngineError, "status 502: gone"),
        (504, b"<html>timeout</html>", EngineError, "status 504: <html>timeout</html>"),
        (413, b"", InputError, "status 413"),
        (200, b'data: {"id": "x", "choices": []}\n\n', EngineError, "ended before its answer did"),
    ],
)
def test_whatever_stands_between_says_something_else(status: int, body: bytes, kind: Any, words: str) -> None:
    async def test() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
        async with httpx.AsyncClient(transport=transport) as http:
            with pytest.raises(kind, match=words):
                await HttpModel("http://gateway/v1", "key", http=http).ask(ASK)

    run(test)


def test_a_gateway_that_is_not_there_is_an_engine_error() -> None:
    async def test() -> None:
        def refuse(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused", request=request)

        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as http:
            model = HttpModel("http://gateway/v1", "key", "control", http=http)
            for work in (model.ask(ASK), model.count(ASK), model.samples()):
                with pytest.raises(EngineError, match="ConnectError: refused"):
                    await work

    run(test)


def test_a_busy_gateway_is_asked_again_after_the_time_it_says() -> None:
    async def test() -> None:
        async with asking("ok", config=GatewayConfig(max_in_flight=1)) as (a, model):
            a.engine.gate = asyncio.Event()
            first = asyncio.create_task(model.ask(ASK))
            while not a.engine.asked:
                await asyncio.sleep(0)
            second = asyncio.create_task(model.ask(ASK))
            impatient = HttpModel(a.session.base_url, a.session.api_key, patience_s=0)
            async with impatient:
                with pytest.raises(SessionError) as busy:
                    await impatient.ask(ASK)
            assert busy.value.kind == "busy"
            a.engine.gate.set()
            await first
            while not second.done():
                move_clock(1)
                await asyncio.sleep(0)
            assert (await second).message.text == "ok"
            assert len(a.engine.asked) == 2

    run(test)


def test_samples_need_the_control_key() -> None:
    async def test() -> None:
        async with asking("ok") as (a, model):
            await model.ask(ASK)
            (sample,) = await model.samples()
            assert sample.trained_tokens == 3
            async with HttpModel(a.session.base_url, a.session.api_key) as agents_own:
                with pytest.raises(InputError, match="control_key: got none"):
                    await agents_own.samples()
            async with HttpModel(a.session.base_url, "x", a.session.api_key) as wrong:
                with pytest.raises(SessionError):
                    await wrong.samples()

    run(test)


def test_a_client_that_is_lent_stays_open() -> None:
    async def test() -> None:
        async with asking("ok") as (a, _), httpx.AsyncClient() as http:
            async with HttpModel(a.session.base_url, a.session.api_key, http=http) as model:
                await model.ask(ASK)
            assert not http.is_closed

    run(test)
