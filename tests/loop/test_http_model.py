from __future__ import annotations

import asyncio
import gc
import ssl
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from typing import Any

import msgspec
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
from branchline.core.extras import install_line
from branchline.core.message import Message, ToolCall
from branchline.core.sample import ExportReport
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.upstream_chat import UpstreamChat
from branchline.export.jsonl import report_to_json
from branchline.gateway.config import GatewayConfig
from branchline.loop.agents import AgentContext, run_agent
from branchline.loop.http_model import HttpModel, Retry
from branchline.loop.state import LoopState, StopReason
from branchline.loop.task import Task
from tests.engines.fake_servers import FakeChat
from tests.engines.test_upstream_chat import chat_event
from tests.gateway.harness import agent
from tests.loop.harness import move_clock, run

ASK = (Message("user", "p"),)


@asynccontextmanager
async def gateway_model(*answers: Any, **options: Any) -> Any:
    codec = ToyCodec.chatml()
    engine = ScriptedEngine(codec, replies(*answers))
    async with (
        agent(engine=engine, **options) as a,
        HttpModel(a.session.base_url, a.session.api_key, a.session.control_key) as model,
    ):
        yield a, model


def http_response(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def fake_server(*responses: bytes) -> AsyncIterator[str]:
    """A server that sends these responses, one to each request, and then closes the connection."""
    remaining = list(responses)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while remaining:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                writer.write(remaining.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        await server.wait_closed()


def test_a_result_is_built_from_its_stream() -> None:
    async def test() -> None:
        answer = Message(
            "assistant",
            "text é",
            reasoning_content="r",
            tool_calls=(ToolCall("f", '{"a":1}'), ToolCall("g", "{}")),
        )
        async with gateway_model(answer) as (a, model):
            result = await model.ask(ASK, call_name="mine")
            tree = a.session.managed.session.tree
            node = tree.nodes[tree.calls[0].outputs[0]]
            assert result.call_id == tree.calls[0].id == "mine"
            assert result.message == node.message
            assert result.finish_reason == "tool_calls"
            assert [*result.prompt_ids, *result.ids] == tree.path_ids(node).tolist()
            assert result.logprobs is not None
            assert node.output is not None
            assert result.logprobs.tolist() == node.output.logprobs.tolist()

    run(test)


def test_a_call_of_a_custom_tool_is_decoded() -> None:
    async def test() -> None:
        patch = Message("assistant", tool_calls=(ToolCall("patch", '{"input":"a line"}'),))
        async with gateway_model(patch, "done") as (a, model):
            tools = [{"type": "custom", "custom": {"name": "patch"}}]
            result = await model.ask(ASK, tools=tools)
            tree = a.session.managed.session.tree
            assert result.message == tree.nodes[tree.calls[0].outputs[0]].message
            tool_message = Message("tool", "patched", tool_call_id=result.message.tool_calls[0].id)
            await model.ask((*ASK, result.message, tool_message), tools=tools)
            assert len(timelines_of(tree)) == 1

    run(test)


@asynccontextmanager
async def upstream_model(*script: Any) -> AsyncIterator[tuple[Any, HttpModel]]:
    """A gateway with an upstream that returns text without ids."""
    async with FakeChat() as server, agent(gateway_engine=UpstreamChat(server.url + "/v1")) as a:
        server.scripted_events = script
        session = a.session
        async with HttpModel(session.base_url, session.api_key, session.control_key) as model:
            yield a, model


def test_an_answer_cut_by_an_upstream() -> None:
    async def test() -> None:
        async with upstream_model(chat_event(content="a long answer"), chat_event("length")) as (_, model):
            state = await run_agent(LoopState.begin(Task(ASK)), AgentContext(model))
            assert (state.stop_reason, state.assistant_turns) == (StopReason.LENGTH, 1)
            assert [message.content for message in state.messages] == ["p", "a long answer"]
        async with upstream_model(chat_event("length")) as (_, model):
            state = await run_agent(LoopState.begin(Task(ASK)), AgentContext(model))
            assert (state.stop_reason, state.assistant_turns) == (StopReason.MODEL_LENGTH, 0)

    run(test)


def test_a_refusal_is_part_of_the_message() -> None:
    async def test() -> None:
        async with upstream_model(chat_event(refusal="No."), chat_event("stop")) as (a, model):
            result = await model.ask(ASK)
            tree = a.session.managed.session.tree
            assert (result.message.refusal, result.message.content, result.message.is_empty) == (
                "No.",
                "",
                False,
            )
            assert result.message == tree.nodes[tree.calls[0].outputs[0]].message

    run(test)


def test_count_tokens_is_the_length_of_the_prompt_and_records_nothing() -> None:
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


def test_the_agent_and_response_ids_are_sent() -> None:
    async def test() -> None:
        async with gateway_model("same") as (a, model):
            managed = a.session.managed
            first, second = [await model.ask(ASK) for _ in range(2)]
            critic = HttpModel(a.session.base_url, a.session.api_key, agent="critic")
            async with critic:
                await critic.ask((Message("system", "s"), *ASK))
            await model.ask((*ASK, second.message, Message("user", "q")))
            tree = managed.session.tree
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
def test_an_error_before_the_first_event_keeps_its_type(error: Exception, kind: Any) -> None:
    async def test() -> None:
        async with gateway_model(error) as (_, model):
            with pytest.raises(kind, match=str(error)):
                await model.ask(ASK)

    run(test)


def test_an_error_event_keeps_its_type() -> None:
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


def test_error_responses_become_the_gateways_errors() -> None:
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
            no_session = await refused(HttpModel(a.gateway.url + "/sessions/unknown/v1", a.gateway.admin_key))
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


def test_a_closed_session_is_no_conflict() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, model):
            await a.session.managed.set_state("finalized")
            for work in (model.ask(ASK), model.ask(ASK, call_name="mine")):
                with pytest.raises(SessionError, match="is finalized and takes no more calls") as closed:
                    await work
                assert closed.value.kind == "closed", "a conflict would be retried under another name"

    run(test)


def test_a_session_closed_during_an_answer() -> None:
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
            call = asyncio.create_task(model.ask(ASK))
            await halfway.wait()
            await a.session.abort("enough")
            with pytest.raises(SessionError) as closed:
                await call
            assert closed.value.kind == "closed"

    run(test)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
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
        (200, b"data: <html>\n\n", EngineError, "not a gateway's response: b'<html>'"),
        (200, b'data: "\xff"\n\n', EngineError, "not a gateway's response"),
        (200, b'data: {"choices": [{"delta": {}}]}\n\n', EngineError, "not a gateway's response.*`id`"),
        (200, b"data: []\n\n", EngineError, "not a gateway's response.*array"),
        (200, b'data: {"error": "x"}\n\n', EngineError, 'status 500: {"error": "x"}'),
        (200, b'data: {"error": {"message": "x"}, "status": "y"}\n\n', EngineError, "status 500: x"),
    ],
)
def test_responses_of_other_servers(status: int, body: bytes, kind: Any, message: str) -> None:
    async def test() -> None:
        async with fake_server(http_response(status, body)) as url, HttpModel(url, "key") as model:
            with pytest.raises(kind, match=message):
                await model.ask(ASK)

    run(test)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b'{"prompt_tokens": "x"}', b'{"samples": [{}]}'])
