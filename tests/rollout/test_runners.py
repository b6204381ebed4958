"""Runners: functions, commands, services and the agents of the loop."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from branchline.core.errors import InputError
from branchline.rollout.processes import run_command
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.runners import (
    CommandRunner,
    FunctionRunner,
    LoopRunner,
    RemoteRunner,
    load_object,
    make_runner,
)
from branchline.rollout.sinks import MemorySink
from tests.rollout.harness import ask_once, run, scripted_gateway

PRINT_ENVIRONMENT = (
    f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"  # one line of output
)


def run_tasks(runner: Any, tasks: Any, **options: Any) -> MemorySink:
    sink = MemorySink()

    async def test() -> None:
        async with scripted_gateway() as gateway:
            await Rollout(gateway, runner, sinks=[sink], **options).run(tasks)

    run(test)
    return sink


def test_a_plain_function_runs_in_a_thread() -> None:
    def agent(task: Mapping[str, Any], session: Any) -> float:
        import httpx

        response = httpx.post(
            f"{session.base_url}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]},
            headers={"authorization": f"Bearer {session.api_key}"},
        )
        return float(response.json()["choices"][0]["message"]["content"] == "ok")

    sink = run_tasks(agent, [{"prompt": "x"}])
    assert [(result.status, result.reward) for result in sink.results] == [("finished", 1.0)]


def test_a_command_gets_the_session_and_the_task_and_no_keys_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHLINE_ADMIN_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "of the user")
    task = {"id": "t", "prompt": [{"role": "user", "content": "hi"}], "answer": 4}
    sink = run_tasks(CommandRunner(PRINT_ENVIRONMENT, tmp_path), [task])
    (result,) = sink.results
    assert result.end.cause == "no_calls", "it ended with 0 and asked nothing"
    environment = json.loads((tmp_path / f"{result.session}.log").read_text())
    assert json.loads(environment["BRANCHLINE_TASK"]) == task
    assert environment["BRANCHLINE_PROMPT"] == "hi"
    assert environment["BRANCHLINE_SESSION"] == result.session
    assert environment["OPENAI_BASE_URL"].endswith(f"/sessions/{result.session}/v1")
    assert environment["ANTHROPIC_BASE_URL"].endswith(f"/sessions/{result.session}")
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] != "of the user"
    assert "BRANCHLINE_ADMIN_KEY" not in environment


READ_TASK_FILE = (
    "import json, os; names = sorted(n for n in os.environ if n.startswith('BRANCHLINE_'));"
    "path = os.environ['BRANCHLINE_TASK_FILE']; print(json.dumps([json.load(open(path)), names, path]))"
)


def test_a_command_gets_a_row_of_any_size_as_a_file(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "é" * 100_000}, {"role": "user", "content": "and?"}]
    sink = run_tasks(
        CommandRunner(f'{sys.executable} -c "{READ_TASK_FILE}"', tmp_path), [{"messages": messages}]
    )
    (result,) = sink.results
    assert result.end.cause == "no_calls", result.end
    row, names, path = json.loads((tmp_path / f"{result.session}.log").read_text())
    assert row == {"messages": messages}, "the whole conversation"
    assert names == ["BRANCHLINE_PROMPT", "BRANCHLINE_SESSION", "BRANCHLINE_TASK_FILE"]
    assert not Path(path).exists(), "it is removed when the command has ended"


def test_a_command_reads_its_row_from_stdin_by_its_file(tmp_path: Path) -> None:
    row = {"prompt": "x" * 200_000}
    sink = run_tasks(CommandRunner('cat < "$BRANCHLINE_TASK_FILE"', tmp_path), [row])
    assert json.loads((tmp_path / f"{sink.results[0].session}.log").read_text()) == row


@pytest.mark.parametrize(
    ("name", "prompt"),
    [("BRANCHLINE_TASK", "x" * 131_072), ("BRANCHLINE_PROMPT", "x" * 131_072), ("BRANCHLINE_PROMPT", "a\0b")],
)
def test_a_command_that_names_a_variable_that_cannot_be_set_is_not_run(name: str, prompt: str) -> None:
    (result,) = run_tasks(CommandRunner(f'echo "${name}" >&2; exit 3'), [{"prompt": prompt}]).results
    assert result.end.cause == "runner_error"
    assert re.search(
        f"{name}: got .*, expected at most 131,0.. bytes without NUL.* BRANCHLINE_TASK_FILE", result.end.error
    )


@pytest.mark.parametrize("excess", [0, 1])
def test_a_variable_is_set_up_to_the_limit_of_the_system(tmp_path: Path, excess: int) -> None:
    size = 128 * 1024 - len("BRANCHLINE_PROMPT=") - 1 + excess
    (result,) = run_tasks(
        CommandRunner(f'echo "${{#BRANCHLINE_PROMPT}}" > {tmp_path}/size'), [{"prompt": "x" * size}]
    ).results
    assert result.end.cause == ("runner_error" if excess else "no_calls"), result.end
    assert excess or int((tmp_path / "size").read_text()) == size


def test_a_command_that_asks_the_model_is_recorded_and_its_exit_code_decides() -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    call = (
        "import os, urllib.request as r;"
        f"q = r.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', b'''{body}''',"
        "{'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'content-type': 'application/json'});"
        "r.urlopen(q).read()"
    )
    command = f'{sys.executable} -c "{call.replace(chr(34), chr(92) + chr(34))}" && exit $BRANCHLINE_PROMPT'
    sink = run_tasks(CommandRunner(command), [{"id": "good", "prompt": "0"}, {"id": "bad", "prompt": "7"}])
    by_id = {result.job.task.uid: result for result in sink.results}
    assert by_id["good"].status == "finished"
    assert len(by_id["good"].samples) == 1
    assert (by_id["bad"].status, str(by_id["bad"].end.cause)) == ("failed", "exit_code")
    assert by_id["bad"].end.error.startswith("exit code 7")
    assert by_id["bad"].line["histories"][0]["messages"][-1]["content"] == "ok", "its trajectory is kept"


def test_a_command_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "pid"
        work = asyncio.create_task(run_command(f"sleep 600 & echo $! > {file}; wait", os.environ))
        while not file.exists() or not file.read_text().strip():
            await asyncio.sleep(0.005)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        pid = int(file.read_text())
        for _ in range(200):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                return
            if state == "Z":
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"process {pid} still runs")

    run(test)


def test_a_service_gets_the_task_and_completes_the_session() -> None:
    received: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        received.append((head.split(b" ")[1], body))
        status = b"500 Broken" if body["task"]["id"] == "bad" else b"202 Accepted"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()
        if body["task"]["id"] != "bad":
            background.append(asyncio.create_task(work(body)))

    background: list[asyncio.Task[None]] = []

    async def work(body: Any) -> None:
        import httpx

        session = body["session"]
        headers = {"authorization": f"Bearer {session['api_key']}"}
        async with httpx.AsyncClient(headers=headers) as http:
            messages = [{"role": "user", "content": body["task"]["prompt"]}]
            await http.post(
                f"{session['base_url']}/chat/completions", json={"model": "m", "messages": messages}
            )
            response = await http.post(f"{session['anthropic_base_url']}/complete")
            assert response.status_code == 200

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        sink = MemorySink()
        async with server, scripted_gateway() as gateway:
            runner = RemoteRunner(f"http://127.0.0.1:{port}/run?kind=x")
            tasks = [{"id": "good", "prompt": "hello"}, {"id": "bad", "prompt": "hello"}]
            await Rollout(gateway, runner, sinks=[sink], config=RolloutConfig(timeout_s=20)).run(tasks)
            await asyncio.gather(*background)
        statuses = {result.job.task.uid: (result.status, result.calls) for result in sink.results}
        assert statuses == {"good": ("finished", 1), "bad": ("failed", 0)}
        assert received[0][0] == b"/run?kind=x"

    run(test)


def test_agents_of_the_loop_run_by_their_names() -> None:
    sink = run_tasks({"other": ask_once}, [{"id": "a", "prompt": "hello", "agent_name": "single_turn"}])
    assert [(result.status, result.calls) for result in sink.results] == [("finished", 1)]
    assert sink.results[0].trajectory.answer == "ok"
    assert isinstance(make_runner("tool"), LoopRunner)
    with pytest.raises(InputError, match="agent: got 'poet', expected MODULE:FUNCTION, or one of"):
        make_runner("poet")


def test_a_runner_can_be_pickled() -> None:
    for runner in (
        FunctionRunner("tests.rollout.harness:ask_once"),
        FunctionRunner(ask_once),
        CommandRunner("true", Path("logs")),
        RemoteRunner("http://127.0.0.1:1/run"),
        LoopRunner("single_turn"),
    ):
        assert pickle.loads(pickle.dumps(runner)) == runner


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nothing", "expected MODULE:FUNCTION"),
        ("no.such.module:run", "cannot be loaded: ModuleNotFoundError"),
        ("json:nothing", "cannot be loaded: json has no nothing"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error(path: str, problem: str) -> None:
    with pytest.raises(InputError, match=f"agent: got '{path}'.*{problem}"):
        load_object(path, "agent")


def test_a_function_with_other_parameters_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected a function of \(task, session\)"):
        make_runner(lambda task: None)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(("status", "cause"), [("500 Broken", "runner_error"), (None, "connection")])
def test_a_service_that_refuses_is_an_error_and_one_that_is_not_there_is_a_connection(
    status: str | None, cause: str
) -> None:
    async def test() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        if status is None:
            server.close()
            await server.wait_closed()
        sink = MemorySink()
        async with scripted_gateway() as gateway:
            await Rollout(gateway, RemoteRunner(f"http://{host}:{port}/run"), sinks=[sink]).run([{}])
        server.close()
        await server.wait_closed()
        assert [result.end.cause for result in sink.results] == [cause]

    run(test)
