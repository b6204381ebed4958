"""`branchline train`: an agent on tasks, with the demo's model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

pytest.importorskip("torch")

from branchline.cli.main import main
from branchline.train.held_out import GREEDY, SAMPLED, is_evaluation
from branchline.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
OPTIONS = ["--agent", "examples.rollout.script_agent:run", "--reward", "examples.rollout.records:score"]
SMALL = ["--n", "2", "--tasks-per-step", "1"]


def test_it_trains_the_demos_model_and_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    tasks = str(ROOT / "examples/rollout/records.jsonl")
    run = ["train", tasks, *OPTIONS, *SMALL, "--run-folder", str(tmp_path / "run"), "--json"]
    assert main([*run, "--steps", "1"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^step   1/1  reward .*  0:\d\d$", printed.err, re.M), printed.err
    outcome = json.loads(printed.out)
    assert outcome["steps"] == 1
    assert outcome["sampled_tokens"] == outcome["delivered_tokens"] > 0
    assert main([*run, "--steps", "2"]) == 2
    assert "has a run" in capsys.readouterr().err
    assert main([*run, "--steps", "2", "--resume", "--max-batch-tokens", "16", "--learning-rate", "0"]) == 0
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["learning_rate"] for line in lines] == [5e-4, 0]
    printed = capsys.readouterr()
    assert re.search(r"^step   2/2  reward ", printed.err, re.M), printed.err
    assert json.loads(printed.out)["steps"] == 2
    assert list((tmp_path / "run/checkpoints").iterdir())
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (config["training"]["steps"], config["training"]["n"]) == (1, 2), "as the run began"


def test_held_out_tasks_are_scored_greedily_and_as_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    rows = Path("examples/rollout/records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "eval.jsonl").write_text("".join(rows[:3]))
    run = ["train", "examples/rollout/records.jsonl", *OPTIONS, *SMALL, "--json"]
    plain, folder = tmp_path / "plain", tmp_path / "run"
    assert main([*run, "--steps", "3", "--run-folder", str(plain)]) == 0
    held_out = ["--eval", str(tmp_path / "eval.jsonl"), "--eval-every", "2", "--run-folder", str(folder)]
    assert main([*run, *held_out, "--steps", "1"]) == 0
    assert main([*run, *held_out, "--steps", "3", "--resume"]) == 0
    printed = capsys.readouterr()
    lines = read_metrics(folder / "metrics.jsonl")
    evaluations = [line for line in lines if is_evaluation(line)]
    assert [line["step"] for line in evaluations] == [0, 1, 2, 3], "the first part ended with step 1"
    for line in evaluations:
        assert {GREEDY, SAMPLED} <= line.keys()
        assert (line["eval/episodes"], line["eval/failed_episodes"]) == (6, 0)
    assert printed.err.count("eval: reward ") == 4
    outcome = json.loads(printed.out.splitlines()[-1])
    assert outcome["steps"] == 3
    assert outcome["first_eval"] == {name: evaluations[0][name] for name in (GREEDY, SAMPLED)}
    assert outcome["last_eval"] == {name: evaluations[3][name] for name in (GREEDY, SAMPLED)}
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    steps = [line for line in lines if not is_evaluation(line)]
    for with_eval, without in zip(steps, read_metrics(plain / "metrics.jsonl"), strict=True):
        assert with_eval["sampled_tokens"] == without["sampled_tokens"]
        assert with_eval["reward"] == pytest.approx(without["reward"])
    (tmp_path / "eval.jsonl").write_text("".join(rows[:2]))
    assert main([*run, *held_out, "--steps", "4", "--resume"]) == 2
    assert "eval_tasks: this run has '3 tasks, " in capsys.readouterr().err


def test_the_greedy_score_of_a_model_does_not_depend_on_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    tasks = str(tmp_path / "tasks.jsonl")
    rows = Path("examples/rollout/records.jsonl").read_text().splitlines(keepends=True)
    Path(tasks).write_text("".join(rows[:20]))
    scores: list[dict[str, float]] = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        run = ["train", tasks, *OPTIONS, *SMALL, "--steps", "1", "--seed", seed, "--run-folder", str(folder)]
        assert main([*run, "--eval", tasks]) == 0
        scores.append(read_metrics(folder / "metrics.jsonl")[0])
    assert scores[0][GREEDY] == scores[1][GREEDY]
    assert all(score[GREEDY] > score[SAMPLED] + 0.2 for score in scores), "it is sure of much, not of all"


def test_calls_of_a_training_run_are_logged_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = ["train", "examples/rollout/records.jsonl", *OPTIONS, *SMALL, "--steps", "1", "--json"]
    logs = ["--log-level", "info", "--log-format", "json", "--explain-forks"]
    assert main([*run, *logs, "--run-folder", str(tmp_path / "a")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert {"call", "session opened"} <= {line["message"] for line in lines}
    assert main([*run, "--run-folder", str(tmp_path / "b")]) == 0
    assert '"call"' not in capsys.readouterr().err


def test_a_reward_that_takes_too_long_fails_its_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = ["train", "examples/rollout/records.jsonl", *OPTIONS[:2], *SMALL, "--steps", "1"]
    verifier = ["--reward-command", "sleep 600", "--reward-timeout-s", "0.2"]
    assert main([*run, *verifier, "--run-folder", str(tmp_path / "run")]) == 1
    assert "all episodes failed, the first with TimeoutError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--resume"], "--resume: expected it with --run-folder only"),
        (["--eval-every", "5"], "--eval-every: got 5, expected it with --eval only"),
        (["--eval", "missing.jsonl"], "--eval: got missing.jsonl, which does not exist"),
        (["--max-batch-tokens", "0"], "--max-batch-tokens: got 0, expected 1 or more"),
        (["--reward-timeout-s", "0"], "--reward-timeout-s: got 0.0, expected a finite number of more than 0"),
        (["--learning-rate", "-1"], "--learning-rate: got -1, expected 0 or more"),
        (["--agent", "examples.rollout.script_agent:nothing"], "which cannot be loaded"),
    ],
)
def test_bad_options_are_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(ROOT)
    given = arguments if "--agent" in arguments else [*OPTIONS, *arguments]
    assert main(["train", "examples/rollout/records.jsonl", "--steps", "1", *given]) == 2
    assert problem in capsys.readouterr().err
