"""The guide on training runs: its program, for two steps, with a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from branchline.train.metrics import read_metrics
from tests.train.tiny_policy import create_policy

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "train-your-agent.md"


def test_the_guides_program_trains_for_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(program.splitlines()) < 40
    model = create_policy(tmp_path / "model")
    for text, replacement in (
        ('"Qwen/Qwen3-0.6B"', repr(str(model))),
        ("steps=200, groups_per_step=8, group_size=8", "steps=2, groups_per_step=1, group_size=2"),
        ("max_tokens=200", "max_tokens=8"),
    ):
        assert program.count(text) == 1
        program = program.replace(text, replacement)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(GUIDE), "exec"), {})
    lines = read_metrics(tmp_path / "runs" / "add" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["failed_episodes"] == 0 for line in lines)
    assert (tmp_path / "runs" / "add" / "checkpoints" / "step-000002").is_dir()
