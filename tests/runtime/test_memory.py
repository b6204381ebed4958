"""A session that leaves memory is freed at once, without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from branchline import Generation, Journal, Message, Request, Session, ToyCodec, classify_forks
from branchline.engines.scripted import ScriptedEngine
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from branchline.tree.tree import Node
from tests.gateway.harness import agent
from tests.hang import HANG_S
from tests.runtime.harness import call_request, complete_call


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_nodes() -> int:
    return sum(type(entry) is Node for entry in gc.get_objects())


def alive(references: list[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


def test_a_tree_is_freed_with_its_last_reference() -> None:
    with no_garbage_collection():
        before = count_nodes()
        session = Session("s", ToyCodec.chatml())
        messages = [Message("user", "p")]
        for index in range(20):
            turn = session.prepare(Request(tuple(messages)))
            for text in ("a", "b"):
                session.commit(
                    turn, Generation(session.codec.encode("x"), message=Message("assistant", text))
                )
            messages += [Message("assistant", "a"), Message("user", str(index))]
        references: list[weakref.ref[Any]] = [weakref.ref(session), weakref.ref(session.tree)]
        references.append(weakref.ref(session.snapshot()))
        assert alive(references) == 2  # the snapshot has gone
        report = classify_forks(session.tree)
        assert len(report.forks) == 20
        branch = report.forks[-1].branch
        depth = branch.depth
        del session, report, turn
        assert alive(references) == 0
        # A node that is still in use keeps the path to it.
        assert len(branch.path()) == depth
        del branch
        assert count_nodes() == before


def test_closed_sessions_are_freed_at_once(tmp_path: Path) -> None:
    async def play(store: SessionStore, engine: ScriptedEngine) -> list[weakref.ref[Any]]:
        references: list[weakref.ref[Any]] = []
        for _ in range(100):
            managed, _, _ = store.open(SessionOptions())
            references += [
                weakref.ref(managed),
                weakref.ref(managed.session),
                weakref.ref(managed.session.tree),
            ]
            await complete_call(managed, engine)
            await complete_call(managed, engine, call_request("p", Message("assistant", "fine")))
            await managed.post_rewards([{"score": 1.0}])
            await store.end_session(managed, "finalized")
            managed.export()
        return references

    with no_garbage_collection(), Journal(tmp_path / "j") as journal:
        codec, before = ToyCodec.chatml(), count_nodes()
        store = SessionStore(codec, journal=journal, max_closed=5)
        references = asyncio.run(play(store, ScriptedEngine(codec, lambda _: "fine")))
        assert len(store) == 5
        assert alive(references) == 3 * 5
        assert count_nodes() - before == sum(len(managed.session.tree.nodes) for managed in store)


def test_sessions_played_over_http_are_freed_at_once(tmp_path: Path) -> None:
    async def test() -> int:
        async with agent(rule=lambda _: "fine", journal=tmp_path / "j") as a:
            a.gateway.sessions._max_closed = 3
            references: list[weakref.ref[Any]] = []
            for index in range(30):
                opened = await a.gateway.session()
                managed = opened.managed
                references += [weakref.ref(managed), weakref.ref(managed.session.tree)]
                url = f"{opened.base_url}/chat/completions"
                headers = {"authorization": f"Bearer {opened.api_key}"}
                for stream in (False, True):
                    body = {"messages": [{"role": "user", "content": f"p{index}"}], "stream": stream}
                    assert (await a.http.post(url, json=body, headers=headers)).status_code == 200
                root = opened.base_url.removesuffix("/v1")
                admin = a.admin_headers
                assert (await a.http.post(f"{root}/reward", json=1, headers=admin)).status_code == 200
                assert (await a.http.post(f"{root}/finalize", headers=admin)).status_code == 200
                assert (await a.http.get(f"{root}/samples?format=tree", headers=admin)).status_code == 200
            del opened, managed
            async with asyncio.timeout(HANG_S):  # a thread may hold one for a moment
                while alive(references) > 2 * 3:
                    await asyncio.sleep(0.01)
            assert alive(references) == 2 * 3
            return count_nodes() - sum(len(managed.session.tree.nodes) for managed in a.gateway.sessions)

    with no_garbage_collection():
        before = count_nodes()
        assert asyncio.run(test()) == before
