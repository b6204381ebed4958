"""`branchline merge --samples` trains every sampled token of a log, and the account is what was written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.cli.main import main, parse_options
from branchline.cli.merge import run
from branchline.export.jsonl import read_jsonl
from branchline.export.parquet import read_parquet
from tests.cli.harness import LogLine, log_line, raw_message
from tests.export.compare import assert_equal_samples

U, V, W = (raw_message("user", text) for text in "uvw")
FIRST, SECOND = raw_message("assistant", "first answer"), raw_message("assistant", "second answer")
SEARCH = [{"type": "function", "function": {"name": "search"}}]
PREFIX = [*range(100, 110)]
STOP = 9
DRIFT_AND_TOOLS = [
    log_line([U], "first answer", PREFIX, [20, 21, 22, STOP]),
    # The first answer was encoded again: 20 21 became 23.
    log_line([U, FIRST, V], "second answer", [*PREFIX, 23, 22, STOP, 30], [24, 25, 26, 27, 28, STOP]),
    # Another tool list changes the beginning of the prompt.
    log_line(
        [U, FIRST, V, SECOND, W],
        "third answer",
        [50, *PREFIX, 23, 22, STOP, 30, 24, 25, 26, 27, 28, STOP, 31],
        [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, STOP],
        tools=SEARCH,
    ),
]
"""21 sampled tokens: 4 exact, 6 after drift, 11 after other tools."""
CUT_OFF = [
    log_line([U], "first answer", [1], [20, 21, 22], finish_reason="length"),
    log_line([U, FIRST, V], "second answer", [1, 23, 22, 30], [24]),
]
"""No stop token tells where the first answer ends in the second prompt."""


@pytest.fixture
def merge_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `merge --json --samples`; returns the printed object and the samples."""

    def merge(lines: Sequence[LogLine], *options: object) -> Any:
        log, target = tmp_path / "calls.jsonl", tmp_path / "samples.jsonl"
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["merge", str(log), "--json", "--samples", str(target), *map(str, options)]) == 0
        return json.loads(capsys.readouterr().out), list(read_jsonl(target))

    return merge


