"""The guide to rollouts: its Python is one program, and its tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.check_docs import read_blocks

from branchline.rollout.session_result import EndCause

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "rollouts.md").read_text()


def test_the_python_of_the_guide_is_a_module_and_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, program = (block.text for block in read_blocks(TEXT, ["python"]))
    assert agent.startswith("# my_agent.py\n")
    (tmp_path / "my_agent.py").write_text(agent)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(program, "rollouts.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "4 1.0"
    assert sorted(printed[1:]) == [f"first-a-{slot} finished 1.0 1" for slot in range(4)]


def test_the_table_names_every_cause() -> None:
    assert set(EndCause) <= set(re.findall(r"`(\w+)`", TEXT))
