"""The public side of the embedded engine: async streams for its callers, one computing thread inside.

Everything that touches the model runs in that thread: a step, and between two steps the submitted tasks (add
a request, remove one, pause, update weights). So an update never overlaps with a step, and the event loop
never waits for the model. Every id carries the version of the weights that sampled it.

    engine = HfEngine.load("models/SmolLM2-135M-Instruct")
    async for chunk in engine.generate(ids, SamplingParams(max_tokens=64, stop_ids=(2,))):
        print(chunk.ids, chunk.logprobs, chunk.version, chunk.finish_reason)
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

from branchline.chat.vision import ImageProcessor, ImageSpan, VisionConfig
from branchline.core.errors import EngineError, EngineInputError, InputError
from branchline.core.model_folder import MODEL_FILES, find_model_folder, model_name
from branchline.core.token_arrays import Ids
from branchline.engines.base import STOP_FIELDS, Chunk, LogprobKind, SamplingParams
from branchline.engines.hf.compatibility import find_max_context
from branchline.engines.hf.devices import check_dtype, choose_device
from branchline.engines.hf.job import Job, StepOutput
from branchline.engines.hf.scheduler import HfConfig, HfStats, Scheduler
from branchline.engines.hf.validation import check_request, check_weights
from branchline.engines.hf.vision import IMAGE_MODEL_TYPES, VisionEncoder

T = TypeVar("T")
_MIXED_WEIGHTS = "the weights are partly updated, expected another update before anything is sampled"


class _TokenStream:
    """A job's tokens on their way from the computing thread to the event loop of its consumer."""

    def __init__(self, flush_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self.is_ended = False
        self._pending: list[StepOutput] = []
        self._flush_s = flush_s
        self._flush_at = 0.0
        """When pending tokens are due; the first ones are at once."""

    def append(self, output: StepOutput) -> None:
        self._pending.append(output)
        self.is_ended = output.is_last

    def take_due(self, now: float, version: int, *, force: bool) -> list[Chunk | Exception]:
        """Removes and returns the pending tokens as a chunk, and the error after them, if they are due."""
        outputs = self._pending
        if not outputs or not (force or self.is_ended or now >= self._flush_at):
            return []
        self._pending, self._flush_at = [], now + self._flush_s
        items: list[Chunk | Exception] = []
        error = outputs[-1].error
        if tokens := outputs if error is None else outputs[:-1]:
            ids = np.array([token.token_id for token in tokens], np.int32)
            logprobs = np.array([token.logprob for token in tokens], np.float32)
            last = tokens[-1]
            items.append(Chunk(ids, logprobs, version, last.finish_reason, last.job.num_preempted))
        return items if error is None else [*items, error]


class HfEngine:
    """A transformers causal language model that samples for many sessions at once."""

    supported_fields = STOP_FIELDS | {"logit_bias", "min_tokens", "allowed_token_ids"}
    constrains_raw_logprobs = False
    logprobs_after_truncation: bool | None = True
    greedy_logprob_temperature: float | None = 0.0
    """At temperature 0 the distribution sampled from is one id with probability 1."""

    def __init__(
        self,
        model: Any,
        config: HfConfig | None = None,
        *,
        name: str = "hf",
        version: int = 0,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """`image_processor` makes a vision-language model take images."""
        config = config or HfConfig()
        self.name = name
        self.version = version
        self.logprob_kind: LogprobKind = config.logprob_kind
        self.max_context: int | None = find_max_context(model.config.get_text_config())
        self._model = model.eval()
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._vision = None if image_processor is None else VisionEncoder(model, image_processor)
        self.supports_images = self._vision is not None
        self._scheduler = Scheduler(model, config, self._vision)
        self._streams: dict[Job, _TokenStream] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._modules = list(model.modules())
        self._is_paused = False
        self._has_mixed_weights = False
        """An update failed halfway; nothing is sampled until another one succeeds."""
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
        **options: Any,
    ) -> HfEngine:
        """Loads a model folder or a model by its Hugging Face name (`NAME` or `NAME@REVISION`).

        `options` go to `from_pretrained`. The default dtype is float32 on a CPU and the model's own on a GPU.
        """
        if "revision" in options:
            raise InputError(f"revision: got {options['revision']!r}, expected it in the name: NAME@REVISION")
        folder = find_model_folder(path, MODEL_FILES)
        device = choose_device(device)
        dtype = dtype or ("float32" if device == "cpu" else "auto")
        check_dtype(dtype)
        logs: Any = transformers.utils.logging
        logs.disable_progress_bar()
        try:
            model_config = transformers.AutoConfig.from_pretrained(str(folder))
            has_images = model_config.model_type in IMAGE_MODEL_TYPES
            auto: Any = (
                transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
            )
            model = auto.from_pretrained(str(folder), dtype=dtype, **options)
        except (OSError, ValueError) as error:
            raise EngineError(f"model {str(path)!r}: {error}") from error
        vision = VisionConfig.find(folder) if has_images else None
        processor = None if vision is None else ImageProcessor(vision)
        return cls(model.to(device), config, name=f"hf:{model_name(folder)}", image_processor=processor)

    @property
    def stats(self) -> HfStats:
        return self._scheduler.stats

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        check_request(prompt_ids, params, self._vocab_size, self.max_context)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        job = await self._create_job(prompt_ids, params, seed, images)
        stream = _TokenStream(params.flush_s)
        added = self._submit(partial(self._add, job, stream))
        is_open = True
        try:
            await asyncio.wrap_future(added)  # Raises if the engine was closed.
            while is_open:
                item = await stream.queue.get()
                is_open = isinstance(item, Chunk) and item.finish_reason is None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if is_open:
                with suppress(EngineError):  # The engine was closed.
                    self._submit(partial(self._remove, job))

    async def _create_job(
        self, prompt_ids: Ids, params: SamplingParams, seed: int, images: Sequence[ImageSpan]
    ) -> Job:
        if self._vision is None:
            if images:
                raise EngineInputError(
                    f"images: got {len(images)}, expected none: {self.name} takes no images"
                )
            return Job(prompt_ids, params, seed)
        decoded = await asyncio.to_thread(self._vision.decode, images, prompt_ids) if images else ()
        return Job(prompt_ids, params, seed, decoded, self._vision.positions(len(prompt_ids), decoded))

    async def ready(self) -> None:
        pass

    def release_session(self, session: str) -> None:
        pass  # The prefix cache is bounded and keyed by ids.

    async def pause(self) -> None:
        """Returns when the running step is complete."""
        await asyncio.wrap_future(self._submit(self._pause))

    async def resume(self, version: int | None = None) -> None:
        """A new version means that the weights were changed in place: drops everything computed before."""
        await asyncio.wrap_future(self._submit(partial(self._resume, version)))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies new weights into the model between two steps; generations continue after their own ids.

        Names and shapes are those of the model's `state_dict`; a weight tied to another may be left out.
        Raises EngineInputError, and changes nothing, if they do not fit. If copying fails, the engine keeps
        its version and samples nothing until another update succeeds.
        """
        await asyncio.wrap_future(self._submit(partial(self._update_weights, weights, version)))

    async def close(self) -> None:
        """Open generations end with an EngineError."""
        with suppress(EngineError):  # Closed already.
            self._submit(self._stop, is_last=True)
        await asyncio.to_thread(self._thread.join)

    # The computing thread

    def _submit(self, task: Callable[[], T], *, is_last: bool = False) -> Future[T]:
        """Runs a task between two steps. Tasks submitted before the last one are certain to run."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._is_closed:
                    raise EngineError(f"engine {self.name!r} is closed")
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)

        with self._submit_lock:
            if self._is_closing:
                raise EngineError(f"engine {self.name!r} is closed")
            self._is_closing = is_last
            self._tasks.put(run)
        return future

    def _run(self) -> None:
        try:
            if (threads := self._scheduler.limits.threads) is not None:
                torch.set_num_threads(threads)  # Of this thread only.
            with torch.inference_mode():
                while not self._is_closed:
                    self._run_tasks()
                    if not self._is_idle:
                        self._step()
        finally:
            self._shut_down()

    @property
    def _is_idle(self) -> bool:
        is_stopped = self._is_closed or self._is_paused or self._has_mixed_weights
        return is_stopped or not self._scheduler.is_busy

    def _run_tasks(self) -> None:
        with suppress(queue.Empty):
            self._tasks.get(block=self._is_idle and not self._is_closed)()
            while True:
                self._tasks.get_nowait()()

    def _step(self) -> None:
        # A trainer that shares the model may have left it in training mode, which means dropout.
        training = [module for module in self._modules if module.training]
        for module in training:
            module.training = False
        try:
            self._scheduler.step()
        except Exception as error:
            failure = EngineError(f"the model failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._scheduler.fail(failure)
        finally:
            for module in training:
                module.training = True
        for output in self._scheduler.take_outputs():
            if output.job in self._streams:
                self._streams[output.job].append(output)
        self._flush()

    def _flush(self, *, force: bool = False) -> None:
        """Passes the tokens of every stream that is due to its event loop, waking each loop once."""
        now = time.monotonic()
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_TokenStream, Chunk | Exception]]]
        by_loop = defaultdict(list)
        for job, stream in list(self._streams.items()):
            by_loop[stream.loop] += [
                (stream, item) for item in stream.take_due(now, self.version, force=force)
            ]
            if stream.is_ended:
                del self._streams[job]
        for loop, items in by_loop.items():
            try:
                if items:
                    loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # The loop is closed.
                for job in [job for job, stream in self._streams.items() if stream.loop is loop]:
                    self._remove(job)

    def _add(self, job: Job, stream: _TokenStream) -> None:
        self._streams[job] = stream
        self._scheduler.add(job)

    def _remove(self, job: Job) -> None:
        self._scheduler.remove(job)
        self._streams.pop(job, None)

    def _pause(self) -> None:
        self._flush(force=True)
        self._is_paused = True

    def _resume(self, version: int | None) -> None:
        if self._has_mixed_weights:
            raise EngineError(_MIXED_WEIGHTS)
        if version is not None and version != self.version:
            self._change_version(version)
        self._is_paused = False

    def _update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        own = self._model.state_dict()
        check_weights(weights, own)
        self._flush(force=True)  # Pending tokens were sampled under the old version.
        self._has_mixed_weights = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                for key, value in weights.items():
                    _copy_weight(own[key], value)
        except Exception as error:
            raise EngineError(f"{_MIXED_WEIGHTS}: {error}") from error
        finally:
            self._scheduler.invalidate()
        self._has_mixed_weights = False
        self.version = version

    def _change_version(self, version: int) -> None:
        self._flush(force=True)  # Pending tokens were sampled under the old version.
        self._scheduler.invalidate()
        self.version = version

    def _stop(self) -> None:
        self._is_closed = True

    def _shut_down(self) -> None:
        """Ends every stream and fails every task that is still queued."""
        with self._submit_lock:
            self._is_closing = self._is_closed = True
        for stream in self._streams.values():
            error = EngineError(f"engine {self.name!r} was closed")
            with suppress(RuntimeError):  # The loop is closed.
                stream.loop.call_soon_threadsafe(stream.queue.put_nowait, error)
        self._streams.clear()
        self._scheduler.clear()
        self._run_tasks()


def _copy_weight(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


def _put_all(items: list[tuple[_TokenStream, Chunk | Exception]]) -> None:
    for stream, item in items:
        stream.queue.put_nowait(item)
