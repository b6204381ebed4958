"""The model that the run starts from: SmolLM2-135M with a template for tools, trained on demonstrations.

SmolLM2's own template shows no tools. The demonstrations have mixed quality: they know every format and every
step, and often choose a wrong step, so a model that imitates them succeeds in about a quarter of the tasks.
They are recorded with the agent itself, through the gateway, and have the ids that the gateway will show.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI

from branchline.chat.base import Codec
from branchline.core.message import Message, ToolCall
from branchline.core.sample import Sample
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.export.packing import TrainingRow
from branchline.gateway.server import Gateway
from branchline.train.demo.evaluation import session_client
from branchline.train.demo.warm_start import supervised_loss
from examples.smollm2_gpu.shop import ITEMS, MAX_PRICE, ShopTask, run_shop_agent

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '<tools>\\n' }}
{%- for tool in tools %}{{- tool.function | tojson + '\\n' }}{%- endfor %}
{{- '</tools>\\nA call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '}</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with tools. Calls have the form of Hermes and Qwen templates."""

_CONCURRENCY = 32
_BATCH_ROWS = 16
_WARM_UP_STEPS = 10
_QUESTION = re.compile(r"How much for (one|\d+) (?:each|pieces) of: ([\w, ]+)\?")
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>")


def write_tool_folder(source: Path, folder: Path) -> None:
    """Copies a model folder, without its weights, and gives it the template for tools."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


@dataclass(frozen=True)
class ShopDemonstratorConfig:
    """Probabilities of the right step at each decision."""

    looks_up: float = 0.7
    """For each item: call `price` with it."""
    calculates: float = 0.6
    answers: float = 0.8


PERFECT = ShopDemonstratorConfig(1, 1, 1)


class ShopDemonstrator:
    """A rule for a scripted engine: it reads a prompt as text, as a model would, and returns a message."""

    def __init__(self, rng: Random, config: ShopDemonstratorConfig | None = None) -> None:
        self._rng = rng
        self._config = config or ShopDemonstratorConfig()

    def __call__(self, request: ScriptedRequest) -> Message:
        text = request.prompt_text
        found = _QUESTION.search(text)
        assert found is not None, f"expected a question in {text!r}"
        count, items = found[1], found[2].split(", ")
        results = _RESULT.findall(text)
        if '"calculate", "arguments"' in text:
            return self._answer(results[-1])
        if len(results) < len(items):
            return self._look_up(items[len(results)], results)
        return self._calculate(
            results if count == "one" else [count, *results], "+" if count == "one" else "*"
        )

    def _look_up(self, item: str, results: Sequence[str]) -> Message:
        if self._is_right(self._config.looks_up):
            return _call("price", item=item)
        choice = self._rng.random()
        if choice < 0.3:
            return _call("price", item=self._rng.choice(ITEMS))
        if choice < 0.6:
            return _call("calculate", expression=" + ".join([*results, str(self._random_price())]))
        return Message("assistant", str(self._random_price()))

    def _calculate(self, numbers: Sequence[str], operator: str) -> Message:
        if self._is_right(self._config.calculates):
            return _call("calculate", expression=f" {operator} ".join(numbers))
        choice = self._rng.random()
        if choice < 0.4:
            other = "*" if operator == "+" else "+"
            return _call("calculate", expression=f" {other} ".join(numbers))
        if choice < 0.7:
            wrong = [*numbers[:-1], str(self._random_price())]
            return _call("calculate", expression=f" {operator} ".join(wrong))
        return Message("assistant", self._rng.choice([*numbers, str(self._random_price())]))

    def _answer(self, result: str) -> Message:
        right = self._is_right(self._config.answers) and not result.startswith("error")
        return Message("assistant", result if right else str(self._random_price()))

    def _is_right(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _random_price(self) -> int:
        return self._rng.randint(2, MAX_PRICE)


def _call(name: str, **arguments: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, json.dumps(arguments)),))


@dataclass(frozen=True)
class Demonstrations:
    """The samples of some episodes, and their mean score."""

    samples: Sequence[Sample]
    score: float


async def collect_demonstrations(
    codec: Codec, count: int, seed: int, config: ShopDemonstratorConfig | None = None
) -> Demonstrations:
    """Runs the agent on `count` tasks with a demonstrator in place of the model."""
    rng = Random(f"demonstrations {seed}")
    gateway = Gateway(engine=ScriptedEngine(codec, ShopDemonstrator(rng, config), chunk_size=64), codec=codec)
    tasks = iter([ShopTask.draw(rng) for _ in range(count)])
    samples: list[Sample] = []
    scores: list[float] = []

    async def work(client: AsyncOpenAI) -> None:
        for task in tasks:
            session = await gateway.session(agent="main")
            result = await run_shop_agent(session_client(client, session), task)
            export = await session.finalize()
            samples.extend(export.samples)
            scores.append(task.score(result.answer))
            gateway.sessions.evict(session.managed)

    async with gateway, AsyncOpenAI(api_key="-", base_url=gateway.url) as client:
        await asyncio.gather(*(work(client) for _ in range(_CONCURRENCY)))
    return Demonstrations(samples, sum(scores) / len(scores))


def train_warm_start(
    model: Any,
    samples: Sequence[Sample],
    *,
    passes: int,
    learning_rate: float,
    max_tokens: int,
    seed: int = 0,
) -> list[float]:
    """Trains a model to imitate samples; returns the loss of each step."""
    rng = Random(f"warm start {seed}")
    batches: list[list[Sample]] = []
    for _ in range(passes):
        order = rng.sample(list(samples), len(samples))
        batches += [order[start : start + _BATCH_ROWS] for start in range(0, len(order), _BATCH_ROWS)]
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            warm_up, decay = min(1.0, (step + 1) / _WARM_UP_STEPS), 1 - step / len(batches)
            group["lr"] = learning_rate * warm_up * decay
        rows = [TrainingRow(sample, sample.shares, np.ones_like(sample.shares)) for sample in batch]
        optimizer.zero_grad()
        losses.append(supervised_loss(model, rows, max_tokens, train=True))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == len(batches) - 1:
            print(f"warm start: step {step + 1} of {len(batches)}, loss {losses[-1]:.4f}", flush=True)
    return losses
