"""By default `branchline merge` writes exact samples only, and names the option that would join more."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from branchline.cli.main import main
from branchline.export.jsonl import read_jsonl
from tests.cli.harness import LogLine, log_line, raw_message

U, V, W = (raw_message("user", text) for text in "uvw")
PROMPT = [*range(100, 110)]
STOP, END_OF_USER, OBSERVATION = 9, 8, 7
FIRST = raw_message("assistant", "first")
SECOND = raw_message("assistant", "second")
Merge = Callable[..., Any]


@pytest.fixture
def merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Merge:
    """Runs `merge --json --samples`; returns the printed object and the samples."""

    def run(lines: Sequence[LogLine | str | bytes], *options: object, code: int = 0) -> Any:
        log, target = tmp_path / "calls.jsonl", tmp_path / "samples.jsonl"
        data = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
        log.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in data))
        assert main(["merge", str(log), "--json", "--samples", str(target), *map(str, options)]) == code
        printed = capsys.readouterr()
        return (json.loads(printed.out), list(read_jsonl(target))) if code == 0 else printed.err

    return run


def contexts(samples: Sequence[Any]) -> list[list[int]]:
    """The ids up to the last trained token of each sample."""
    return sorted([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()] for sample in samples)


def logged(lines: Sequence[LogLine]) -> list[list[int]]:
    responses = [line["response"] for line in lines]
    return sorted(one["prompt_token_ids"] + one["choices"][0]["token_ids"] for one in responses)


# -- stop tokens


REACT = [
    # A stop string ended the answer: its last id is a word, which the tool's message has too.
    log_line([U], "Action: look", PROMPT, [20, 21, OBSERVATION]),
    log_line(
        [U, raw_message("assistant", "Action: look"), V],
        "done",
        [*PROMPT, 22, STOP, 60, 61, OBSERVATION, 62, STOP],
        [30, STOP],
    ),
]


@pytest.mark.parametrize(
    "options", [(), ("--repair", "--stop-id", STOP), ("--repair", "--stop-id", OBSERVATION)]
)
def test_the_last_id_of_an_answer_is_no_stop_token_and_no_message_is_lost(
    merge: Merge, options: tuple[object, ...]
) -> None:
    report, samples = merge(REACT, *options)
    if OBSERVATION not in options:
        assert contexts(samples) == logged(REACT)
        assert report["repairs"] == []
        assert all(sample.exact for sample in samples)
    else:
        # Who names a word as a stop id is believed; the tokens are counted.
        assert report["inexact_tokens"] == 2


def test_a_known_stop_token_ends_an_answer_only_if_no_other_one_comes_first(merge: Merge) -> None:
    lines = [
        log_line([U], "first", PROMPT, [20, 21, STOP]),
        # The template ends this answer with another token; STOP comes after the next message.
        log_line([U, FIRST, V], "second", [*PROMPT, 22, END_OF_USER, 60, STOP, 61], [30, STOP]),
    ]
    _, samples = merge(lines, "--repair", "--stop-id", STOP, "--stop-id", END_OF_USER)
    assert contexts(samples) == logged(lines)


# -- dropped reasoning


THOUGHT = {"role": "assistant", "content": "first", "reasoning_content": "hm"}
LONG = [*range(60, 69)]
DROPPED = [
    log_line([U], THOUGHT, PROMPT, [50, 51, 20, 21, STOP]),
    # The second turn still shows the reasoning of the first.
    log_line([U, THOUGHT, V], "second", [*PROMPT, 50, 51, 20, 21, STOP, *LONG], [30, 31, STOP]),
    # The third does not: the template drops it two turns later.
    log_line([U, FIRST, V, SECOND, W], "third", [*PROMPT, 20, 21, STOP, *LONG, 30, 31, STOP, 61], [40, STOP]),
]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--repair", "--stop-id", STOP),
        ("--ignore-tools",),
        ("--inexact",),
        ("--inexact", "--ignore-tools"),
    ],
)
def test_an_answer_is_trained_after_the_reasoning_that_its_prompt_had(
    merge: Merge, options: tuple[object, ...]
) -> None:
    report, samples = merge(DROPPED, *options)
    assert contexts(samples) == logged(DROPPED[1:])
    assert all(sample.exact for sample in samples)
    assert report["delivered_tokens"] == 10


def test_other_tools_do_not_hide_dropped_reasoning(merge: Merge) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    third = DROPPED[2]
    third = {**third, "request": {**third["request"], "tools": tools}}
    third = {
        **third,
        "response": {
            **third["response"],
            "prompt_token_ids": [5, *PROMPT, 20, 21, STOP, *LONG, 30, 31, STOP, 61],
        },
    }
    lines = [*DROPPED[:2], third]
    _, samples = merge(lines, "--ignore-tools", "--inexact")
    assert logged([third])[0] in contexts(samples)


# -- what is kept apart


def test_equal_text_with_equal_ids_needs_no_option(merge: Merge) -> None:
    lines = [
        log_line([U], "first", PROMPT, [20, STOP]),
        log_line([U, FIRST, V], "second", [*PROMPT, 20, STOP, 60], [30, STOP]),
    ]
    report, (sample,) = merge(lines)
    assert sample.exact
    assert (report["inexact_tokens"], report["kept_apart"]) == (0, [])


DRIFTED = [
    log_line([U], "first", PROMPT, [20, 21, STOP]),
    log_line([U, FIRST, V], "second", [*PROMPT, 22, STOP, 60], [30, STOP]),
]
OTHER_TOOLS = [
    log_line([U], "first", PROMPT, [20, STOP], tools=[{"type": "function", "function": {"name": "f"}}]),
    log_line([U, FIRST, V], "second", [5, *PROMPT, 20, STOP, 60], [30, STOP]),
]
UNEXPLAINED = [
    log_line([U], "first", PROMPT, [20, STOP]),
    log_line([U, FIRST, V], "second", [5, *PROMPT, 20, STOP, 60], [30, STOP]),
]


@pytest.mark.parametrize(
    ("lines", "known", "needed"),
    [
        (DRIFTED, ("--stop-id", STOP), ["--repair"]),
        (DRIFTED, (), ["--inexact"]),
        (OTHER_TOOLS, (), ["--ignore-tools"]),
        (UNEXPLAINED, (), ["--inexact"]),
    ],
)
def test_each_option_allows_one_thing_and_is_named_where_it_is_missing(
    merge: Merge, lines: list[LogLine], known: tuple[object, ...], needed: list[str]
) -> None:
    others = {"--repair", "--ignore-tools", "--inexact"} - set(needed)
    if "--repair" in needed:
        others.remove("--inexact")  # Merging by text includes repairs.
    if "--stop-id" not in known:
        others.discard("--repair")
    for options in ([], sorted(others)):
        report, samples = merge(lines, *known, *options)
        assert report["kept_apart"] == [{"line": 2, "options": needed}]
        assert contexts(samples) == logged(lines)
        assert all(sample.exact for sample in samples)
    report, (sample,) = merge(lines, *known, *needed)
    assert (report["kept_apart"], report["inexact_tokens"]) == ([], 2)
    assert (sample.exact, sample.inexact_tokens, sample.trained_tokens) == (
        False,
        2,
        report["sampled_tokens"],
    )


def test_the_tables_name_the_option_that_would_join_or_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "calls.jsonl"
    lines = [*OTHER_TOOLS, log_line([W], "alone", None, [1, 2]), log_line([W], "text only")]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["merge", str(log)]) == 0
    out = capsys.readouterr().out
    assert "kept apart: 1 call (--ignore-tools would join)" in out
    assert "dropped, inexact: 1 output, 2 tokens (ids or prompt not logged; --inexact trains them)" in out
    assert "dropped, no_token_ids: 1 output, 0 tokens (--tokenizer with --inexact encodes" in out


def test_other_tools_skip_no_message_to_a_repeated_answer(merge: Merge) -> None:
    lines = [
        log_line(
            [U], "first", [5, *PROMPT], [20, STOP], tools=[{"type": "function", "function": {"name": "f"}}]
        ),
        log_line([U, FIRST, U, FIRST, V], "end", [*PROMPT, 21, STOP, *PROMPT, 20, STOP, 60], [30, STOP]),
    ]
    report, samples = merge(lines, "--ignore-tools", "--stop-id", STOP)
    assert report["kept_apart"] == [{"line": 2, "options": ["--repair"]}]
    assert contexts(samples) == logged(lines)
    _, (sample,) = merge(lines, "--ignore-tools", "--repair", "--stop-id", STOP)
    assert contexts([sample]) == [[5, *PROMPT, 20, STOP, *PROMPT, 20, STOP, 60, 30, STOP]]


def test_repair_without_knowledge_is_refused(merge: Merge) -> None:
    assert "--repair: nothing tells where an answer ends" in merge(DRIFTED, "--repair", code=2)
    assert "--stop-id: got '<end>', expected an id" in merge(DRIFTED, "--stop-id", "<end>", code=2)
    assert "inexact: got True, expected False with compare='token'" in merge(
        DRIFTED, "--compare", "token", "--inexact", code=2
    )


# -- models


def named(line: LogLine, asked: object = None, served: object = None) -> LogLine:
    request = {**line["request"], "model": asked} if asked is not None else line["request"]
    response = {**line["response"], "model": served} if served is not None else line["response"]
    return {**line, "request": request, "response": response}


JOINED = [
    log_line([U], "first", PROMPT, [20, STOP]),
    log_line([U, FIRST, V], "second", [*PROMPT, 20, STOP, 60], [30, 31, STOP]),
]
TWO_MODELS = [named(JOINED[0], "policy"), named(JOINED[1], "critic")]


def test_two_models_are_never_one_row(merge: Merge) -> None:
    report, samples = merge(TWO_MODELS, "--rule", "model=*")
    assert [sample.trained_tokens for sample in samples] == [2, 3]
    assert [timeline["model"] for timeline in report["timelines"]] == ["policy", "critic"]
    served = [named(line, "auto", name) for line, name in zip(JOINED, ("one", "two"), strict=True)]
    assert len(merge(served, "--rule", "model=*")[1]) == 2
    same = [named(line, asked, "one") for line, asked in zip(JOINED, ("a", "b"), strict=True)]
    assert len(merge(same)[1]) == 1


@pytest.mark.parametrize("options", [(), ("--inexact",)])
def test_a_fork_between_two_models_has_that_cause(merge: Merge, options: tuple[str, ...]) -> None:
    for lines in (TWO_MODELS, TWO_MODELS[::-1]):
        assert merge(lines, "--rule", "model=*", *options)[0]["causes"] == {"other_model": 1}
    # Where the client edited its history as well, that is the cause.
    edited = named(log_line([V, FIRST, V], "second", [*PROMPT, 20, STOP, 60], [30, STOP]), "critic")
    assert "other_model" not in merge([TWO_MODELS[0], edited], "--rule", "model=*")[0]["causes"]


def test_samples_of_two_models_are_written_only_by_choice(merge: Merge) -> None:
    error = merge(TWO_MODELS, code=2)
    assert "the log has calls of 2 models (critic, policy); expected --train-model" in error


@pytest.mark.parametrize("options", [("--train-model", "policy"), ("--rule", "model=cri*,train=no")])
def test_the_other_model_is_context_and_counted(merge: Merge, options: tuple[str, ...]) -> None:
    report, (sample,) = merge(TWO_MODELS, *options)
    assert sample.response_ids.tolist() == [20, STOP]
    assert report["dropped"] == [{"reason": "untrained", "call": "line-2", "tokens": 3}]
    assert report["models"] == [
        {"model": "policy", "calls": 1, "trained_calls": 1},
        {"model": "critic", "calls": 1, "trained_calls": 0},
    ]


def test_a_name_or_rule_that_fits_nothing_is_refused_with_what_there_is(merge: Merge) -> None:
    assert "got 'polcy', expected one of the log's: critic, policy" in merge(
        TWO_MODELS, "--train-model", "polcy", code=2
    )
    error = merge(TWO_MODELS, "--rule", "model=x*,train=no", code=2)
    assert "which no call matches; the log has models critic, policy and agents (no name)" in error
    assert "engine=big, expected model, agent and train" in merge(
        TWO_MODELS, "--rule", "model=*,engine=big", code=2
    )
    assert "response.model: got 3, expected a string" in merge([named(JOINED[0], None, 3)], code=2)


# -- equal timelines


def test_equal_answers_are_absorbed_on_request_only(merge: Merge) -> None:
    other_ids = log_line([U], "first", PROMPT, [23, STOP])
    lines = [JOINED[0], JOINED[0], other_ids, JOINED[1]]
    assert len(merge(lines)[1]) == 3
    report, samples = merge(lines, "--dedupe")
    assert len(samples) == 2
    assert report["dropped"] == [{"reason": "duplicate", "call": "line-2", "tokens": 2}]
    # By text as AgentJet compares, also what was sampled as other ids.
    report, (sample,) = merge(lines, "--dedupe", "--inexact")
    assert sample.trained_tokens == 5
    assert [entry["reason"] for entry in report["dropped"]] == ["duplicate", "duplicate"]


def test_answers_with_other_reasoning_are_not_equal(merge: Merge) -> None:
    lines = [log_line([U], {**FIRST, "reasoning_content": text}) for text in ("one", "two")]
    assert len(merge(lines, "--dedupe")[0]["dropped"]) == 2
    assert {entry["reason"] for entry in merge(lines, "--dedupe")[0]["dropped"]} == {"no_token_ids"}


def test_equal_choices_of_one_response_in_lines_of_their_own_are_two_samples(merge: Merge) -> None:
    lines = [log_line([U], "first", PROMPT, [20, STOP]) for _ in range(2)]
    for index, line in enumerate(lines):
        line["response"]["id"] = "r"
        line["response"]["choices"][0]["index"] = index
    report, samples = merge(lines)
    assert (report["logged_twice"], len(samples)) == ([], 2)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("texts", [("first", "first"), ("first", "other")])
def test_a_response_that_is_logged_whole_and_by_choice_is_trained_once(
    merge: Merge, order: tuple[int, ...], is_streamed: bool, texts: tuple[str, str]
) -> None:
    lines = [log_line([U], text, PROMPT, [20 + place, STOP]) for place, text in enumerate(texts)]
    for index, line in enumerate(lines):
        line["response"]["id"] = "c"
        line["response"]["choices"][0]["index"] = index
    choices: list[Any] = [
        {**choice, "message": {**choice["message"], "tool_calls": []}}
        for choice in (line["response"]["choices"][0] for line in lines)
    ]
    whole = {**lines[0], "response": {**lines[0]["response"], "choices": choices}}
    if is_streamed:
        lines = [streamed(line) for line in lines]
    log = [whole, *lines]
    report, samples = merge([log[place] for place in order])
    assert sorted(sample.response_ids.tolist() for sample in samples) == [[20, STOP], [21, STOP]]
    assert sum(entry["tokens"] for entry in report["logged_twice"]) == 4
    assert report["sampled_tokens"] == report["delivered_tokens"] == 4


def test_of_a_response_that_is_logged_again_only_the_new_choices_are_trained(merge: Merge) -> None:
    line = log_line([U], "first", PROMPT, [20, STOP])
    line["response"]["id"] = "c"
    (choice,) = line["response"]["choices"]
    whole = {**line, "response": {**line["response"], "choices": [choice, {**choice, "index": 1}]}}
    report, samples = merge([line, whole])
    assert len(samples) == 2
    assert report["logged_twice"] == [{"line": 2, "tokens": 2}]


def test_a_choice_that_was_cut_off_is_finished_by_another_line_in_any_order(merge: Merge) -> None:
    lines = [log_line([U], "first", PROMPT, [20, 21 + index, STOP]) for index in range(2)]
    for index, line in enumerate(lines):
        line["response"]["id"] = "c"
        line["response"]["choices"][0]["index"] = index
    choices: list[Any] = [line["response"]["choices"][0] for line in lines]
    cut = [{**choices[0], "finish_reason": None}, choices[1]]
    whole = {**lines[0], "response": {**lines[0]["response"], "choices": cut}}
    for log in permutations([whole, *lines]):
        report, samples = merge(log)
        assert sorted(sample.response_ids.tolist() for sample in samples) == [[20, 21, STOP], [20, 22, STOP]]
        assert (report["dropped"], report["calls"]) == ([], 3)
        assert sum(entry["tokens"] for entry in report["logged_twice"]) == 6
    report, (sample,) = merge([whole])
    assert sample.response_ids.tolist() == [20, 22, STOP]
    assert [(entry["reason"], entry["tokens"]) for entry in report["dropped"]] == [("cancelled", 3)]


@pytest.mark.parametrize("options", [(), ("--allow-missing-logprobs",), ("--missing-logprob", "-1")])
@pytest.mark.parametrize("missing", ["logprobs", "token_ids"])
def test_what_one_line_of_an_answer_lacks_another_has(
    merge: Merge, options: tuple[str, ...], missing: str
) -> None:
    line = log_line([U], "first", PROMPT, [20, STOP])
    line["response"]["id"] = "c"
    poor = json.loads(json.dumps(line))
    del poor["response"]["choices"][0][missing]
    for log in permutations([line, poor, line]):
        report, (sample,) = merge(log, *options)
        assert sample.response_logprobs.tolist() == [-0.5, -0.5]
        assert report["sampled_tokens"] == report["delivered_tokens"] == 2
        assert len(report["logged_twice"]) == 2


def test_a_model_that_is_not_trained_is_shown_so_if_its_lines_were_logged_twice(merge: Merge) -> None:
    other = named(log_line([W], "other", PROMPT, [22, STOP]), "critic")
    other["response"]["id"] = "c"
    report, _ = merge([named(JOINED[0], "policy"), other, other], "--train-model", "policy")
    assert report["models"] == [
        {"model": "critic", "calls": 2, "trained_calls": 0},
        {"model": "policy", "calls": 1, "trained_calls": 1},
    ]


def test_answers_that_contradict_each_other_are_named_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "calls.jsonl"
    lines = [log_line([U], text, PROMPT, [20, STOP]) for text in ("first", "second")]
    for line in lines:
        line["response"]["id"] = "c"
        del line["response"]["choices"][0]["finish_reason"]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["merge", str(log)]) == 0
    out = capsys.readouterr().out
    assert "other answers or requests under one response id and index: 1 line" in out
    assert "each counted (first: line 2)" in out
    assert "cut off, or logged without finish_reason; if the logger left it out, add it" in out


@pytest.mark.parametrize("options", [["--stop-id", STOP], ["--stop-id", STOP, "--ignore-tools"]])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_repaired_call_continues_no_answer_with_other_spaces_beside_one_that_is_verbatim(
    merge: Merge, options: list[object], is_first: bool
) -> None:
    # The verbatim answer was ended by a stop string, so nothing tells where it ends in the next prompt.
    verbatim = log_line([U], "first\n", PROMPT, [20, OBSERVATION])
    trimmed = log_line([U], "first", PROMPT, [21, STOP])
    messages = [U, raw_message("assistant", "first\n"), V]
    later = log_line(messages, "done", [*PROMPT, 22, STOP, 60, STOP], [30, STOP])
    answers = [trimmed, verbatim] if is_first else [verbatim, trimmed]
    report, samples = merge([*answers, later], "--repair", *options)
    assert report["repairs"] == []
    assert report["kept_apart"] == [{"line": 3, "options": ["--inexact"]}]
    assert contexts(samples) == logged([*answers, later])
    # Without it, the white space may have been trimmed by the client.
    report, _ = merge([trimmed, later], "--repair", *options)
    assert [repair["method"] for repair in report["repairs"]] == ["stop_token"]


@pytest.mark.parametrize("reason", [None, "", ...])
def test_an_answer_without_a_finish_reason_is_counted_and_not_trained(merge: Merge, reason: object) -> None:
    line = log_line([U], "first", PROMPT, [20, STOP])
    (choice,) = line["response"]["choices"]
    del choice["finish_reason"]
    if reason is not ...:
        choice["finish_reason"] = reason
    report, samples = merge([line])
    assert samples == []
    assert [(entry["reason"], entry["tokens"]) for entry in report["dropped"]] == [("cancelled", 2)]


def test_fewer_ids_than_the_server_counted_are_refused(merge: Merge) -> None:
    line = log_line([U], "first", PROMPT, [20, STOP])
    line["response"]["usage"] = {"completion_tokens": 9}
    choice = line["response"]["choices"][0]
    problem = "response.usage.completion_tokens: got 9, expected 2, the number of token_ids"
    assert problem in merge([line], code=2)
    both = {**line, "response": {**line["response"], "choices": [choice, choice]}}
    assert problem.replace("expected 2", "expected 4") in merge([both], code=2)
    # The other choices, which are counted too, stand in other lines.
    for part in (
        {**line, "request": {**line["request"], "n": 2}},
        {**line, "response": {**line["response"], "choices": [{**choice, "index": 1}]}},
    ):
        assert len(merge([part])[1]) == 1


def test_a_call_that_was_logged_twice_is_trained_once_and_counted(merge: Merge) -> None:
    call = {**JOINED[0], "response": {**JOINED[0]["response"], "id": "chatcmpl-1"}}
    report, samples = merge([call, call, JOINED[1]])
    assert sum(sample.trained_tokens for sample in samples) == 5
    assert report["logged_twice"] == [{"line": 2, "tokens": 2}]
    assert report["sampled_tokens"] == report["delivered_tokens"] == 5


# -- texts and files


def test_keys_of_a_line_that_nothing_reads_are_named(
    merge: Merge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{**line, "sesion": "a", "reward": 1.0} for line in JOINED]
    lines[1]["met\nadata"] = {}
    report, _ = merge(lines)
    assert report["ignored_keys"] == {"met\nadata": 1, "reward": 2, "sesion": 2}
    assert main(["merge", str(tmp_path / "calls.jsonl")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "reward, sesion (session, agent, request and response are read)" in out
    assert merge(JOINED)[0]["ignored_keys"] == {}


def test_half_a_character_loses_no_line(merge: Merge) -> None:
    cut = json.dumps(log_line([raw_message("user", "\ud83d")], "\ude00", PROMPT, [20]))
    invalid = (
        json.dumps(log_line([raw_message("user", "#")], "b", PROMPT, [21]))
        .encode()
        .replace(b"#", b"\xf0\x9f")
    )
    encoded = (
        json.dumps(log_line([raw_message("user", "#")], "c", PROMPT, [22]))
        .encode()
        .replace(b"#", b"\xed\xa0\xbd")
    )
    report, samples = merge([cut, invalid, encoded])
    assert sorted(sample.response_ids.tolist() for sample in samples) == [[20], [21], [22]]
    assert report["skipped"] == []
    assert report["replaced_text"] == [2, 3]


def test_a_byte_order_mark_and_gzip_are_read(
    merge: Merge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(merge([b"\xef\xbb\xbf" + json.dumps(JOINED[0]).encode(), JOINED[1]])[1]) == 1
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress((tmp_path / "calls.jsonl").read_bytes()))
    assert main(["merge", str(packed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 2
    packed.write_bytes(packed.read_bytes()[:-20])
    assert main(["merge", str(packed)]) == 2
    assert "cannot be read: Compressed file ended" in capsys.readouterr().err


def test_all_bad_lines_are_counted_and_the_way_to_read_the_others_is_named(merge: Merge) -> None:
    error = merge(["{", JOINED[0], "[]", "{}"], code=2)
    assert "calls.jsonl:1: expected one JSON object a line" in error
    assert "(and 2 other bad lines); --skip-bad reads the other lines" in error


# -- streams


def streamed(line: LogLine, finish: str | None = "stop") -> LogLine:
    response = line["response"]
    (choice,) = response["choices"]
    entries, index = choice["logprobs"]["content"], choice.get("index", 0)
    chunks: list[dict[str, Any]] = [
        {
            "choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}],
            "id": response.get("id", "c"),
        }
    ]
    chunks[0]["prompt_token_ids"] = response["prompt_token_ids"]
    text = choice["message"]["content"]
    for position, token in enumerate(choice["token_ids"]):
        part = text if position == 0 else ""
        logprobs = {"content": [entries[position]]}
        chunks.append(
            {
                "choices": [
                    {"index": index, "delta": {"content": part}, "token_ids": [token], "logprobs": logprobs}
                ]
            }
        )
    chunks.append({"choices": [{"index": index, "delta": {}, "finish_reason": finish}]})
    return {**line, "response": chunks}


@pytest.mark.parametrize("as_text", [False, True])
def test_a_streamed_log_gives_the_rows_of_a_plain_one(merge: Merge, as_text: bool) -> None:
    lines = [streamed(line) for line in JOINED]
    if as_text:
        for line in lines:
            line["response"] = (
                "".join(f"data: {json.dumps(one)}\n\n" for one in line["response"]) + "data: [DONE]\n\n"
            )
    _, (plain,) = merge(JOINED)
    _, (sample,) = merge(lines)
    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
        assert getattr(sample, name).tolist() == getattr(plain, name).tolist()


def test_a_stream_that_was_cut_off_is_counted_and_not_trained(merge: Merge) -> None:
    report, (sample,) = merge([JOINED[0], streamed(JOINED[1], None)])
    assert sample.trained_tokens == 2
    assert [(entry["reason"], entry["tokens"]) for entry in report["dropped"]] == [("cancelled", 3)]
