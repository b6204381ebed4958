"""The guide to trajectories: its Python is one program, and its tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from branchline.export.credit import CreditName, GroupStd, Normaliser

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "trajectories.md").read_text()


def test_the_python_of_the_guide_is_one_program(capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "trajectories.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2 (3,) 1"
    assert printed[1] == "[(True, 2), (True, 5)]"
    assert printed[2].startswith("[0.70700")
    padded, packed, tree = map(int, printed[-2].split())
    assert padded >= packed > tree
    assert printed[-1] == "2 2"


def test_the_tables_name_every_credit_policy_normaliser_and_group_std() -> None:
    named = set(re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE))
    assert {*get_args(CreditName), *get_args(Normaliser), *get_args(GroupStd)} <= named
