"""Views read a snapshot while calls continue."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from branchline.gateway import views
from branchline.runtime import session_snapshot
from tests.gateway.harness import agent, run


@pytest.mark.parametrize(
    ("path", "module", "function"),
    [
        ("/tree", views, "classify_forks"),
        ("/samples", session_snapshot, "export_samples"),
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
        was_resumed.append(resume.wait(10))
        return original(*args, **options)

    async def test() -> None:
        async with agent("A1", "A2") as a:
            await a.ask_text("p")
            monkeypatch.setattr(module, function, slow)
            response = asyncio.create_task(a.get(path))
            await asyncio.to_thread(started.wait, 10)
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
