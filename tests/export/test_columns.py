"""Files of samples: what was written is read back equal, bit for bit, with the task that it is from; files of
one version have one schema; what a file cannot hold is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.core.sample import RewardSpan, Sample
from branchline.export.columns import (
    FILE_COLUMNS,
    ORIGIN_COLUMNS,
    SampleOrigin,
    SampleRow,
)
from branchline.export.jsonl import read_jsonl_rows, write_jsonl
from branchline.export.parquet import PARQUET_SCHEMA, read_parquet_rows, write_parquet
from tests.export.test_parquet import random_sample

Write = Callable[[Iterable[Sample | SampleRow], Path], int]
Read = Callable[[Path], Iterator[SampleRow]]
FORMATS: dict[str, tuple[Write, Read]] = {
    "jsonl": (write_jsonl, read_jsonl_rows),
    "parquet": (write_parquet, read_parquet_rows),
}
texts = st.text(st.characters(codec="utf-8"), max_size=6)
names = st.none() | texts
counts = st.none() | st.integers(0, 2**40)
logprobs = st.floats(max_value=0.0, allow_infinity=False, width=32) | st.sampled_from(
    [math.nan, -math.inf, -0.0, -1.401298464324817e-45, -1.1754943508222875e-38]
)


@st.composite
def rows(draw: st.DrawFn) -> SampleRow:
    sample = random_sample(Random(draw(st.integers(0, 2**32))))
    count = len(sample.response_ids)
    # The lowest float32 stands for minus infinity in JSON.
    values = draw(arrays.arrays(np.float32, count, elements=logprobs))
    values[values == np.finfo(np.float32).min] = -np.inf
    shares = draw(arrays.arrays(np.float32, count, elements=st.floats(0, 1, width=32)))
    values[sample.response_mask == 0] = shares[sample.response_mask == 0] = 0
    sample = replace(
        sample,
        response_logprobs=values,
        shares=shares,
        missing_logprobs=int(np.isnan(values).sum()),
        agent=draw(texts),
        session=draw(texts),
        calls=tuple(draw(st.lists(texts, max_size=2))),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        reward_extras=draw(st.sampled_from(["", "{}", '{"é😀":[null,1.5]}'])),
    )
    origin = SampleOrigin(draw(names), draw(names), draw(names), draw(names), draw(counts), draw(counts))
    return SampleRow(sample, origin)


def assert_same_bits(one: SampleRow, other: SampleRow) -> None:
    assert other.origin == one.origin
    for field in fields(Sample):
        left: Any = getattr(one.sample, field.name)
        right: Any = getattr(other.sample, field.name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, len(left)) == (right.dtype, len(right)), field.name
            if left.dtype == np.float32:
                missing = np.isnan(left)
                assert (missing == np.isnan(right)).all(), field.name
                left, right = left[~missing], right[~missing]
            assert left.tobytes() == right.tobytes(), field.name
        else:
            assert left == right, field.name
            assert type(left) is type(right), field.name


@settings(max_examples=60)
@given(st.lists(rows(), max_size=4))
@pytest.mark.parametrize("format", FORMATS)
def test_rows_read_back_equal_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, format: str, written: list[SampleRow]
) -> None:
    write, read = FORMATS[format]
    file = tmp_path_factory.mktemp("rows") / "file"
    assert write(written, file) == len(written)
    again = list(read(file))
    assert len(again) == len(written)
    for one, other in zip(written, again, strict=True):
        assert_same_bits(one, other)


def plain(**changes: Any) -> Sample:
    return replace(random_sample(Random(3)), **{"media": (), **changes})


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (plain(agent="\ud83d"), r"agent: got '\ud83d', expected Unicode without lone surrogates"),
        (plain(calls=("a", "\ude00")), r"calls: got '\ude00', expected Unicode"),
        (plain(reward_extras='{"a":"\ud83d"}'), "reward_extras: got"),
        (plain(media=(Media("image", "d", url="\udcff"),)), "media[0].url: got"),
        (plain(reward=math.nan), "reward: got nan, expected a finite number"),
        (plain(reward=math.inf), "reward: got inf, expected a finite number"),
        (plain(rewards=(RewardSpan(math.nan, 0, 1),)), "rewards[0].score: got nan, expected a finite number"),
        (plain(prompt_ids=np.array([2**40])), "prompt_ids: got an array of int64, expected one of int32"),
        (plain(shares=np.array([0.1])), "shares: got an array of float64, expected one of float32"),
        (
            plain(shares=np.zeros(9, np.float32)),
            f"shares: got 9 values, expected {len(plain().response_ids)}, as many as response_ids",
        ),
        (plain(response_mask=np.array([True])), "response_mask: got an array of bool, expected one of int8"),
    ],
)
def test_what_would_not_be_read_back_equal_is_refused_by_sample_and_column(
    tmp_path: Path, format: str, sample: Sample, problem: str
) -> None:
    write, _ = FORMATS[format]
    file = tmp_path / "file"
    file.write_text("before")
    row = SampleRow(sample, SampleOrigin(key="a_0_0"))
    with pytest.raises(InputError, match=re.escape(f"sample a_0_0: {problem}"[:200])):
        write([plain(), row], file)
    assert file.read_text() == "before"
    with pytest.raises(InputError, match="sample of session"):
        write([replace(sample, session="s")], file)


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"3", b"{", b'{"report": {}}', b"\xef\xbb\xbf{}", b'{"media": 3}']
)
def test_a_line_that_is_no_sample_is_refused_by_its_number(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "s.jsonl"
    write_jsonl([plain()], file)
    file.write_bytes(file.read_bytes() + line + b"\n")
    read = read_jsonl_rows(file)
    next(read)
    with pytest.raises(InputError, match=r"s.jsonl:2: got .*, expected a sample"):
        next(read)


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("response_ids", ["1"], r"response_ids: got string, expected list<item: int32>"),
        ("response_ids", [[1.0]], r"response_ids: got list<element: double>, expected list<item: int32>"),
        ("response_ids", [None], r"row 1: response_ids: got None, expected a list of int32"),
        ("response_ids", [[None]], r"row 1: response_ids\[0\]: got None, expected a list of int32"),
        ("response_ids", [[2**40]], rf"row 1: response_ids\[0\]: got {2**40}, expected a list of int32"),
        ("response_mask", [[1, 300]], r"row 1: response_mask\[1\]: got 300, expected a list of int8"),
        ("shares", [None], r"row 1: shares: got None, expected a list of numbers or null"),
        ("shares", [[1e300]], r"row 1: shares\[0\]: got 1e\+300, expected a list of numbers or null"),
        ("reward", [[1.0]], r"row 1: reward: got \[1.0\], expected a finite number or null"),
        ("reward", ["1"], r"row 1: reward: got '1', expected a finite number or null"),
        ("reward", [True], r"row 1: reward: got True, expected a finite number or null"),
        ("exact", [1], r"row 1: exact: got 1, expected true or false"),
        ("missing_logprobs", [0.0], r"row 1: missing_logprobs: got 0.0, expected an integer"),
        ("slot", ["1"], r"row 1: slot: got '1', expected an integer or null"),
        ("session", [b"s"], r"row 1: session: got b's', expected a text"),
        ("rewards", [[{"score": 1.0, "start": 0}]], r"row 1: rewards\[0\]: got no end, expected the fields"),
        ("answers", ["[]"], r"row 1: answers: got '\[\]', expected a list of objects"),
    ],
)
def test_a_column_of_another_type_is_refused_by_its_name(
    tmp_path: Path, column: str, values: list[Any], problem: str
) -> None:
    file = tmp_path / "s.parquet"
    write_parquet([plain()], file)
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, pa.array(values)), file)
    with pytest.raises(InputError, match=f"s.parquet: {problem}"):
        list(read_parquet_rows(file))


def test_a_column_with_wider_numbers_is_read(tmp_path: Path) -> None:
    """As a program writes it that has no smaller ones."""
    file, sample = tmp_path / "s.parquet", plain()
    write_parquet([sample], file)
    table = pq.read_table(file)
    for name, kind in (("response_ids", pa.int64()), ("response_logprobs", pa.float64())):
        wide = table[name].cast(pa.list_(kind))
        table = table.set_column(table.schema.get_field_index(name), name, wide)
    pq.write_table(table, file)
    (row,) = read_parquet_rows(file)
    assert_same_bits(row, SampleRow(sample))


def test_files_have_all_columns_whatever_the_samples(tmp_path: Path) -> None:
    named = SampleRow(plain(), SampleOrigin("a_0_0", "a", "a", "coder", 0, 1))
    files: list[list[Sample | SampleRow]] = [
        [],
        [plain()],
        [named],
        [plain(calls=(), answers=(), rewards=())],
    ]
    for index, written in enumerate(files):
        file = tmp_path / f"{index}.parquet"
        write_parquet(written, file)
        assert pq.read_schema(file) == PARQUET_SCHEMA, index
        write_jsonl(written, tmp_path / "file.jsonl")
        for line in (tmp_path / "file.jsonl").read_bytes().splitlines():
            assert list(msgspec.json.decode(line)) == [column.name for column in FILE_COLUMNS]
    table = pq.read_table([tmp_path / f"{index}.parquet" for index in range(4)])
    assert table["key"].to_pylist() == [None, "a_0_0", None]
    assert table["attempt"].to_pylist() == [None, 1, None]


def test_older_files_are_read_without_the_task(tmp_path: Path) -> None:
    sample = plain()
    write_parquet([sample], tmp_path / "new.parquet")
    table = pq.read_table(tmp_path / "new.parquet")
    pq.write_table(table.drop_columns([one.name for one in ORIGIN_COLUMNS]), tmp_path / "old.parquet")
    (row,) = read_parquet_rows(tmp_path / "old.parquet")
    assert_same_bits(row, SampleRow(sample))
    write_jsonl([sample], tmp_path / "new.jsonl")
    line = msgspec.json.decode((tmp_path / "new.jsonl").read_bytes())
    for column in ORIGIN_COLUMNS:
        del line[column.name]
    (tmp_path / "old.jsonl").write_bytes(msgspec.json.encode(line))
    (row,) = read_jsonl_rows(tmp_path / "old.jsonl")
    assert_same_bits(row, SampleRow(sample))


def test_the_page_states_every_column_and_its_type() -> None:
    page = Path("docs/guides/trajectories.md").read_text()
    stated = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE)
    types = [re.sub(r"item: |(?<=struct)<.*>(?=>)", "", str(field.type)) for field in PARQUET_SCHEMA]
    assert stated == list(zip(PARQUET_SCHEMA.names, types, strict=True))
