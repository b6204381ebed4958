"""Views are read while calls go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import branchline.gateway.views as views
from tests.gateway.harness import agent, run


@pytest.mark.parametrize(
    ("path", "part"), [("/tree", "judge"), ("/samples", "export_samples"), ("/timelines", "timelines_of")]
)
def test_call_does_not_wait_for_a_slow_view(path: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    was_let: list[bool] = []
    real = getattr(views, part)

    def slow(*given: Any, **more: Any) -> Any:
        begun.set()
        was_let.append(go_on.wait(10))
        return real(*given, **more)

    async def test() -> None:
        async with agent("A1", "A2") as a:
            await a.ask_text("p")
            monkeypatch.setattr(views, part, slow)
            reading = asyncio.create_task(a.get(path))
            await asyncio.to_thread(begun.wait, 10)
            await a.ask_text("p", "A1", "q")
            go_on.set()
            told = await reading
            assert was_let == [True]
            # It shows what there was when it was asked for.
            assert "A2" not in str(told)
            assert len(a.session.managed.session.tree.calls) == 2
            monkeypatch.setattr(views, part, real)
            calls = len(told["nodes"]) if path == "/tree" else len(told[path[1:]][0]["calls"])
            assert calls == (2 if path == "/tree" else 1)

    run(test)


def test_sample_has_the_group_and_metadata_of_its_session() -> None:
    async def test() -> None:
        async with agent("A1", group="g7", metadata={"task": 3}) as a:
            await a.ask_text("p")
            (sample,) = (await a.get("/samples"))["samples"]
            assert (sample["group"], sample["metadata"]) == ("g7", {"task": 3})

    run(test)
