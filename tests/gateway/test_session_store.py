"""Sessions come back from their journal, and closed ones do not fill the memory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from branchline import Journal, Message, Request, ToyCodec
from branchline.core.errors import InputError, MessageError, SessionError
from branchline.runtime.managed_session import SessionOptions, read_session_options
from branchline.runtime.session_store import SessionStore
from tests.gateway.harness import agent, run


def _ended(sessions: SessionStore, name: str) -> None:
    live, _, _ = sessions.open(SessionOptions(id=name, metadata={"name": name}))
    asyncio.run(live.post_reward({"score": 1.0}))
    asyncio.run(live.set_state("finalized"))
    sessions.mark_closed(live)


def test_closed_sessions_leave_the_memory_and_are_read_back_when_asked_for(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        sessions = SessionStore(ToyCodec(), journal=journal, max_closed=2)
        sessions.open(SessionOptions(id="open"))
        for name in ("a", "b", "c", "d"):
            _ended(sessions, name)
        assert [live.id for live in sessions] == ["open", "c", "d"]
        journal.flush()
        back = sessions.get("a")
        assert (back.state, back.reward, back.options.metadata) == ("finalized", 1.0, {"name": "a"})
        assert [live.id for live in sessions] == ["open", "d", "a"]
        with pytest.raises(SessionError, match="exists already"):
            sessions.open(SessionOptions(id="b"))
        with pytest.raises(SessionError, match="no session"):
            sessions.get("never")
        again = SessionStore(ToyCodec(), journal=journal, max_closed=1)
        assert [live.id for live in again] == ["open", "d"]
        assert again.get("b").reward == 1.0


def test_without_a_journal_closed_sessions_stay_until_they_are_forgotten() -> None:
    sessions = SessionStore(ToyCodec(), max_closed=1)
    for name in ("a", "b", "c"):
        _ended(sessions, name)
    assert len(sessions) == 3
    sessions.evict(sessions.get("b"))
    with pytest.raises(SessionError, match="no session 'b'"):
        sessions.get("b")
    live, _, _ = sessions.open(SessionOptions(id="d"))
    with pytest.raises(SessionError, match="finalize or abort it first"):
        sessions.evict(live)


def test_of_those_who_open_one_id_at_once_one_gets_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal, ThreadPoolExecutor(8) as threads:
        sessions = SessionStore(ToyCodec(), journal=journal)

        def attempt(_: int) -> bool:
            try:
                sessions.open(SessionOptions(id="one"))
            except SessionError:
                return False
            return True

        assert sum(threads.map(attempt, range(16))) == 1


@pytest.mark.parametrize("name", ["a/b", "..%2f", "x" * 129, "a b", ".", ".."])
def test_an_id_that_is_no_name_is_refused_with_what_is_expected(name: str) -> None:
    with pytest.raises(MessageError, match="expected letters, digits"):
        SessionStore(ToyCodec()).open(SessionOptions(id=name))


def test_sessions_are_listed_and_forgotten_over_http() -> None:
    async def test() -> None:
        async with agent("x", group="g") as a:
            other = await a.gateway.session(id="other")
            await other.finalize()
            admin = {"authorization": f"Bearer {a.gateway.admin_key}"}
            url = f"{a.gateway.url}/sessions"
            everything = (await a.http.get(url, headers=admin)).json()["sessions"]
            assert [view["id"] for view in everything] == [a.session.id, "other"]
            chosen = (await a.http.get(f"{url}?group=g&state=open", headers=admin)).json()["sessions"]
            assert [view["id"] for view in chosen] == [a.session.id]
            assert (await a.http.get(url)).status_code == 401
            assert (await a.http.delete(f"{url}/{a.session.id}", headers=admin)).status_code == 409
            assert (await a.http.delete(f"{url}/other", headers=admin)).status_code == 204
            assert (await a.http.get(f"{url}/other", headers=admin)).status_code == 404

    run(test)


def test_a_session_that_left_the_memory_is_read_back_only_for_those_who_have_a_key(tmp_path: Path) -> None:
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


THOUGHT = Message("assistant", "so", reasoning_content="hm")


@pytest.mark.parametrize("restored", [True, False])
def test_a_session_may_say_that_dropped_reasoning_stays_dropped(restored: bool, tmp_path: Path) -> None:
    async def test() -> None:
        options = {} if restored else {"restore_reasoning": False}
        codec = ToyCodec.chatml()
        async with agent(THOUGHT, "ok", codec=codec, journal=tmp_path / "j", **options) as a:
            await a.ask_text("p")
            await a.ask_text("p", "so", "q")
            # With it the answer is known again, and its path goes on; without it is an edit.
            assert len(await a.timelines()) == (1 if restored else 2)
            session_id = a.session.id
        with Journal(tmp_path / "j") as journal:
            again = SessionStore(codec, journal=journal).get(session_id)
            assert again.options.restore_reasoning is restored
            said = [Message("user", "p"), Message("assistant", "so"), Message("user", "q")]
            turn = again.session.prepare(Request(tuple(said)))
            assert ("hm" in codec.decode(turn.prompt_ids)) is restored

    run(test)


def test_a_session_may_show_its_history_otherwise_than_the_gateway_does() -> None:
    sessions = SessionStore(ToyCodec(), history="template")
    chosen, _, _ = sessions.open(read_session_options({"history": "verbatim"}))
    plain, _, _ = sessions.open(read_session_options(None))
    assert (chosen.session.history, plain.session.history) == ("verbatim", "template")
    with pytest.raises(InputError, match="history"):
        read_session_options({"history": "none"})
