"""The demo: its outcome, its run folder, and what happens when it is interrupted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from branchline.chat.generic.codec import GenericCodec  # noqa: E402
from branchline.cli.main import main  # noqa: E402
from branchline.train.demo import MODEL_FOLDER, demo  # noqa: E402
from branchline.train.demo.archive import CHANCE  # noqa: E402
from branchline.train.demo.demo import describe_result, summarise  # noqa: E402
from branchline.train.demo.evaluation import evaluate  # noqa: E402
from branchline.train.metrics import read_metrics  # noqa: E402
from branchline.train.trainer import StepResult  # noqa: E402

KEYS = {"first_reward", "last_reward", "steps", "seconds", "sampled_tokens", "delivered_tokens", "learned"}


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    full_config = demo.demo_config
    monkeypatch.setattr(
        demo, "demo_config", lambda settings: replace(full_config(settings), groups_per_step=2, group_size=4)
    )
    monkeypatch.setattr(demo, "_EVALUATION_TASKS", 4)


def last_json(text: str) -> dict[str, Any]:
    return dict(json.loads(text.splitlines()[-1]))


@pytest.mark.usefixtures("small_demo")
def test_the_last_line_is_the_outcome_and_the_run_folder_has_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["demo", "--steps", "2", "--seed", "3", "--json", "--run-folder", str(folder)]) == 0
    output = capsys.readouterr()
    outcome = last_json(output.out)
    assert outcome.keys() >= KEYS
    assert len(output.out.splitlines()) == 1
    assert "logprobs of engine and trainer differ by" in output.err
    assert outcome["steps"] == 2
    assert outcome["sampled_tokens"] == outcome["delivered_tokens"] > 0
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "# After" in (folder / "transcripts.md").read_text()
    assert len(read_metrics(folder / "metrics.jsonl")) == 2
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["settings"] == {"seed": 3, "steps": 2}
    assert main(["demo", "--run-folder", str(folder)]) == 2
    assert "has a run; continue it with --resume" in capsys.readouterr().err


@pytest.mark.usefixtures("small_demo")
def test_an_interrupted_demo_is_resumed_with_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupt(steps: AsyncGenerator[StepResult, None], *_: Any) -> None:
        await anext(steps)
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(demo, "_show_steps", interrupt)
        assert main(["demo", "--steps", "2", "--seed", "5", "--run-folder", str(folder)]) == 130
    assert f"--run-folder {folder} --resume" in capsys.readouterr().out.replace("\n", "")
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1]
    resume = ["demo", "--run-folder", str(folder), "--resume"]
    assert main([*resume, "--seed", "5"]) == 2
    assert main([*resume, "--json", "--log-level", "info", "--log-contents"]) == 0
    output = capsys.readouterr()
    assert "branchline.calls call outcome=ok" in output.err
    assert last_json(output.out)["steps"] == 2
    assert json.loads((folder / "demo.json").read_text()) == {"seed": 5, "steps": 2}


def test_a_run_that_did_not_learn_says_so(tmp_path: Path) -> None:
    def outcome(*rewards: float) -> demo.DemoResult:
        lines = [
            {"reward": reward, "step_time": 1.5, "sampled_tokens": 10.0, "delivered_tokens": 9.0}
            for reward in rewards
        ]
        return summarise(lines, 0.1, 0.2, tmp_path)

    flat, rising = outcome(*[0.2] * 20), outcome(*[0.2] * 10, *[0.8] * 10)
    assert not flat.learned
    assert describe_result(flat).startswith("did not learn")
    assert rising.learned
    assert describe_result(rising).startswith("learned: reward 0.20 → 0.80")
    assert (rising.seconds, rising.sampled_tokens, rising.delivered_tokens) == (30.0, 200, 180)


def test_the_warm_start_solves_few_tasks_and_none_but_by_chance_without_the_tool() -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    codec = GenericCodec.open(MODEL_FOLDER)
    with_tool = asyncio.run(evaluate(model, codec, 24))
    without = asyncio.run(evaluate(model, codec, 24, has_lookup=False))
    assert 0 < with_tool.score <= 0.4
    # 24 draws with probability 0.1: five standard deviations above it.
    assert without.score < CHANCE + 0.31
    assert "main: " in with_tool.transcript


def test_the_shipped_model_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) < 2_000_000
