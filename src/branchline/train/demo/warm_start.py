"""Makes the model that the demo starts from: a tokenizer, a tiny decoder, supervised steps on demonstrations.

Demonstrations are sessions of the demo's own agent through the gateway, with a demonstrator in place of the
model, so the model is trained on the ids that the gateway will show it. `make warm-start` writes the folder
that ships with the package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from branchline.chat.generic.codec import GenericCodec
from branchline.core.message import Message
from branchline.core.sample import Sample
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.scripted import ScriptedEngine
from branchline.export.packing import TrainingRow, pack_rows
from branchline.gateway.server import Gateway
from branchline.train.demo.archive import (
    MAX_TOKENS,
    WINDOW_TOKENS,
    ArchiveTask,
    run_archive_agent,
)
from branchline.train.demo.demonstrations import Demonstrator
from branchline.train.packed_forward import forward_packed

MODEL_FOLDER = Path(__file__).parent / "model"
_END, _START = "<|im_end|>", "<|im_start|>"
_CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' }}{%- for tool in tools %}\
{{- tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')\\n' }}\
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_ADDED = [_START, _END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def build_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Writes a byte-level tokenizer whose merges fit the texts of the task, and its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = Random(0)
    texts = []
    for _ in range(300):
        task = ArchiveTask.draw(rng)
        key = task.keys[task.item]
        texts += [
            f"system\nName the owner of an item.\nuser\nWho is the owner of the {task.item}?\nassistant\ntools\n",
            task.catalog, f"{task.item} {key}", str(task.records[key]), task.answer, "no record ok (deleted)",
            '\n{"name": "forget", "arguments": {"note": "' + f'{task.item} {key}"' + "}}\n",
            '\n{"name": "delegate", "arguments": {"task": "find ' + f'{key}"' + "}}\n",
            '\n{"name": "lookup", "arguments": {"key": "' + f'{key}"' + "}}\n",
            '\n{"name": "catalog", "arguments": {}}\n', "catalog()\nforget(note)\ndelegate(task)\nlookup(key)\n",
            f"Find a record.\nfind {key}", "tool\nThe clerk has looked into it and reports as follows. owner: ",
        ]  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(_START, special=True), AddedToken(_END, special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _ADDED[2:]])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _END,
                    "chat_template": _CHAT_TEMPLATE, "model_max_length": WINDOW_TOKENS}, indent=1)
    )  # fmt: skip


class RespellingCodec(GenericCodec):
    """Encodes replies with random other ids of the same text (BPE dropout)."""

    dropout = 0.05

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        reply = self.render_reply(message)
        assert reply is not None
        text, terminator = reply
        if not hasattr(self, "_dropping"):
            self._dropping = Tokenizer.from_file(str(self.tokenizer.path / "tokenizer.json"))
            self._dropping.model.dropout = self.dropout
        ids = self._dropping.encode(text, add_special_tokens=False).ids
        return as_ids([*ids, terminator] if stop else ids)


async def collect_demonstrations(codec: Any, count: int, seed: int, concurrency: int = 32) -> tuple[list[list[Sample]], list[float]]:
    rng = Random(seed)
    engine = ScriptedEngine(codec, Demonstrator(rng), max_context=WINDOW_TOKENS, chunk_size=64)
    tasks = [ArchiveTask.draw(rng) for _ in range(count)]
    episodes: list[list[Sample]] = []
    scores: list[float] = []
    async with Gateway(engine=engine, codec=codec) as gateway, AsyncOpenAI(api_key="-", base_url=gateway.url) as client:
        async def run(task: ArchiveTask) -> None:
            session = await gateway.session(agent="main")
            own = client.with_options(base_url=session.base_url, api_key=session.api_key)
            answer = await run_archive_agent(own, task)
            scores.append(task.score(answer))
            episodes.append((await session.finalize()).samples)
            gateway.sessions.evict(session.managed)
        pending = iter(tasks)
        async def work() -> None:
            for task in pending:
                await run(task)
        await asyncio.gather(*(work() for _ in range(concurrency)))
    return episodes, scores
