"""Sessions are restored from their journal, end once with their observers, and closed ones leave memory."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from branchline import Generation, Journal, Message, Request, ToyCodec
from branchline.core.errors import InputError, MessageError, SessionError
from branchline.core.message import Media
from branchline.core.token_arrays import as_ids
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.runtime.managed_session import ManagedSession, SessionOptions, read_session_options
from branchline.runtime.session_store import SessionStore
from branchline.tree.journal_repair import repair_journal
from tests.gateway.harness import agent, run
from tests.runtime.harness import call_request, complete_call


def _open_and_finalize(store: SessionStore, name: str) -> None:
    async def end() -> None:
        managed, _, _ = store.open(SessionOptions(id=name, metadata={"name": name}))
        await managed.post_rewards([{"score": 1.0}])
        await store.end_session(managed, "finalized")

    asyncio.run(end())


def test_closed_sessions_leave_memory_and_are_read_back_on_demand(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        store = SessionStore(ToyCodec(), journal=journal, max_closed=2)
        store.open(SessionOptions(id="open"))
        for name in ("a", "b", "c", "d"):
            _open_and_finalize(store, name)
        assert [managed.id for managed in store] == ["open", "c", "d"]
        journal.flush()
        restored = store.get("a")
        assert (restored.state, restored.reward, restored.options.metadata) == (
            "finalized",
            1.0,
            {"name": "a"},
        )
        assert [managed.id for managed in store] == ["open", "d", "a"]
        with pytest.raises(SessionError, match="exists already"):
            store.open(SessionOptions(id="b"))
        with pytest.raises(SessionError, match="no session"):
            store.get("never")
        again = SessionStore(ToyCodec(), journal=journal, max_closed=1)
        assert [managed.id for managed in again] == ["open", "d"]
        assert again.get("b").reward == 1.0


def test_without_a_journal_closed_sessions_stay_until_they_are_evicted() -> None:
    store = SessionStore(ToyCodec(), max_closed=1)
    for name in ("a", "b", "c"):
        _open_and_finalize(store, name)
    assert len(store) == 3
    store.evict(store.get("b"))
    with pytest.raises(SessionError, match="no session 'b'"):
        store.get("b")
    managed, _, _ = store.open(SessionOptions(id="d"))
    with pytest.raises(SessionError, match="finalize or abort it first"):
        store.evict(managed)


def test_one_of_several_threads_that_open_the_same_id_gets_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal, ThreadPoolExecutor(8) as threads:
        store = SessionStore(ToyCodec(), journal=journal)

        def attempt(_: int) -> bool:
            try:
                store.open(SessionOptions(id="one"))
            except SessionError:
                return False
            return True

        assert sum(threads.map(attempt, range(16))) == 1


@pytest.mark.parametrize("name", ["a/b", "..%2f", "x" * 129, "a b", ".", ".."])
def test_an_invalid_id_is_refused_with_what_is_expected(name: str) -> None:
    with pytest.raises(MessageError, match="expected letters, digits"):
        SessionStore(ToyCodec()).open(SessionOptions(id=name))


# -- ending ------------------------------------------------------------------------------------------


def test_observers_are_called_once_when_a_session_is_closed() -> None:
    async def test() -> None:
        store, ended = SessionStore(ToyCodec()), list[tuple[str, str, str]]()

        def observer(name: str) -> None:
            def observe(managed: ManagedSession) -> None:
                ended.append((name, managed.id, managed.state))

            target = store.on_session_end if name == "loop" else store.on_session_end_in_thread
            target.append(observe)

        observer("loop")
        observer("thread")
        managed, _, _ = store.open(SessionOptions(id="s"))
        await store.end_session(managed, "completed")
        assert not ended
        for _ in range(2):
            await store.end_session(managed, "finalized")
        assert ended == [("loop", "s", "finalized"), ("thread", "s", "finalized")]
        with pytest.raises(SessionError, match="takes no more calls"):
            await store.end_session(managed, "aborted")

    run(test)


@pytest.mark.parametrize("journaled", [False, True])
def test_closing_a_store_ends_open_sessions_that_no_journal_keeps(tmp_path: Path, journaled: bool) -> None:
    async def test() -> None:
        with Journal(tmp_path / "j") as journal:
            store, ended = SessionStore(ToyCodec(), journal=journal if journaled else None), list[str]()
            store.on_session_end.append(lambda managed: ended.append(managed.id))
            for name in ("open", "closed"):
                store.open(SessionOptions(id=name))
            await store.end_session(store.get("closed"), "finalized")
            store.close()
            assert ended == (["closed"] if journaled else ["closed", "open"])

    run(test)


def test_a_wait_ends_with_the_session_the_timeout_or_the_process() -> None:
    async def test() -> None:
        store = SessionStore(ToyCodec())
        managed, other = (store.open(SessionOptions())[0] for _ in range(2))
        await store.wait_until_ended(managed, 0)
        waits = [asyncio.create_task(store.wait_until_ended(one)) for one in (managed, other)]
        await asyncio.sleep(0)
        await store.end_session(managed, "completed")
        await waits[0]
        assert not waits[1].done()
        store.stopping.set()
        await waits[1]

    run(test)


def test_only_idle_sessions_expire() -> None:
    async def test() -> None:
        store = SessionStore(ToyCodec())
        idle, busy, used = (store.open(SessionOptions(id=name))[0] for name in ("idle", "busy", "used"))
        for managed in (idle, busy):
            managed.last_used -= 101
        busy.in_flight = 1
        await store.expire_idle(0)
        assert idle.state == "open"
        await store.expire_idle(100)
        assert (idle.state, idle.reason) == ("finalized", "idle for 100 s")
        assert busy.state == used.state == "open"

    run(test)


def test_a_program_without_a_gateway_finalizes_a_session_and_exports_it() -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        store, engine = SessionStore(codec), ScriptedEngine(codec, replies("fine"))
        managed, _, _ = store.open(SessionOptions())
        evaluation, _, _ = store.open(SessionOptions(eval=True))
        for session in (managed, evaluation):
            await complete_call(session, engine)
            await session.post_rewards([{"score": 0.5}])
            await store.end_session(session, "finalized")
        export = managed.export()
        assert (len(export.samples), export.samples[0].reward) == (1, 0.5)
        assert export.report.trained_tokens == len("fine") + 1
        assert not evaluation.export().samples
        with pytest.raises(SessionError, match="takes no more calls"):
            await complete_call(managed, engine, call_request("q"))

    run(test)


# -- damage ------------------------------------------------------------------------------------------


def _play_two_turns(path: Path, *names: str) -> None:
    async def play() -> None:
        codec = ToyCodec.chatml()
        with Journal(path) as journal:
            store, engine = SessionStore(codec, journal=journal), ScriptedEngine(codec, lambda _: "fine")
            for name in names:
                managed, _, _ = store.open(SessionOptions(id=name))
                await complete_call(managed, engine)
                await complete_call(managed, engine, call_request("q"))
                await managed.post_rewards([{"score": 1.0}])

    asyncio.run(play())


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_damaged_record_quarantines_its_session_and_the_others_continue(
    tmp_path: Path, position: int, has_checksums: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "j"
    _play_two_turns(path, "a", "b", "c")
    with closing(sqlite3.connect(path)) as disk:
        seqs = [seq for (seq,) in disk.execute("SELECT seq FROM records WHERE session = 2 ORDER BY seq")]
        assert len(seqs) == 6
        disk.execute("UPDATE records SET record = x'c1' || record WHERE seq = ?", (seqs[position],))
        if not has_checksums:
            disk.execute("UPDATE records SET checksum = NULL")
        disk.commit()
    with Journal(path) as journal:
        store = SessionStore(ToyCodec.chatml(), journal=journal)
        assert [managed.id for managed in store] == ["a", "c"]
        assert list(store.quarantined) == ["b"]
        assert "session b is quarantined" in caplog.text
        for managed in store:
            assert (len(managed.session.tree.calls), managed.reward) == (2, 1.0)
        with pytest.raises(SessionError, match="session b is quarantined"):
            store.get("b")
        with pytest.raises(SessionError, match="exists already"):
            store.open(SessionOptions(id="b"))
        store.open(SessionOptions(id="d"))
        # Nothing was removed: the session is in the journal as it was.
        assert sum(name == "b" for name, _ in journal.replay()) == 6
    repair_journal(path)
    with Journal(path) as journal:
        store = SessionStore(ToyCodec.chatml(), journal=journal)
        assert not store.quarantined
        if position:
            restored = store.get("b")
            assert len(restored.session.tree.calls) == [0, 0, 1, 1, 2, 2][position]
            assert restored.rewards == []
        else:
            with pytest.raises(SessionError, match="no session 'b'"):
                store.get("b")


def test_damage_that_is_found_when_a_session_is_read_back_quarantines_it(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        store = SessionStore(ToyCodec(), journal=journal)
        _open_and_finalize(store, "a")
        store.evict(store.get("a"))
        with closing(sqlite3.connect(path)) as disk:
            disk.execute("UPDATE records SET record = x'00' WHERE seq = 2")
            disk.commit()
        for _ in range(2):
            with pytest.raises(SessionError, match=r"session a is quarantined: .*record 2"):
                store.get("a")


def test_a_damaged_image_quarantines_its_session(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        managed, _, _ = SessionStore(ToyCodec(), journal=journal).open(SessionOptions(id="a"))
        image = Media("image", xxhash.xxh3_128_hexdigest(b"pixels"), payload=b"pixels")
        turn = managed.session.prepare(Request((Message("user", "look", parts=("look", image)),)))
        managed.session.commit(turn, Generation(as_ids([1, 2]), message=Message("assistant", "nice")))
        journal.flush()
    with closing(sqlite3.connect(path)) as disk:
        disk.execute("UPDATE media SET payload = x'00'")
        disk.commit()
    with Journal(path) as journal:
        assert "media" in SessionStore(ToyCodec(), journal=journal).quarantined["a"]


# -- options -----------------------------------------------------------------------------------------

THOUGHT = Message("assistant", "so", reasoning_content="hm")


@pytest.mark.parametrize("restored", [True, False])
def test_a_session_may_let_clients_drop_reasoning(restored: bool, tmp_path: Path) -> None:
    async def test() -> None:
        codec, options = ToyCodec.chatml(), {} if restored else {"restore_reasoning": False}
        later = (Message("assistant", "so"), Message("user", "q"))
        with Journal(tmp_path / "j") as journal:
            managed, _, _ = SessionStore(codec, journal=journal).open(
                read_session_options({"id": "s", **options})
            )
            engine = ScriptedEngine(codec, replies(THOUGHT, "ok"))
            await complete_call(managed, engine)
            await complete_call(managed, engine, call_request("p", *later))
            # With its reasoning the answer is recognised; without, it is an edit and starts a branch.
            assert len(managed.export().samples) == (1 if restored else 2)
        with Journal(tmp_path / "j") as journal:
            again = SessionStore(codec, journal=journal).get("s")
            assert again.options.restore_reasoning is restored
            turn = again.session.prepare(Request((Message("user", "p"), *later)))
            assert ("hm" in codec.decode(turn.prompt_ids)) is restored

    run(test)


def test_a_session_may_have_another_history_policy_than_its_store() -> None:
    store = SessionStore(ToyCodec(), history="template")
    chosen, _, _ = store.open(read_session_options({"history": "verbatim"}))
    plain, _, _ = store.open(read_session_options(None))
    assert (chosen.session.history, plain.session.history) == ("verbatim", "template")
    with pytest.raises(InputError, match="history"):
        read_session_options({"history": "none"})


# -- over HTTP ---------------------------------------------------------------------------------------


def test_sessions_are_listed_and_deleted_over_http() -> None:
    async def test() -> None:
        async with agent("x", group="g") as a:
            other = await a.gateway.session(id="other")
            await other.finalize()
            admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
            url = f"{a.gateway.url}/sessions"
            listed = (await a.http.get(url, headers=admin)).json()["sessions"]
            assert [view["id"] for view in listed] == [a.session.id, "other"]
            filtered = (await a.http.get(f"{url}?group=g&state=open", headers=admin)).json()["sessions"]
            assert [view["id"] for view in filtered] == [a.session.id]
            assert (await a.http.get(url)).status_code == 401
            assert (await a.http.delete(f"{url}/{a.session.id}", headers=admin)).status_code == 409
            assert (await a.http.delete(f"{url}/other", headers=admin)).status_code == 204
            assert (await a.http.get(f"{url}/other", headers=admin)).status_code == 404

    run(test)


def test_an_evicted_session_is_read_back_only_with_its_key(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent("x", journal=tmp_path / "j", id="s") as a:
            await a.ask_text("p")
            await a.session.finalize()
            a.gateway.sessions.evict(a.session.managed)
            url = f"{a.gateway.url}/sessions/s"
            wrong = {"authorization": "Bearer wrong"}
            for path, own in (("", a.session.api_key), ("/v1/models", "none")):
                assert (await a.http.get(url + path)).status_code == 401
                assert (await a.http.get(url + path, headers=wrong)).status_code == 403
                refused = await a.http.get(url + path, headers={"authorization": f"Bearer {own}"})
                assert refused.status_code == 403
            assert (await a.http.post(f"{url}/reward", json=1, headers=wrong)).status_code == 403
            assert len(a.gateway.sessions) == 0
            assert (await a.get(""))["calls"] == 1
            assert len(a.gateway.sessions) == 1

    run(test)
