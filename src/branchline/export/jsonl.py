"""Samples as JSON lines: one object a sample, written whole or not at all.

NaN is not JSON, so an unknown logprob is null.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from branchline.core.message import Media
from branchline.core.sample import ExportReport, Sample

_MIN_FLOAT32 = np.finfo(np.float32).min
"""What minus infinity becomes: JSON has no word for it, and null means unknown."""


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A sample as plain JSON values."""
    return {
        "session": sample.session,
        "agent": sample.agent,
        "calls": list(sample.calls),
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "response_mask": sample.response_mask.tolist(),
        "response_logprobs": [
            None if unknown else value
            for value, unknown in zip(
                np.maximum(sample.response_logprobs, _MIN_FLOAT32).tolist(),
                np.isnan(sample.response_logprobs).tolist(),
                strict=True,
            )
        ],
        "response_versions": sample.response_versions.tolist(),
        "shares": sample.shares.tolist(),
        "finish": sample.finish_reason,
        "exact": sample.exact,
        "tokens_behind_other_ids": sample.inexact_tokens,
        "missing_logprobs": sample.missing_logprobs,
        "truncated_tokens": sample.truncated_tokens,
        "reward": sample.reward,
        "routed_experts": None if sample.routed_experts is None else sample.routed_experts.tolist(),
        "media": [{"kind": media.kind, "digest": media.digest, "url": media.url} for media in sample.media],
    }


def report_to_json(report: ExportReport) -> dict[str, Any]:
    """A report as plain JSON values."""
    return {
        "samples": report.samples,
        "sampled_tokens": report.sampled_tokens,
        "trained_tokens": report.trained_tokens,
        "inexact_tokens": report.inexact_tokens,
        "missing_logprobs": report.missing_logprobs,
        "dropped": [
            {"reason": dropped.reason, "call": dropped.call, "tokens": dropped.tokens}
            for dropped in report.dropped
        ],
    }


def write_jsonl(samples: Iterable[Sample], path: str | os.PathLike[str]) -> int:
    """Writes samples to a file and says how many. A fault on the way leaves what was there before."""
    target = Path(path)
    count = 0
    handle, temporary = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for sample in samples:
                file.write(msgspec.json.encode(sample_to_json(sample)) + b"\n")
                count += 1
        # mkstemp is for secrets; a data set is as readable as any other file its user makes.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return count


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of a file that `write_jsonl` wrote. Media come back as digests without payload."""
    with Path(path).open("rb") as file:
        for line in file:
            yield sample_from_json(msgspec.json.decode(line))


def sample_from_json(raw: Mapping[str, Any]) -> Sample:
    """A sample from what `sample_record` made of it; its media are digests without payload."""
    logprobs = [np.nan if value is None else value for value in raw["response_logprobs"]]
    return Sample(
        prompt_ids=np.array(raw["prompt_ids"], np.int32),
        response_ids=np.array(raw["response_ids"], np.int32),
        response_mask=np.array(raw["response_mask"], np.int8),
        response_logprobs=np.array(logprobs, np.float32),
        response_versions=np.array(raw["response_versions"], np.int32),
        shares=np.array(raw["shares"], np.float32),
        agent=raw["agent"],
        session=raw["session"],
        calls=tuple(raw["calls"]),
        finish_reason=raw["finish"],
        exact=raw["exact"],
        inexact_tokens=raw["tokens_behind_other_ids"],
        missing_logprobs=raw["missing_logprobs"],
        truncated_tokens=raw["truncated_tokens"],
        reward=raw["reward"],
        media=tuple(Media(**media) for media in raw["media"]),
        routed_experts=None if raw["routed_experts"] is None else np.array(raw["routed_experts"], np.int32),
    )
