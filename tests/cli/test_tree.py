"""`branchline tree` draws what was merged: forks indent, chains do not, and text is shown as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from branchline.cli.main import main

Draw = Callable[..., list[str]]


def raw_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def log_line(
    messages: Sequence[dict[str, Any]],
    answer: str | dict[str, Any],
    prompt: Sequence[int],
    ids: Sequence[int],
    finish_reason: str = "stop",
    **names: str,
) -> dict[str, Any]:
    message = raw_message("assistant", answer) if isinstance(answer, str) else answer
    choice = {"message": message, "token_ids": list(ids), "finish_reason": finish_reason}
    return {
        "request": {"messages": list(messages)},
        "response": {"prompt_token_ids": list(prompt), "choices": [choice]},
        **names,
    }


def conversation(turns: int, others: int = 0) -> list[dict[str, Any]]:
    """A long talk; each turn is answered once, and `others` times more without being continued."""
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
def draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Draw:
    """Runs `tree` on lines and returns what it printed, line by line."""

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


def test_a_fork_indents_and_names_its_cause_and_a_cut_answer_is_marked(draw: Draw) -> None:
    title, *lines = draw(THREE_WORDS)
    assert title.startswith("session · 3 calls · 2 timelines · ")
    assert [" ".join(line.split()) for line in lines] == [
        "system s",
        "user Three words.",
        "├── * assistant 2+2 Luminous",
        "└── * assistant 2+3 (best_of_n) (cut) Serendipity",
        "user next",
        "* assistant 1+2 Whimsical",
    ]


def test_a_long_conversation_stays_at_its_margin(draw: Draw) -> None:
    lines = draw(conversation(300))
    assert len(lines) == 1 + 600
    assert all(line.startswith(("  user ", "* assistant ")) for line in lines[1:])


def test_forks_inside_forks_go_on_at_the_margin_before_they_run_out_of_room(draw: Draw) -> None:
    lines = draw(conversation(40, others=2), "--width", "80")
    assert max(map(cell_len, lines)) <= 80
    for turn in range(40):
        for other in range(3):
            assert sum(f"answer {turn}.{other}" in line for line in lines) == 1
    parts = [line for line in lines if line.startswith("… part ")]
    assert parts == [f"… part {number}" for number in range(1, len(parts) + 1)]
    assert parts


def test_message_text_is_never_read_as_markup_nor_as_control_characters(draw: Draw) -> None:
    text = "[bold]x[/bold] [/] :smile: \x1b[31mred\x07 two\nlines"
    out = "\n".join(draw([log_line([raw_message("user", text)], text, [1], [2], agent="[red]")]))
    assert out.count(r"[bold]x[/bold] [/] :smile: \x1b[31mred\x07 two lines") == 2
    assert "\x1b" not in out


def test_wide_letters_are_cut_by_their_width(draw: Draw) -> None:
    lines = draw([log_line([raw_message("user", "世界" * 100)], "👩‍🚀 é" * 50, [1], [2])], "--width", "40")
    assert all(cell_len(line) <= 40 for line in lines[1:])
    assert all(line.endswith("…") for line in lines[1:])


def test_a_reply_shown_in_another_place_says_so(draw: Draw) -> None:
    bad, err, good = (
        raw_message("assistant", "bad call"),
        raw_message("user", "error"),
        raw_message("assistant", "good call"),
    )
    lines = draw(
        [
            log_line(ASK, "bad call", [1, 2], [3]),
            log_line([*ASK, bad, err], "good call", [1, 2, 3, 4], [5]),
            log_line([*ASK, good, raw_message("user", "on")], "done", [1, 2, 5, 6], [7]),
        ]
    )
    shown = [line for line in lines if "good call" in line]
    assert len(shown) == 2
    assert sum("(shown again)" in line and "(repair_loop)" in line for line in shown) == 1


def test_tool_calls_and_images_are_shown_where_there_is_no_text(draw: Draw) -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
    out = "\n".join(draw([log_line([{"role": "user", "content": [image]}], answer, [1], [2])]))
    assert 'search({"q": "x"})' in out
    assert "<image>" in out


def test_agents_are_named_where_there_are_several(draw: Draw) -> None:
    alone = draw([{**line, "agent": "solo"} for line in THREE_WORDS])
    assert not any("(solo)" in line for line in alone)
    lines = draw([{**THREE_WORDS[0], "agent": "one"}, THREE_WORDS[1]])
    assert any("(one) Luminous" in line for line in lines)
    assert any("(no agent named)" in line for line in lines)


def test_sessions_are_drawn_one_after_the_other_or_one_alone(
    draw: Draw, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{**THREE_WORDS[0], "session": "a"}, {**THREE_WORDS[1], "session": "b"}]
    assert sum(line.startswith("session ") for line in draw(lines)) == 2
    alone = draw(lines, "--session", "b")
    assert [line for line in alone if line.startswith("session ")] == [alone[0]]
    assert "Serendipity" in alone[-1]
    assert main(["tree", str(tmp_path / "calls.jsonl"), "--session", "c"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--session: got 'c', expected one of the log's: a, b" in printed.err


def test_skipped_lines_are_counted(draw: Draw) -> None:
    assert draw([*THREE_WORDS, "{"], "--skip-bad")[-1] == "skipped 1 bad line"


def test_separate_first_messages_hang_below_the_session(draw: Draw) -> None:
    lines = draw([THREE_WORDS[0], log_line([raw_message("user", "else")], "other", [7], [8])])
    assert [line[:3] for line in lines if line.startswith(("├", "└"))] == ["├──", "└──"]
