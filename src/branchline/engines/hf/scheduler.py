"""Who computes next: requests join and leave between steps, and nothing is computed twice.

A step admits what fits, computes one portion of pending prompts, and samples one id for every row that has
no prompt pending. A new request starts behind the longest prefix that is known: of a sequence that ended,
or of one that is running. Where a neighbour is just computing that prefix, it waits for it, so that a group
of requests with one prompt computes it once.

Its invariant: `running[row]` is the job in that row. Used from one thread only; knows no asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from branchline.core.errors import EngineError, EngineInputError
from branchline.engines.base import Finish, LogprobKind
from branchline.engines.hf.job import Job, Sampled
from branchline.engines.hf.prefixes import KeysValues, Prefixes, shared
from branchline.engines.hf.rows import Rows
from branchline.engines.hf.sampling import sample
from branchline.engines.hf.trial import try_out

# A request waits for a neighbour that is computing at least this many ids it needs too.
_WORTH_WAITING: Final = 16


@dataclass(frozen=True)
class HfConfig:
    """What the embedded engine may use."""

    max_batch: int = 64
    """Requests decoded together; the others wait."""
    batch_bytes: int = 4 * 2**30
    """Keys and values of what is running (rows × the longest row); beyond it the youngest wait."""
    cache_bytes: int = 2**30
    """Keys and values kept for next turns."""
    prefill_tokens: int = 512
    """Prompt ids computed between two steps of those that are decoding."""
    stream_interval_s: float = 0.02
    """Ids sampled within this time travel in one chunk, but for the first: every chunk of every stream costs
    the event loop, and a small model samples hundreds of ids a second."""
    logprobs: LogprobKind = "raw"

    def __post_init__(self) -> None:
        for field in ("max_batch", "prefill_tokens"):
            if (value := getattr(self, field)) < 1:
                raise EngineInputError(f"{field}: got {value}, expected 1 or more: nothing would be computed")


@dataclass(frozen=True)
class HfStats:
    """What has been done since the start, and what is held now."""

    running: int
    waiting: int
    computed_tokens: int
    """Ids of prompts that went through the model."""
    reused_tokens: int
    """Ids of prompts that did not have to."""
    sampled_tokens: int
    steps: int
    cached_tokens: int
    evictions: int
    """Sequences kept for a next turn that had to go, to stay within `cache_bytes`."""
    held: int
    """Times a running request had to wait again."""


class Scheduler:
    """The jobs of one model."""

    def __init__(self, model: Any, config: HfConfig, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._config = config
        self._decode = decode
        try_out(model)
        self._rows = Rows(model, config.batch_bytes, config.max_batch)
        self._prefixes = Prefixes(config.cache_bytes, self._rows.token_bytes)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._tickets = 0
        self._computed = self._reused = self._sampled = self._steps = self._held = 0
        self.outbox: list[Sampled] = []
        """What was sampled and not yet taken away."""

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
            cached_tokens=self._prefixes.tokens,
            evictions=self._prefixes.evictions,
            held=self._held,
        )

    def add(self, job: Job) -> None:
        self._tickets += 1
        job.ticket = self._tickets
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """Forgets a job that nobody wants any more; what it computed is kept as a prefix."""
        if job in self._running:
            self._leave(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def forget(self) -> None:
        """The weights are others now: nothing computed counts, running jobs start again behind their ids."""
        for job in sorted(self._running, key=lambda job: job.ticket, reverse=True):
            self._wait_again(job)
        self._let_go()

    def end(self) -> None:
        """Forgets every job and everything computed."""
        self._waiting.clear()
        self._let_go()

    def fail(self, error: Exception) -> None:
        """Ends every running job with an error, or the first that waits if none was running."""
        jobs = self._running or [self._waiting.popleft()]
        self.outbox += [Sampled(job, error=error) for job in jobs]
        self._running.clear()
        self._rows.release()

    def step(self) -> None:
        """One portion of prompts, and one id for every other row; what was sampled goes to the outbox."""
        self._steps += 1
        self._admit()
        prompts = self._prompts_to_compute()
        if prompts:
            self._compute(prompts, [min(job.pending, self._config.prefill_tokens) for job in prompts])
        self._make_room()
        if jobs := [job for job in self._running if job.pending == 1 and job not in prompts]:
            self._compute(jobs, [1] * len(jobs))
        if not self._running:
            self._rows.release()

    # Joining and leaving

    def _admit(self) -> None:
        for job in list(self._waiting):
            row = len(self._running)
            if row == self._config.max_batch:
                return
            found = self._known(job)
            if found is None:
                continue
            longest = max(job.length, *(other.length for other in self._running), 0)
            if not self._rows.reserve(row + 1, longest + 1):
                return
            known, kv = found
            if known:
                self._rows.write(row, kv, known)
            job.filled = known
            self._reused += known
            self._waiting.remove(job)
            self._running.append(job)

    def _known(self, job: Job) -> tuple[int, KeysValues] | None:
        """How many ids are known, and their keys and values; None: a neighbour is computing them."""
        wanted = job.ids[:-1]  # the last id is computed in any case, for its logits
        best, entry = self._prefixes.longest(wanted)
        promised, source = 0, -1
        for row, other in enumerate(self._running):
            common = shared(wanted, other.ids)
            if (size := min(common, other.filled)) > best:
                best, source = size, row
            if other.pending > 1:
                promised = max(promised, common)
        if promised >= best + _WORTH_WAITING:
            return None
        if source >= 0:
            return best, self._rows.view(source, best)
        if entry is not None:
            self._prefixes.touch(entry)
            return best, entry.kv
        return 0, []

    def _let_go(self) -> None:
        self._running.clear()
        self._prefixes.clear()
        self._rows.release()

    def _leave(self, job: Job, *, keep: bool = True) -> None:
        """Frees a job's row; the last row moves into the gap."""
        row = self._running.index(job)
        if keep:
            self._prefixes.add(job.ids[: job.filled], lambda: self._rows.read(row, job.filled))
        if job.pending > 1 or not keep:  # no logits have shown yet that these are numbers, or they are not
            self._rows.clear(row)
        last = self._running[-1]
        if last is not job:  # until it is copied, both are running: should that fail, both are told
            self._rows.write(row, self._rows.view(len(self._running) - 1, last.filled), last.filled)
            self._running[row] = last
        self._running.pop()

    def _make_room(self) -> None:
        """Room for one more id in every row; where there is none, the youngest wait."""
        while self._running:
            longest = max(job.length for job in self._running)
            if self._rows.reserve(len(self._running), longest + 1):
                return
            youngest = max(self._running, key=lambda job: job.ticket)
            self._leave(youngest)
            self._wait_again(youngest)

    def _wait_again(self, job: Job) -> None:
        job.filled = 0
        self._held += 1
        self._waiting.appendleft(job)

    # Computing

    def _prompts_to_compute(self) -> list[Job]:
        """One pending prompt, and those beside it that cost no more padding than work.

        The oldest and the shortest take turns: a long prompt does not hold up short ones, nor they it.
        """
        limit = self._config.prefill_tokens
        pending = [job for job in self._running if job.pending > 1]
        if not pending:
            return []
        is_turn_of_oldest = self._steps % 2
        first = min(pending, key=lambda job: job.ticket if is_turn_of_oldest else job.pending)
        chosen, work = [first], min(first.pending, limit)
        width = work
        for job in sorted(pending, key=lambda job: job.pending, reverse=True):
            size = min(job.pending, limit)
            padded = max(width, size) * (len(chosen) + 1)
            if job is not first and padded <= limit and padded <= 2 * (work + size):
                chosen.append(job)
                width, work = max(width, size), work + size
        return sorted(chosen, key=self._running.index)

    def _compute(self, jobs: Sequence[Job], sizes: Sequence[int]) -> None:
        """Runs the next ids of each job through the model; samples where none is pending then."""
        rows = {job: row for row, job in enumerate(self._running)}
        logits = self._rows.forward(
            [rows[job] for job in jobs],
            [job.filled for job in jobs],
            [job.ids[job.filled : job.filled + size] for job, size in zip(jobs, sizes, strict=True)],
        )
        for job, size in zip(jobs, sizes, strict=True):
            if job.length == len(job.prompt_ids) or size > 1:
                self._computed += size
            job.filled += size
        ready = [index for index, job in enumerate(jobs) if not job.pending]
        if not ready:
            return
        if len(ready) < len(jobs):
            logits = logits[ready]
        jobs = [jobs[index] for index in ready]
        draws = sample(logits, jobs, self._config.logprobs)
        for job, token, logprob, raw in zip(jobs, draws.ids, draws.logprobs, draws.raw, strict=True):
            if isfinite(raw):
                self._advance(job, token, logprob)
            else:
                self._leave(job, keep=False)
                error = EngineError(f"logits behind {job.length} ids: got NaN or infinity, expected numbers")
                self.outbox.append(Sampled(job, error=error))

    def _advance(self, job: Job, token: int, logprob: float) -> None:
        job.append(token)
        self._sampled += 1
        finish = self._finish_of(job, token)
        self.outbox.append(Sampled(job, token, logprob, finish))
        if finish:
            self._leave(job)

    def _finish_of(self, job: Job, token: int) -> Finish | None:
        params = job.params
        if token in params.stop_ids or (params.stop and self._says_stop(job)):
            return "stop"
        return "length" if job.length == len(job.prompt_ids) + params.max_tokens else None

    def _says_stop(self, job: Job) -> bool:
        """Whether the output ends in, or just went over, a stop text."""
        assert self._decode is not None
        # An id stands for at least a byte, so a text of n bytes lies within the last n ids; a few more
        # because ids that are not shown stand for none.
        size = max(len(text.encode()) for text in job.params.stop) + 8
        tail = self._decode(job.output_ids[-size:].tolist())
        return any(text in tail for text in job.params.stop)
