"""The guide to rollouts: its Python is one program, and its tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from branchline.rollout.session_result import EndCause

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "rollouts.md").read_text()


def test_the_python_of_the_guide_is_one_program(capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    exec(compile(program, "rollouts.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "4 1.0"
    assert sorted(printed[1:]) == [f"first-a-{slot} finished 1.0 1" for slot in range(4)]


def test_the_table_names_every_cause() -> None:
    assert set(EndCause) <= set(re.findall(r"`(\w+)`", TEXT))
