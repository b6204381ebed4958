"""Wrong command lines of all commands: each gets one sentence and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchline.cli.main import main

AGENT = """
async def run(task, session): pass
def score(task, trajectory): return 1
def one(task): return 1
"""
FILES = {
    "tasks.jsonl": '{"prompt": "2+2?"}\n',
    "named.jsonl": '{"prompt": "2+2?", "agent_name": "singel_turn"}\n',
    "list.jsonl": "[1]\n",
    "empty.jsonl": "",
    "calls.jsonl": "x\n",
    "rubric.txt": "hello",
    "serve.yaml": "port: 0\n",
    "my_agent_of_wrong_lines.py": AGENT,
    "broken_of_wrong_lines.py": "import nope_missing\n",
    "syntax_of_wrong_lines.py": "def f(:\n",
    "runs/first/run.json": "{}",
    "runs/first/trajectories.jsonl": "",
    "empty/.keep": "",
}
RUN = "run tasks.jsonl --engine scripted --agent my_agent_of_wrong_lines:run"
TRAIN = "train tasks.jsonl --agent my_agent_of_wrong_lines:run"

PLACES = [
    # addresses
    ("serve --engine scripted --port {port}", "--port: got {port}, which is in use on 127.0.0.1"),
    ("serve --engine scripted --port 0 --host nohost.invalid", "--host: got 'nohost.invalid', expected an"),
    ("serve --engine scripted --port 0 --host 300.1.1.1", "--host: got '300.1.1.1', expected an address of"),
    ("serve --engine scripted --port 0 --host 192.0.2.1", "--host: got '192.0.2.1', expected an address of"),
    ("serve --engine scripted --port 0 --host 127.0.0.1:8", "--host: got '127.0.0.1:8', expected an address"),
    ("serve --engine scripted --port 0 --host=", "--host: got '', expected an address"),
    ("serve --engine vllm --engine-url 127.0.0.1:1", "got '127.0.0.1:1', expected http://HOST:PORT"),
    ("serve --engine scripted --upstream a=b", "got 'b', expected http://HOST:PORT"),
    # files
    ("serve --config srve.yaml", "No such file or directory; did you mean serve.yaml?"),
    ("serve --engine scripted --journal empty", "empty: the journal cannot be opened"),
    ("serve --engine scripted --journal no/j", "/no does not exist"),
    ("serve --engine scripted --journal tasks.jsonl", "tasks.jsonl: found a file that starts"),
    ("serve --model ./modle", "./modle: not a directory, expected the folder of a model"),
    (
        "serve --model ./empt",
        "expected the folder of a model or a Hugging Face name such as Qwen/Qwen3-8B; did",
    ),
    ("doctor --tokenizer tasks.jsonl", "tasks.jsonl: not a directory"),
    ("doctor --tokenizer empty", "empty/tokenizer.json: cannot be read: No such file"),
    (
        "run taks.jsonl --agent a:b",
        "TASKS: got taks.jsonl, which does not exist, expected a JSONL",
    ),
    ("run taks.jsonl --agent a:b", "; did you mean tasks.jsonl?"),
    ("run tasks --agent a:b", "; did you mean tasks.jsonl?"),
    ("run taks.parquet --agent a:b", "; did you mean tasks.jsonl?"),
    ("train taks.jsonl --agent a:b", "; did you mean tasks.jsonl?"),
    ("run runs/first/ --agent a:b", "TASKS: got runs/first/, which is no file, expected a JSONL"),
    ("run list.jsonl --agent a:b", "list.jsonl[0]: got list, expected an object"),
    ("run calls.jsonl --agent a:b", "calls.jsonl:1: got b'x\\n', expected a JSON object"),
    ("run empty.jsonl --agent a:b", "empty.jsonl: got no rows, expected at least one task"),
    (f"{RUN} --judge-url http://x --judge-model m --judge-rubric rubri.txt", "; did you mean rubric.txt?"),
    ("merge call.jsonl", "call.jsonl: cannot be read: No such file or directory; did you mean calls.jsonl?"),
    ("merge calls.jsonl --samples calls.jsonl", "--samples calls.jsonl: that is the log itself"),
    ("merge calls.jsonl --samples empty", "--samples empty: not a regular file, expected a file"),
    ("merge empty", "empty: cannot be read: Is a directory"),
    ("tree call.jsonl", "call.jsonl: cannot be read: No such file or directory; did you mean calls.jsonl?"),
    ("doctor --tokenizer empty call.jsonl", "empty"),
    ("journal check task.jsonl", "task.jsonl: there is no such file, expected a journal; did you mean tasks"),
    # agents and rewards
    ("run tasks.jsonl --agent my_agnet_of_wrong_lines:run", "; did you mean my_agent_of_wrong_lines:run?"),
    ("run tasks.jsonl --agent my_agent_of_wrong_lines.py:run", "; did you mean my_agent_of_wrong_lines:run?"),
    ("run tasks.jsonl --agent my_agent_of_wrong_lines:rum", "has no rum; did you mean run?"),
    (
        "run tasks.jsonl --agent my_agent_of_wrong_lines:one",
        "expected a function of (task, session), but",
    ),
    ("run tasks.jsonl --agent broken_of_wrong_lines:run", "(broken_of_wrong_lines.py:1 in <module>)"),
    ("run tasks.jsonl --agent syntax_of_wrong_lines:run", "(syntax_of_wrong_lines.py, line 1)"),
    (
        "run tasks.jsonl --agent singel_turn",
        "--agent: got 'singel_turn', expected MODULE:FUNCTION, or",
    ),
    ("run tasks.jsonl --agent a=", "--agent: got 'a=', expected MODULE:FUNCTION, or NAME=MODULE:FUNCTION"),
    ("run tasks.jsonl --agent-url x", "got 'x', expected http://HOST:PORT"),
    ("run tasks.jsonl --command=", "--command: got '', expected a shell command"),
    ("run tasks.jsonl --engine scripted", "expected --agent MODULE:FUNCTION, --command or --agent-url"),
    ("run named.jsonl --agent my_agent_of_wrong_lines:run", "did you mean single_turn?"),
    (f"{RUN} --reward my_agent_of_wrong_lines:scor", "--reward: got 'my_agent_of_wrong_lines:scor', which"),
    (f"{RUN} --reward my_agent_of_wrong_lines", "--reward: got 'my_agent_of_wrong_lines', expected MODULE:"),
    (f"{RUN} --judge-url http://x", "--judge-model: got none, expected the name of the judge's model"),
    # folders of runs
    (f"{RUN} --run-folder runs/frist --resume", "--run-folder: got runs/frist, expected with --resume the"),
    (f"{RUN} --run-folder runs/frist --resume", "; did you mean runs/first?"),
    (f"{RUN} --run-folder runs --resume", "; did you mean runs/first?"),
    (f"{RUN} --run-folder empty --resume", "--run-folder: got empty, expected with --resume the folder of a"),
    (f"{RUN} --run-folder runs/first", "--run-folder: got runs/first, which has a run; continue it"),
    (f"{RUN} --run-folder tasks.jsonl", "--run-folder: got tasks.jsonl, expected a folder"),
    (f"{RUN} --run-folder tasks.jsonl/x", "expected a folder: tasks.jsonl is a file"),
    (f"{TRAIN} --run-folder empty --resume", "--run-folder: got empty, expected with --resume the folder of"),
    (f"{TRAIN} --run-folder tasks.jsonl", "--run-folder: got tasks.jsonl, expected a folder"),
    (f"{TRAIN} --device cudaa", "--device: got 'cudaa', expected a device of this machine"),
    ("demo --run-folder empty --resume", "--run-folder: got empty, expected with --resume the folder of a"),
    ("demo --run-folder tasks.jsonl", "--run-folder: got tasks.jsonl, expected a folder"),
    ("stats runs/frist", "expected the folder of a run, with trajectories.jsonl; did you mean runs/first?"),
    ("stats runs/first/trajectories.jsonl", "; did you mean runs/first?"),
    ("stats runs", "; did you mean runs/first?"),
    ("export runs/frist --to jsonl", "; did you mean runs/first?"),
    ("export runs/first --to jsonl --output no/x", "--output: got no/x, expected a file in an existing"),
]
"""Command lines, and a part of what they get."""


@pytest.fixture
def used_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(("line", "problem"), PLACES)
def test_it_gets_one_sentence(
    line: str, problem: str, used_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if line.startswith(("train ", "demo ", "serve --model")):
        pytest.importorskip("torch")  # without it these say so first
    assert main(line.format(port=used_port).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("branchline: error: ")
    assert problem.format(port=used_port) in printed.err
    assert len(printed.err.splitlines()) <= 3
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    # A lock of a journal stays.
    left = {name for name in left if not name.endswith("-lock")}
    assert left == set(FILES), "nothing was written"


def test_there_are_enough_of_them() -> None:
    commands = {re.split(" ", line)[0] for line, _ in PLACES}
    assert len({line for line, _ in PLACES}) >= 40
    assert commands >= {"serve", "run", "train", "demo", "merge", "tree", "doctor", "stats", "export"}
