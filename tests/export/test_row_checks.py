"""One statement of what a sample is: a writer refuses what a reader would refuse, and everything that is
written is read back equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.core.sample import AnswerSpan, LogprobMeasurement, RewardSpan, Sample
from branchline.core.token_arrays import as_ids
from branchline.export import jsonl, parquet
from branchline.export.columns import SampleOrigin, SampleRow
from branchline.export.jsonl import read_jsonl, read_jsonl_rows, sample_from_json, sample_to_json, write_jsonl
from branchline.export.parquet import read_parquet_rows, write_parquet
from tests.export.compare import assert_equal_samples

Write = Callable[[Iterable[Sample | SampleRow], Path], int]
Read = Callable[[Path], Iterator[SampleRow]]
FORMATS: dict[str, tuple[Write, Read]] = {
    "jsonl": (write_jsonl, read_jsonl_rows),
    "parquet": (write_parquet, read_parquet_rows),
}


def floats(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


GOOD = Sample(
    prompt_ids=as_ids([1, 2]),
    response_ids=as_ids([3, 4, 5, 6]),
    response_mask=np.array([1, 0, 1, 1], np.int8),
    response_logprobs=floats(-0.5, 0, math.nan, -math.inf),
    response_versions=np.array([7, -1, 8, 8], np.int32),
    shares=floats(1, 0, 0.5, 0.5),
    session="s",
    calls=("a", "b"),
    exact=False,
    inexact_tokens=2,
    missing_logprobs=1,
    reward=0.5,
    answers=(AnswerSpan(0, 1, "a", 1), AnswerSpan(2, 4, "b", 3)),
    rewards=(RewardSpan(0.5, 0, 1, "a", 1), RewardSpan(1.0, 0, 4)),
)


def measured(**changes: Any) -> tuple[AnswerSpan, ...]:
    return (GOOD.answers[0], replace(GOOD.answers[1], logprobs=LogprobMeasurement(**changes)))


def rewarded(**changes: Any) -> tuple[RewardSpan, ...]:
    return (replace(GOOD.rewards[0], **changes),)


DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": as_ids([1, -2])}, "prompt_ids[1]: got -2, expected ids from 0 on"),
    ({"response_ids": as_ids([3, -4, 5, 6])}, "response_ids[1]: got -4, expected ids from 0 on"),
    ({"response_mask": np.array([2, 0, 1, 1], np.int8)}, "response_mask[0]: got 2, expected 0 and 1"),
    ({"response_mask": np.array([1, 0, -1, 1], np.int8)}, "response_mask[2]: got -1, expected 0 and 1"),
    ({"shares": floats(1, 0, -0.5, 0.5)}, "shares[2]: got -0.5, expected numbers from 0 to 1"),
    ({"shares": floats(2, 0, 0.5, 0.5)}, "shares[0]: got 2.0, expected numbers from 0 to 1"),
    ({"shares": floats(math.nan, 0, 0.5, 0.5)}, "shares[0]: got nan, expected numbers from 0 to 1"),
    ({"shares": floats(1, 0.5, 0.5, 0.5)}, "shares[1]: got 0.5, expected 0 where response_mask is 0"),
    (
        {"response_logprobs": floats(0.5, 0, math.nan, -1)},
        "response_logprobs[0]: got 0.5, expected numbers up to 0",
    ),
    (
        {"response_logprobs": floats(math.inf, 0, math.nan, -1)},
        "response_logprobs[0]: got inf, expected numbers up to 0",
    ),
    (
        {"response_logprobs": floats(-1, -1, math.nan, -1)},
        "response_logprobs[1]: got -1.0, expected 0 where response_mask is 0",
    ),
    (
        {"response_logprobs": floats(-1, math.nan, -1, -1)},
        "response_logprobs[1]: got nan, expected 0 where response_mask is 0",
    ),
    (
        {"response_versions": np.array([-2, -1, 8, 8], np.int32)},
        "response_versions[0]: got -2, expected versions from -1 on",
    ),
    (
        {"response_versions": np.array([7, 7, 8, 8], np.int32)},
        "response_versions[1]: got 7, expected -1 where response_mask is 0",
    ),
    ({"missing_logprobs": 0}, "missing_logprobs: got 0, expected a number from 1"),
    (
        {"missing_logprobs": 4},
        "missing_logprobs: got 4, expected a number from 1, the tokens without one, to 3",
    ),
    ({"inexact_tokens": 4}, "tokens_behind_other_ids: got 4, expected at most 3, the trained tokens"),
    ({"inexact_tokens": -1}, "tokens_behind_other_ids: got -1, expected an integer of 0 or more"),
    ({"exact": True}, "exact: got True, expected False, as tokens_behind_other_ids is 2"),
    ({"inexact_tokens": 0}, "exact: got False, expected True, as tokens_behind_other_ids is 0"),
    ({"truncated_tokens": -1}, "truncated_tokens: got -1, expected an integer of 0 or more"),
    (
        {"answers": (AnswerSpan(0, 1), AnswerSpan(2, 5))},
        "answers[1]: got (2, 5), expected a part of the row's 4",
    ),
    (
        {"answers": (AnswerSpan(0, 1), AnswerSpan(0, 1))},
        "answers[1]: got (0, 1), expected a part of the row's 4",
    ),
    ({"answers": (AnswerSpan(0, 0),)}, "answers[0]: got (0, 0), expected a part of the row's 4 response_ids"),
    ({"answers": (AnswerSpan(-1, 1),)}, "answers[0].start: got -1, expected an integer of 0 or more"),
    (
        {"answers": (AnswerSpan(0, 1),)},
        "response_mask[2]: got 1, expected 1 in the answers of the row, and 0",
    ),
    (
        {"answers": (AnswerSpan(0, 4),)},
        "response_mask[1]: got 0, expected 1 in the answers of the row, and 0",
    ),
    ({"answers": (AnswerSpan(0, 1, "a", -2),)}, "answers[0].node: got -2, expected an integer of -1 or more"),
    ({"answers": measured(kind="cooked")}, "answers[1].logprobs.kind: got 'cooked', expected one of raw,"),
    ({"answers": measured(top_k=-5)}, "answers[1].logprobs.top_k: got -5, expected an integer of -1 or more"),
    ({"rewards": rewarded(end=5)}, "rewards[0]: got (0, 5), expected a part of the row's 4 response_ids"),
    ({"rewards": rewarded(start=2)}, "rewards[0]: got (2, 1), expected a part of the row's 4 response_ids"),
    ({"rewards": rewarded(turn=0)}, "rewards[0].turn: got 0, expected an integer of 1 or more"),
    ({"rewards": rewarded(extras="{")}, "rewards[0].extras: got '{', expected the text of a JSON object"),
    ({"reward_extras": "[1]"}, "reward_extras: got '[1]', expected the text of a JSON object"),
    ({"reward_extras": "[" * 9000}, "reward_extras: got '[[[["),
    ({"media": (Media("smell", "d", b"x"),)}, "media[0].kind: got 'smell', expected one of image"),  # type: ignore[arg-type]
    ({"origin": SampleOrigin(slot=-1)}, "slot: got -1, expected an integer of 0 or more"),
]
"""Changes of a good sample that both formats can hold, and what is said of them."""
TYPES: list[tuple[dict[str, Any], str]] = [
    (
        {"answers": measured(temperature=math.inf)},
        "answers[1].logprobs.temperature: got inf, expected a finite",
    ),
    ({"agent": None}, "agent: got None, expected a text"),
    ({"session": 3}, "session: got 3, expected a text"),
    ({"calls": ["a"]}, "calls: got ['a'], expected a tuple of texts"),
    ({"calls": ("a", None)}, "calls[1]: got None, expected a text"),
    ({"exact": 0}, "exact: got 0, expected true or false"),
    ({"inexact_tokens": 2.0}, "tokens_behind_other_ids: got 2.0, expected an integer"),
    ({"inexact_tokens": np.int64(2)}, "tokens_behind_other_ids: got np.int64(2), expected an integer"),
    ({"missing_logprobs": True}, "missing_logprobs: got True, expected an integer"),
    ({"reward": "1"}, "reward: got '1', expected a finite number or null"),
    ({"reward": True}, "reward: got True, expected a finite number or null"),
    ({"reward": 2**70}, f"reward: got {2**70}, expected a finite number"),
    ({"reward": np.float64(0.5)}, "reward: got np.float64(0.5), expected a finite number"),
    ({"response_ids": [3, 4, 5, 6]}, "response_ids: got [3, 4, 5, 6], expected an array of int32"),
    ({"prompt_ids": as_ids([1, 2]).reshape(1, 2)}, "prompt_ids: got 2 axes, expected one"),
    ({"prompt_ids": np.array([])}, "prompt_ids: got an array of float64, expected one of int32"),
    ({"answers": (3,)}, "answers[0]: got 3, expected AnswerSpan"),
    ({"answers": measured(top_k=1.5)}, "answers[1].logprobs.top_k: got 1.5, expected an integer or null"),
    (
        {"answers": measured(temperature="0.7")},
        "answers[1].logprobs.temperature: got '0.7', expected a finite",
    ),
    (
        {"answers": measured(is_truncated=1)},
        "answers[1].logprobs.is_truncated: got 1, expected true or false",
    ),
    ({"rewards": rewarded(score=True)}, "rewards[0].score: got True, expected a finite number"),
    ({"rewards": list(GOOD.rewards)}, "rewards: got [RewardSpan("),
    ({"media": (Media("image", "d", url=None),)}, "media[0].url: got None, expected a text"),  # type: ignore[arg-type]
    ({"origin": SampleOrigin(key=3)}, "key: got 3, expected a text or null"),  # type: ignore[arg-type]
]
"""Values of other types, of which a format may hold some."""


def damaged(changes: dict[str, Any]) -> SampleRow:
    fields = dict(changes)
    origin = fields.pop("origin", SampleOrigin())
    return SampleRow(replace(GOOD, **fields), origin)


def describe(case: object) -> str | None:
    return case.split(",")[0][:60] if isinstance(case, str) else None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("changes", "problem"), DAMAGES + TYPES, ids=describe)
def test_what_is_no_sample_is_not_written(
    tmp_path: Path, format: str, changes: dict[str, Any], problem: str
) -> None:
    write, _ = FORMATS[format]
    with pytest.raises(InputError) as caught:
        write([GOOD, damaged(changes)], tmp_path / "file")
    assert problem in str(caught.value)
    assert str(caught.value).startswith("sample ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("changes", "problem"), DAMAGES, ids=describe)
def test_what_is_no_sample_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, changes: dict[str, Any], problem: str
) -> None:
    write, read = FORMATS[format]
    for module in (jsonl, parquet):  # A program that writes without our checks.
        monkeypatch.setattr(
            module, "check_to_write", lambda one: one if isinstance(one, SampleRow) else SampleRow(one)
        )
    file = tmp_path / f"file.{format}"
    write([GOOD, damaged(changes)], file)
    rows = read(file)
    assert_equal_samples(next(rows).sample, GOOD)
    with pytest.raises(InputError) as caught:
        next(rows)
    place = f"{file}:2: " if format == "jsonl" else f"{file}: row 2: "
    # Plus infinity is null in JSON, as NaN is.
    is_null = format == "jsonl" and "got inf" in problem
    expected = "missing_logprobs: got 1, expected a number from 2" if is_null else problem
    assert str(caught.value).startswith(place + expected)


def test_numbers_are_read_as_numbers_in_both_formats(tmp_path: Path) -> None:
    sample = replace(GOOD, reward=1, answers=measured(temperature=1))
    for write, read in FORMATS.values():
        write([sample], tmp_path / "file")
        (row,) = read(tmp_path / "file")
        assert (row.sample.reward, type(row.sample.reward)) == (1.0, float)
        assert type(row.sample.answers[1].logprobs.temperature) is float


def test_a_sample_may_have_what_an_upstream_was_asked_for(tmp_path: Path) -> None:
    """All tokens are 0 or -1."""
    sample = replace(GOOD, answers=measured(top_k=-1, temperature=0))
    for write, read in FORMATS.values():
        write([sample], tmp_path / "file")
        assert [row.sample.answers for row in read(tmp_path / "file")] == [sample.answers]


def test_a_sample_of_a_response_is_checked_as_one_of_a_file() -> None:
    raw = sample_to_json(GOOD)
    assert_equal_samples(sample_from_json(raw), GOOD)
    with pytest.raises(InputError, match=r"^shares\[0\]: got 3, expected numbers|^shares\[0\]: got 3.0"):
        sample_from_json({**raw, "shares": [3, 0, 0.5, 0.5]})


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("calls", "ab", "calls: got 'ab', expected a list of texts"),
        ("calls", None, "calls: got None, expected a list of texts"),
        ("response_mask", [1, 0, 1, True], "response_mask[3]: got True, expected a list of int8"),
        ("response_ids", [3, 4, 5, 2**70], f"response_ids[3]: got {2**70}, expected a list of int32"),
        (
            "shares",
            [1e300, 0, 0.5, 0.5],
            "shares[0]: got 1e+300, expected a list of numbers or null, as float32",
        ),
        ("answers", [3], "answers[0]: got 3, expected an object"),
        ("answers", {"start": 0}, "answers: got {'start': 0}, expected a list of objects"),
        (
            "answers",
            [{"start": 0, "end": 1, "nod": 2}],
            "answers[0].nod: got 2, expected one of the fields start",
        ),
        (
            "answers",
            [{"end": 1}],
            "answers[0]: got no start, call, node, logprobs, expected the fields start, end",
        ),
        (
            "answers",
            [{"start": 0, "end": 1, "call": "c", "node": 1, "logprobs": 3}],
            "answers[0].logprobs: got 3, expected an object",
        ),
        (
            "media",
            [{"kind": "image", "digest": "d", "data": "%%"}],
            "media[0].data: got '%%', expected a text in",
        ),
        (
            "media",
            [{"kind": "image", "digest": "d", "data": 3}],
            "media[0].data: got 3, expected a text in base64",
        ),
        ("media", [{"kind": "image", "digest": 3}], "media[0].digest: got 3, expected a text"),
        ("media", [{"kind": "image", "digest": "d"}], "media[0].data: got None, expected the data of 'd'"),
        ("media", "image", "media: got 'image', expected a list of objects"),
    ],
)
def test_a_line_of_another_shape_is_refused_by_column_and_value(
    tmp_path: Path, column: str, value: object, problem: str
) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(msgspec.json.encode({**sample_to_json(GOOD), column: value}))
    with pytest.raises(InputError) as caught:
        list(read_jsonl(file))
    assert str(caught.value).startswith(f"{file}:1: {problem}")


@pytest.mark.parametrize("line", [b"[" * 100_000, b"\xff", b'{"session": "\xed\xa0\xbd"}'])
def test_a_line_that_cannot_be_decoded_is_refused_by_its_number(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(line + b"\n")
    with pytest.raises(InputError, match=r"s.jsonl:1: got .*, expected a sample"):
        list(read_jsonl(file))


def test_media_with_one_digest_and_other_data_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    write_jsonl([replace(GOOD, media=(Media("image", "d", b"one"),))], file)
    first = file.read_bytes()
    write_jsonl([replace(GOOD, media=(Media("image", "d", b"two"),))], file)
    file.write_bytes(first + file.read_bytes())
    with pytest.raises(
        InputError, match=r"s.jsonl:2: media\[0\].data: got b'two', expected the data that a row"
    ):
        list(read_jsonl(file))
    both = replace(GOOD, media=(Media("image", "d", b"one"), Media("image", "d", b"two")))
    for write, _ in FORMATS.values():
        with pytest.raises(InputError, match=r"media\[1\].data: got b'two', expected the data that 'd' has"):
            write([both], file)


def test_an_empty_image_is_read_back(tmp_path: Path) -> None:
    sample = replace(GOOD, media=(Media("image", "empty", b""), Media("image", "empty", b"")))
    for write, read in FORMATS.values():
        write([sample, sample], tmp_path / "file")
        assert [row.sample.media for row in read(tmp_path / "file")] == [sample.media] * 2
