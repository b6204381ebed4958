"""Continuous batching: decides in each step which jobs join, which prompts are computed, which rows sample.

A step admits the jobs that fit, computes one portion of the pending prompts, and samples one id for every row
without a pending prompt. A new job starts after the longest prefix with known keys and values: of an ended
sequence, or of a running one. Prefixes with images are equal only if their images are. If another job is
computing that prefix, it waits for it, so that a group of requests with one prompt computes it once.

Invariant: `_running[row]` is the job in that row. Used from one thread only; does not use asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor

from branchline.core.errors import EngineError
from branchline.engines.base import FinishReason
from branchline.engines.hf.compatibility import check_compatibility
from branchline.engines.hf.job import Job, StepOutput
from branchline.engines.hf.kv_cache import BatchKvCache, MultimodalInputs
from branchline.engines.hf.prefix_cache import KeysValues, PrefixCache, common_prefix_length
from branchline.engines.hf.sampling import sample
from branchline.engines.hf.vision import VisionEncoder
from branchline.engines.hf_config import HfConfig as HfConfig

# A job waits for another that is computing at least this many ids of its prompt.
_MIN_SHARED_TOKENS: Final = 16


@dataclass(frozen=True)
class HfLimits:
    """The limits of an engine on its device."""

    max_batch: int
    batch_bytes: int
    cache_bytes: int
    prefill_tokens: int
    threads: int | None
    """None: as many as torch uses."""

    @classmethod
    def for_model(cls, model: Any, config: HfConfig) -> HfLimits:
        """The limits that a config sets, and those that suit the model's device for all others."""
        given = {name: getattr(config, name) for name in cls.__dataclass_fields__}
        limits = asdict(_gpu_limits(model.device) if model.device.type == "cuda" else _CPU_LIMITS)
        if model.device.type == "cpu" and model.num_parameters() < _SINGLE_THREAD_PARAMETERS:
            limits["threads"] = 1
        return cls(**limits | {name: value for name, value in given.items() if value is not None})


_CPU_LIMITS = HfLimits(64, 4 * 2**30, 2**30, 512, None)
_SINGLE_THREAD_PARAMETERS = 20_000_000