def test_a_body_of_another_form_is_an_engine_error(body: bytes) -> None:
    async def test() -> None:
        async with (
            fake_server(*[http_response(200, body)] * 3) as url,
            HttpModel(url, "key", "control") as model,
        ):
            for work in (model.count_tokens(ASK), model.samples(), HttpModel.open(url)):
                with pytest.raises(EngineError, match="not a gateway's response"):
                    await work

    run(test)


def test_a_stopping_gateway_is_an_engine_error() -> None:
    async def test() -> None:
        body = b'{"error": {"message": "the gateway is stopping"}}'
        async with (
            fake_server(http_response(503, body, "retry-after: 1")) as url,
            HttpModel(url, "key") as model,
        ):
            with pytest.raises(EngineError, match="status 503: the gateway is stopping"):
                await model.ask(ASK)

    run(test)


def test_a_failed_connection_is_an_engine_error() -> None:
    async def test() -> None:
        async with fake_server() as url:
            pass
        async with HttpModel(url, "key", "control") as model:
            for work in (model.ask(ASK), model.count_tokens(ASK), model.samples(), HttpModel.open(url)):
                with pytest.raises(EngineError, match="cannot connect"):
                    await work

    run(test)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"base_url": "gateway:8100"}, "url: got 'gateway:8100'"),
        ({"api_key": "two\nlines"}, "api_key: has characters that no header can carry"),
    ],
)
def test_invalid_options_are_refused(options: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        HttpModel(**{"base_url": "http://127.0.0.1:1/v1", "api_key": "k", **options})


def test_an_agent_name_that_fits_no_header_is_refused() -> None:
    async def test() -> None:
        async with HttpModel("http://127.0.0.1:1/v1", "k", agent="two\r\nlines") as model:
            with pytest.raises(
                InputError, match=r"x-branchline-agent: got 'two\\r\\nlines', expected printable"
            ):
                await model.ask(ASK)

    run(test)


def test_a_thousand_models_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def count(*args: Any, **options: Any) -> ssl.SSLContext:
        contexts.append(create(*args, **options))
        return contexts[-1]

    monkeypatch.setattr(ssl, "create_default_context", count)
    for scheme in ("http", "https"):
        HttpModel(f"{scheme}://127.0.0.1:1/v1", "k")
        gc.collect()
        tracemalloc.start()
        models = [HttpModel(f"{scheme}://127.0.0.1:1/v1", "k") for _ in range(1000)]
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size / len(models) < 10_000, "bytes each"
    assert len(contexts) <= 1, "each takes 20 ms"


def test_without_the_serve_extra_the_error_names_the_pip_command() -> None:
    code = (
        "import sys; sys.modules['httptools'] = None\n"
        "try: from branchline import HttpModel\n"
        "except ImportError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == f"httptools is not installed: {install_line('serve')}\n"


def test_150_concurrent_calls() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, model):
            a.engine.gate = asyncio.Event()
            calls = [asyncio.create_task(model.ask(ASK)) for _ in range(150)]
            while len(a.engine.received_prompts) < 150:
                await asyncio.sleep(0)
            move_clock(900)
            await asyncio.sleep(0)
            a.engine.gate.set()
            assert {result.message.content for result in await asyncio.gather(*calls)} == {"ok"}

    run(test)


def test_open_opens_a_session() -> None:
    async def test() -> None:
        async with gateway_model("ok") as (a, _):
            opened = await HttpModel.open(a.gateway.url, a.gateway.admin_key, id="mine", group="doors")
            async with opened as model:
                await model.ask(ASK)
                assert len(await model.samples()) == 1
            managed = a.gateway.sessions.get("mine")
            assert (managed.options.group, len(managed.session.tree.calls)) == ("doors", 1)
            with pytest.raises(SessionError) as exists:
                await HttpModel.open(a.gateway.url, a.gateway.admin_key, id="mine")
            with pytest.raises(SessionError) as forbidden:
                await HttpModel.open(a.gateway.url, "wrong")
            assert (exists.value.kind, forbidden.value.kind) == ("exists", "forbidden")
            with pytest.raises(InputError, match="gruop"):
                await HttpModel.open(a.gateway.url, a.gateway.admin_key, gruop="doors")

    run(test)


@pytest.mark.parametrize("after", ["2", "date", "soon", None])
def test_all_forms_of_retry_after_are_honoured(after: str | None) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        when = formatdate(time.time() + 1.5, usegmt=True) if after == "date" else after
        headers = [f"Retry-After: {when}"] if when else []
        busy, gone = http_response(429, b"slow down", *headers), http_response(500, b"gone")
        async with fake_server(busy, gone) as url, HttpModel(url, "key") as model:
            call = asyncio.create_task(model.ask(ASK))
            started = loop.time()
            while not call.done():
                move_clock(0.1)
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="gone"):
                await call
            if after == "2":
                assert loop.time() - started >= 2
        async with fake_server(busy) as url, HttpModel(url, "key", retry_timeout_s=0.1) as model:
            with pytest.raises(EngineBusyError, match="slow down"):
                await model.ask(ASK)

    run(test)


