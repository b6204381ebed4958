"""A real command-line agent as the command of a rollout: ten trajectories, every token delivered."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from branchline.cli.main import main
from tests.clients.programs import PROGRAMS, ClientEnvironment, prepare

PROGRAM = PROGRAMS["qwen-code"]
TASKS = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node: the clients are programs of npm"),
    pytest.mark.skipif(
        not PROGRAM.package.executable.exists(), reason="needs the clients: make test-clients"
    ),
]


def test_ten_tasks_are_ten_trajectories_of_which_every_token_is_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    setting = ClientEnvironment(tmp_path / "home", tmp_path, "", "", "")
    prepare(PROGRAM, setting)
    rows = [{"id": f"t{index}", "prompt": f"Say number {index}."} for index in range(TASKS)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = f"HOME={shlex.quote(str(setting.home))} OPENAI_MODEL=branchline NO_COLOR=1"
    command = f'{environment} {PROGRAM.package.executable} --yolo -p "$BRANCHLINE_PROMPT"'
    options = ["--engine", "scripted", "--concurrency", "2", "--timeout-s", "120", "--run-folder", "out"]
    assert main(["run", "tasks.jsonl", "--command", command, *options]) == 0
    stats = json.loads((tmp_path / "out/stats.json").read_text())
    print(
        json.dumps(
            {name: stats[name] for name in ("finished", "sampled_tokens", "delivered_tokens", "forks")}
        )
    )
    assert (stats["sessions"], stats["finished"]) == (TASKS, TASKS)
    assert stats["sampled_tokens"] == stats["delivered_tokens"] > 0
    lines = [json.loads(line) for line in (tmp_path / "out/trajectories.jsonl").read_text().splitlines()]
    for line in lines:
        said = [message["content"] for message in line["histories"][0]["messages"]]
        assert any(line["task"]["prompt"] in str(text) for text in said)
