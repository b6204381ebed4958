"""From groups of trajectories to batches of arrays: training rows, then padded, packed or tree-packed.

rows = training_rows(groups)
pad_rows(rows)                              # one row per sequence, padded on the right
pack_rows(rows, 8192, share_prefixes=False) # one after the other, with a document mask
pack_rows(rows, 8192)                       # as trees: shared prefixes once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from branchline.core.errors import ExportError
from branchline.core.message import Media
from branchline.core.sample import Sample
from branchline.core.token_arrays import Floats
from branchline.export.credit import (
    CreditPolicy,
    GroupStd,
    Normaliser,
    group_statistics,
    token_advantages,
    token_weights,
)
from branchline.export.packing import TrainingRow
from branchline.export.trajectory import TrajectoryGroup
from branchline.timelines.timeline import NO_VERSION


def training_rows(
    groups: Sequence[TrajectoryGroup],
    *,
    normaliser: Normaliser = "trajectory",
    credit: CreditPolicy | None = None,
    group_std: GroupStd = "sample",
    mask_unfinished: bool = False,
    scale_weights: bool = True,
) -> list[TrainingRow]:
    """Returns a row for each sample of the groups' trajectories; failed trajectories have none.

    With `mask_unfinished`, trajectories that were cut off train nothing; their rewards still count in their
    groups. With `scale_weights` the weights have mean 1 over the trained tokens.
    """
    credit = credit or CreditPolicy()
    samples: list[Sample] = []
    weights: list[NDArray[np.float64]] = []
    advantages: list[Floats] = []
    for group in groups:
        statistics = group_statistics(group, group_std=group_std)
        for trajectory in group:
            if trajectory.failed:
                continue
            if mask_unfinished and not trajectory.finished:
                trajectory = replace(trajectory, samples=tuple(map(mask_sample, trajectory.samples)))
            samples += trajectory.samples
            weights += token_weights(trajectory, normaliser)
            advantages += token_advantages(trajectory, statistics, credit)
    scale = 1.0
    if scale_weights:
        total = sum(float(values.sum()) for values in weights)
        tokens = sum(float(sample.shares.sum(dtype=np.float64)) for sample in samples)
        scale = tokens / total if total else 1.0
    return [
        TrainingRow(sample, (values * scale).astype(np.float32), row_advantages)
        for sample, values, row_advantages in zip(samples, weights, advantages, strict=True)
    ]


def mask_sample(sample: Sample) -> Sample:
    """Returns a sample that trains nothing and keeps its tokens and its reward."""
    return replace(
        sample,
        response_mask=np.zeros_like(sample.response_mask),
        shares=np.zeros_like(sample.shares),
        response_logprobs=np.zeros_like(sample.response_logprobs),
        response_versions=np.full_like(sample.response_versions, NO_VERSION),
        missing_logprobs=0,
        exact=True,
        inexact_tokens=0,
        answers=(),
    )


@dataclass(frozen=True)
class PaddedBatch:
    """Rows padded on the right to one length. All arrays are rows × tokens."""

    ids: NDArray[np.int32]
    attention_mask: NDArray[np.int8]
    """1 for tokens, 0 for padding."""
    positions: NDArray[np.int32]
    old_logprobs: Floats
    """As sampled; NaN for tokens that are not trained or came without one."""
    versions: NDArray[np.int32]
    weights: NDArray[np.float64]
    """0: not trained."""
    advantages: NDArray[np.float64]
    prompt_lengths: NDArray[np.int32]
    """The number of tokens before each row's response."""
    media: tuple[tuple[Media, ...], ...]
    """The media of each row."""
    rows: tuple[int, ...]
    """The place of each row in the sequence that was padded."""

    def __len__(self) -> int:
        return len(self.ids)


def pad_rows(
    rows: Sequence[TrainingRow], max_tokens: int | None = None, *, pad_id: int = 0, multiple_of: int = 1
) -> list[PaddedBatch]:
    """Pads rows into batches of at most `max_tokens` tokens, padding included; a row that is longer is a
    batch of its own.

    Rows of similar length share a batch. Each length is a multiple of `multiple_of`.
    """
    if multiple_of < 1:
        raise ExportError(f"multiple_of: got {multiple_of}, expected at least 1")
    if max_tokens is not None and max_tokens < 1:
        raise ExportError(f"max_tokens: got {max_tokens}, expected 1 or more")
    lengths = [-(-len(row) // multiple_of) * multiple_of for row in rows]
    batches: list[PaddedBatch] = []
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: (-lengths[index], index)):
        if batch and max_tokens is not None and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            batches.append(_pad(rows, batch, lengths[batch[0]], pad_id))
            batch = []
        batch.append(index)
    return [*batches, _pad(rows, batch, lengths[batch[0]], pad_id)] if batch else batches


def _pad(rows: Sequence[TrainingRow], order: Sequence[int], length: int, pad_id: int) -> PaddedBatch:
    shape = (len(order), length)
    ids = np.full(shape, pad_id, np.int32)
    attention_mask, versions = np.zeros(shape, np.int8), np.full(shape, NO_VERSION, np.int32)
    old_logprobs = np.full(shape, np.nan, np.float32)
    weights, advantages = np.zeros((2, *shape), np.float64)
    prompt_lengths = np.array([len(rows[index].sample.prompt_ids) for index in order], np.int32)
    for place, index in enumerate(order):
        row, start = rows[index], int(prompt_lengths[place])
        sample = row.sample
        ids[place, :start], ids[place, start : len(row)] = sample.prompt_ids, sample.response_ids
        attention_mask[place, : len(row)] = 1
        trained = np.flatnonzero(row.weights)
        old_logprobs[place, start + trained] = sample.response_logprobs[trained]
        versions[place, start + trained] = sample.response_versions[trained]
        weights[place, start + trained] = row.weights[trained]
        advantages[place, start + trained] = row.advantages[trained]
    return PaddedBatch(
        ids=ids,
        attention_mask=attention_mask,
        positions=np.where(attention_mask, np.arange(length, dtype=np.int32), np.int32(0)),
        old_logprobs=old_logprobs,
        versions=versions,
        weights=weights,
        advantages=advantages,
        prompt_lengths=prompt_lengths,
        media=tuple(rows[index].sample.media for index in order),
        rows=tuple(order),
    )