@pytest.mark.parametrize("after", ["0", formatdate(0, usegmt=True)])
def test_a_retry_after_in_the_past_is_not_retried_without_delay(after: str) -> None:
    async def test() -> None:
        busy = http_response(429, b'{"error": {"message": "full", "code": "busy"}}', f"Retry-After: {after}")
        # At 0, 0.1 and 0.3 s; a fourth attempt would find the connection closed, which is another error.
        async with fake_server(*[busy] * 3) as url, HttpModel(url, "key", retry_timeout_s=0.4) as model:
            with pytest.raises(SessionError) as refused:
                await model.ask(ASK)
            assert refused.value.kind == "busy"

    run(test)


def test_every_kind_of_request_is_retried() -> None:
    async def test() -> None:
        busy = http_response(429, b"slow down", "retry-after: 0")
        session = b'{"base_url": "http://127.0.0.1:1/v1", "api_key": "a", "control_key": "c"}'
        report = msgspec.json.encode(report_to_json(ExportReport(0, 0)))
        responses = [
            busy,
            http_response(200, b'{"prompt_tokens": 3}'),
            busy,
            http_response(200, b'{"samples": [], "report": %s}' % report),
        ]
        async with (
            fake_server(*responses, busy, http_response(201, session)) as url,
            HttpModel(url, "key", "control") as model,
        ):
            assert await model.count_tokens(ASK) == 3
            assert await model.samples() == []
            opened = await HttpModel.open(url)
            await opened.__aexit__()

    run(test)


