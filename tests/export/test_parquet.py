"""Parquet: samples read back equal, in the columns that JSON lines have, and no file is written partially."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import Sample, read_jsonl, read_parquet, write_jsonl, write_parquet
from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.core.sample import AnswerSpan, LogprobMeasurement, RewardSpan
from branchline.core.token_arrays import as_ids
from branchline.export import parquet
from tests.export.compare import assert_equal_samples

DATASETS_PYTHON = Path(".cache/datasets/bin/python")
CAT = Media("image", "cat", b"\x89PNG\x00" * 50, mime="image/png", detail="high")


def random_sample(rng: Random) -> Sample:
    """Returns a sample in which every field has a value of its own."""
    prompt, count = rng.randint(0, 4), rng.randint(0, 5)
    mask = [rng.randint(0, 1) for _ in range(count)]
    trained = sum(mask)
    logprobs = [rng.choice([np.nan, -0.1, -2.5]) if one else 0 for one in mask]
    inexact = rng.randint(0, trained)
    rewards = (
        RewardSpan(0.1, 0, count, "call-0", None, "search", extras='{"a":1}'),
        RewardSpan(1.0, 0, count),
    )
    return Sample(
        prompt_ids=as_ids([rng.randrange(2**31) for _ in range(prompt)]),
        response_ids=as_ids([rng.randrange(2**31) for _ in range(count)]),
        response_mask=np.array(mask, np.int8),
        response_logprobs=np.array(logprobs, np.float32),
        response_versions=np.array([rng.choice([0, 2**31 - 1]) if one else -1 for one in mask], np.int32),
        shares=np.array([one / 3 for one in mask], np.float32),
        agent=rng.choice(["", "räuber"]),
        session=rng.choice(["", "s"]),
        calls=tuple(f"call-{index}" for index in range(rng.randint(0, 2))),
        finish_reason=rng.choice(["stop", "length"]),
        exact=not inexact,
        inexact_tokens=inexact,
        missing_logprobs=rng.randint(int(np.isnan(logprobs).sum()), trained),
        truncated_tokens=rng.randint(0, 3),
        reward=rng.choice([None, 0.1, -1.0]),
        media=rng.choice([(), (CAT,), (CAT, Media("image", "url:http://h/p", url="http://h/p"))]),
        rewards=rng.choice([(), rewards]),
        answers=rng.choice([(), tuple(random_answers(rng, mask))]),
    )


def random_answers(rng: Random, mask: list[int]) -> Iterator[AnswerSpan]:
    """Yields answers of which each trained token is a part."""
    for index, one in enumerate(mask):
        if one:
            measurement = LogprobMeasurement(
                rng.choice(["raw", "processed", "unknown"]),
                rng.choice([None, 0.7]),
                rng.choice([None, True, False]),
                temperature=rng.choice([None, 0.1]),
                top_k=rng.choice([None, 0, 50]),
                constraints=rng.choice([(), ("logit_bias",)]),
            )
            yield AnswerSpan(index, index + 1, rng.choice(["", "call-0"]), rng.choice([-1, 7]), measurement)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 6), rows_per_group=st.integers(1, 3))
def test_samples_read_back_equal_from_parquet_and_from_json_lines(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, rows_per_group: int
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    samples = [random_sample(Random(seed + index)) for index in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_ROWS_PER_GROUP", rows_per_group)
        assert write_parquet(samples, folder / "s.parquet") == count
        from_parquet = list(read_parquet(folder / "s.parquet"))
    assert write_jsonl(samples, folder / "s.jsonl") == count
    for again in (from_parquet, list(read_jsonl(folder / "s.jsonl"))):
        assert len(again) == count
        for one, other in zip(samples, again, strict=True):
            assert_equal_samples(one, other)


def test_columns_have_small_types() -> None:
    types = {field.name: str(field.type) for field in parquet.PARQUET_SCHEMA}
    assert "int32" in types["response_ids"]
    assert "int8" in types["response_mask"]
    assert "float" in types["response_logprobs"]
    assert "measured_temperature: double" in types["answers"]


def test_the_data_of_an_image_is_written_once(tmp_path: Path) -> None:
    sample = replace(random_sample(Random(1)), media=(CAT,))
    write_parquet([sample, sample], tmp_path / "s.parquet")
    data = [row[0]["data"] for row in pq.read_table(tmp_path / "s.parquet")["media"].to_pylist()]
    assert data == [CAT.payload, None]
    assert [again.media for again in read_parquet(tmp_path / "s.parquet")] == [(CAT,), (CAT,)]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "s.parquet"
    target.write_text("before")

    def broken() -> Iterator[Sample]:
        yield random_sample(Random(1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_parquet(broken(), target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["s.parquet"]


def test_a_file_that_is_not_parquet_or_has_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(InputError, match="expected Parquet"):
        list(read_parquet(tmp_path / "text.parquet"))
    with pytest.raises(InputError, match="expected Parquet"):
        list(read_parquet(tmp_path / "absent.parquet"))
    pq.write_table(pa.table({"session": ["s"]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="no column agent, calls"):
        list(read_parquet(tmp_path / "other.parquet"))


@pytest.mark.slow
def test_datasets_loads_both_files(tmp_path: Path) -> None:
    samples = [random_sample(Random(seed)) for seed in range(20)]
    write_parquet(samples, tmp_path / "s.parquet")
    write_jsonl(samples, tmp_path / "s.jsonl")
    code = (
        "import sys, datasets\n"
        "for kind, path in (('parquet', sys.argv[1]), ('json', sys.argv[2])):\n"
        "    rows = datasets.load_dataset(kind, data_files=path, split='train', cache_dir=sys.argv[3])\n"
        "    print(len(rows), sum(map(sum, rows['response_ids'])), rows.features['response_ids'])\n"
    )
    done = subprocess.run(
        [DATASETS_PYTHON, "-c", code, tmp_path / "s.parquet", tmp_path / "s.jsonl", tmp_path / "cache"],
        capture_output=True,
        text=True,
        check=True,
    )
    total = sum(int(sample.response_ids.sum(dtype=np.int64)) for sample in samples)
    lines = done.stdout.splitlines()
    assert [line.startswith(f"20 {total} ") for line in lines] == [True, True]
    assert "int32" in lines[0]
