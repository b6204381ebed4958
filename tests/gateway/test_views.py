"""Views read a snapshot while calls continue."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from branchline.export.jsonl import sample_to_json
from branchline.export.tree_lines import samples_from_tree_lines
from branchline.gateway import session_reads, views
from branchline.runtime import session_snapshot
from tests.engines.manual_clock import yield_to_loop
from tests.gateway.harness import Agent, agent, run
from tests.hang import HANG_S


@pytest.mark.parametrize(
    ("path", "module", "function"),
    [
        ("/tree", views, "classify_forks"),
        ("/samples", session_snapshot, "SampleStream"),
        ("/timelines", views, "timelines_of"),
    ],
)
def test_call_does_not_wait_for_a_slow_view(
    path: str, module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, resume = threading.Event(), threading.Event()
    was_resumed: list[bool] = []
    original = getattr(module, function)

    def slow(*args: Any, **options: Any) -> Any:
        started.set()
        was_resumed.append(resume.wait(HANG_S))
        return original(*args, **options)

    async def test() -> None:
        async with agent("A1", "A2") as a:
            await a.ask_text("p")
            monkeypatch.setattr(module, function, slow)
            response = asyncio.create_task(a.get(path))
            await asyncio.to_thread(started.wait, HANG_S)
            await a.ask_text("p", "A1", "q")
            resume.set()
            view = await response
            assert was_resumed == [True]
            # It shows the tree at the time of the request.
            assert "A2" not in str(view)
            assert len(a.session.managed.session.tree.calls) == 2
            monkeypatch.setattr(module, function, original)
            calls = len(view["nodes"]) if path == "/tree" else len(view[path[1:]][0]["calls"])
            assert calls == (2 if path == "/tree" else 1)

    run(test)


def test_sample_has_the_group_and_metadata_of_its_session() -> None:
    async def test() -> None:
        async with agent("A1", group="g7", metadata={"task": 3}) as a:
            await a.ask_text("p")
            (sample,) = (await a.get("/samples"))["samples"]
            assert (sample["group"], sample["metadata"]) == ("g7", {"task": 3})

    run(test)


# -- formats of samples ------------------------------------------------------------------------------


async def _get_samples(a: Agent, query: str = "", **headers: str) -> httpx.Response:
    url = f"{a.gateway.url}/sessions/{a.session.id}/samples{query}"
    return await a.http.get(url, headers={**a.control_headers, **headers})


def test_samples_are_one_object_json_lines_or_a_tree() -> None:
    async def test() -> None:
        async with agent("A1", "A2", "A3", group="g") as a:
            await a.ask_text("p")
            await a.ask_text("p", "A1", "q")
            await a.ask_text("p", "A1", "r")
            whole = (await _get_samples(a)).json()
            assert len(whole["samples"]) == 2
            for query, headers in (("?format=jsonl", {}), ("", {"accept": "application/x-ndjson, */*"})):
                response = await _get_samples(a, query, **headers)
                assert response.headers["content-type"].startswith("application/jsonl")
                *samples, report = map(json.loads, response.text.splitlines())
                assert samples == whole["samples"]
                assert report == {"report": whole["report"]}
            lines = [json.loads(line) for line in (await _get_samples(a, "?format=tree")).text.splitlines()]
            read = json.dumps([sample_to_json(sample) for sample in samples_from_tree_lines(lines)])
            assert json.loads(read) == [
                {name: value for name, value in sample.items() if name not in ("group", "metadata")}
                for sample in whole["samples"]
            ]
            assert lines[-1] == {"report": whole["report"]}
            assert {line["group"] for line in lines if "sample" in line} == {"g"}
            # The first turn is in both samples and was written once.
            ids = [len(line["ids"]) for line in lines if "node" in line]
            written = [len(one["prompt_ids"]) + len(one["response_ids"]) for one in whole["samples"]]
            assert sum(ids) < sum(written)

    run(test)


@pytest.mark.parametrize("format", ["json", "jsonl", "tree"])
def test_a_session_without_samples_has_a_report_in_every_format(format: str) -> None:
    async def test() -> None:
        async with agent("x", eval=True) as a:
            for _ in range(2):
                response = await _get_samples(a, f"?format={format}")
                body = json.loads(response.text)
                assert body.get("samples", []) == []
                assert "sampled_tokens" in body["report"]
                await a.ask_text("p")

    run(test)


def test_an_unknown_format_and_an_invalid_policy_are_refused_before_the_stream() -> None:
    async def test() -> None:
        async with agent("x") as a:
            await a.ask_text("p")
            for query in ("?format=xml", "?format=json&format=tree", "?shares=none", "?max_samples=0"):
                response = await _get_samples(a, query)
                assert response.status_code == 400, query
            assert (
                "format: got 'xml', expected json, jsonl or tree"
                in (await _get_samples(a, "?format=xml")).text
            )

    run(test)


def test_a_large_export_is_built_in_parts_while_the_event_loop_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what a client has read is built, and no part runs in the event loop."""
    monkeypatch.setattr(session_reads, "_STREAM_BYTES", 1)
    threads: set[int] = set()
    built: list[int] = []
    sent: list[bytes] = []
    original = sample_to_json

    def note(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        built.append(1)
        return original(*args, **options)

    monkeypatch.setattr(views, "sample_to_json", note)

    async def test() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()  # The client stays connected.

        async def send(message: Any) -> None:
            # In place of a socket, whose buffers may take all of it: a client that reads one part at a time.
            if body := message.get("body"):
                sent.append(body)
                assert len(built) <= len(sent) + 1
                await yield_to_loop()

        async with agent(rule=lambda _: "x" * 20_000) as a:
            for index in range(40):
                await a.ask_text(f"question {index}")
            scope = {
                "type": "http",
                "http_version": "1.1",
                "method": "GET",
                "scheme": "http",
                "path": f"/sessions/{a.session.id}/samples",
                "query_string": b"format=jsonl",
                "headers": [(b"authorization", a.control_headers["authorization"].encode())],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 80),
            }
            await a.gateway.app(scope, receive, send)
            last = b"".join(sent).splitlines()[-1]
            assert json.loads(last)["report"]["samples"] == len(built) == 40
            assert threading.get_ident() not in threads

    run(test)