def test_open_honours_retry_timeout_s() -> None:
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


def test_a_request_to_a_busy_gateway_is_retried() -> None:
    async def test() -> None:
        async with gateway_model("ok", config=GatewayConfig(max_in_flight=1)) as (a, model):
            a.engine.gate = asyncio.Event()
            first = asyncio.create_task(model.ask(ASK))
            while not a.engine.received_prompts:
                await asyncio.sleep(0)
            second = asyncio.create_task(model.ask(ASK))
            without_retry = HttpModel(a.session.base_url, a.session.api_key, retry_timeout_s=0)
            async with without_retry:
                with pytest.raises(SessionError) as busy:
                    await without_retry.ask(ASK)
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
            async with HttpModel(a.session.base_url, a.session.api_key) as without_control_key:
                with pytest.raises(InputError, match="control_key: got none"):
                    await without_control_key.samples()
            async with HttpModel(a.session.base_url, "x", a.session.api_key) as wrong:
                with pytest.raises(SessionError):
                    await wrong.samples()

    run(test)


def test_the_delay_doubles_up_to_a_second() -> None:
    async def test() -> None:
        retry = Retry(600)
        assert [retry.next_delay_s("0") for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]

    run(test)


def test_a_longer_retry_after_is_honoured() -> None:
    async def test() -> None:
        later = formatdate(time.time() + 100, usegmt=True)
        assert [Retry(600).next_delay_s(value) for value in ("2", "soon", "")] == [2.0, 1.0, 1.0]
        assert 90 < Retry(600).next_delay_s(later) <= 100

    run(test)


@pytest.mark.parametrize(
    ("status", "retry_after", "moved_s", "expected"),
    [
        (429, "0", 0, True),
        (429, "11", 0, False),
        (429, "0", 10, False),
        (503, "0", 0, False),
    ],
)
def test_retries_end_at_the_deadline(status: int, retry_after: str, moved_s: float, expected: bool) -> None:
    async def test() -> None:
        retry = Retry(10)
        move_clock(moved_s)
        assert await retry.wait_to_retry(status, retry_after) is expected

    run(test)
