"""All commands: their options, what `--help` imports, and what a wrong command line gets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from branchline.cli.main import COMMANDS, load_command, main
from branchline.cli.options.command import Command, CommandGroup
from branchline.cli.options.parser import read_options
from branchline.cli.options.schema import OptionSchema
from branchline.core.errors import InputError
from branchline.rollout import processes

OTHER_VARIABLES = ("BRANCHLINE_TASK", "BRANCHLINE_PROMPT", "BRANCHLINE_SESSION", "BRANCHLINE_TASK_FILE")
"""What a run sets for its agents, which may run `branchline` themselves."""
MAX_MODULES = {"--version": 130, "--help": 260}
"""Modules that Python and a command have imported, some 60 of them before the first line of ours. numpy alone
has 100, msgspec, asyncio and rich 60 or more each."""
SLOW = {"asyncio", "msgspec", "numpy", "rich", "torch", "transformers", "ray", "starlette", "jinja2", "yaml"}


def commands() -> Iterator[Command]:
    for name in COMMANDS:
        command = load_command(name)
        if isinstance(command, CommandGroup):
            yield from (action for _, action in command.actions.values())
        else:
            yield command


EACH = {command.name: command for command in commands()}


@pytest.mark.parametrize("name", EACH)
def test_every_option_has_help(name: str) -> None:
    for option in OptionSchema(EACH[name].options).options.values():
        assert option.type.metavar
        assert option.help, option.name
        assert option.help.endswith((".", ")")), option.name


@pytest.mark.parametrize("name", EACH)
def test_no_variable_is_one_of_something_else(name: str) -> None:
    for option in OptionSchema(EACH[name].options).options.values():
        assert not option.about.variable or option.variable not in OTHER_VARIABLES
        assert not re.match("BRANCHLINE_(ENGINE|JUDGE|UPSTREAM)_KEY", option.variable)


@pytest.mark.parametrize("name", EACH)
def test_texts_name_only_options_that_exist(name: str) -> None:
    command = EACH[name]
    text = "".join((command.description, command.examples, command.details))
    text += "".join(option.help for option in OptionSchema(command.options).options.values())
    known = {"--help", "--help-all", "--config"}
    for other in EACH.values():
        if other is command or f"branchline {other.name}" in text:
            known |= {option.flag for option in OptionSchema(other.options).options.values()}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= known


@pytest.mark.parametrize("name", EACH)
def test_what_is_needed_and_what_was_renamed_exists(name: str) -> None:
    options = OptionSchema(EACH[name].options).options
    assert set(EACH[name].renamed.values()) <= options.keys()
    assert EACH[name].renamed.keys().isdisjoint(options)
    for option in options.values():
        for needed, accepted in option.about.needs.items():
            # An option of a group may need one that only some commands have.
            choices = options[needed].type.choices if needed in options else ()
            assert not choices or set(accepted) <= set(choices)


@pytest.mark.parametrize("name", EACH)
def test_help_has_a_screen_or_two_and_the_full_one_everything(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: branchline {name} ")
    assert len(text.splitlines()) <= 80
    assert main([*name.split(), "--help-all"]) == 0
    full = capsys.readouterr().out
    assert all(option.flag in full for option in OptionSchema(EACH[name].options).options.values())


@pytest.mark.parametrize("name", EACH)
def test_the_printed_config_of_a_command_is_read_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split(), "--print-config"]) == 0
    text = capsys.readouterr().out
    assert isinstance(yaml.safe_load(text), dict)
    (tmp_path / "c.yaml").write_text(text)
    assert main([*name.split(), "--config", str(tmp_path / "c.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == text
    assert "admin_key" not in text


def imported(*arguments: str) -> set[str]:
    code = (
        "import sys; from branchline.cli.main import main\n"
        f"main({list(arguments)!r}); print('\\n', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([*name.split(), "--help"] for name in EACH)]
)
def test_help_imports_its_command_only_and_little_else(arguments: list[str]) -> None:
    modules = imported(*arguments)
    assert not SLOW & modules
    assert len(modules) <= MAX_MODULES[arguments[-1]]
    loaded = {name.rpartition(".")[2] for name in modules if name.startswith("branchline.cli.commands.")}
    assert loaded <= {arguments[0]}


def test_branchline_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for name in COMMANDS:
        assert name in error


def test_admin_keys_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--admin-key", "sk-secret", "--print-config"]) == 0
    assert "sk-secret" not in capsys.readouterr().out
    assert "sk-secret" not in repr(read_options(EACH["serve"], ["--admin-key", "sk-secret"]).options)


def test_agents_get_variables_that_are_no_options() -> None:
    source = Path(processes.__file__).parent.joinpath("task_variables.py").read_text()
    assert set(re.findall(r"BRANCHLINE_\w+", source)) == set(OTHER_VARIABLES)


def test_a_name_is_one_kind_of_value_in_all_commands() -> None:
    kinds: dict[str, set[object]] = {}
    for command in EACH.values():
        for option in OptionSchema(command.options).options.values():
            kinds.setdefault(option.name, set()).add((option.type.scalar, option.type.is_repeated))
    assert {name for name, found in kinds.items() if len(found) > 1} == set()


def test_a_variable_that_no_command_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PROT", "JOURNALS", "STEPS", "TASK", "FAULTS", "ENGINE_KEY", "UPSTREAM_KEY_A"):
        monkeypatch.setenv(f"BRANCHLINE_{name}", "1")
    assert main(["serve", "--print-config"]) == 0
    journals, prot = sorted(capsys.readouterr().err.splitlines())
    warning = "branchline: warning: {}: no option has this variable; did you mean {}?"
    assert prot == warning.format("BRANCHLINE_PROT", "BRANCHLINE_PORT")
    assert journals == warning.format("BRANCHLINE_JOURNALS", "BRANCHLINE_JOURNAL")
    monkeypatch.setenv("BRANCHLINE_RUN_FOLDR", "x")
    assert main(["run", "--print-config"]) == 0
    assert "did you mean BRANCHLINE_RUN_FOLDER?" in capsys.readouterr().err


WRONG = [
    ("", "got no command, expected one of serve, run"),
    ("srve", "srve: unknown command; did you mean serve?"),
    ("--verison", "--verison: unknown option; did you mean --version?"),
    ("journal", "journal: got no action, expected one of check, repair"),
    ("journal chek f", "got 'chek', expected one of check, repair; did you mean check?"),
    ("journal check", "FILE: got none, expected the journal"),
    ("journal check a b", "got 'b', expected FILE only"),
    ("serve --port 99999", "--port: got 99999, expected 0 to 65535 (branchline serve --help)"),
    ("serve --port http", "--port: got 'http', expected a whole number"),
    ("serve --port", "--port: expected a value"),
    ("serve --prot 1", "--prot: unknown option; did you mean --port?"),
    ("serve extra", "got 'extra', expected options only"),
    (
        "serve --engine vlm",
        "--engine: got 'vlm', expected one of hf, vllm, sglang, scripted, openai; did you mean",
    ),
    (
        "serve --engine scripted --model x",
        "--model: got 'x', expected it with --engine hf, vllm or sglang only",
    ),
    ("serve --engine scripted --device cpu", "--device: got 'cpu', expected it with --engine hf only"),
    (
        "serve --engine hf --engine-url http://h",
        "--engine-url: got ['http://h'], expected it with --engine vllm",
    ),
    ("serve --engine vllm", "--engine vllm: expected --engine-url URL"),
    ("serve --family qwen3", "--family: got 'qwen3', expected it with --codec renderers only"),
    ("serve --durability disk", "--durability: got 'disk', expected it with --journal only"),
    ("serve --allow-image-urls", "--allow-image-urls: its name is --image-urls now"),
    ("serve --max-tools 0", "--max-tools: got 0, expected more than 0"),
    ("serve --drain-s soon", "--drain-s: got 'soon', expected a number (branchline serve --help-all)"),
    ("serve --public-url host", "--public-url: got 'host', expected http://HOST or https://HOST"),
    ("serve --config no.yaml", "--config no.yaml: cannot be read: No such file or directory"),
    ("serve --config x.ini", "--config: got 'x.ini', expected a file named .yaml, .yml or .toml"),
    ("serve --default-chat-template-kwargs x", "got 'x', expected a JSON object"),
    ("serve --log-level loud", "--log-level: got 'loud', expected one of debug, info, warning, error"),
    ("run", "TASKS: got none, expected a JSONL or Parquet file"),
    ("run t.jsonl --agent a:b --out x", "--out: its name is --run-folder now"),
    ("run t.jsonl --agent a:b --resume", "--resume: expected it with --run-folder only"),
    ("run t.jsonl --agent a:b --n 0", "--n: got 0, expected a whole number of 1 or more"),
    ("run t.jsonl --agent a:b --retry x", "--retry: got 'x', expected NAME=N"),
    ("run t.jsonl --agent a:b --retry sad=1", "--retry: got sad=1, expected a cause"),
    ("run t.jsonl --agent a:b --gateways 2", "--gateways: got 2, expected it with --ray only"),
    ("run t.jsonl --agent a:b --judge-model m", "--judge-model: got 'm', expected it with --judge-url only"),
    (
        "run t.jsonl --agent a:b --reward-exit-code",
        "--reward-exit-code: expected it with --reward-command only",
    ),
    ("run t.jsonl --agent a:b", "t.jsonl"),
    ("train t.jsonl --agent a:b --steps 0", "--steps: got 0, expected 1 or more"),
    ("train t.jsonl --agent a:b --n 1", "--n: got 1, expected 2 or more"),
    (
        "train t.jsonl --agent a:b --layout tre",
        "--layout: got 'tre', expected one of auto, tree, rows; did you",
    ),
    ("demo --resume runs/x", "got 'runs/x', expected options only, the folder of a run with --run-folder"),
    ("demo --run-folder x --resume --steps 9", "--steps: got 9, expected it without --resume only"),
    ("merge", "CALLS.jsonl: got none, expected the log"),
    ("merge no.jsonl", "no.jsonl: cannot be read: No such file or directory"),
    ("merge x --compare bytes", "--compare: got 'bytes', expected one of text, token"),
    ("merge x --missing-logprob -1", "--missing-logprob: got -1.0, expected it with --samples only"),
    (
        "merge x --train-model a --rule train=no",
        "--rule: got 'train=no', expected either --rule or --train-model",
    ),
    ("tree x --width 3", "--width: got 3, expected a number of columns from 20"),
    ("doctor", "--tokenizer: got none, expected DIR|NAME"),
    ("doctor --tokenizer t --skip-bad", "--skip-bad: expected it with CALLS.jsonl only"),
    ("stats no", "got no, expected the folder of a run"),
    ("export no", "--to: got none, expected parquet|jsonl|messages"),
    ("export no --to csv", "--to: got 'csv', expected one of parquet, jsonl, messages"),
]


@pytest.mark.parametrize(("line", "problem"), WRONG)
def test_a_wrong_command_line_gets_one_sentence(
    line: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("branchline: error: ")
    assert problem in printed.err
    assert len(printed.err.splitlines()) <= 3
    assert not list(tmp_path.iterdir()), "nothing was written"


WORDS = [
    "-",
    "--",
    "-1",
    "",
    "x",
    "a=1",
    "{}",
    "[]",
    "7",
    "1e400",
    "yes",
    "vllm",
    "--nothing",
    "é\n",
    "no.yaml",
]


@given(st.sampled_from(sorted(EACH)), st.data())
def test_any_command_line_is_read_or_gets_one_sentence(name: str, data: st.DataObject) -> None:
    flags = [option.flag for option in OptionSchema(EACH[name].options).options.values()]
    words = data.draw(st.lists(st.sampled_from([*flags, *flags, *WORDS, "--config", "--resume"]), max_size=6))
    try:
        problem = ""
        text = read_options(EACH[name], ["--print-config", *words]).text
    except InputError as error:
        problem, text = str(error), ""
    assert len(problem.splitlines()) <= 3
    assert bool(problem) != bool(text)
