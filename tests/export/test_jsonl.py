"""JSON lines: samples read back unchanged, and no file is written partially."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from branchline import ExportPolicy, Generation, Message, Request, Sample, Session, ToyCodec, export_samples
from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.core.token_arrays import as_ids
from branchline.export.jsonl import read_jsonl, sample_from_json, sample_to_json, write_jsonl


def samples() -> list[Sample]:
    codec = ToyCodec()
    session = Session("s", codec)
    turn = session.prepare(Request((Message("user", "u"),)))
    logprobs = np.array([-0.5, np.nan], np.float32)
    session.commit(turn, Generation(codec.encode_reply(Message("assistant", "A1")), logprobs, 7))
    return export_samples(
        session.tree, ExportPolicy(include_missing_logprobs=True), session="s", reward=1.0
    ).samples


def test_a_sample_reads_back_unchanged(tmp_path: Path) -> None:
    written = samples()
    assert write_jsonl(written, tmp_path / "out.jsonl") == 1
    (again,) = read_jsonl(tmp_path / "out.jsonl")
    for name in (
        "prompt_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "response_versions",
        "shares",
    ):
        np.testing.assert_array_equal(getattr(again, name), getattr(written[0], name))
    assert (again.session, again.reward, again.missing_logprobs, again.calls) == ("s", 1.0, 1, ("call-0",))
    assert b"NaN" not in (tmp_path / "out.jsonl").read_bytes()


def test_fields_of_older_files_are_ignored() -> None:
    (sample,) = samples()
    assert sample_from_json({**sample_to_json(sample), "routed_experts": None}).calls == sample.calls


@pytest.mark.parametrize("field", ["start", "end", "call", "node", "logprobs"])
def test_an_answer_without_a_field_is_refused_as_in_parquet(field: str) -> None:
    (sample,) = samples()
    raw = sample_to_json(sample)
    del raw["answers"][0][field]
    with pytest.raises(InputError, match=rf"answers\[0\]: got no {field}, expected the fields start, end"):
        sample_from_json(raw)


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("before")

    def broken() -> Iterator[Sample]:
        yield from samples()
        raise RuntimeError("engine failed")

    with pytest.raises(RuntimeError):
        write_jsonl(broken(), target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_the_data_of_an_image_is_written_once_in_a_file(tmp_path: Path) -> None:
    cat, dog = (Media("image", name, name.encode() * 500, mime="image/png") for name in ("cat", "dog"))
    link = Media("image", "url:http://h/p", url="http://h/p")
    (sample,) = samples()[:1]
    written = [replace(sample, media=media) for media in ((cat, link), (cat, dog, cat), (), (dog,))]
    target = tmp_path / "out.jsonl"
    write_jsonl(written, target)
    assert [one.media for one in read_jsonl(target)] == [one.media for one in written]
    assert target.read_text().count(base64.b64encode(cat.payload).decode()) == 1
    assert target.read_text().count(base64.b64encode(dog.payload).decode()) == 1
    assert sample_to_json(written[0])["media"][0]["data"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("response_mask", [1]),
        ("response_mask", [1, 2]),
        ("response_mask", ["1", "0"]),
        ("response_mask", [True, False]),
        ("response_versions", [0]),
        ("response_ids", [4, 5.5]),
        ("response_ids", [4, -1]),
        ("response_ids", [4, 2**40]),
        ("prompt_ids", [[1]]),
        ("prompt_ids", None),
        ("reward", "1"),
        ("reward", True),
        ("exact", "no"),
        ("missing_logprobs", 1.5),
        ("session", 3),
    ],
)
def test_a_line_with_a_value_that_no_export_writes_is_refused(
    tmp_path: Path, column: str, value: object
) -> None:
    sample = replace(
        samples()[0],
        response_ids=as_ids([4, 5]),
        response_mask=np.ones(2, np.int8),
        response_logprobs=np.full(2, -0.5, np.float32),
        response_versions=np.zeros(2, np.int32),
        shares=np.ones(2, np.float32),
    )
    target = tmp_path / "samples.jsonl"
    target.write_text(json.dumps({**sample_to_json(sample), column: value}) + "\n")
    with pytest.raises(InputError, match=rf"samples.jsonl:1: {column}(\[\d\])?: got .*, expected"):
        list(read_jsonl(target))
