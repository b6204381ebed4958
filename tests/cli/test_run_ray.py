"""`branchline run --ray`: options that are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from branchline.cli.main import main
from branchline.core.errors import InputError
from branchline.rollout.run_folder import RunFolder
from branchline.rollout.tasks import read_tasks

TASKS = [{"id": "a", "prompt": "x"}]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--ray", "auto", "--engine", "hf"], "--ray: got --engine hf, expected --engine vllm, sglang"),
        (["--gateways", "2"], "--gateways: got 2, expected it with --ray only"),
        (["--ray-runners", "2"], "--ray-runners: got 2, expected it with --ray only"),
        (["--ray-journals", "/x"], "--ray-journals: got '/x', expected it with --ray only"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_no_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASKS[0]) + "\n")
    out = tmp_path / "out"
    given = ["run", str(tasks), "--agent", "single_turn", "--run-folder", str(out), *arguments]
    if "--engine" not in arguments:
        given += ["--engine", "scripted"]
    assert main(given) == 2
    assert error in capsys.readouterr().err
    assert not out.exists()


def test_a_run_of_a_cluster_is_resumed_in_a_cluster_only(tmp_path: Path) -> None:
    tasks = read_tasks(TASKS)
    RunFolder.create(tmp_path, tasks, 1, is_ray=True)
    RunFolder.create(tmp_path, tasks, 1, is_ray=True, resume=True)
    with pytest.raises(InputError, match=r"ray: this run has True, got False; expected those of .*run\.json"):
        RunFolder.create(tmp_path, tasks, 1, resume=True)
