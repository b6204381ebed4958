"""`branchline tree`: forks indent, chains do not, and message text is printed literally."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from branchline.cli.main import main
from tests.cli.harness import log_line, raw_message

RunTree = Callable[..., list[str]]


def conversation(turns: int, others: int = 0) -> list[dict[str, Any]]:
    """A long conversation; each turn has `others` more answers that are not continued."""
    messages, ids, lines = [raw_message("user", "start")], [1], []
    for turn in range(turns):
        lines += [
            log_line(messages, f"answer {turn}.{other}", ids, [100 + other, turn])
            for other in range(others + 1)
        ]
        messages = [
            *messages,
            raw_message("assistant", f"answer {turn}.0"),
            raw_message("user", f"go {turn}"),
        ]
        ids = [*ids, 100, turn, 2]
    return lines


@pytest.fixture
def run_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunTree:
    """Runs `tree` on log lines and returns the printed lines."""

    def run(lines: Sequence[dict[str, Any] | str], *options: str) -> list[str]:
        path = tmp_path / "calls.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        code = main(["tree", str(path), *options])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        return printed.out.splitlines()

    return run


ASK = [raw_message("system", "s"), raw_message("user", "Three words.")]
THREE_WORDS = [
    log_line(ASK, "Luminous", [1, 2], [10, 11]),
    log_line(ASK, "Serendipity", [1, 2], [12, 13, 14], finish_reason="length"),
    log_line(
        [*ASK, raw_message("assistant", "Serendipity"), raw_message("user", "next")],
        "Whimsical",
        [1, 2, 12, 13, 14, 3],
        [16, 17],
    ),
]


def test_a_fork_indents_with_its_cause_and_truncated_answers_are_marked(run_tree: RunTree) -> None:
    title, *lines = run_tree(THREE_WORDS)
    assert title.startswith("session · 3 calls · 2 timelines · ")
    assert [" ".join(line.split()) for line in lines] == [
        "system s",
        "user Three words.",
        "├── * assistant 2+2 Luminous",
        "└── * assistant 2+3 (best_of_n) (cut) Serendipity",
        "user next",
        "* assistant 1+2 Whimsical",
    ]


def test_a_long_conversation_is_not_indented(run_tree: RunTree) -> None:
    lines = run_tree(conversation(300))
    assert len(lines) == 1 + 600
    assert all(line.startswith(("  user ", "* assistant ")) for line in lines[1:])


def test_deeply_nested_forks_continue_at_the_margin(run_tree: RunTree) -> None:
    lines = run_tree(conversation(40, others=2), "--width", "80")
    assert max(map(cell_len, lines)) <= 80
    for turn in range(40):
        for other in range(3):
            assert sum(f"answer {turn}.{other}" in line for line in lines) == 1
    parts = [line for line in lines if line.startswith("… part ")]
    assert parts == [f"… part {number}" for number in range(1, len(parts) + 1)]
    assert parts


def test_markup_and_control_characters_of_messages_are_escaped(run_tree: RunTree) -> None:
    text = "[bold]x[/bold] [/] :smile: \x1b[31mred\x07 two\nlines"
    out = "\n".join(run_tree([log_line([raw_message("user", text)], text, [1], [2], agent="[red]")]))
    assert out.count(r"[bold]x[/bold] [/] :smile: \x1b[31mred\x07 two lines") == 2
    assert "\x1b" not in out


def test_wide_characters_are_cut_by_their_display_width(run_tree: RunTree) -> None:
    lines = run_tree(
        [log_line([raw_message("user", "世界" * 100)], "👩‍🚀 é" * 50, [1], [2])], "--width", "40"
    )
    assert all(cell_len(line) <= 40 for line in lines[1:])
    assert all(line.endswith("…") for line in lines[1:])


def test_a_reply_shown_on_another_branch_is_marked(run_tree: RunTree) -> None:
    bad, err, good = (
        raw_message("assistant", "bad call"),
        raw_message("user", "error"),
        raw_message("assistant", "good call"),
    )
    lines = run_tree(
        [
            log_line(ASK, "bad call", [1, 2], [3]),
            log_line([*ASK, bad, err], "good call", [1, 2, 3, 4], [5]),
            log_line([*ASK, good, raw_message("user", "on")], "done", [1, 2, 5, 6], [7]),
        ]
    )
    shown = [line for line in lines if "good call" in line]
    assert len(shown) == 2
    assert sum("(shown again)" in line and "(repair_loop)" in line for line in shown) == 1


def test_tool_calls_and_images_are_printed(run_tree: RunTree) -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
    out = "\n".join(run_tree([log_line([{"role": "user", "content": [image]}], answer, [1], [2])]))
    assert 'search({"q": "x"})' in out
    assert "<image>" in out


def test_agent_names_are_printed_if_there_are_several(run_tree: RunTree) -> None:
    single = run_tree([{**line, "agent": "solo"} for line in THREE_WORDS])
    assert not any("(solo)" in line for line in single)
    lines = run_tree([{**THREE_WORDS[0], "agent": "one"}, THREE_WORDS[1]])
    assert any("(one) Luminous" in line for line in lines)
    assert any("(no agent named)" in line for line in lines)


def test_all_sessions_are_printed_or_the_selected_one(
    run_tree: RunTree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{**THREE_WORDS[0], "session": "a"}, {**THREE_WORDS[1], "session": "b"}]
    assert sum(line.startswith("session ") for line in run_tree(lines)) == 2
    selected = run_tree(lines, "--session", "b")
    assert [line for line in selected if line.startswith("session ")] == [selected[0]]
    assert "Serendipity" in selected[-1]
    assert main(["tree", str(tmp_path / "calls.jsonl"), "--session", "c"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--session: got 'c', expected one of the log's: a, b" in printed.err


def test_skipped_lines_are_counted(run_tree: RunTree) -> None:
    assert run_tree([*THREE_WORDS, "{"], "--skip-bad")[-1] == "skipped 1 bad line"


def test_several_first_messages_are_branches_of_the_session(run_tree: RunTree) -> None:
    lines = run_tree([THREE_WORDS[0], log_line([raw_message("user", "else")], "other", [7], [8])])
    assert [line[:3] for line in lines if line.startswith(("├", "└"))] == ["├──", "└──"]
