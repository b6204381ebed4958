"""The embedded engine as the others see it: async streams outside, one computing thread inside.

Everything that touches the model runs in that thread: a step, and between two steps whatever was asked for
(add a request, drop one, pause, swap weights). So a swap never meets a step, and the event loop never waits
for the model. Every id carries the version of the weights that sampled it.

    engine = HfEngine.load("models/SmolLM2-135M-Instruct")
    async for chunk in engine.generate(ids, SamplingParams(max_tokens=64, stop_ids=(2,))):
        print(chunk.ids, chunk.logprobs, chunk.version, chunk.finish)
    await engine.close()
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor

from branchline.core.errors import EngineError
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, LogprobKind, SamplingParams
from branchline.engines.hf.job import Job, StepOutput
from branchline.engines.hf.scheduler import HfConfig, HfStats, Scheduler
from branchline.engines.hf.validation import EngineLimits, check_request, check_weights

T = TypeVar("T")


class _ChunkQueue:
    """Where a job's chunks go: a queue in the event loop that asked for them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()


QueuedItem = tuple[_ChunkQueue, Chunk | Exception]


class HfEngine:
    """A transformers causal language model that samples for many sessions at once."""

    def __init__(
        self,
        model: Any,
        config: HfConfig | None = None,
        *,
        name: str = "hf",
        version: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`decode` turns ids into text; without it stop texts are refused."""
        self._model = model.eval()
        self._config = config or HfConfig()
        self._name = name
        self._version = version
        self._limits = EngineLimits(
            vocab_size=int(model.get_input_embeddings().weight.shape[0]),
            max_context=getattr(model.config.get_text_config(), "max_position_embeddings", None),
            has_text=decode is not None,
        )
        self._scheduler = Scheduler(model, self._config, decode)
        self._queues: dict[Job, _ChunkQueue] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last_flush_s = 0.0
        self._is_paused = False
        self._is_closing = False
        self._is_closed = False
        self._submit_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"branchline-{name}", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: HfConfig | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        **options: Any,
    ) -> HfEngine:
        """Reads a model folder; `options` go to `from_pretrained`. float32 on a CPU, else the model's own."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("float32" if device == "cpu" else "auto")
        auto: Any = transformers.AutoModelForCausalLM
        logs: Any = transformers.utils.logging
        logs.disable_progress_bar()
        try:
            model = auto.from_pretrained(str(path), dtype=dtype, **options)
        except (OSError, ValueError) as error:
            raise EngineError(f"model {str(path)!r}: {error}") from error
        return cls(model.to(device), config, name=f"hf:{Path(path).name}", decode=decode)

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int:
        return self._version

    @property
    def logprob_kind(self) -> LogprobKind:
        return self._config.logprob_kind

    @property
    def max_context(self) -> int | None:
        return self._limits.max_context

    @property
    def stats(self) -> HfStats:
        return self._scheduler.stats

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        check_request(prompt_ids, params, self._limits)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        job, stream = Job(prompt_ids, params, seed), _ChunkQueue()
        added = self._submit(partial(self._add, job, stream))
        is_open = True
        try:
            await asyncio.wrap_future(added)  # raises where nothing would ever come
            while is_open:
                item = await stream.items.get()
                is_open = isinstance(item, Chunk) and item.finish_reason is None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if is_open:
                with suppress(EngineError):  # closed meanwhile
                    self._submit(partial(self._remove, job))

    async def ready(self) -> None:
        pass

    def release_session(self, session: str) -> None:
        pass

    async def pause(self) -> None:
        """Returns when the step that was running is done."""
        await asyncio.wrap_future(self._submit(self._pause))

    async def resume(self, version: int | None = None) -> None:
        """Another version than the one of now means that somebody changed the weights in place: everything
        computed under the old ones is forgotten."""
        await asyncio.wrap_future(self._submit(partial(self._resume, version)))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies new weights into the model between two steps. What runs goes on behind its own ids.

        Names and shapes are those of the model's `state_dict`; a weight tied to another may be left out.
        A mapping that does not fit raises EngineInputError and changes nothing.
        """
        await asyncio.wrap_future(self._submit(partial(self._update_weights, weights, version)))

    async def close(self) -> None:
        """Generations that are open end with an EngineError."""
        with suppress(EngineError):  # closed already
            self._submit(self._stop, is_last=True)
        await asyncio.to_thread(self._thread.join)

    # The computing thread

    def _submit(self, task: Callable[[], T], *, is_last: bool = False) -> Future[T]:
        """Has something done between two steps; what is asked before the last thing is done for certain."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._is_closed:
                    raise EngineError(f"engine {self._name!r} is closed")
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)

        with self._submit_lock:
            if self._is_closing:
                raise EngineError(f"engine {self._name!r} is closed")
            self._is_closing = is_last
            self._tasks.put(run)
        return future

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._is_closed:
                    self._run_tasks()
                    if not self._is_idle:
                        self._step()
        finally:
            self._shut_down()

    @property
    def _is_idle(self) -> bool:
        return self._is_closed or self._is_paused or not self._scheduler.is_busy

    def _step(self) -> None:
        try:
            self._scheduler.step()
        except Exception as error:
            failure = EngineError(f"the model failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._scheduler.fail(failure)
        outbox = self._scheduler.outputs
        is_due = time.monotonic() - self._last_flush_s >= self._config.flush_s
        if is_due or any(item.is_first or item.is_last for item in outbox):
            self._flush()

    def _run_tasks(self) -> None:
        with suppress(queue.Empty):
            self._tasks.get(block=self._is_idle and not self._is_closed)()
            while True:
                self._tasks.get_nowait()()

    def _flush(self) -> None:
        """Hands what was sampled to the event loops, each woken once."""
        sampled, self._scheduler.outputs = self._scheduler.outputs, []
        self._last_flush_s = time.monotonic()
        by_job: dict[Job, list[StepOutput]] = defaultdict(list)
        for item in sampled:
            if item.job in self._queues:  # else dropped since
                by_job[item.job].append(item)
        by_loop: dict[asyncio.AbstractEventLoop, list[QueuedItem]] = defaultdict(list)
        for job, items in by_job.items():
            stream, last = self._queues[job], items[-1]
            if tokens := [item for item in items if item.error is None]:
                by_loop[stream.loop].append((stream, self._to_chunk(tokens)))
            if last.error is not None:
                by_loop[stream.loop].append((stream, last.error))
            if last.is_last:
                del self._queues[job]
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, deliveries)
            except RuntimeError:  # the loop is closed: nobody reads these any more
                for job in [job for job, stream in self._queues.items() if stream.loop is loop]:
                    self._remove(job)

    def _to_chunk(self, items: list[StepOutput]) -> Chunk:
        ids = np.array([item.token_id for item in items], np.int32)
        logprobs = np.array([item.logprob for item in items], np.float32)
        return Chunk(ids, logprobs, self._version, items[-1].finish_reason)

    def _add(self, job: Job, stream: _ChunkQueue) -> None:
        self._queues[job] = stream
        self._scheduler.add(job)

    def _remove(self, job: Job) -> None:
        self._scheduler.remove(job)
        self._queues.pop(job, None)

    def _pause(self) -> None:
        self._flush()
        self._is_paused = True

    def _resume(self, version: int | None) -> None:
        if version is not None and version != self._version:
            self._change_version(version)
        self._is_paused = False

    def _update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        own = self._model.state_dict()
        check_weights(weights, own)
        self._change_version(version)
        with torch.inference_mode(False), torch.no_grad():
            for key, value in weights.items():
                own[key].copy_(value)

    def _change_version(self, version: int) -> None:
        self._flush()  # what lies there was sampled under the old one
        self._scheduler.invalidate()
        self._version = version

    def _stop(self) -> None:
        self._is_closed = True

    def _shut_down(self) -> None:
        """Nothing waits for a thread that is gone."""
        with self._submit_lock:
            self._is_closing = self._is_closed = True
        for stream in self._queues.values():
            error: QueuedItem = (stream, EngineError(f"engine {self._name!r} was closed"))
            with suppress(RuntimeError):
                stream.loop.call_soon_threadsafe(_put_all, [error])
        self._queues.clear()
        self._scheduler.clear()
        self._run_tasks()


def _put_all(items: list[QueuedItem]) -> None:
    for stream, item in items:
        stream.items.put_nowait(item)