@pytest.mark.parametrize("name", ["samples.parquet", "samples.PARQUET"])
def test_samples_are_written_as_parquet_if_the_file_is_named_so(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "calls.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in DRIFT_AND_TOOLS))
    files = [tmp_path / "samples.jsonl", tmp_path / name]
    for file in files:
        assert main(["merge", str(log), "--samples", str(file)]) == 0
    assert name in capsys.readouterr().out
    for one, other in zip(read_jsonl(files[0]), read_parquet(files[1]), strict=True):
        assert_equal_samples(one, other)


def test_repaired_calls_and_calls_with_other_tools_are_trained_and_counted(
    merge_samples: Callable[..., Any],
) -> None:
    report, samples = merge_samples(DRIFT_AND_TOOLS, "--repair", "--stop-id", STOP, "--ignore-tools")
    (sample,) = samples
    assert (sample.trained_tokens, sample.exact, sample.inexact_tokens) == (21, False, 17)
    assert report["sampled_tokens"] == report["delivered_tokens"] == 21
    assert report["samples"]["trained_tokens"] == 21
    assert report["samples"]["inexact_tokens"] == 17
    assert report["samples"]["dropped_tokens"] == {}


def test_by_default_every_sample_is_exact_and_everything_is_trained(
    merge_samples: Callable[..., Any],
) -> None:
    report, samples = merge_samples(DRIFT_AND_TOOLS)
    assert [sample.trained_tokens for sample in samples] == [4, 6, 11]
    assert all(sample.exact for sample in samples)
    prompts = [line["response"]["prompt_token_ids"] for line in DRIFT_AND_TOOLS]
    assert [sample.prompt_ids.tolist() for sample in samples] == prompts
    assert report["delivered_tokens"] == report["samples"]["trained_tokens"] == 21
    assert report["repairs"] == []
    # The stop token is not known, so that only an estimate would join the drifted call.
    assert report["kept_apart"] == [
        {"line": 2, "options": ["--inexact"]},
        {"line": 3, "options": ["--ignore-tools"]},
    ]


def test_calls_are_kept_apart_where_the_end_of_an_answer_is_only_estimated(
    merge_samples: Callable[..., Any],
) -> None:
    report, samples = merge_samples(CUT_OFF, "--repair", "--stop-id", STOP)
    assert [(sample.trained_tokens, sample.exact) for sample in samples] == [(3, True), (1, True)]
    assert report["repairs"] == []
    report, samples = merge_samples(CUT_OFF, "--inexact")
    assert [(sample.trained_tokens, sample.exact) for sample in samples] == [(4, False)]
    assert report["repairs"] == [{"line": 2, "method": "estimate"}]


def test_an_answer_whose_prompt_was_not_logged_is_trained_on_request_only(
    merge_samples: Callable[..., Any],
) -> None:
    lines = [log_line([U], "first answer", None, [20, 21]), log_line([V], "second answer", [1], [24])]
    report, samples = merge_samples(lines)
    assert [sample.trained_tokens for sample in samples] == [1]
    assert (report["sampled_tokens"], report["delivered_tokens"]) == (3, 1)
    assert report["samples"]["dropped_tokens"] == {"inexact": 2}
    assert report["dropped"] == [{"reason": "inexact", "call": "line-1", "tokens": 2}]
    trained = [timeline["trained_tokens"] for timeline in report["timelines"]]
    assert trained == [0, 1]
    _, samples = merge_samples(lines, "--inexact")
    assert sum(sample.trained_tokens for sample in samples) == 3


def test_the_tables_say_how_many_trained_tokens_are_inexact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "calls.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in DRIFT_AND_TOOLS))
    options = ["--repair", "--stop-id", str(STOP), "--ignore-tools"]
    assert main(["merge", str(log), "--samples", str(tmp_path / "samples.jsonl"), *options]) == 0
    out = capsys.readouterr().out
    assert "21 sampled tokens, 21 delivered, 17 of them inexact" in out
    assert "wrote 1 sample with 21 trained tokens" in out


def test_missing_logprobs_can_be_written_as_a_number(merge_samples: Callable[..., Any]) -> None:
    lines = [log_line([U], "first answer", [1], [20, 21], logprobs=False)]
    _, (sample,) = merge_samples(lines, "--missing-logprob", "-1.5")
    assert sample.response_logprobs.tolist() == [-1.5, -1.5]
    assert sample.missing_logprobs == 2


token_ids = st.integers(10, 14)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(token_ids, max_size=4), st.booleans(), st.booleans()), max_size=5))
def test_whatever_drifted_the_account_is_what_the_samples_train(
    turns: list[tuple[list[int], bool, bool]],
) -> None:
    messages, prompt, lines = [U], [1, 2], []
    for index, (ids, has_drifted, has_tools) in enumerate(turns):
        answer = raw_message("assistant", f"answer {index}")
        shown = [7, *prompt] if has_tools else prompt
        tools = SEARCH if has_tools else []
        lines.append(log_line(messages, answer["content"], shown, [*ids, STOP], tools=tools))
        echoed = [15 + len(ids), STOP] if has_drifted else [*ids, STOP]
        messages = [*messages, answer, V]
        prompt = [*prompt, *echoed, 3]
    if not lines:
        return
    total = sum(len(line["response"]["choices"][0]["token_ids"]) for line in lines)
    repair = ["--repair", "--stop-id", str(STOP)]
    for options in ([], repair, ["--ignore-tools"], [*repair, "--ignore-tools"], ["--inexact"]):
        with tempfile.TemporaryDirectory() as folder:
            log, target = Path(folder, "calls.jsonl"), Path(folder, "samples.jsonl")
            log.write_text("".join(json.dumps(line) + "\n" for line in lines))
            arguments = ["merge", str(log), "--json", "--samples", str(target), *options]
            report = json.loads(run(parse_options(*arguments)))
            samples = list(read_jsonl(target))
        assert report["sampled_tokens"] == report["delivered_tokens"] == total
        assert round(sum(float(sample.shares.sum()) for sample in samples), 3) == total
        assert all(sample.exact for sample in samples) or options
        assert all(sample.exact for sample in samples) == (report["inexact_tokens"] == 0)
