"""`branchline merge` accounts for every sampled token of a log and names the lines it cannot read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from branchline.cli.main import main
from branchline.export.jsonl import read_jsonl
from tests.cli.harness import LogLine, log_line, raw_message

RunMerge = Callable[..., Any]


ASK = [raw_message("system", "s"), raw_message("user", "Three words.")]
THREE_WORDS = [
    log_line(ASK, "Luminous", [1, 2], [10, 11]),
    log_line(ASK, "Serendipity", [1, 2], [12, 13, 14]),
    log_line(ASK, "Ephemeral", [1, 2], [15]),
    log_line(
        [*ASK, raw_message("assistant", "Serendipity"), raw_message("user", "next")],
        "Whimsical",
        [1, 2, 12, 13, 14, 3],
        [16, 17],
    ),
]
DRIFTED_LOG = [
    log_line([raw_message("user", "u")], "ab", [1], [20, 21, 9]),
    log_line(
        [raw_message("user", "u"), raw_message("assistant", "ab"), raw_message("user", "v")],
        "c",
        [1, 22, 9, 2],
        [23],
    ),
]


@pytest.fixture
def log(tmp_path: Path) -> Callable[[Sequence[LogLine | str]], Path]:
    def write(lines: Sequence[LogLine | str]) -> Path:
        path = tmp_path / "calls.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return path

    return write


@pytest.fixture
def run_merge(log: Callable[[Sequence[LogLine | str]], Path], capsys: pytest.CaptureFixture[str]) -> RunMerge:
    """Runs `merge --json` on log lines and returns the printed object."""

    def run(lines: Sequence[LogLine | str], *options: object) -> Any:
        code = main(["merge", str(log(lines)), "--json", *map(str, options)])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        assert printed.err == ""
        assert printed.out.count("\n") == 1
        return json.loads(printed.out)

    return run


def merge_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error text of a command that must fail with an empty stdout."""
    assert main(["merge", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("branchline: error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("branchline: error: ").strip()


# -- timelines and the account


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_three_answers_are_three_timelines_in_every_order(
    run_merge: RunMerge, order: tuple[int, ...]
) -> None:
    report = run_merge([THREE_WORDS[index] for index in order])
    histories = {
        tuple((entry["text"], entry["author"]) for entry in timeline["history"])
        for timeline in report["timelines"]
    }
    prompt = (("s", "env"), ("Three words.", "env"))
    assert histories == {
        (*prompt, ("Luminous", "llm")),
        (*prompt, ("Ephemeral", "llm")),
        (*prompt, ("Serendipity", "llm"), ("next", "env"), ("Whimsical", "llm")),
    }
    assert len(report["timelines"]) == 3
    assert report["sampled_tokens"] == report["delivered_tokens"] == 8
    assert report["dropped"] == []
    assert all(line["exact"] for line in report["timelines"])


def test_a_timeline_lists_its_size_calls_and_lines(run_merge: RunMerge) -> None:
    report = run_merge(["", *THREE_WORDS])
    longest = max(report["timelines"], key=lambda line: line["messages"])
    longest.pop("history")
    assert longest == {
        "session": None,
        "agent": None,
        "model": None,
        "messages": 5,
        "tokens": 8,
        "trained_tokens": 5,
        "calls": 2,
        "lines": [3, 5],
        "exact": True,
        "tokens_behind_other_ids": 0,
        "missing_logprobs": 0,
        "finish": "stop",
    }
    assert (report["calls"], report["sessions"]) == (4, 1)


def test_every_fork_has_a_cause_a_token_a_line_and_a_diagnosis(run_merge: RunMerge) -> None:
    report = run_merge(THREE_WORDS)
    assert report["causes"] == {"best_of_n": 2}
    for fork in report["forks"]:
        assert fork["cause"] == "best_of_n"
        assert fork["line"] in (2, 3)
        assert fork["first_divergent_token"] == 2
        assert "first divergent token 2" in fork["diagnosis"]


def test_forks_are_sorted_by_cost(run_merge: RunMerge) -> None:
    long, short = "x" * 60, "y"
    lines = [
        log_line([raw_message("user", "u"), raw_message("user", long)], "a", [1, *range(100, 160)], [9]),
        log_line([raw_message("user", "u"), raw_message("user", short)], "b", [1, 2], [9]),
        log_line([raw_message("user", "w"), raw_message("user", long)], "c", [5, *range(100, 160)], [9]),
    ]
    costs = [fork["tokens_computed_again"] for fork in run_merge(lines)["forks"]]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 0


def test_sessions_and_named_agents_are_kept_apart(run_merge: RunMerge) -> None:
    lines = [
        log_line(ASK, "a", [1], [2], session="one", agent="planner"),
        log_line(
            [*ASK, raw_message("assistant", "a"), raw_message("user", "go")],
            "b",
            [1, 2, 3],
            [4],
            session="two",
        ),
        log_line(
            [*ASK, raw_message("assistant", "a"), raw_message("user", "go")],
            "b",
            [1, 2, 3],
            [4],
            session="one",
            agent="coder",
        ),
        log_line(
            [*ASK, raw_message("assistant", "a"), raw_message("user", "go")],
            "b",
            [1, 2, 3],
            [4],
            session="one",
            agent="planner",
        ),
    ]
    report = run_merge(lines)
    found = {(line["session"], line["agent"], line["calls"]) for line in report["timelines"]}
    assert found == {("one", "planner", 2), ("one", "coder", 1), ("two", None, 1)}
    assert report["sessions"] == 2


def test_tool_lists_matter_only_where_they_change_ids(run_merge: RunMerge) -> None:
    more = [*ASK, raw_message("assistant", "a"), raw_message("user", "go")]
    before, tools = [*range(100, 110)], [{"type": "function", "function": {"name": "f"}}]
    first = log_line(ASK, "a", before, [2], tools=tools)
    assert len(run_merge([first, log_line(more, "b", [*before, 2, 3], [4])])["timelines"]) == 1
    lines = [first, log_line(more, "b", [50, *before, 2, 3], [4])]
    apart = run_merge(lines)
    assert len(apart["timelines"]) == 2
    assert apart["kept_apart"] == [{"line": 2, "options": ["--ignore-tools"]}]
    joined = run_merge(lines, "--ignore-tools")
    assert (len(joined["timelines"]), joined["inexact_tokens"], joined["kept_apart"]) == (1, 1, [])


def test_without_ids_tool_lists_keep_calls_apart_unless_ignored(run_merge: RunMerge) -> None:
    more = [*ASK, raw_message("assistant", "a"), raw_message("user", "go")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [log_line(ASK, "a", tools=tools), log_line(more, "b")]
    assert len(run_merge(lines)["timelines"]) == 2
    assert len(run_merge(lines, "--ignore-tools")["timelines"]) == 1


def test_dedupe_keeps_one_of_several_equal_answers(run_merge: RunMerge) -> None:
    lines = [THREE_WORDS[0], THREE_WORDS[0]]
    report = run_merge(lines)
    assert len(report["timelines"]) == 2
    report = run_merge(lines, "--dedupe")
    assert len(report["timelines"]) == 1
    assert report["dropped"] == [{"reason": "duplicate", "call": "line-2", "tokens": 2}]
    assert report["sampled_tokens"] == report["delivered_tokens"] + 2


# -- drift


def test_drift_is_repaired_and_outputs_after_it_are_inexact(run_merge: RunMerge) -> None:
    report = run_merge(DRIFTED_LOG, "--repair", "--stop-id", 9)
    (line,) = report["timelines"]
    assert report["repairs"] == [{"line": 2, "method": "stop_token"}]
    assert (line["exact"], line["tokens_behind_other_ids"], line["trained_tokens"]) == (False, 1, 4)
    assert report["sampled_tokens"] == report["delivered_tokens"] == 4


@pytest.mark.parametrize("options", [(), ("--stop-id", "9"), ("--ignore-tools",), ("--compare", "token")])
def test_drift_forks_at_token_level_or_without_repair(run_merge: RunMerge, options: tuple[str, ...]) -> None:
    report = run_merge(DRIFTED_LOG, *options)
    assert len(report["timelines"]) == 2
    assert all(line["exact"] for line in report["timelines"])
    assert report["repairs"] == []
    assert report["causes"] == {"drift": 1}
    assert report["sampled_tokens"] == report["delivered_tokens"] == 4


def test_calls_without_ids_merge_by_text_and_are_listed_as_dropped(run_merge: RunMerge) -> None:
    more = [*ASK, raw_message("assistant", "a"), raw_message("user", "go")]
    report = run_merge([log_line(ASK, "a"), log_line(more, "b")])
    (line,) = report["timelines"]
    assert (line["tokens"], line["calls"], line["exact"]) == (0, 2, False)
    assert report["dropped"] == [
        {"reason": "no_token_ids", "call": "line-1", "tokens": 0},
        {"reason": "no_token_ids", "call": "line-2", "tokens": 0},
    ]


# -- tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["ab"] = 256
    built = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<e>", special=True)])
    path = tmp_path / "model"
    path.mkdir()
    built.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<e>{% endfor %}a"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


def test_a_tokenizer_repairs_by_bytes_and_shows_forks_as_text(run_merge: RunMerge, tokenizer: Path) -> None:
    a, b, ab, end = 64, 65, 256, 257
    assert json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]["a"] == a
    # Truncated by length, so there is no stop token: only the bytes show where `abb` ends.
    first = log_line([raw_message("user", "u")], "abb", [1], [a, b, b], finish_reason="length")
    later = [raw_message("user", "u"), raw_message("assistant", "abb"), raw_message("user", "v")]
    lines = [first, log_line(later, "c", [1, ab, b, end], [5])]
    assert run_merge(lines, "--repair", "--stop-id", end)["repairs"] == []
    assert run_merge(lines, "--inexact")["repairs"][0]["method"] == "estimate"
    report = run_merge(lines, "--tokenizer", tokenizer, "--repair")
    assert report["repairs"] == [{"line": 2, "method": "bytes"}]
    apart = run_merge(lines, "--tokenizer", tokenizer)
    assert apart["kept_apart"] == [{"line": 2, "options": ["--repair"]}]
    assert (apart["forks"][0]["before"], apart["forks"][0]["after"]) == ("abb", "abb<e>")


def test_the_stop_token_of_a_template_ends_an_answer_that_it_trims(
    run_merge: RunMerge, tokenizer: Path
) -> None:
    a, ab, space, end, q, x = 64, 256, 220, 257, 80, 87
    lines = [
        log_line([raw_message("user", "q")], "ab ", [q, end, a], [ab, space, end]),
        log_line(
            [raw_message("user", "q"), raw_message("assistant", "ab"), raw_message("user", "x")],
            "a",
            [q, end, a, ab, end, x, end, a],
            [a, end],
        ),
    ]
    apart = run_merge(lines, "--tokenizer", tokenizer)
    assert apart["kept_apart"] == [{"line": 2, "options": ["--repair"]}]
    assert len(apart["timelines"]) == 2
    repaired = run_merge(lines, "--tokenizer", tokenizer, "--repair")
    assert repaired["repairs"] == [{"line": 2, "method": "stop_token"}]
    assert (repaired["inexact_tokens"], repaired["delivered_tokens"]) == (2, 5)


def test_a_tokenizer_encodes_calls_without_ids_as_inexact(run_merge: RunMerge, tokenizer: Path) -> None:
    lines = [
        log_line([raw_message("user", "u")], "ab"),
        log_line([raw_message("user", "u"), raw_message("assistant", "ab"), raw_message("user", "v")], "b"),
    ]
    assert run_merge(lines, "--tokenizer", tokenizer)["delivered_tokens"] == 0
    report = run_merge(lines, "--tokenizer", tokenizer, "--inexact")
    (line,) = report["timelines"]
    # uu<e>a + ab<e>, then uv<e>a + b<e>
    assert (line["tokens"], line["trained_tokens"], line["exact"]) == (4 + 2 + 4 + 2, 4, False)
    assert line["missing_logprobs"] == 4
    assert report["dropped"] == []


def test_logged_output_ids_are_kept_if_only_the_prompt_has_none(run_merge: RunMerge, tokenizer: Path) -> None:
    lines = [log_line([raw_message("user", "u")], "ab", None, [64, 65])]
    report = run_merge(lines, "--tokenizer", tokenizer, "--inexact")
    (line,) = report["timelines"]
    assert (line["trained_tokens"], line["missing_logprobs"], line["exact"]) == (2, 0, False)


def test_ids_that_do_not_decode_are_errors_with_their_line(
    log: Callable[..., Path], tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log([THREE_WORDS[0], log_line(ASK, "x", [1, 5000], [2])])
    error = merge_error(capsys, path, "--tokenizer", tokenizer)
    assert error.startswith(f"{path}:2: response.prompt_token_ids: id 5000 at index 1 does not decode")


def test_a_call_that_the_template_rejects_is_a_bad_line(
    log: Callable[..., Path], run_merge: RunMerge, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    (tokenizer / "chat_template.jinja").write_text(template)
    lines = [THREE_WORDS[0], log_line(ASK, "x")]
    path = log(lines)
    assert merge_error(capsys, path, "--tokenizer", tokenizer).startswith(f"{path}:2: cannot be encoded")
    report = run_merge(lines, "--tokenizer", tokenizer, "--skip-bad")
    assert [entry["line"] for entry in report["skipped"]] == [2]
    assert "user first" in report["skipped"][0]["problem"]


# -- bad input


BAD_LINES = {
    "{broken": "expected one JSON object a line",
    "[1, 2]": "expected an object with request and response",
    '{"request": {"messages": []}}': "response: got None, expected an object",
    '{"request": {"messages": []}, "response": {"choices": []}}': "messages: got [], expected",
    json.dumps(
        log_line([raw_message("wizard", "x")], "y")
    ): "messages[0].role: got 'wizard', expected one of system",
    json.dumps(
        log_line(ASK, "y", [1], [1.5])
    ): "response.choices[0].token_ids: got [1.5], expected a list of token ids",
    json.dumps(log_line(ASK, "y", [-1], [1])): "response.prompt_token_ids[0]: got -1, expected a token id",
    json.dumps({**THREE_WORDS[0], "session": 3}): "session: got 3, expected a string",
}


@pytest.mark.parametrize(("bad", "expected"), list(BAD_LINES.items()))
def test_a_bad_line_is_an_error_with_file_line_and_expectation(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str], bad: str, expected: str
) -> None:
    path = log([THREE_WORDS[0], "", bad, THREE_WORDS[1]])
    error = merge_error(capsys, path, "--json")
    assert error.startswith(f"{path}:3: ")
    assert expected in error


def test_skip_bad_continues_and_lists_bad_lines(run_merge: RunMerge) -> None:
    report = run_merge([THREE_WORDS[0], *BAD_LINES, THREE_WORDS[1]], "--skip-bad")
    assert report["calls"] == 2
    assert [entry["line"] for entry in report["skipped"]] == list(range(2, 2 + len(BAD_LINES)))
    assert report["skipped"][0]["problem"].startswith("expected one JSON object a line")


def test_a_log_without_calls_is_an_error(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = log([])
    assert merge_error(capsys, path) == f"{path}: no calls in it, expected one JSON object a line"
    path = log(["{", "{"])
    assert f"the first of 2 bad lines: {path}:1:" in merge_error(capsys, path, "--skip-bad")


def test_a_missing_log_or_tokenizer_is_named(
    log: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "missing.jsonl: cannot be read: No such file" in merge_error(capsys, tmp_path / "missing.jsonl")
    assert "cannot be read: Is a directory" in merge_error(capsys, tmp_path)
    assert "not a directory" in merge_error(capsys, log(THREE_WORDS), "--tokenizer", tmp_path / "missing")


# -- samples


def test_shares_of_written_samples_add_up(run_merge: RunMerge, tmp_path: Path) -> None:
    target = tmp_path / "samples.jsonl"
    report = run_merge(THREE_WORDS, "--samples", target)
    samples = list(read_jsonl(target))
    assert report["samples"]["samples"] == len(samples) == 3
    assert sum(float(sample.shares.sum()) for sample in samples) == report["sampled_tokens"]
    assert {tuple(sample.prompt_ids) for sample in samples} == {(1, 2)}


def test_messages_have_token_spans_where_the_log_has_ids(run_merge: RunMerge, tokenizer: Path) -> None:
    history = run_merge(THREE_WORDS)["timelines"][-1]["history"]
    assert [message["span"] for message in history] == [None, None, [2, 5], [5, 6], [6, 8]]
    # The template renders `ss<e>uu<e>a`, so a tokenizer tells the two messages of the prompt apart.
    messages = [raw_message("system", "s"), raw_message("user", "u")]
    s, u, a, end = 82, 84, 64, 257
    lines = [log_line(messages, "ab", [s, s, end, u, u, end, a], [256])]
    (line,) = run_merge(lines, "--tokenizer", tokenizer)["timelines"]
    assert [message["span"] for message in line["history"]] == [[0, 3], [3, 6], [7, 8]]
    assert [message["tokens"] for message in line["history"]] == [3, 3, 1]


def test_missing_logprobs_leave_no_file_unless_allowed(
    log: Callable[..., Path], run_merge: RunMerge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {**THREE_WORDS[0], "session": "good"},
        log_line(ASK, "x", [1, 2], [3], logprobs=False, session="bad"),
    ]
    target = tmp_path / "samples.jsonl"
    error = merge_error(capsys, log(lines), "--samples", target)
    assert "session 'bad': 1 of 1 sampled tokens have no logprobs" in error
    assert "--allow-missing-logprobs" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls.jsonl"]
    run_merge(lines, "--samples", target, "--allow-missing-logprobs")
    assert len(list(read_jsonl(target))) == 2


def test_a_bad_line_leaves_earlier_samples_untouched(
    log: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "samples.jsonl"
    target.write_text("before")
    merge_error(capsys, log([THREE_WORDS[0], "{"]), "--samples", target)
    assert target.read_text() == "before"


def test_samples_never_replace_the_log_or_a_non_file(
    log: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(THREE_WORDS)
    before = path.read_bytes()
    assert "that is the log itself" in merge_error(capsys, path, "--samples", path)
    assert "not a regular file" in merge_error(capsys, path, "--samples", tmp_path)
    assert "cannot be written" in merge_error(capsys, path, "--samples", tmp_path / "missing" / "x.jsonl")
    assert path.read_bytes() == before


# -- tables


def test_the_tables_show_timelines_totals_repairs_forks_and_skipped_lines(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        *({**line, "session": "[bold]words", "agent": "a"} for line in THREE_WORDS),
        *({**line, "session": "drift"} for line in DRIFTED_LOG),
        log_line(ASK, "no ids", session="drift"),
        "{",
    ]
    path = log(lines)
    assert main(["merge", str(path), "--skip-bad", "--repair", "--stop-id", "9"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]words" in out
    for expected in (
        "7 calls in 2 sessions became 5 timelines",
        "12 sampled tokens, 12 delivered",
        "dropped, no_token_ids: 1 output, 0 tokens",
        "repaired by stop_token: 1 call",
        "best_of_n 2",
        "first divergent token 2",
        "skipped 1 bad line",
        f"{path}:8: expected one JSON object a line",
    ):
        assert expected in out


def test_long_lists_are_cut_with_a_count_of_the_rest(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[LogLine | str] = [log_line(ASK, f"word {index}", [1, 2], [index]) for index in range(60)]
    assert main(["merge", str(log([*lines, *["{"] * 12])), "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "10 more timelines; --json lists them all" in out
    assert "39 more; --json lists them all" in out
    assert "2 more; --json lists them all" in out
