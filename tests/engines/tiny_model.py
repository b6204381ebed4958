"""A tiny random model, its reference outputs by transformers, and an embedded engine that runs it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Engine, SamplingParams
from tests.hang import HANG_S, fail_if_hung

SKIP_REASON = "torch and transformers are not installed: make test-hf"
torch = pytest.importorskip("torch", reason=SKIP_REASON)
transformers = pytest.importorskip("transformers", reason=SKIP_REASON)
hf = pytest.importorskip("branchline.engines.hf", reason=SKIP_REASON)

# For a model this small a second thread only adds waiting.
torch.set_num_threads(1)

VOCAB = 1000
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(seed: int = 0, kind: str = "Qwen3", **changes: Any) -> Any:
    """A random model whose outputs are not repetitive."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**CONFIG, **changes})
    attention = changes.get("attn_implementation", "sdpa")
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def prompt(seed: int, size: int) -> Ids:
    return as_ids(np.random.default_rng(seed).integers(0, VOCAB - 1, size))


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **changes)


def reference_ids(model: Any, ids: Ids, max_tokens: int) -> list[int]:
    """The ids that `generate` gives for this prompt alone."""
    batch = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.inference_mode():
        output = model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=max_tokens, do_sample=False
        )
    return list(output[0, len(ids) :].tolist())


def full_logprobs(model: Any, ids: Sequence[int], start: int) -> Any:
    """The log-softmax before each id from `start` on, computed in one forward pass without a cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)])).logits[0]
    return logits[start - 1 : -1].float().log_softmax(-1)


@dataclass
class CollectedOutput:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_preempted: int = 0
    finish_reason: str | None = None
    chunks: int = 0


async def collect(engine: Engine, ids: Ids, params: SamplingParams) -> CollectedOutput:
    output = CollectedOutput()
    async for chunk in engine.generate(ids, params):
        assert output.finish_reason is None
        assert chunk.logprobs is not None
        output.ids += chunk.ids.tolist()
        output.logprobs += chunk.logprobs.tolist()
        output.versions += [chunk.version] * len(chunk.ids)
        output.num_preempted = chunk.num_preempted
        output.finish_reason = chunk.finish_reason
        output.chunks += 1
    return output


@asynccontextmanager
async def running_engine(model: Any, config: Any = None, **options: Any) -> AsyncIterator[Any]:
    engine = hf.HfEngine(model, config, **options)
    try:
        yield engine
    finally:
        await engine.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(fail_if_hung(test))


class ForwardGate:
    """Holds the computing thread in the model's n-th forward pass until a test has submitted a task."""

    def __init__(self, model: Any, forwards: int) -> None:
        self.forward, self.remaining = model.forward, forwards
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        model.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.remaining -= 1
        if self.remaining == 0:
            self.is_reached.set()
            assert self.is_open.wait(HANG_S)
        return self.forward(*args, **kwargs)

    async def run_during_step(self, action: Coroutine[Any, Any, None]) -> None:
        """Starts an action in the middle of a step, and returns when it is done."""
        await asyncio.to_thread(self.is_reached.wait)
        task = asyncio.create_task(action)
        await asyncio.sleep(0)
        self.is_open.set()
        await task
