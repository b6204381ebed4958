from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from typing import Any

import pytest

from branchline import ToyCodec, timelines_of
from branchline.core.errors import (
    BranchlineError,
    ContextLengthError,
    EngineBusyError,
    EngineError,
    InputError,
    JournalError,
    SessionError,
)
from branchline.core.message import Message, ToolCall
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.upstream_chat import UpstreamChat
from branchline.gateway.config import GatewayConfig
from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.http_model import HttpModel, Retry
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import Task
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import chat_event as told
from tests.gateway.harness import agent
from tests.loop.harness import move_clock, run

ASK = (Message("user", "p"),)


@asynccontextmanager
async def gateway_model(*said: Any, **options: Any) -> Any:
    codec = ToyCodec.chatml()
    engine = ScriptedEngine(codec, replies(*said))
    async with (
        agent(engine=engine, **options) as a,
        HttpModel(a.session.base_url, a.session.api_key, a.session.control_key) as model,
    ):
        yield a, model


def http_response(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def fake_server(*answers: bytes) -> AsyncIterator[str]:
    """Something that is no gateway and says these, one to each request; behind them it hangs up."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while left:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        await server.wait_closed()


def test_a_reply_is_put_together_from_its_stream() -> None:
    async def test() -> None:
        said = Message(
            "assistant",
            "text é",
            reasoning_content="r",
            tool_calls=(ToolCall("f", '{"a":1}'), ToolCall("g", "{}")),
        )
        async with gateway_model(said) as (a, model):
            reply = await model.ask(ASK, call_name="mine")
            tree = a.session.managed.session.tree
            node = tree.nodes[tree.calls[0].outputs[0]]
            assert reply.call_id == tree.calls[0].id == "mine"
            assert reply.message == node.message
            assert reply.finish_reason == "tool_calls"
            assert [*reply.prompt_ids, *reply.ids] == tree.path_ids(node).tolist()
            assert reply.logprobs is not None
            assert node.output is not None
            assert reply.logprobs.tolist() == node.output.logprobs.tolist()

    run(test)


def test_a_call_of_a_tool_that_is_no_function_is_read_too() -> None:
    async def test() -> None:
        patch = Message("assistant", tool_calls=(ToolCall("patch", '{"input":"a line"}'),))
        async with gateway_model(patch, "done") as (a, model):
            tools = [{"type": "custom", "custom": {"name": "patch"}}]
            reply = await model.ask(ASK, tools=tools)
            tree = a.session.managed.session.tree
            assert reply.message == tree.nodes[tree.calls[0].outputs[0]].message
            result = Message("tool", "patched", tool_call_id=reply.message.tool_calls[0].id)
            await model.ask((*ASK, reply.message, result), tools=tools)
            assert len(timelines_of(tree)) == 1

    run(test)


@asynccontextmanager
async def upstream_model(*script: Any) -> AsyncIterator[tuple[Any, HttpModel]]:
    """A gateway whose engine tells words and no ids."""
    async with FakeChat() as server, agent(engine=UpstreamChat(server.url + "/v1")) as a:
        server.scripted_events = script
        session = a.session
        async with HttpModel(session.base_url, session.api_key, session.control_key) as model:
            yield a, model


def test_an_answer_that_an_upstream_cut_is_an_answer() -> None:
    async def test() -> None:
        async with upstream_model(told(content="a long answer"), told("length")) as (_, model):
            state = await run_agent(LoopState.begin(Task(ASK)), AgentContext(model))
            assert (state.stop_reason, state.assistant_turns) == (StopReason.LENGTH, 1)
            assert [message.content for message in state.messages] == ["p", "a long answer"]
        async with upstream_model(told("length")) as (_, model):
            state = await run_agent(LoopState.begin(Task(ASK)), AgentContext(model))
            assert (state.stop_reason, state.assistant_turns) == (StopReason.MODEL_LENGTH, 0)

    run(test)


def test_a_refusal_is_what_was_said() -> None:
    async def test() -> None:
        async with upstream_model(told(refusal="No."), told("stop")) as (a, model):
            reply = await model.ask(ASK)
            tree = a.session.managed.session.tree
            assert (reply.message.refusal, reply.message.content, reply.message.is_empty) == (
                "No.",
                "",
                False,
            )
            assert reply.message == tree.nodes[tree.calls[0].outputs[0]].message

    run(test)


def test_a_count_is_the_length_of_the_prompt_that_would_be_asked_and_leaves_nothing() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, model):
            options = {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "params": {"chat_template_kwargs": {"deep": True}},
            }
            counted = await model.count_tokens(ASK, **options)
            assert not a.session.managed.session.tree.calls
            assert counted == len((await model.ask(ASK, **options)).prompt_ids)
            assert counted != await model.count_tokens(ASK)

    run(test)


def test_the_agent_and_the_id_of_what_was_said_travel_along() -> None:
    async def test() -> None:
        async with gateway_model("same") as (a, model):
            live = a.session.managed
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
            assert not tree.calls[3].ambiguous_match
            assert len(timelines_of(tree)) == 3

    run(test)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(EngineError("gone"), EngineError), (ValueError("bad"), EngineError)],
)
def test_an_error_before_the_first_word_is_the_error_it_was(error: Exception, kind: Any) -> None:
    async def test() -> None:
        async with gateway_model(error) as (_, model):
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
            assert not a.session.managed.session.tree.calls

    run(test)


def test_refusals_are_the_errors_they_were() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, model):
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
            await model.ask(ASK, call_name="mine")
            with pytest.raises(SessionError) as conflict:
                await model.ask((Message("user", "q"),), call_name="mine")
            assert conflict.value.kind == "conflict"

    run(test)


def test_what_becomes_of_a_session_has_the_same_name_here_as_at_the_gateway() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, model):
            await a.session.managed.set_state("finalized")
            for work in (model.ask(ASK), model.ask(ASK, call_name="mine")):
                with pytest.raises(SessionError, match="is finalized and takes no more calls") as closed:
                    await work
                assert closed.value.kind == "closed", "no conflict, which would be asked again"

    run(test)


def test_a_session_that_is_closed_in_the_middle_of_an_answer_is_closed() -> None:
    class Slow(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            async for chunk in super().generate(*args, **options):
                yield chunk
                halfway.set()
                await asyncio.Event().wait()

    halfway = asyncio.Event()

    async def test() -> None:
        engine = Slow(ToyCodec.chatml(), replies("a long answer"))
        async with agent(engine=engine) as a, HttpModel(a.session.base_url, a.session.api_key) as model:
            asked = asyncio.create_task(model.ask(ASK))
            await halfway.wait()
            await a.session.abort("enough")
            with pytest.raises(SessionError) as closed:
                await asked
            assert closed.value.kind == "closed"

    run(test)


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (503, b'{"error": {"message": "disk full"}}', JournalError, "disk full"),
        (503, b"<html>upstream down</html>", EngineError, "status 503: <html>upstream down</html>"),
        (503, b'{"error": "down"}', EngineError, "status 503"),
        (502, b'{"error": "\xff"}', EngineError, "status 502"),
        (502, b'{"error": {"message": "gone"}}', EngineError, "status 502: gone"),
        (504, b"<html>timeout</html>", EngineError, "status 504: <html>timeout</html>"),
        (500, b'{"error": "all of it"}', EngineError, 'status 500: {"error": "all of it"}'),
        (409, b'{"error": {"message": "no", "code": "odd"}}', SessionError, "no"),
        (413, b"", InputError, "status 413"),
        (200, b'data: {"id": "x", "choices": []}\n\n', EngineError, "ended before its answer did"),
        (200, b"data: <html>\n\n", EngineError, "not what a gateway says: b'<html>'"),
        (200, b'data: "\xff"\n\n', EngineError, "not what a gateway says"),
        (200, b'data: {"choices": [{"delta": {}}]}\n\n', EngineError, "not what a gateway says.*`id`"),
        (200, b"data: []\n\n", EngineError, "not what a gateway says.*array"),
        (200, b'data: {"error": "x"}\n\n', EngineError, 'status 500: {"error": "x"}'),
        (200, b'data: {"error": {"message": "x"}, "status": "y"}\n\n', EngineError, "status 500: x"),
    ],
)
def test_whatever_stands_between_says_something_else(status: int, body: bytes, kind: Any, words: str) -> None:
    async def test() -> None:
        async with fake_server(http_response(status, body)) as url, HttpModel(url, "key") as model:
            with pytest.raises(kind, match=words):
                await model.ask(ASK)

    run(test)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b'{"prompt_tokens": "x"}', b'{"samples": [{}]}'])
def test_what_is_told_in_another_form_than_a_gateways_is_an_engine_error(body: bytes) -> None:
    async def test() -> None:
        async with (
            fake_server(*[http_response(200, body)] * 3) as url,
            HttpModel(url, "key", "control") as model,
        ):
            for work in (model.count_tokens(ASK), model.samples(), HttpModel.open(url)):
                with pytest.raises(EngineError, match="not what a gateway says"):
                    await work

    run(test)


def test_a_gateway_that_stops_is_an_engine_that_is_gone_and_no_broken_journal() -> None:
    async def test() -> None:
        body = b'{"error": {"message": "the gateway is stopping"}}'
        async with (
            fake_server(http_response(503, body, "retry-after: 1")) as url,
            HttpModel(url, "key") as model,
        ):
            with pytest.raises(EngineError, match="status 503: the gateway is stopping"):
                await model.ask(ASK)

    run(test)


def test_a_gateway_that_is_not_there_is_an_engine_error() -> None:
    async def test() -> None:
        async with fake_server() as url:
            pass
        async with HttpModel(url, "key", "control") as model:
            for work in (model.ask(ASK), model.count_tokens(ASK), model.samples(), HttpModel.open(url)):
                with pytest.raises(EngineError, match="cannot connect"):
                    await work

    run(test)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"base_url": "gateway:8100"}, "url: got 'gateway:8100'"),
        ({"api_key": "two\nlines"}, "api_key: has characters that no header can carry"),
    ],
)
def test_what_cannot_be_asked_at_all_is_refused_at_once(given: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        HttpModel(**{"base_url": "http://127.0.0.1:1/v1", "api_key": "k", **given})


def test_a_name_that_no_header_can_carry_is_refused() -> None:
    async def test() -> None:
        async with HttpModel("http://127.0.0.1:1/v1", "k", agent="two\r\nlines") as model:
            with pytest.raises(
                InputError, match=r"x-branchline-agent: got 'two\\r\\nlines', expected printable"
            ):
                await model.ask(ASK)

    run(test)


def test_a_thousand_models_cost_next_to_nothing() -> None:
    began = time.process_time()
    for address in ("http", "https"):
        HttpModel(f"{address}://127.0.0.1:1/v1", "k")
        gc.collect()
        tracemalloc.start()
        models = [HttpModel(f"{address}://127.0.0.1:1/v1", "k") for _ in range(1000)]
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held / len(models) < 10_000, "bytes each"
    # A TLS context each would take twenty.
    assert time.process_time() - began < 5


def test_a_hundred_and_fifty_answers_may_be_waited_for_at_once() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, model):
            a.engine.gate = asyncio.Event()
            asked = [asyncio.create_task(model.ask(ASK)) for _ in range(150)]
            while len(a.engine.received_prompts) < 150:
                await asyncio.sleep(0)
            move_clock(900)
            await asyncio.sleep(0)
            a.engine.gate.set()
            assert {reply.message.content for reply in await asyncio.gather(*asked)} == {"ok"}

    run(test)


def test_a_session_can_be_opened_where_it_is_used() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, _):
            opened = await HttpModel.open(a.gateway.url, a.gateway.admin_key, id="mine", group="doors")
            async with opened as model:
                await model.ask(ASK)
                assert len(await model.samples()) == 1
            live = a.gateway.sessions.get("mine")
            assert (live.options.group, len(live.session.tree.calls)) == ("doors", 1)
            with pytest.raises(SessionError) as exists:
                await HttpModel.open(a.gateway.url, a.gateway.admin_key, id="mine")
            with pytest.raises(SessionError) as forbidden:
                await HttpModel.open(a.gateway.url, "wrong")
            assert (exists.value.kind, forbidden.value.kind) == ("exists", "forbidden")
            with pytest.raises(InputError, match="gruop"):
                await HttpModel.open(a.gateway.url, a.gateway.admin_key, gruop="doors")

    run(test)


@pytest.mark.parametrize("after", ["2", "date", "soon", None])
def test_whoever_is_busy_may_say_until_when_as_it_likes(after: str | None) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        when = formatdate(time.time() + 1.5, usegmt=True) if after == "date" else after
        headers = [f"Retry-After: {when}"] if when else []
        busy, gone = http_response(429, b"slow down", *headers), http_response(500, b"gone")
        async with fake_server(busy, gone) as url, HttpModel(url, "key") as model:
            asked = asyncio.create_task(model.ask(ASK))
            began = loop.time()
            while not asked.done():
                move_clock(0.1)
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="gone"):
                await asked
            if after == "2":
                assert loop.time() - began >= 2
        async with fake_server(busy) as url, HttpModel(url, "key", retry_timeout_s=0.1) as model:
            with pytest.raises(EngineBusyError, match="slow down"):
                await model.ask(ASK)

    run(test)


@pytest.mark.parametrize("after", ["0", formatdate(0, usegmt=True)])
def test_a_busy_gateway_that_names_no_time_worth_waiting_is_not_asked_without_pause(after: str) -> None:
    async def test() -> None:
        busy = http_response(429, b'{"error": {"message": "full", "code": "busy"}}', f"Retry-After: {after}")
        # At 0, 0.1 and 0.3 s; a fourth time finds nobody there any more, which is another error.
        async with fake_server(*[busy] * 3) as url, HttpModel(url, "key", retry_timeout_s=0.4) as model:
            with pytest.raises(SessionError) as refused:
                await model.ask(ASK)
            assert refused.value.kind == "busy"

    run(test)


def test_whatever_is_asked_of_a_busy_gateway_is_asked_again() -> None:
    async def test() -> None:
        busy = http_response(429, b"slow down", "retry-after: 0")
        session = b'{"base_url": "http://127.0.0.1:1/v1", "api_key": "a", "control_key": "c"}'
        told = [
            busy,
            http_response(200, b'{"prompt_tokens": 3}'),
            busy,
            http_response(200, b'{"samples": []}'),
        ]
        async with (
            fake_server(*told, busy, http_response(201, session)) as url,
            HttpModel(url, "key", "control") as model,
        ):
            assert await model.count_tokens(ASK) == 3
            assert await model.samples() == []
            opened = await HttpModel.open(url)
            await opened.__aexit__()

    run(test)


def test_whoever_opens_a_session_says_how_long_to_knock() -> None:
    async def test() -> None:
        busy = http_response(429, b"slow down", "retry-after: 5")
        session = http_response(201, b'{"base_url": "%s", "api_key": "a", "control_key": "c"}')
        async with fake_server(busy) as url:
            with pytest.raises(EngineBusyError):
                await HttpModel.open(url, retry_timeout_s=4)
        async with fake_server(busy) as other:
            opening = http_response(201, session.partition(b"\r\n\r\n")[2] % other.encode())
            async with fake_server(opening) as url, await HttpModel.open(url, retry_timeout_s=4) as model:
                with pytest.raises(EngineBusyError):
                    await model.count_tokens(ASK)

    run(test)


def test_a_busy_gateway_is_asked_again_after_the_time_it_says() -> None:
    async def test() -> None:
        async with gateway_model("ok", config=GatewayConfig(max_in_flight=1)) as (a, model):
            a.engine.gate = asyncio.Event()
            first = asyncio.create_task(model.ask(ASK))
            while not a.engine.received_prompts:
                await asyncio.sleep(0)
            second = asyncio.create_task(model.ask(ASK))
            impatient = HttpModel(a.session.base_url, a.session.api_key, retry_timeout_s=0)
            async with impatient:
                with pytest.raises(SessionError) as busy:
                    await impatient.ask(ASK)
            assert busy.value.kind == "busy"
            a.engine.gate.set()
            await first
            while not second.done():
                move_clock(1)
                await asyncio.sleep(0)
            assert (await second).message.content == "ok"
            assert len(a.engine.received_prompts) == 2

    run(test)


def test_samples_need_the_control_key() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, model):
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


def test_between_knocks_stands_a_pause_that_grows_where_none_is_asked_for() -> None:
    async def test() -> None:
        patience = Retry(600)
        assert [patience.next_delay_s("0") for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]

    run(test)


def test_what_is_asked_for_is_waited_if_it_is_longer() -> None:
    async def test() -> None:
        later = formatdate(time.time() + 100, usegmt=True)
        assert [Retry(600).next_delay_s(said) for said in ("2", "soon", "")] == [2.0, 1.0, 1.0]
        assert 90 < Retry(600).next_delay_s(later) <= 100

    run(test)


@pytest.mark.parametrize(
    ("status", "said", "moved_s", "goes_on"),
    [
        (429, "0", 0, True),
        (429, "11", 0, False),
        (429, "0", 10, False),
        (503, "0", 0, False),
    ],
)
def test_patience_ends(status: int, said: str, moved_s: float, goes_on: bool) -> None:
    async def test() -> None:
        patience = Retry(10)
        move_clock(moved_s)
        assert await patience.wait_to_retry(status, said) is goes_on

    run(test)
