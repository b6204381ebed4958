"""The guide to context editing: what its Python prints, and what its tables name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from scripts.check_docs import read_blocks

from branchline.loop.context.context_loop import CONTEXT_TOOLS, ContextOptions
from tests.hang import HANG_S

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "guides" / "context.md").read_text()


def table(heading: str) -> str:
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))


def test_the_guides_python_runs_as_one_program(tmp_path: Path) -> None:
    (tmp_path / "guide.py").write_text("\n".join(block.text for block in read_blocks(TEXT, ["python"])))
    ran = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    ended, stub, samples, turn, without, compacted, own, lengths = ran.stdout.splitlines()
    assert ended.startswith("finish Room 3. ")
    prompts = [int(length) for length in re.findall(r"\d{3,}", ended)]
    assert len(prompts) == 6
    assert prompts[5] < prompts[3] < prompts[4]
    assert '"status":"success"' in stub
    assert '"original_tool":"searchEngine"' in stub
    assert samples.count("(") == 2
    assert turn.startswith(f"{prompts[5]} 1 (0, ")
    assert without.startswith("model_length -1.0 True")
    assert compacted == "max_assistant_turns None False 9"
    assert own.startswith("max_assistant_turns [(4, 6, 8")
    assert max(int(length) for length in re.findall(r"\d+", lengths)) <= 800


def test_the_guide_lists_every_tool_and_option() -> None:
    tools = set(re.findall(r"`(\w+)\(", table("A task with a document")))
    assert tools == set(CONTEXT_TOOLS)
    options = set(re.findall(r"`(\w+)`", table("A context that becomes too long")))
    assert options == {field.name for field in fields(ContextOptions)}