def _gpu_limits(device: torch.device) -> HfLimits:
    free, _ = torch.cuda.mem_get_info(device)
    return HfLimits(256, free // 2, free // 5, 8192, None)


@dataclass(frozen=True)
class HfStats:
    """Counters since the start, and current sizes."""

    running: int
    waiting: int
    computed_tokens: int
    """Prompt ids that went through the model."""
    reused_tokens: int
    """Prompt ids whose keys and values were reused."""
    sampled_tokens: int
    steps: int
    cached_tokens: int
    evictions: int
    """Cached sequences dropped to stay within `cache_bytes`."""
    preemptions: int
    """How often a running request lost its row and had to wait."""


class Scheduler:
    """Schedules the jobs of one model."""

    def __init__(self, model: Any, config: HfConfig, vision: VisionEncoder | None = None) -> None:
        self.limits = HfLimits.for_model(model, config)
        self._logprob_kind = config.logprob_kind
        self._vision = vision
        check_compatibility(model)
        self._kv_cache = BatchKvCache(model, self.limits.batch_bytes, self.limits.max_batch)
        self._prefix_cache = PrefixCache(self.limits.cache_bytes, self._kv_cache.token_bytes)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._arrivals = 0
        self._computed = self._reused = self._sampled = self._steps = self._preemptions = 0
        self._outputs: list[StepOutput] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> HfStats:
        return HfStats(
            running=len(self._running),
            waiting=len(self._waiting),
            computed_tokens=self._computed,
            reused_tokens=self._reused,
            sampled_tokens=self._sampled,
            steps=self._steps,
            cached_tokens=self._prefix_cache.token_count,
            evictions=self._prefix_cache.evictions,
            preemptions=self._preemptions,
        )

    def take_outputs(self) -> list[StepOutput]:
        """Removes and returns the outputs of the steps since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def add(self, job: Job) -> None:
        self._arrivals += 1
        job.arrival = self._arrivals
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Removes a cancelled job; its keys and values are kept as a prefix."""
        if job in self._running:
            self._release_row(job)
            if not self._running:
                self._kv_cache.free()
        elif job in self._waiting:
            self._waiting.remove(job)

    def invalidate(self) -> None:
        """Drops all keys and values after a weight change; running jobs compute theirs again."""
        for job in sorted(self._running, key=lambda job: job.arrival, reverse=True):
            self._preempt(job)
        self._drop_all()

    def clear(self) -> None:
        """Drops all jobs, keys and values."""
        self._waiting.clear()
        self._drop_all()

    def fail(self, error: Exception) -> None:
        """Ends every running job with an error, or the first waiting one if none was running."""
        jobs = self._running or [self._waiting.popleft()]
        self._outputs += [StepOutput(job, error=error) for job in jobs]
        self._running.clear()
        self._kv_cache.free()

    def step(self) -> None:
        """Computes one portion of prompts and samples one id for every other row."""
        self._steps += 1
        self._admit()
        prompts = self._select_prefills()
        if prompts:
            self._compute(
                prompts, [min(job.num_pending_tokens, self.limits.prefill_tokens) for job in prompts]
            )
        self._ensure_capacity()
        if jobs := [job for job in self._running if job.num_pending_tokens == 1 and job not in prompts]:
            self._compute(jobs, [1] * len(jobs))
        if not self._running:
            self._kv_cache.free()

    # Rows

    def _admit(self) -> None:
        for job in list(self._waiting):
            row = len(self._running)
            if row == self.limits.max_batch:
                return
            found = self._find_prefix(job)
            if found is None:
                continue
            longest = max(job.length, *(other.length for other in self._running), 0)
            if not self._kv_cache.reserve(row + 1, longest + 1):
                return
            known, kv = found
            if known:
                self._kv_cache.write_row(row, kv, known)
            job.num_computed_tokens = known
            self._reused += known
            self._waiting.remove(job)
            self._running.append(job)

    def _find_prefix(self, job: Job) -> tuple[int, KeysValues] | None:
        """The length of the known prefix, and its keys and values; None if another job is computing more."""
        ids = job.prefix_keys[:-1]  # The last id is always computed, for its logits.
        best, entry = self._prefix_cache.find_longest(ids)
        upcoming, source = 0, -1
        for row, other in enumerate(self._running):
            common = common_prefix_length(ids, other.prefix_keys)
            if (size := min(common, other.num_computed_tokens)) > best:
                best, source = size, row
            if other.num_pending_tokens > 1:
                upcoming = max(upcoming, common)
        if upcoming >= best + _MIN_SHARED_TOKENS:
            return None
        if source >= 0:
            return best, self._kv_cache.row_view(source, best)
        if entry is not None:
            self._prefix_cache.touch(entry)
            return best, entry.kv
        return 0, []

    def _drop_all(self) -> None:
        self._running.clear()
        self._prefix_cache.clear()
        if self._vision is not None:
            self._vision.clear()
        self._kv_cache.free()

    def _release_row(self, job: Job, *, keep: bool = True) -> None:
        """Frees a job's row; the last row moves there."""
        row = self._running.index(job)
        if keep:
            self._prefix_cache.add(
                job.prefix_keys[: job.num_computed_tokens],
                lambda: self._kv_cache.copy_row(row, job.num_computed_tokens),
            )
        # Without logits it is not known that the row's values are finite.
        if job.num_pending_tokens > 1 or not keep:
            self._kv_cache.zero_row(row)
        last = self._running[-1]
        if last is not job:  # Both stay in `_running` until the copy succeeds, so that both get its error.
            self._kv_cache.write_row(
                row,
                self._kv_cache.row_view(len(self._running) - 1, last.num_computed_tokens),
                last.num_computed_tokens,
            )
            self._running[row] = last
        self._running.pop()

    def _ensure_capacity(self) -> None:
        """Makes room for one more id in every row; preempts the latest jobs if there is none."""
        while self._running:
            longest = max(job.length for job in self._running)
            if self._kv_cache.reserve(len(self._running), longest + 1):
                return
            latest = max(self._running, key=lambda job: job.arrival)
            self._release_row(latest)
            self._preempt(latest)

    def _preempt(self, job: Job) -> None:
        job.num_computed_tokens = 0
        job.num_preempted += 1
        self._preemptions += 1
        self._waiting.appendleft(job)

    # Computing

    def _select_prefills(self) -> list[Job]:
        """One pending prompt, and others that fit beside it without more padding than work.

        The oldest and the shortest prompt alternate, so that long and short ones do not delay each other.
        """
        limit = self.limits.prefill_tokens
        pending = [job for job in self._running if job.num_pending_tokens > 1]
        if not pending:
            return []
        is_turn_of_oldest = self._steps % 2
        first = min(pending, key=lambda job: job.arrival if is_turn_of_oldest else job.num_pending_tokens)
        chosen, work = [first], min(first.num_pending_tokens, limit)
        width = work
        for job in sorted(pending, key=lambda job: job.num_pending_tokens, reverse=True):
            size = min(job.num_pending_tokens, limit)
            padded = max(width, size) * (len(chosen) + 1)
            if job is not first and padded <= limit and padded <= 2 * (work + size):
                chosen.append(job)
                width, work = max(width, size), work + size
        return sorted(chosen, key=self._running.index)

    def _compute(self, jobs: Sequence[Job], sizes: Sequence[int]) -> None:
        """Runs the next ids of each job through the model; samples for jobs with no pending ids left."""
        rows = {job: row for row, job in enumerate(self._running)}
        parts = [
            slice(job.num_computed_tokens, job.num_computed_tokens + size)
            for job, size in zip(jobs, sizes, strict=True)
        ]
        logits = self._kv_cache.forward(
            [rows[job] for job in jobs],
            [part.start for part in parts],
            [job.ids[part] for job, part in zip(jobs, parts, strict=True)],
            self._multimodal_inputs(jobs, parts),
        )
        for job, size in zip(jobs, sizes, strict=True):
            if job.length == len(job.prompt_ids) or size > 1:
                self._computed += size
            job.num_computed_tokens += size
        ready = [index for index, job in enumerate(jobs) if not job.num_pending_tokens]
        if not ready:
            return
        if len(ready) < len(jobs):
            logits = logits[ready]
        jobs = [jobs[index] for index in ready]
        draws = sample(logits, jobs, self._logprob_kind)
        for job, token, logprob, raw in zip(jobs, draws.ids, draws.logprobs, draws.raw_logprobs, strict=True):
            if isfinite(raw):
                self._advance(job, token, logprob)
            else:
                self._release_row(job, keep=False)
                error = EngineError(f"logits after {job.length} ids: got NaN or infinity, expected numbers")
                self._outputs.append(StepOutput(job, error=error))

    def _multimodal_inputs(self, jobs: Sequence[Job], parts: Sequence[slice]) -> MultimodalInputs | None:
        """The positions of the computed ids and the features among them; None for a text model."""
        if self._vision is None:
            return None
        features: list[tuple[int, int, Tensor]] = []
        for index, (job, part) in enumerate(zip(jobs, parts, strict=True)):
            for image in job.images:
                start, end = max(part.start, image.offset), min(part.stop, image.offset + image.length)
                if start < end:
                    found = self._vision.features(image)[start - image.offset : end - image.offset]
                    features.append((index, start - part.start, found))
        positions = [job.positions(part.start, part.stop) for job, part in zip(jobs, parts, strict=True)]
        return MultimodalInputs(positions, features)

    def _advance(self, job: Job, token: int, logprob: float) -> None:
        job.append(token)
        self._sampled += 1
        finish = self._finish_reason(job, token)
        self._outputs.append(StepOutput(job, token, logprob, finish))
        if finish:
            self._release_row(job)

    def _finish_reason(self, job: Job, token: int) -> FinishReason | None:
        params = job.params
        if token in params.stop_ids:
            return "stop"
        return "length" if job.length == len(job.prompt_ids) + params.max_tokens else None
