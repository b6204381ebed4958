"""Rewards: functions, verifier commands, rewards of parts, and workers in parallel."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline import Trajectory
from branchline.core.errors import InputError
from branchline.core.reward import Reward, read_rewards
from branchline.export.rewards import session_reward
from branchline.rollout import processes
from branchline.rollout.gateway_pool import GatewayPool
from branchline.rollout.rewards import RewardScorer, VerifierCommand
from branchline.rollout.rollout import Rollout, RolloutConfig
from branchline.rollout.session_result import SessionEnd, SessionJob, SessionResult
from branchline.rollout.sinks import MemorySink
from branchline.rollout.tasks import RolloutTask
from tests.export.test_samples import forked_session
from tests.hang import HANG_S
from tests.rollout.harness import ask, run, scripted_gateway


async def two_turns(task: Mapping[str, Any], session: Any) -> None:
    await ask(session, task["prompt"])
    await ask(session, task["prompt"], "ok", "more")


def rewarded(
    reward: Any, tasks: Any = ({"id": "a", "prompt": "x", "answer": "ok"},), **config: Any
) -> MemorySink:
    sink = MemorySink()

    async def test() -> None:
        async with scripted_gateway() as gateway:
            await Rollout(
                gateway, two_turns, reward=reward, sinks=[sink], config=RolloutConfig(**config)
            ).run(tasks)

    run(test)
    return sink


def test_an_async_function_may_reward_turns_and_the_whole() -> None:
    async def reward(task: Mapping[str, Any], trajectory: Trajectory) -> list[dict[str, Any]]:
        assert trajectory.answer == task["answer"]
        return [{"score": 0.5, "turn": 1}, {"score": 2.0, "turn": 2}, {"score": 1.0, "note": "good"}]

    (result,) = rewarded(reward).results
    assert result.reward == 1.0
    (sample,) = result.samples
    assert [(span.score, span.turn) for span in sample.rewards] == [(0.5, 1), (2.0, 2)]
    assert sample.reward_extras == '{"note":"good"}'


@pytest.mark.parametrize(
    "value",
    [
        "much", "0.5", "1%", b"1", {"points": 1}, {"reward": 1}, [{"turn": 1}], [], [1.0], [True], (0.5, {}),
        [None], float("inf"), float("nan"), 10**400, 1j, object(), np.array([1.0]), np.float32("nan"),
        {"score": "1"},
        {"score": None}, {"score": [1]}, {"score": 1, "id": [2]}, {"score": 1, "extras": [2]},
        {"score": 1, "note": object()}, {"score": 1, "note": float("nan")}, {"score": 1, 2: 3},
    ],
)  # fmt: skip
def test_a_value_that_is_no_reward_fails_the_session(value: Any) -> None:
    (result,) = rewarded(lambda task, trajectory: value).results
    assert (result.status, str(result.end.cause)) == ("failed", "reward_error")
    assert result.rewards == []


def test_a_function_that_returns_nothing_is_told_so() -> None:
    (result,) = rewarded(lambda task, trajectory: None).results
    assert str(result.end.cause) == "reward_error"
    assert "returned None, expected a reward (is a `return` missing?)" in result.end.error


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0), (False, 0.0), ({"score": False}, 0.0), (np.bool_(True), 1.0), (np.float32(0.5), 0.5),
        (np.int64(3), 3.0), (np.array(0.25), 0.25),
        (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25), (-2, -2.0), (({"score": 1}, {"score": 0.5}), 0.5),
    ],
)  # fmt: skip
def test_numbers_of_every_kind_and_truth_values_are_scores(value: Any, expected: float) -> None:
    (result,) = rewarded(lambda task, trajectory: value).results
    assert result.reward == expected
    assert [sample.reward for sample in result.samples] == [expected]


def test_a_number_of_torch_is_a_score() -> None:
    torch = pytest.importorskip("torch")
    for value, expected in ((torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0)):
        (result,) = rewarded(lambda task, trajectory, value=value: value).results
        assert result.reward == expected


@pytest.mark.parametrize(
    "name",
    ["call_id", "calls", "turns", "Turn", "turn_number", "turn-index", "timelineId", "tools", "tool_name",
     "agents", "agent_name", "reward", "trun", "utrn", "Tunr", "tur", "turnn", "cal", "cals", "trun_id",
     "tolo", "time_line", "timelime", "timelines", "aegnt", "agetn_name"],
)  # fmt: skip
def test_a_misspelt_part_does_not_reward_the_whole_session(name: str) -> None:
    value = [{"score": 1.0}, {"score": 0.2, name: 1}]
    (result,) = rewarded(lambda task, trajectory: value).results
    assert (str(result.end.cause), result.rewards) == ("reward_error", [])
    assert name in result.end.error
    assert "put it under `extras`" in result.end.error


@pytest.mark.parametrize("name", ["trun", "turnn", "utrn", "turns"])
def test_the_error_of_a_misspelt_part_says_which_is_meant(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}: got 5, expected .*did you mean `turn`\?"):
        verified(printing(f'{{"score": 1, "{name}": 5}}'.encode()))


@pytest.mark.parametrize(
    "name", ["total", "recall", "return", "n_turns", "turn1", "tokens", "talk", "true", "agreement", "scale"]
)
def test_other_words_are_extras(name: str) -> None:
    assert read_rewards({"score": 1, name: 2}) == [{"score": 1.0, "extras": {name: 2}}]


def test_what_a_function_returns_beside_the_score_is_in_the_samples_as_extras() -> None:
    value = {"score": 1, "passed": np.int64(3), "extras": {"turns": 2, "why": ("a", "b")}}
    (result,) = rewarded(lambda task, trajectory: value).results
    extras = {"passed": 3, "turns": 2, "why": ["a", "b"]}
    assert result.rewards == [{"score": 1.0, "extras": extras}]
    assert [json.loads(sample.reward_extras) for sample in result.samples] == [extras]


def test_an_agent_that_returns_nonsense_fails_its_session_only() -> None:
    class Broken(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise RuntimeError("broken")

    async def agent(task: Mapping[str, Any], session: Any) -> Any:
        await ask(session, task["prompt"])
        return {"text": "1", "truth": True, "object": Broken(score=1, call="x")}[task["id"]]

    sink = MemorySink()

    async def test() -> None:
        async with scripted_gateway() as gateway:
            tasks = [{"id": name, "prompt": "x"} for name in ("text", "truth", "object")]
            await Rollout(gateway, agent, sinks=[sink]).run(tasks)

    run(test)
    found = {result.job.task.uid: (str(result.end.cause), result.reward) for result in sink.results}
    assert found == {"text": ("reward_error", None), "truth": ("None", 1.0), "object": ("reward_error", None)}


def test_a_function_that_raises_fails_its_session_only() -> None:
    def reward(task: Mapping[str, Any], trajectory: Trajectory) -> float:
        return 1 / int(task["id"])

    results = rewarded(reward, [{"id": "0", "prompt": "x"}, {"id": "1", "prompt": "x"}]).results
    found = {result.job.task.uid: (result.status, result.end.error.partition(" (")[0]) for result in results}
    assert found == {"0": ("failed", "ZeroDivisionError: division by zero"), "1": ("finished", "")}


def test_rewards_are_computed_in_parallel_up_to_the_number_of_workers() -> None:
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(3, timeout=HANG_S)

    def reward(task: Mapping[str, Any], trajectory: Trajectory) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        return 1.0

    sink = rewarded(reward, [{"id": str(index), "prompt": "x"} for index in range(12)], reward_workers=3)
    assert len(sink.results) == 12
    assert most == 3


def test_a_reward_that_takes_too_long_fails_the_session() -> None:
    async def reward(task: Mapping[str, Any], trajectory: Trajectory) -> float:
        await asyncio.Event().wait()
        return 1.0

    (result,) = rewarded(reward, reward_timeout_s=0.02).results
    assert (result.status, result.end.error) == ("failed", "TimeoutError: timed out after 0.02 s")


def run_agent(agent: Any, tasks: Any, **options: Any) -> list[SessionResult]:
    """Runs an agent at a gateway of this process, and at one that is reached over HTTP."""
    results: list[SessionResult] = []

    async def test() -> None:
        async with (
            scripted_gateway() as gateway,
            scripted_gateway() as remote,
            GatewayPool([remote.url], remote.admin_key) as pool,
        ):
            for place in (gateway, pool):
                sink = MemorySink()
                await Rollout(place, agent, sinks=[sink], **options).run(tasks)
                results.extend(sink.results)

    run(test)
    return results


@pytest.mark.parametrize("end", ["complete", "finalize"])
@pytest.mark.parametrize("scored_by", ["agent", "function", "verifier", "judge"])
def test_a_session_that_its_agent_has_ended_gets_its_reward(end: str, scored_by: str) -> None:
    async def agent(task: Mapping[str, Any], session: Any) -> Any:
        await ask(session, task["prompt"])
        await getattr(session, end)()
        return {"score": 0.5, "by": "x"} if scored_by == "agent" else None

    def judge(task: object, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [0.5 for _ in trajectories]

    options: dict[str, dict[str, Any]] = {
        "agent": {},
        "function": {"reward": lambda task, trajectory: {"score": 0.5, "by": "x"}},
        "verifier": {"reward": VerifierCommand("""echo '{"score": 0.5, "by": "x"}'""")},
        "judge": {"judge": judge},
    }
    results = run_agent(agent, [{"id": "a", "prompt": "x"}], **options[scored_by])
    assert [(result.status, result.reward) for result in results] == [("finished", 0.5)] * 2
    for result in results:
        (sample,) = result.samples
        assert (sample.reward, result.line["reward"]) == (0.5, 0.5)
        if scored_by != "judge":
            assert sample.reward_extras == '{"by":"x"}'


@pytest.mark.parametrize("scored", [False, True])
def test_a_resumed_run_scores_a_session_that_its_agent_has_finalized_unless_it_is_scored(
    scored: bool, tmp_path: Path
) -> None:
    first, again = MemorySink(), MemorySink()

    async def agent(task: Mapping[str, Any], session: Any) -> None:
        await ask(session, task["prompt"])
        await session.finalize()

    async def test() -> None:
        async with scripted_gateway(journal=tmp_path / "j") as gateway:
            # A run that does not score its sessions, or scores them, and dies before they are written.
            reward = (lambda task, trajectory: 0.25) if scored else None
            await Rollout(gateway, agent, reward=reward, sinks=[first], run_id="r").run(tasks)
        async with scripted_gateway(journal=tmp_path / "j") as gateway:
            await Rollout(
                gateway, agent, reward=lambda task, trajectory: 0.5, sinks=[again], run_id="r", resume=True
            ).run(tasks)

    tasks = [{"id": "a", "prompt": "x"}]
    run(test)
    ((one,), (other,)) = first.results, again.results
    assert one.session == other.session
    assert (other.status, other.reward) == ("finished", 0.25 if scored else 0.5)
    assert [sample.reward for sample in other.samples] == [other.reward]


def test_a_session_that_its_agent_has_aborted_takes_no_reward() -> None:
    async def agent(task: Mapping[str, Any], session: Any) -> float:
        await ask(session, task["prompt"])
        await session.abort("enough")
        return 1.0

    results = run_agent(agent, [{"id": "a", "prompt": "x"}])
    assert [(result.status, result.reward, list(result.rewards)) for result in results] == [
        ("aborted", None, [])
    ] * 2


@pytest.mark.parametrize("by_function", [False, True])
def test_rewards_of_turns_alone_are_no_reward_where_one_is_required(by_function: bool) -> None:
    value = [{"score": 1.0, "turn": 1}]

    async def agent(task: Mapping[str, Any], session: Any) -> Any:
        await ask(session, task["prompt"], agent="solver")
        return None if by_function else {**value[0], **task.get("part", {})}

    tasks = [{"id": "a", "prompt": "x"}]
    config = RolloutConfig(require_reward=True)
    reward = (lambda task, trajectory: value) if by_function else None
    for result in run_agent(agent, tasks, reward=reward, config=config):
        assert str(result.end.cause) == "no_reward"
        assert "rewards for turns, calls or tools only" in result.end.error


def test_a_reward_for_a_part_that_the_session_does_not_have_fails_it_and_names_what_there_is() -> None:
    async def agent(task: Mapping[str, Any], session: Any) -> Any:
        await ask(session, task["prompt"], agent="solver")
        return {"score": 1, **task["part"]}

    parts = {
        "agent": {"agent": "critic"},
        "tool": {"tool": "shell"},
        "turn": {"turn": 2},
        "fine": {"agent": "solver"},
    }
    tasks = [{"id": name, "prompt": "x", "part": part} for name, part in parts.items()]
    for result in run_agent(agent, tasks):
        name = result.job.task.uid
        if name == "fine":
            assert (result.status, result.reward, result.samples[0].reward) == ("finished", 1.0, 1.0)
            continue
        assert str(result.end.cause) == "reward_error"
        expected = {"agent": "'solver'", "tool": "none", "turn": "the main conversation has 1"}[name]
        assert expected in result.end.error


# -- verifier commands -------------------------------------------------------------------------------


def verified(command: str, *, exit_code: bool = False, prompt: str = "question") -> list[Reward]:
    """Returns what a verifier says about an empty session of a task."""
    job = SessionJob(RolloutTask("a", {"prompt": prompt}))
    result = SessionResult(job, SessionEnd(), Trajectory(()))
    return asyncio.run(VerifierCommand(command, exit_code).score(result))


@pytest.mark.parametrize(
    ("stdout", "expected"),
    [
        ("1", 1.0),
        ("checking\n0.25\n\n \r\n", 0.25),
        ("-1e-3", -0.001),
        ("true", 1.0),
        ("false", 0.0),
        ('{"score": 0}', 0.0),
        ('[{"score": 0}]', 0.0),
        ('[{"score": 1}, {"score": false}]', 0.0),
        ('{"score": 1}\r', 1.0),
        ("1\n0", 0.0),
        ('{"score": 0.5, "why": "\u2028"}', 0.5),
    ],
)
def test_the_last_line_of_a_verifier_is_the_reward(stdout: str, expected: float) -> None:
    assert session_reward(verified(printing(stdout.encode()))) == expected


def printing(stdout: bytes, then: str = "") -> str:
    """Returns a command that prints bytes."""
    program = f"import sys; sys.stdout.buffer.write(bytes.fromhex({stdout.hex()!r}))"
    return f'"{sys.executable}" -c "{program}"; {then}'


@pytest.mark.parametrize(
    "stdout",
    [
        b"", b"\n \n", b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" * 5000, b"null",
        b'"0.25"', b"reward: 0", b"1%", b"4/5", b"1 passed", b"0 1",
        b"0.5 # fine", b"{}", b"[]", b"[0]", b"[[{}]]",
        b'[{"score":0}, 1]', b'{"score": "1"}', b'{"score": null}', b'{"score": NaN}', b'{"score": 1',
        b'{"score": 1} ok',
        b'{"score": 0, "score": 1}', b'{"reward": 0}', b'{"score": 0, "turns": 1}', b"\xef\xbb\xbf1",
        b"\x1b[32m1\x1b[0m", b'{"score": 1, "why": "\xff"}', b'{"score": 1, "why": "\\ud83d"}',
        "½".encode(), b"1\x00", b"1\n0\x0c", b"True",
        b"1,",         b"0x1", b"1_0", b"+1", b".5", b"01", b"1\nwarning: done",
    ],
)  # fmt: skip
def test_a_last_line_that_is_no_reward_is_an_error_that_shows_it(stdout: bytes) -> None:
    with pytest.raises(InputError, match=r"verifier command: (got nothing|the last line) ") as caught:
        verified(printing(stdout, "echo a warning >&2"))
    assert "its stderr ends with 'a warning'" in str(caught.value)
    if stdout.strip():
        last = stdout.rsplit(b"\n", 1)[-1].decode(errors="backslashreplace")
        assert repr(last)[1:60] in str(caught.value)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo 1; exit 1", "exit status 1, expected 0"),
        ("echo 1; exit 2", "exit status 2, expected 0"),
        ("echo 1; kill -9 $$", "signal SIGKILL, expected 0"),
        ("no-such-verifier", "exit status 127"),
        ("false", "exit status 1"),
        ("grep -q BRANCHLINE_NOTHING", "exit status 1"),
    ],
)
def test_a_verifier_that_crashes_is_an_error_whatever_it_printed(command: str, problem: str) -> None:
    with pytest.raises(InputError, match=f"verifier command: got {problem}"):
        verified(f"echo before >&2; {command}")


def test_a_warning_on_stderr_does_not_hide_the_reward() -> None:
    assert verified("echo 0; echo deprecated >&2") == [{"score": 0.0}]
    assert verified("echo 0.5; echo 1 >&2") == [{"score": 0.5}]


def test_a_verifier_gets_a_row_of_any_size_as_a_file() -> None:
    large = "x" * 200_000
    assert verified("""wc -c < "$BRANCHLINE_TASK_FILE" """, prompt=large) == [{"score": 200_013.0}]
    with pytest.raises(InputError, match="BRANCHLINE_TASK: got 200,013 bytes, expected at most 131,0"):
        verified("""echo "$BRANCHLINE_TASK" | wc -c""", prompt=large)


def test_a_verifier_gets_the_task_and_the_session() -> None:
    assert verified("""grep -q '"uid":"a"' && echo 1""") == [{"score": 1.0}]
    assert verified("""test "$BRANCHLINE_TASK" = '{"prompt":"question"}' && echo 1""") == [{"score": 1.0}]


@pytest.mark.parametrize(
    ("command", "expected"),
    [("true", 1.0), ("false", 0.0), ("echo 0.25", 1.0), ("echo 1; exit 1", 0.0), ("echo nonsense", 1.0)],
)
def test_exit_statuses_are_rewards_on_request_and_stdout_is_not_read(command: str, expected: float) -> None:
    assert verified(command, exit_code=True) == [{"score": expected}]


@pytest.mark.parametrize("command", ["exit 2", "exit 127", "kill -9 $$", "kill -15 $$"])
def test_other_exit_statuses_are_errors_on_request_too(command: str) -> None:
    with pytest.raises(InputError, match=r"expected 0 for a right answer or 1 .*; its stderr ends with 'x'"):
        verified(f"echo 1; echo x >&2; {command}", exit_code=True)


def test_a_verifier_may_print_much_before_and_in_its_last_line() -> None:
    much = f'"{sys.executable}" -c "print(\'x\' * 300_000); print(1)"'
    assert verified(much) == [{"score": 1.0}]
    note = f"\"{sys.executable}\" -c \"print(chr(123), chr(34)+'score'+chr(34), ':1,', end=chr(32))\""
    long = f"""{note}; head -c 300000 /dev/zero | tr '\\0' ' '; echo '"note": 2}}'"""
    assert verified(long) == [{"score": 1.0, "extras": {"note": 2}}]


@pytest.mark.parametrize("text", ["[" * 16_000, '{"score":' * 16_000, "[" * 150_000 + "]" * 150_000])
def test_deep_brackets_are_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(text)
    with pytest.raises(InputError, match="the last line of its stdout: got"):
        verified(f"cat {tmp_path / 'out'}")


def test_a_last_line_that_is_not_read_completely_is_an_error_and_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_MAX_OUTPUT_BYTES", 16)
    assert verified("echo 1234567890123; echo 0.5") == [{"score": 0.5}]
    with pytest.raises(InputError, match="the last line of its stdout is not in its last 16 bytes"):
        verified("echo 123456789012345678.5")
    with pytest.raises(InputError, match="the last line of its stdout is not in its last 16 bytes"):
        verified("echo 0.5; head -c 100 /dev/zero | tr '\\0' '\\n'")


def test_a_verifier_that_cannot_be_read_fails_its_session_with_a_reward_error() -> None:
    command = VerifierCommand("echo 1; exit $(( $(grep -c broken) ))")
    results = rewarded(command, [{"id": "a", "prompt": "broken"}, {"id": "b", "prompt": "fine"}]).results
    found = {result.job.task.uid: (result.status, str(result.end.cause)) for result in results}
    assert found == {"a": ("failed", "reward_error"), "b": ("finished", "None")}


def test_a_verifier_that_takes_too_long_fails_its_session() -> None:
    (result,) = rewarded(VerifierCommand("echo 1; sleep 60"), reward_timeout_s=0.2).results
    assert (str(result.end.cause), result.rewards) == ("reward_error", [])


def test_a_function_with_other_parameters_is_refused() -> None:
    with pytest.raises(InputError, match=r"reward: expected a function of \(task, trajectory\)"):
        RewardScorer(lambda: 1.0)  # type: ignore[arg-type, misc]
    with pytest.raises(InputError, match="reward: got 3, expected a function"):
        RewardScorer(3)  # type: ignore[arg-type]


@given(st.floats(-5, 5), st.booleans())
def test_a_reward_added_to_a_trajectory_equals_one_that_was_posted(score: float, has_timeline: bool) -> None:
    session = forked_session()
    parts: list[Any] = [{"score": 3.0, "timeline": session.tree.leaves()[0].id}] if has_timeline else []
    posted = Trajectory.from_session(session, rewards=[*parts, {"score": score}])
    added = Trajectory.from_session(session, rewards=parts).with_reward(score)
    assert added.reward == posted.reward == score
    assert [sample.reward for sample in added.samples] == [sample.reward for sample in posted.samples]
