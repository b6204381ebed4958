"""Reading call logs: optional fields may be missing, invalid lines are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchline import read_log
from branchline.core.errors import InputError, LogError, MessageError
from branchline.timelines.log import LogReader, read_choice


def log_line(**changes: Any) -> dict[str, Any]:
    choice = {
        "message": {"role": "assistant", "content": "b"},
        "finish_reason": "stop",
        "token_ids": [3, 4],
        "logprobs": {"content": [{"token": "b", "logprob": -0.5}, {"token": "<end>", "logprob": None}]},
    }
    raw: dict[str, Any] = {
        "session": "s",
        "agent": "main",
        "request": {"messages": [{"role": "user", "content": "a"}]},
        "response": {"id": "resp", "prompt_token_ids": [1, 2], "choices": [choice]},
    }
    for path, value in changes.items():
        *keys, last = path.split("__")
        target: Any = raw
        for key in keys:
            target = target[int(key) if key.isdigit() else key]
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return raw


def write_log(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "calls.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_all_fields_of_a_line_are_read(tmp_path: Path) -> None:
    (call,) = read_log(write_log(tmp_path, log_line()))
    assert (call.session, call.agent, call.line, call.id) == ("s", "main", 1, "resp")
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [1, 2]
    (output,) = call.outputs
    assert output.ids is not None
    assert output.ids.tolist() == [3, 4]
    assert output.logprobs is not None
    np.testing.assert_array_equal(output.logprobs, np.array([-0.5, np.nan], np.float32))
    assert output.message.id == "resp"


def test_ids_and_logprobs_may_be_missing(tmp_path: Path) -> None:
    raw = log_line(
        response__prompt_token_ids=...,
        response__choices__0__token_ids=...,
        response__choices__0__logprobs=None,
    )
    (call,) = read_log(write_log(tmp_path, raw, ""))
    assert call.prompt_ids is None
    assert call.outputs[0].ids is None
    assert call.outputs[0].logprobs is None


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("{broken", "expected one JSON object a line"),
        ("[1]", "line: got [1], expected an object with request and response"),
        (log_line(request=...), "request: got None, expected an object"),
        (log_line(response=3), "response: got 3, expected an object"),
        (log_line(request__messages=...), "messages: got None, expected a non-empty list of messages"),
        (log_line(request__messages=[{"role": "wizard"}]), "messages[0].role: got 'wizard'"),
        (log_line(response__choices=[]), "response.choices: got [], expected a non-empty list"),
        (log_line(response__choices__0__message=None), "response.choices[0].message: got None"),
        (log_line(response__choices__0__message={"role": "user"}), "expected assistant"),
        (log_line(response__choices__0__token_ids=["x"]), "expected a list of token ids (integers)"),
        (log_line(response__choices__0__token_ids=[1.5, 2.5]), "expected a list of token ids (integers)"),
        (
            log_line(response__choices__0__token_ids=[1, -2]),
            "token_ids[1]: got -2, expected a token id from 0",
        ),
        (log_line(response__prompt_token_ids=[2**31]), "prompt_token_ids[0]: got 2147483648"),
        (
            log_line(response__choices__0__token_ids=[1]),
            "got '2 entries', expected one for each of 1 token_ids",
        ),
        (log_line(response__choices__0__logprobs={"content": [{}]}), "expected entries with a logprob"),
        (log_line(agent=7), "agent: got 7, expected a string"),
        (log_line(response__id=[1]), "response.id: got [1], expected a string"),
        (log_line(response__model=True), "response.model: got True, expected a string"),
        (log_line(request__model=3), "request.model: got 3, expected a string"),
        (log_line(response__choices__0__token_ids=[True, 4]), "got [True, 4], expected a list of token ids"),
        (log_line(response__choices__0__token_ids=[3.0, 4.0]), "expected a list of token ids (integers)"),
        (log_line(response__choices__0__token_ids="3 4"), "got '3 4', expected a list of token ids"),
        (
            log_line(response__prompt_token_ids=[]),
            "prompt_token_ids: got [], expected the ids of the messages",
        ),
        (
            log_line(response__choices__0__token_ids=[], response__choices__0__logprobs=None),
            "response.choices[0].token_ids: got [], expected the ids of its text, or null",
        ),
        (log_line(response__choices__0__finish_reason=3), "finish_reason: got 3, expected a string or null"),
        (log_line(response__choices__0__prompt_token_ids=[7]), "got [7], expected those of response"),
        *(
            (
                log_line(response__choices__0__logprobs={"content": [{"logprob": value}, {"logprob": -1}]}),
                f"content[0].logprob: got {value!r}, expected a finite number up to 0, or null",
            )
            for value in ("-1.0", True, 0.9, -1e39, [-1])
        ),
        (
            json.dumps(log_line(response__choices__0__logprobs={"content": [{"logprob": float("nan")}]})),
            "expected one JSON object a line",
        ),
        (log_line(response__usage="x"), "response.usage: got 'x', expected an object or null"),
        *(
            (
                log_line(response__usage={name: value}),
                f"response.usage.{name}: got {value!r}, expected an integer from 0 on, or null",
            )
            for name in ("completion_tokens", "prompt_tokens")
            for value in ("2", 2.0, True, -1, [2])
        ),
        *(
            (
                log_line(response__usage={"prompt_tokens": count}),
                f"response.usage.prompt_tokens: got {count}, expected 2, the number of prompt_token_ids",
            )
            for count in (0, 1, 77)
        ),
        *(
            (
                log_line(response__usage={"completion_tokens": count}, response__id="other"),
                f"response.usage.completion_tokens: got {count}, expected 2, the number of token_ids",
            )
            for count in (0, 1, 3, 9)
        ),
        ("[" * 16_000, "expected one JSON object a line"),
        (json.dumps(log_line()) * 2, "expected one JSON object a line"),
        (json.dumps(log_line())[:50], "expected one JSON object a line"),
    ],
)
def test_an_invalid_line_is_reported_with_file_line_and_expectation(
    tmp_path: Path, raw: object, problem: str
) -> None:
    path = write_log(tmp_path, log_line(), raw)
    with pytest.raises(LogError) as error:
        read_log(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert problem in str(error.value)
    reader = LogReader(path, skip_bad=True)
    assert len(reader.check_counts(reader)) == 1
    assert [bad.line for bad in reader.errors] == [2]


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}, {"completion_tokens": 2}])
def test_usage_is_optional(tmp_path: Path, usage: object) -> None:
    assert len(read_log(write_log(tmp_path, log_line(response__usage=usage)))) == 1


def choice_line(index: int, counted: int, ids: int = 2, **changes: object) -> Any:
    """A line with one choice of a response of several."""
    choice = {"index": index, "message": {"content": "x"}, "finish_reason": "stop", "token_ids": [3] * ids}
    return log_line(response__choices=[choice], response__usage={"completion_tokens": counted}, **changes)


@pytest.mark.parametrize("indices", [(0, 1), (1, 0), (0, 1, 0), (2, 0, 1)])
def test_the_usage_of_a_line_may_be_that_of_its_response(tmp_path: Path, indices: tuple[int, ...]) -> None:
    for counted in (2, 2 * len(set(indices))):
        lines = [choice_line(index, counted) for index in indices]
        assert len(read_log(write_log(tmp_path, *lines))) == len(indices)


def without_ids(line: Any) -> Any:
    line["response"]["choices"][0]["token_ids"] = None
    return line


@pytest.mark.parametrize(
    ("lines", "bad"),
    [
        # A line without ids has the count of its choice, whose ids another line has, or of the response.
        ([without_ids(choice_line(0, 2)), choice_line(0, 5), choice_line(1, 5, ids=3)], []),
        ([without_ids(choice_line(0, 5)), choice_line(0, 5), choice_line(1, 5, ids=3)], []),
        ([without_ids(choice_line(0, 3)), choice_line(0, 5), choice_line(1, 5, ids=3)], [1]),
        # An id of the second choice is missing; which choice it is, nothing tells.
        ([choice_line(0, 4), choice_line(1, 4, ids=1)], [1, 2]),
        ([choice_line(0, 2), choice_line(1, 2, ids=1)], [2]),
        ([choice_line(0, 4), choice_line(1, 4, response__id="other")], [1]),
        ([choice_line(0, 4), choice_line(1, 4, session="other")], [1]),
        ([choice_line(1, 1)], [1]),
        # More choices were asked for than are logged, or an index says so.
        ([choice_line(0, 4, request__n=2)], []),
        ([choice_line(0, 4, request__n=2), choice_line(1, 4, request__n=2)], []),
        ([choice_line(0, 9, request__n=2), choice_line(1, 9, request__n=2)], [1, 2]),
        ([choice_line(1, 4)], []),
        # A stream that was cut off may end with an early count.
        ([log_line(response__usage={"completion_tokens": 1}, response__choices__0__finish_reason=None)], []),
    ],
)
def test_ids_are_counted_in_all_lines_of_a_response(tmp_path: Path, lines: list[Any], bad: list[int]) -> None:
    path = write_log(tmp_path, *lines)
    reader = LogReader(path, skip_bad=True)
    assert len(reader.check_counts(reader)) == len(lines) - len(bad)
    assert [error.line for error in reader.errors] == bad
    if bad:
        with pytest.raises(LogError, match="completion_tokens: got"):
            read_log(path)


def test_images_may_count_as_more_tokens_than_ids(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    raw = log_line(
        request__messages=[{"role": "user", "content": [image]}], response__usage={"prompt_tokens": 99}
    )
    assert len(read_log(write_log(tmp_path, raw))) == 1


def test_ids_that_fail_the_check_make_a_line_invalid(tmp_path: Path) -> None:
    path = write_log(tmp_path, log_line())
    reader = LogReader(path, check_ids=lambda ids: f"id {ids.max()} is beyond 2" if ids.max() > 2 else None)
    with pytest.raises(LogError, match=r"choices\[0\].token_ids: id 4 is beyond 2"):
        list(reader)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path / "nothing.jsonl")


def choice_with_tokens(content: object) -> dict[str, object]:
    return {"message": {"content": "x"}, "logprobs": {"content": content}}


def test_ids_written_as_tokens_of_logprobs_are_read() -> None:
    entries = [{"token": f"token_id:{token}", "logprob": -1.0} for token in (7, 0, 2**31 - 1)]
    ids = read_choice(choice_with_tokens(entries), "choice").ids
    assert ids is not None
    assert ids.tolist() == [7, 0, 2**31 - 1]
    entries[1]["token"] = "x"
    assert read_choice(choice_with_tokens(entries), "choice").ids is None


@pytest.mark.parametrize("content", [5, "abc", [1], [{"token": "token_id:9999999999", "logprob": -1}]])
def test_tokens_of_logprobs_that_cannot_be_read_are_refused(content: object) -> None:
    with pytest.raises(MessageError, match=r"choice.logprobs.content"):
        read_choice(choice_with_tokens(content), "choice")


def test_a_missing_number_that_is_not_json_is_named(tmp_path: Path) -> None:
    raw = log_line(response__choices__0__logprobs={"content": [{"logprob": float("nan")}, {"logprob": -1}]})
    with pytest.raises(LogError, match="got NaN, expected a number or null"):
        read_log(write_log(tmp_path, json.dumps(raw)))


def test_the_model_is_the_one_that_answered_else_the_one_that_was_asked(tmp_path: Path) -> None:
    lines = [
        log_line(request__model="asked", response__model="served"),
        log_line(request__model="asked"),
        log_line(),
    ]
    assert [call.model for call in read_log(write_log(tmp_path, *lines))] == ["served", "asked", ""]


def test_prompt_ids_may_be_on_the_choices(tmp_path: Path) -> None:
    line = log_line(response__prompt_token_ids=None, response__choices__0__prompt_token_ids=[7, 8])
    (call,) = read_log(write_log(tmp_path, line))
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == [7, 8]


def test_half_a_character_is_replaced_wherever_it_is(tmp_path: Path) -> None:
    half = "\ud83d"
    line = log_line(
        session=half, agent=half, response__id=half, response__model=half, request__messages__0__content=half
    )
    reader = LogReader(write_log(tmp_path, line))
    (call,) = reader
    assert {call.session, call.agent, call.id, call.model, call.request.messages[0].content} == {"\ufffd"}
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(json.dumps(log_line(session="#")).encode().replace(b"#", b"\xf0\x9f\x98") + b"\n")
    reader = LogReader(path)
    (call,) = reader
    assert (call.session, reader.replaced_text) == ("\ufffd", [1])


def test_ids_that_the_logprobs_name_otherwise_are_refused(tmp_path: Path) -> None:
    entries = [{"token": f"token_id:{token}", "logprob": -0.5} for token in (3, 7)]
    path = write_log(tmp_path, log_line(response__choices__0__logprobs__content=entries))
    with pytest.raises(LogError, match=r"content\[1\].token: got 'token_id:7', expected token_id:4"):
        read_log(path)
