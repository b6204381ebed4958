"""`branchline merge` accounts for every sampled token of a log, or names the line it cannot read."""

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

Line = dict[str, Any]
Merge = Callable[..., Any]


def raw_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def log_line(
    messages: Sequence[dict[str, Any]],
    answer: str | dict[str, Any],
    prompt: Sequence[int] | None = None,
    ids: Sequence[int] | None = None,
    *,
    logprobs: bool = True,
    tools: Sequence[dict[str, Any]] = (),
    **names: str,
) -> Line:
    choice: dict[str, Any] = {
        "message": raw_message("assistant", answer) if isinstance(answer, str) else answer
    }
    response: dict[str, Any] = {"choices": [choice]}
    if prompt is not None:
        response["prompt_token_ids"] = list(prompt)
    if ids is not None:
        choice["token_ids"] = list(ids)
        if logprobs:
            choice["logprobs"] = {"content": [{"logprob": -0.5} for _ in ids]}
    return {"request": {"messages": list(messages), "tools": list(tools)}, "response": response, **names}


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
def log(tmp_path: Path) -> Callable[[Sequence[Line | str]], Path]:
    def write(lines: Sequence[Line | str]) -> Path:
        path = tmp_path / "calls.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return path

    return write


@pytest.fixture
def merge(log: Callable[[Sequence[Line | str]], Path], capsys: pytest.CaptureFixture[str]) -> Merge:
    """Runs `merge --json` on lines and returns the object it printed."""

    def run(lines: Sequence[Line | str], *options: object) -> Any:
        code = main(["merge", str(log(lines)), "--json", *map(str, options)])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        assert printed.err == ""
        assert printed.out.count("\n") == 1
        return json.loads(printed.out)

    return run


