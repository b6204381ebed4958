"""Log lines: one per call, and lines of sessions; never a key, and messages only with contents."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from branchline import Message, ToolCall, ToyCodec
from branchline.core.choices import LogFormat
from branchline.core.errors import EngineError
from branchline.engines.scripted import ScriptedEngine, ScriptedReply, ScriptedRequest, replies
from branchline.gateway.logs import JsonFormatter, TextFormatter, configure_logging, exception_text
from branchline.gateway.server import Gateway, GatewaySession
from branchline.runtime.call_record import CallFailure
from tests.gateway.harness import run
from tests.hang import HANG_S

SECRET = "marzipan"
"""A word in all messages; without contents no log may contain it."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": SECRET, "parameters": {"type": "object"}},
    }
]


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("branchline")
    handlers, level = list(root.handlers), ours.level
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


def rule(request: ScriptedRequest) -> ScriptedReply:
    """Replies or fails as the prompt says; every text contains the secret."""
    if "unexpected" in request.prompt_text:
        raise ValueError(request.prompt_text)
    if "engine down" in request.prompt_text:
        return EngineError(f"the server said: {request.prompt_text}")
    if "caused" in request.prompt_text:
        return ConnectionRefusedError(request.prompt_text)
    if "call a tool" in request.prompt_text:
        return Message("assistant", SECRET, tool_calls=(ToolCall("look", json.dumps({"at": SECRET})),))
    return f"you like {SECRET}"


async def _send_all_requests(gateway: Gateway, http: httpx.AsyncClient) -> tuple[GatewaySession, list[str]]:
    """Sends valid and invalid requests of every kind; returns the session and all keys used."""
    s = await gateway.session(agent="main", group="g7")
    wrong = "sk-bl-wrong-" + SECRET
    keys = [s.api_key, s.control_key, gateway.admin_key, wrong]
    url = f"{s.base_url}/chat/completions"
    api_headers = {"authorization": f"Bearer {s.api_key}"}

    async def post(content: str = SECRET, key: str = s.api_key, to: str = url, **body: Any) -> int:
        body = {"model": "toy", "messages": [{"role": "user", "content": content}], **body}
        answer = await http.post(to, json=body, headers={"authorization": f"Bearer {key}"})
        return answer.status_code

    assert await post() == 200
    assert await post(stream=True) == 200
    assert await post(f"call a tool {SECRET}", tools=TOOLS) == 200
    assert await post(n=2, stop=[SECRET + "!"]) == 200
    assert await post(f"engine down {SECRET}") == 502
    assert await post(f"caused {SECRET}") == 502
    assert await post(f"unexpected {SECRET}") == 500
    assert await post(temperature=SECRET) == 400
    assert await post(messages=[{"role": SECRET, "content": SECRET}]) == 400
    assert await post(messages=SECRET) == 400
    assert await post(key=wrong) == 403
    assert await post(key=wrong, to=f"{gateway.url}/v1/chat/completions") == 403
    assert await post(to=f"{gateway.url}/sessions/{SECRET}/v1/chat/completions") == 403
    assert await post(to=f"{s.base_url}/completions", messages=None, prompt=SECRET) == 200
    for body in (b'{"messages": [{"role": "user", "content": "' + SECRET.encode(), SECRET.encode(), b"\xff"):
        assert (await http.post(url, content=body, headers=api_headers)).status_code == 400
    assert (await http.post(url, json={}, headers={"x-api-key": wrong})).status_code == 403
    control = f"{gateway.url}/sessions/{s.id}"
    for path in ("/tree", "/reward"):
        assert (await http.request("GET", control + path, headers=api_headers)).status_code in (403, 405)
    control_headers = {"authorization": f"Bearer {s.control_key}"}
    assert (await http.post(f"{control}/reward", content=SECRET, headers=control_headers)).status_code == 400
    assert (
        await http.post(f"{control}/reward", json={"score": 0.5}, headers=control_headers)
    ).status_code == 200
    admin = {"authorization": f"Bearer {gateway.admin_key}"}
    opened = await http.post(f"{gateway.url}/sessions", json={"metadata": {"about": SECRET}}, headers=admin)
    keys += [opened.json()["api_key"], opened.json()["control_key"]]
    await _send_garbage(gateway.url)
    await s.finalize()
    assert await post() == 409
    return s, keys


