"""Where the code of a user failed: the place in its own file, and the traceback in the session's log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from branchline.core.errors import InputError
from branchline.loop.timeouts import run_in_thread
from branchline.rollout.failures import describe_traceback, keep_traceback, own_place


def fail_in(error: Exception) -> BaseException:
    try:
        raise error
    except Exception as raised:
        return raised


def test_the_place_is_the_last_frame_of_the_users_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    try:
        json.loads("{")  # raises in a file of Python's
    except ValueError as raised:
        error = raised
    line = error.__traceback__.tb_lineno  # type: ignore[union-attr]
    place = f" (test_failures.py:{line} in test_the_place_is_the_last_frame_of_the_users_own_file)"
    assert own_place(error) == place


def test_files_elsewhere_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert own_place(fail_in(ValueError())).startswith(f" ({__file__}:")


def test_an_error_in_a_group_is_where_it_was_raised() -> None:
    async def inner() -> None:
        raise ValueError("x")

    async def outer() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(inner())

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(outer())
    assert own_place(raised.value).endswith(" in inner)")


@pytest.mark.parametrize("error", [SystemExit("bye"), StopIteration("no more"), ValueError("x")])
def test_an_error_of_a_thread_is_where_it_was_raised(error: BaseException) -> None:
    def give_up() -> None:
        raise error

    async def call() -> None:
        await run_in_thread(give_up)

    with pytest.raises((RuntimeError, ValueError)) as raised:
        asyncio.run(call())
    assert own_place(raised.value).endswith(" in give_up)")


def test_without_a_file_of_the_user_there_is_no_place() -> None:
    assert own_place(InputError("reward: got None")) == ""
    assert describe_traceback(InputError("reward: got None")) == ""
    assert describe_traceback(ValueError("x")).strip() == "ValueError: x"


def test_a_traceback_is_added_to_the_log_of_its_session(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    assert keep_traceback(None, "s", "Traceback") == ""
    assert keep_traceback(folder, "s", "") == ""
    assert not folder.exists()
    assert keep_traceback(folder, "s", "Traceback\n") == f"; log: {folder / 's.log'}"
    assert keep_traceback(folder, "s", "another\n") == f"; log: {folder / 's.log'}"
    assert (folder / "s.log").read_text() == "Traceback\nanother\n"


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    assert "could not be written" in keep_traceback(tmp_path / "logs", "s", "Traceback")