def merge_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error of a command that must fail, with nothing on stdout."""
    assert main(["merge", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("branchline: error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("branchline: error: ").strip()


# Timelines and the account


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_three_words_one_continued_are_three_timelines_in_every_order(
    merge: Merge, order: tuple[int, ...]
) -> None:
    told = merge([THREE_WORDS[index] for index in order])
    histories = {
        tuple((entry["text"], entry["author"]) for entry in line["history"]) for line in told["timelines"]
    }
    asked = (("s", "env"), ("Three words.", "env"))
    assert histories == {
        (*asked, ("Luminous", "llm")),
        (*asked, ("Ephemeral", "llm")),
        (*asked, ("Serendipity", "llm"), ("next", "env"), ("Whimsical", "llm")),
    }
    assert len(told["timelines"]) == 3
    assert told["sampled_tokens"] == told["delivered_tokens"] == 8
    assert told["dropped"] == []
    assert all(line["exact"] for line in told["timelines"])


def test_a_timeline_tells_its_size_its_calls_and_its_lines(merge: Merge) -> None:
    told = merge(["", *THREE_WORDS])
    longest = max(told["timelines"], key=lambda line: line["messages"])
    longest.pop("history")
    assert longest == {
        "session": None,
        "agent": None,
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
    assert (told["calls"], told["sessions"]) == (4, 1)


def test_every_fork_has_a_cause_a_place_a_line_and_a_sentence(merge: Merge) -> None:
    told = merge(THREE_WORDS)
    assert told["causes"] == {"best_of_n": 2}
    for fork in told["forks"]:
        assert fork["cause"] == "best_of_n"
        assert fork["line"] in (2, 3)
        assert fork["first_divergent_token"] == 2
        assert "first divergent token 2" in fork["diagnosis"]


def test_forks_come_most_expensive_first(merge: Merge) -> None:
    long, short = "x" * 60, "y"
    lines = [
        log_line([raw_message("user", "u"), raw_message("user", long)], "a", [1, *range(100, 160)], [9]),
        log_line([raw_message("user", "u"), raw_message("user", short)], "b", [1, 2], [9]),
        log_line([raw_message("user", "w"), raw_message("user", long)], "c", [5, *range(100, 160)], [9]),
    ]
    costs = [fork["tokens_computed_again"] for fork in merge(lines)["forks"]]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 0


def test_sessions_and_named_agents_are_kept_apart(merge: Merge) -> None:
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
    told = merge(lines)
    found = {(line["session"], line["agent"], line["calls"]) for line in told["timelines"]}
    assert found == {("one", "planner", 2), ("one", "coder", 1), ("two", None, 1)}
    assert told["sessions"] == 2


def test_tool_lists_are_ignored_unless_they_are_kept(merge: Merge) -> None:
    more = [*ASK, raw_message("assistant", "a"), raw_message("user", "go")]
    lines = [
        log_line(ASK, "a", [1], [2], tools=[{"type": "function", "function": {"name": "f"}}]),
        log_line(more, "b", [1, 2, 3], [4]),
    ]
    assert len(merge(lines)["timelines"]) == 1
    assert len(merge(lines, "--keep-tools")["timelines"]) == 2


def test_equal_answers_are_samples_each_unless_one_is_asked_for(merge: Merge) -> None:
    lines = [THREE_WORDS[0], THREE_WORDS[0]]
    told = merge(lines)
    assert len(told["timelines"]) == 2
    told = merge(lines, "--dedupe")
    assert len(told["timelines"]) == 1
    assert told["dropped"] == [{"reason": "duplicate", "call": "line-2", "tokens": 2}]
    assert told["sampled_tokens"] == told["delivered_tokens"] + 2


# Drift


def test_drift_is_repaired_by_text_and_what_stood_behind_it_is_inexact(merge: Merge) -> None:
    told = merge(DRIFTED_LOG)
    (line,) = told["timelines"]
    assert told["repairs"] == [{"line": 2, "method": "stop_token"}]
    assert (line["exact"], line["tokens_behind_other_ids"], line["trained_tokens"]) == (False, 1, 4)
    assert told["sampled_tokens"] == told["delivered_tokens"] == 4


@pytest.mark.parametrize("options", [("--no-repair",), ("--compare", "token")])
def test_drift_forks_by_token_or_without_repair_and_all_stays_exact(
    merge: Merge, options: tuple[str, ...]
) -> None:
    told = merge(DRIFTED_LOG, *options)
    assert len(told["timelines"]) == 2
    assert all(line["exact"] for line in told["timelines"])
    assert told["repairs"] == []
    assert told["causes"] == {"drift": 1}
    assert told["sampled_tokens"] == told["delivered_tokens"] == 4


def test_calls_without_ids_merge_by_text_and_are_listed_as_undelivered(merge: Merge) -> None:
    more = [*ASK, raw_message("assistant", "a"), raw_message("user", "go")]
    told = merge([log_line(ASK, "a"), log_line(more, "b")])
    (line,) = told["timelines"]
    assert (line["tokens"], line["calls"], line["exact"]) == (0, 2, False)
    assert told["dropped"] == [
        {"reason": "no_token_ids", "call": "line-1", "tokens": 0},
        {"reason": "no_token_ids", "call": "line-2", "tokens": 0},
    ]


# A tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
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


def test_a_tokenizer_makes_repairs_certain_and_shows_forks_as_text(merge: Merge, tokenizer: Path) -> None:
    a, b, ab, end = 64, 65, 256, 257
    assert json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]["a"] == a
    # Cut by length, so there is no stop token to go by: only the bytes tell where `abb` ends.
    first = log_line([raw_message("user", "u")], "abb", [1], [a, b, b])
    first["response"]["choices"][0]["finish_reason"] = "length"
    later = [raw_message("user", "u"), raw_message("assistant", "abb"), raw_message("user", "v")]
    lines = [first, log_line(later, "c", [1, ab, b, end], [5])]
    assert merge(lines)["repairs"][0]["method"] == "estimate"
    told = merge(lines, "--tokenizer", tokenizer)
    assert told["repairs"] == [{"line": 2, "method": "bytes"}]
    apart = merge(lines, "--tokenizer", tokenizer, "--no-repair")
    assert (apart["forks"][0]["before"], apart["forks"][0]["after"]) == ("abb", "abb<e>")


def test_a_tokenizer_gives_ids_to_calls_without_and_they_are_inexact(merge: Merge, tokenizer: Path) -> None:
    lines = [
        log_line([raw_message("user", "u")], "ab"),
        log_line([raw_message("user", "u"), raw_message("assistant", "ab"), raw_message("user", "v")], "b"),
    ]
    told = merge(lines, "--tokenizer", tokenizer)
    (line,) = told["timelines"]
    # uu<e>a + ab, then <e>uv<e>a + b
    assert (line["tokens"], line["trained_tokens"], line["exact"]) == (4 + 1 + 5 + 1, 2, False)
    assert line["missing_logprobs"] == 2
    assert told["dropped"] == []


def test_logged_ids_stay_as_logged_where_only_the_prompt_has_none(merge: Merge, tokenizer: Path) -> None:
    told = merge([log_line([raw_message("user", "u")], "ab", None, [64, 65])], "--tokenizer", tokenizer)
    (line,) = told["timelines"]
    assert (line["trained_tokens"], line["missing_logprobs"], line["exact"]) == (2, 0, False)


def test_ids_that_do_not_decode_are_refused_with_their_line(
    log: Callable[..., Path], tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log([THREE_WORDS[0], log_line(ASK, "x", [1, 5000], [2])])
    error = merge_error(capsys, path, "--tokenizer", tokenizer)
    assert error.startswith(f"{path}:2: response.prompt_token_ids: id 5000 at index 1 does not decode")


def test_a_call_the_template_refuses_is_a_bad_line(
    log: Callable[..., Path], merge: Merge, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    (tokenizer / "chat_template.jinja").write_text(template)
    lines = [THREE_WORDS[0], log_line(ASK, "x")]
    path = log(lines)
    assert merge_error(capsys, path, "--tokenizer", tokenizer).startswith(f"{path}:2: cannot be encoded")
    told = merge(lines, "--tokenizer", tokenizer, "--skip-bad")
    assert [entry["line"] for entry in told["skipped"]] == [2]
    assert "user first" in told["skipped"][0]["problem"]


# Bad input


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
def test_a_bad_line_is_refused_with_file_line_and_what_was_expected(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str], bad: str, expected: str
) -> None:
    path = log([THREE_WORDS[0], "", bad, THREE_WORDS[1]])
    error = merge_error(capsys, path, "--json")
    assert error.startswith(f"{path}:3: ")
    assert expected in error


def test_skipping_bad_lines_goes_on_and_counts_them(merge: Merge) -> None:
    told = merge([THREE_WORDS[0], *BAD_LINES, THREE_WORDS[1]], "--skip-bad")
    assert told["calls"] == 2
    assert [entry["line"] for entry in told["skipped"]] == list(range(2, 2 + len(BAD_LINES)))
    assert told["skipped"][0]["problem"].startswith("expected one JSON object a line")


def test_a_log_with_nothing_to_merge_says_so(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = log([])
    assert merge_error(capsys, path) == f"{path}: no calls in it, expected one JSON object a line"
    path = log(["{", "{"])
    assert f"the first of 2 bad lines: {path}:1:" in merge_error(capsys, path, "--skip-bad")


def test_a_missing_log_or_tokenizer_is_named(
    log: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere.jsonl: cannot be read: No such file" in merge_error(capsys, tmp_path / "nowhere.jsonl")
    assert "cannot be read: Is a directory" in merge_error(capsys, tmp_path)
    assert "not a directory" in merge_error(capsys, log(THREE_WORDS), "--tokenizer", tmp_path / "nowhere")


# Samples


def test_samples_are_written_whole_and_their_shares_add_up(merge: Merge, tmp_path: Path) -> None:
    target = tmp_path / "samples.jsonl"
    told = merge(THREE_WORDS, "--samples", target)
    samples = list(read_jsonl(target))
    assert told["samples"]["samples"] == len(samples) == 3
    assert sum(float(sample.shares.sum()) for sample in samples) == told["sampled_tokens"]
    assert {tuple(sample.prompt_ids) for sample in samples} == {(1, 2)}


def test_inexact_outputs_are_not_trained_unless_asked_for(merge: Merge, tmp_path: Path) -> None:
    target = tmp_path / "samples.jsonl"
    told = merge(DRIFTED_LOG, "--samples", target)
    assert told["samples"]["dropped_tokens"] == {"inexact": 1}
    assert [sample.trained_tokens for sample in read_jsonl(target)] == [3]
    merge(DRIFTED_LOG, "--samples", target, "--inexact")
    assert [sample.trained_tokens for sample in read_jsonl(target)] == [4]


def test_missing_logprobs_leave_no_file_unless_allowed(
    log: Callable[..., Path], merge: Merge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {**THREE_WORDS[0], "session": "good"},
        log_line(ASK, "x", [1, 2], [3], logprobs=False, session="bad"),
    ]
    target = tmp_path / "samples.jsonl"
    error = merge_error(capsys, log(lines), "--samples", target)
    assert "session 'bad': 1 of 1 sampled tokens came without logprobs" in error
    assert "--allow-missing-logprobs" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls.jsonl"]
    merge(lines, "--samples", target, "--allow-missing-logprobs")
    assert len(list(read_jsonl(target))) == 2


def test_a_bad_line_leaves_earlier_samples_untouched(
    log: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "samples.jsonl"
    target.write_text("before")
    merge_error(capsys, log([THREE_WORDS[0], "{"]), "--samples", target)
    assert target.read_text() == "before"


def test_samples_never_replace_the_log_or_something_that_is_no_file(
    log: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(THREE_WORDS)
    before = path.read_bytes()
    assert "that is the log itself" in merge_error(capsys, path, "--samples", path)
    assert "not a regular file" in merge_error(capsys, path, "--samples", tmp_path)
    assert "cannot be written" in merge_error(capsys, path, "--samples", tmp_path / "nowhere" / "x.jsonl")
    assert path.read_bytes() == before


# Tables


def test_the_tables_tell_timelines_totals_repairs_forks_and_skipped_lines(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        *({**line, "session": "[bold]words", "agent": "a"} for line in THREE_WORDS),
        *({**line, "session": "drift"} for line in DRIFTED_LOG),
        log_line(ASK, "no ids", session="drift"),
        "{",
    ]
    path = log(lines)
    assert main(["merge", str(path), "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]words" in out
    for told in (
        "7 calls in 2 sessions became 5 timelines",
        "12 sampled tokens, 12 delivered",
        "dropped, no_token_ids: 1 output, 0 tokens",
        "repaired by stop_token: 1 call",
        "best_of_n 2",
        "first divergent token 2",
        "skipped 1 bad line",
        f"{path}:8: expected one JSON object a line",
    ):
        assert told in out


def test_long_lists_are_cut_and_say_how_many_more(
    log: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Line | str] = [log_line(ASK, f"word {index}", [1, 2], [index]) for index in range(60)]
    assert main(["merge", str(log([*lines, *["{"] * 12])), "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "10 more timelines; --json lists them all" in out
    assert "39 more; --json lists them all" in out
    assert "2 more; --json lists them all" in out
