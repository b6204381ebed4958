"""Samples as JSON lines, one object per sample. A file is written completely or not at all.

NaN is not JSON, so a missing logprob is null. The data of an image is written once, in the first sample of a
file (or of a response) that has the image; later samples have its digest.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from branchline.core.message import Media
from branchline.core.sample import ExportReport, RewardSpan, Sample

_MIN_FLOAT32 = np.finfo(np.float32).min
"""Replaces minus infinity, which JSON cannot represent."""


def sample_to_json(sample: Sample, written_digests: set[str] | None = None) -> dict[str, Any]:
    """Returns a sample as JSON values. Media whose digests are in `written_digests` are written without their
    data; the digests of the others are added."""
    written = set() if written_digests is None else written_digests
    return {
        "session": sample.session,
        "agent": sample.agent,
        "calls": list(sample.calls),
        "prompt_ids": sample.prompt_ids.tolist(),
        "response_ids": sample.response_ids.tolist(),
        "response_mask": sample.response_mask.tolist(),
        "response_logprobs": [
            None if missing else value
            for value, missing in zip(
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
        "rewards": [asdict(reward) for reward in sample.rewards],
        "media": [_media_to_json(media, written) for media in sample.media],
    }


def _media_to_json(media: Media, written: set[str]) -> dict[str, str]:
    fields = {"kind": media.kind, "digest": media.digest, "url": media.url, "mime": media.mime}
    if media.payload and media.digest not in written:
        written.add(media.digest)
        fields["data"] = base64.b64encode(media.payload).decode()
    return fields


def report_to_json(report: ExportReport) -> dict[str, Any]:
    """Returns a report as JSON values."""
    return {
        "samples": report.samples,
        "sampled_tokens": report.sampled_tokens,
        "trained_tokens": report.trained_tokens,
        "inexact_tokens": report.inexact_tokens,
        "missing_logprobs": report.missing_logprobs,
        "unassigned_rewards": report.unassigned_rewards,
        "dropped": [
            {"reason": dropped.reason, "call": dropped.call, "tokens": dropped.tokens}
            for dropped in report.dropped
        ],
    }


def write_jsonl(samples: Iterable[Sample], path: str | os.PathLike[str]) -> int:
    """Writes samples to a file and returns their number. If an error occurs, the old file is unchanged."""
    target = Path(path)
    count = 0
    written_digests: set[str] = set()
    handle, temporary = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for sample in samples:
                file.write(msgspec.json.encode(sample_to_json(sample, written_digests)) + b"\n")
                count += 1
        # mkstemp creates a file that only its owner can read; give it the usual permissions.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return count


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """Yields the samples of a file written by `write_jsonl`, with the payloads of their media."""
    payloads: dict[str, bytes] = {}
    with Path(path).open("rb") as file:
        for line in file:
            yield sample_from_json(msgspec.json.decode(line), payloads)


def sample_from_json(raw: Mapping[str, Any], payloads: dict[str, bytes] | None = None) -> Sample:
    """Returns the sample that `sample_to_json` wrote. `payloads` are those of the samples before it, by
    digest; the sample's own are added."""
    known = {} if payloads is None else payloads
    known |= {media["digest"]: base64.b64decode(media["data"]) for media in raw["media"] if media.get("data")}
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
        media=tuple(_media_from_json(media, known) for media in raw["media"]),
        rewards=tuple(RewardSpan(**reward) for reward in raw.get("rewards", ())),
    )


def _media_from_json(raw: Mapping[str, Any], payloads: Mapping[str, bytes]) -> Media:
    payload = payloads.get(raw["digest"], b"")
    return Media(raw["kind"], raw["digest"], payload, url=raw["url"], mime=raw.get("mime", ""))