async def _send_garbage(url: str) -> None:
    """Sends bytes that are not HTTP; the server logs that."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{SECRET} {SECRET}\r\n\r\n".encode())
    await reader.read()
    writer.close()
    await writer.wait_closed()


def _logged_output(format: LogFormat, contents: bool) -> tuple[str, GatewaySession, list[str]]:
    """All that is logged, at every level, for requests of every kind."""
    stream = io.StringIO()
    found: list[Any] = []

    async def test() -> None:
        log_call = configure_logging(format, "debug", contents, stream)
        codec = ToyCodec()
        engine = ScriptedEngine(codec, rule)
        async with (
            Gateway(engine=engine, codec=codec, observers=[log_call]) as gateway,
            httpx.AsyncClient(timeout=HANG_S) as http,
        ):
            found.extend(await _send_all_requests(gateway, http))

    run(test)
    return stream.getvalue(), *found


@pytest.mark.parametrize("format", ["text", "json"])
def test_no_key_and_no_message_is_logged(format: LogFormat) -> None:
    output, session, keys = _logged_output(format, contents=False)
    assert SECRET not in output
    for key in keys:
        assert key not in output
    assert output.count(session.id) > 15
    assert "ValueError" in output, "the unexpected error has no traceback"
    assert "Invalid HTTP request received" in output, "the server's own line is missing"


@pytest.mark.parametrize("format", ["text", "json"])
def test_contents_logs_messages_but_no_keys(format: LogFormat) -> None:
    output, _, keys = _logged_output(format, contents=True)
    assert output.count(SECRET) > 15
    assert "you like" in output
    for key in keys:
        assert key not in output


def test_call_is_one_line_with_all_fields() -> None:
    output, session, _ = _logged_output("json", contents=False)
    lines = [json.loads(line) for line in output.splitlines()]
    calls = [line for line in lines if line["logger"] == "branchline.calls"]
    assert len({line["call"] for line in calls}) == len(calls) == 15
    first = calls[0]
    times = [first.pop(name) for name in ("prepare_s", "queue_s", "generate_s", "commit_s")]
    assert 0 < sum(times) <= first.pop("total_s")
    assert first.pop("call").startswith("chatcmpl-")
    assert first.pop("time").endswith("Z")
    prompt, sampled = f"user:{SECRET}\nassistant:", f"you like {SECRET}"
    assert first == {
        "level": "info",
        "logger": "branchline.calls",
        "message": "call",
        "outcome": "ok",
        "status": 200,
        "session": session.id,
        "group": "g7",
        "agent": "main",
        "model": "toy",
        "engine": "scripted",
        "protocol": "chat",
        "streamed": False,
        "prompt_tokens": len(prompt),
        "sampled_tokens": len(sampled),
        "reused_tokens": 0,
        "encoded_tokens": len(prompt),
        "finish_reasons": ["stop"],
        "versions": [0, 0],
    }
    assert [line["streamed"] for line in calls[:2]] == [False, True]
    assert calls[2]["finish_reasons"] == ["tool_calls"]
    assert calls[3]["sampled_tokens"] == 2 * len(sampled)
    # A closed session does not read the request.
    assert calls[-1] | {"total_s": 0} == {
        "time": calls[-1]["time"],
        "level": "info",
        "logger": "branchline.calls",
        "message": "call",
        "outcome": "refused",
        "status": 409,
        "session": session.id,
        "group": "g7",
        "protocol": "chat",
        "streamed": False,
        "call": calls[-1]["call"],
        "error": "SessionError",
        "reason": f"session {session.id} is finalized and takes no more calls",
        "total_s": 0,
    }


def test_error_has_type_cause_and_field() -> None:
    output, _, _ = _logged_output("json", contents=False)
    lines = [json.loads(line) for line in output.splitlines()]
    wrong = [line for line in lines if line["message"] == "call" and line["outcome"] != "ok"]
    assert [(line["outcome"], line["level"], line["error"], line.get("field")) for line in wrong[:6]] == [
        ("failed", "warning", "EngineError", None),
        ("failed", "warning", "EngineError from ConnectionRefusedError", None),
        ("failed", "warning", "ValueError", None),
        ("refused", "info", "MessageError", "temperature"),
        ("refused", "info", "MessageError", "messages[0].role"),
        ("refused", "info", "MessageError", "messages"),
    ]


def test_opened_and_ended_sessions_are_logged() -> None:
    output, session, _ = _logged_output("json", contents=False)
    lines = [json.loads(line) for line in output.splitlines()]
    opened, other, ended = [line for line in lines if line["logger"] == "branchline.sessions"]
    assert (opened["message"], opened["session"], opened["agent"]) == ("session opened", session.id, "main")
    assert other["message"] == "session opened"
    assert (ended["message"], ended["session"], ended["reward"]) == ("session finalized", session.id, 0.5)
    assert ended["calls"] == 5


def test_disconnect_is_logged_as_a_cancelled_call() -> None:
    stream = io.StringIO()

    async def test() -> None:
        log_call = configure_logging("json", stream=stream)
        recorded = asyncio.Event()

        def observe(record: Any) -> None:
            log_call(record)
            recorded.set()

        engine = ScriptedEngine(ToyCodec(), replies("long " * 50), gate=asyncio.Event())
        async with Gateway(engine=engine, codec=engine.codec, observers=[observe]) as gateway:
            s = await gateway.session()
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
            head = f"POST /sessions/{s.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            head += f"authorization: Bearer {s.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
            host, port = gateway.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as client:
                client.sendall((head + body).encode())
                while not engine.received_prompts:
                    await asyncio.sleep(0)
            await recorded.wait()

    run(test)
    (line,) = [one for one in map(json.loads, stream.getvalue().splitlines()) if one["message"] == "call"]
    assert (line["outcome"], line["status"], line["level"]) == ("cancelled", 499, "info")
    assert "sampled_tokens" not in line


def test_warning_level_keeps_failed_calls() -> None:
    stream = io.StringIO()

    async def test() -> None:
        log_call = configure_logging("text", "warning", stream=stream)
        engine = ScriptedEngine(ToyCodec(), rule)
        async with Gateway(engine=engine, codec=engine.codec, observers=[log_call]) as gateway:
            s = await gateway.session()
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {s.api_key}"}) as http:
                for text in ("fine", "engine down"):
                    body = {"messages": [{"role": "user", "content": text}]}
                    await http.post(f"{s.base_url}/chat/completions", json=body)

    run(test)
    (line,) = stream.getvalue().splitlines()
    assert " WARNING branchline.calls call outcome=failed status=502 " in line
    assert " error=EngineError " in line


# -- formats -----------------------------------------------------------------------------------------


def _record(message: str, **fields: Any) -> logging.LogRecord:
    record = logging.makeLogRecord(
        {"name": "branchline.calls", "levelno": 20, "levelname": "INFO", "msg": message, **fields}
    )
    record.created = 1.5
    return record


def test_text_is_one_line_for_any_agent_name() -> None:
    line = TextFormatter().format(_record("call", agent="a\nb=c \x9b\x1b[2J", model="x" * 500, total_s=12.34))
    assert line.startswith('1970-01-01T00:00:01.500Z INFO    branchline.calls call agent="a\\nb=c \\u009b')
    assert line.isprintable()
    assert f" model={'x' * 200}… total=12.3s" in line.replace('"', "")


def test_json_is_one_line_for_any_value() -> None:
    line = JsonFormatter().format(_record("call", agent="a\n\ud800", odd=ValueError, nothing=None))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "info",
        "logger": "branchline.calls",
        "message": "call",
        "agent": "a\n\ud800",
        "odd": "<class 'ValueError'>",
    }


def test_asyncio_messages_about_failed_tasks_quote_nothing() -> None:
    stream = io.StringIO()

    async def test() -> None:
        configure_logging("json", stream=stream)

        async def fail() -> None:
            raise ValueError(SECRET)

        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        asyncio.get_running_loop().call_exception_handler(
            {"message": "Task exception was never retrieved", "exception": task.exception(), "future": task}
        )

    run(test)
    line = json.loads(stream.getvalue())
    assert line["message"] == "Task exception was never retrieved"
    assert line["exception"].endswith("ValueError")
    assert SECRET not in stream.getvalue()


def test_traceback_has_cause_types_without_their_texts() -> None:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise EngineError("about " + SECRET) from error
    except EngineError as error:
        quiet, full = exception_text(error), exception_text(error, contents=True)
    assert SECRET in full
    assert "marzipan" not in quiet.replace("SECRET", "")
    assert quiet.index("KeyError\nwhich led to\n") < quiet.index('raise EngineError("about " + SECRET)')
    assert quiet.endswith("EngineError")


def test_error_that_is_its_own_cause_appears_once() -> None:
    error = EngineError(SECRET)
    error.__cause__ = error
    assert exception_text(error) == CallFailure.from_error(error).error_type == "EngineError"


def test_second_configure_logging_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second)
    logging.getLogger("branchline.gateway").info("here")
    assert not first.getvalue()
    assert second.getvalue().endswith(" INFO    branchline.gateway here\n")
