"""Demonstrations of mixed quality: they know every format and every step, and often choose a wrong step.

A demonstrator reads a prompt as text, as a model would, and returns the next message. At each decision it
takes the right step with the given probability. It acts in the demo's own agent, through the gateway, so the
demonstrations have the ids that the gateway will show the model.

    python -m branchline.train.demo.demonstrations FOLDER     # builds the tokenizer and demonstrations.npz
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
from openai import AsyncOpenAI

from branchline.chat.base import Codec
from branchline.core.message import Message, ToolCall
from branchline.core.sample import Sample
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.gateway.server import Gateway
from branchline.train.demo.archive import (
    ANIMALS,
    COLORS,
    DELETED,
    ITEMS,
    NAMES,
    WINDOW_TOKENS,
    ArchiveTask,
    run_archive_agent,
)
from branchline.train.demo.tokenizer import RespellingCodec, build_tokenizer

FILE_NAME = "demonstrations.npz"
_CONCURRENCY = 32
_PARTS = 16
"""Parts of the demonstrations, each with its own seed; processes collect them."""

_ITEM = re.compile(r"Who is the owner of the (\w+)\?")
_NOTE = re.compile(r'"note": "\w+ ([\w-]+)"')
_REPORT = re.compile(r"reports as follows\. (.*)\n")
_JOB = re.compile(r"find ([\w-]+)")


@dataclass(frozen=True)
class DemonstratorConfig:
    """Probabilities of the right step at each decision."""

    opens_catalog: float = 0.6
    deletes_page: float = 0.5
    delegates: float = 0.85
    looks_up: float = 0.55
    reads_owner: float = 0.75
    reports: float = 0.95


PERFECT = DemonstratorConfig(1, 1, 1, 1, 1, 1)


class Demonstrator:
    """A rule for a scripted engine."""

    def __init__(self, rng: Random, config: DemonstratorConfig | None = None) -> None:
        self._rng = rng
        self._config = config or DemonstratorConfig()

    def __call__(self, request: ScriptedRequest) -> Message:
        text = request.prompt_text
        return self._clerk(text) if "lookup(" in text else self._main(text)

    def _main(self, text: str) -> Message:
        config, item = self._config, self._find(_ITEM, text, self._rng.choice(ITEMS))
        if report := _REPORT.findall(text):
            return Message("assistant", report[-1]) if self._draw(config.reports) else self._guess()
        if DELETED in text:
            key = self._find(_NOTE, text, self._random_key())
            return self._delegate(key) if self._draw(config.delegates) else self._guess()
        if "catalog\n" in text:
            key = self._find(re.compile(rf"\n{item} ([\w-]+)"), text, self._random_key())
            if self._draw(config.deletes_page):
                return self._call("forget", note=f"{item} {key}")
            return self._delegate(key) if self._draw(0.7) else self._guess()
        if self._draw(config.opens_catalog):
            return self._call("catalog")
        return self._delegate(self._random_key()) if self._draw(0.4) else self._guess()

    def _clerk(self, text: str) -> Message:
        if owner := re.findall(r"\n(owner: \w+)", text):
            if self._draw(self._config.reads_owner):
                return Message("assistant", owner[-1])
            return Message("assistant", "owner: " + self._find(re.compile(r"keeper: (\w+)"), text, NAMES[0]))
        if "no record" in text:
            return self._guess()
        key = self._find(_JOB, text, self._random_key())
        if self._draw(self._config.looks_up):
            return self._call("lookup", key=key)
        return self._guess() if self._draw(0.8) else self._call("lookup", key=self._random_key())

    def _draw(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _guess(self) -> Message:
        return Message("assistant", f"owner: {self._rng.choice(NAMES)}")

    def _delegate(self, key: str) -> Message:
        return self._call("delegate", task=f"find {key}")

    def _random_key(self) -> str:
        return f"{self._rng.choice(COLORS)}-{self._rng.choice(ANIMALS)}"

    def _call(self, name: str, **arguments: str) -> Message:
        return Message("assistant", tool_calls=(ToolCall(name, json.dumps(arguments)),))

    def _find(self, pattern: re.Pattern[str], text: str, default: str) -> str:
        found = pattern.findall(text)
        return str(found[-1]) if found else default


@dataclass(frozen=True)
class DemonstratedEpisode:
    """The samples of a demonstration, and its score."""

    samples: Sequence[Sample]
    score: float


async def collect_demonstrations(
    codec: Codec,
    count: int,
    seed: int,
    config: DemonstratorConfig | None = None,
    *,
    has_lookup: bool = True,
) -> list[DemonstratedEpisode]:
    """Runs the agent on `count` tasks with a demonstrator in place of the model."""
    rng = Random(seed)
    engine = ScriptedEngine(codec, Demonstrator(rng, config), max_context=WINDOW_TOKENS, chunk_size=64)
    tasks = iter([ArchiveTask.draw(rng) for _ in range(count)])
    episodes: list[DemonstratedEpisode] = []
    gateway = Gateway(engine=engine, codec=codec)

    async def work(client: AsyncOpenAI) -> None:
        for task in tasks:
            session = await gateway.session(agent="main")
            own = client.with_options(base_url=session.base_url, api_key=session.api_key)
            answer = await run_archive_agent(own, task, has_lookup=has_lookup)
            export = await session.finalize()
            episodes.append(DemonstratedEpisode(export.samples, task.score(answer)))
            gateway.sessions.evict(session.managed)

    async with gateway, AsyncOpenAI(api_key="-", base_url=gateway.url) as client:
        await asyncio.gather(*(work(client) for _ in range(_CONCURRENCY)))
    return episodes


def save_demonstrations(path: Path, episodes: Sequence[DemonstratedEpisode]) -> None:
    """Writes the ids and shares of all samples to one file."""
    samples = [(index, sample) for index, episode in enumerate(episodes) for sample in episode.samples]
    np.savez_compressed(
        path,
        episodes=np.array([index for index, _ in samples], np.int32),
        prompt_lengths=np.array([len(sample.prompt_ids) for _, sample in samples], np.int32),
        lengths=np.array([len(sample) for _, sample in samples], np.int32),
        ids=np.concatenate(
            [part for _, sample in samples for part in (sample.prompt_ids, sample.response_ids)]
        ),
        shares=np.concatenate([sample.shares for _, sample in samples]),
    )


def _collect_part(folder: Path, count: int, seed: int) -> list[DemonstratedEpisode]:
    return asyncio.run(collect_demonstrations(RespellingCodec.open(folder), count, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the tokenizer and records demonstrations.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=1000)
    options = parser.parse_args()
    build_tokenizer(options.folder)
    size = -(-options.episodes // _PARTS)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        seeds = range(options.seed, options.seed + _PARTS)
        parts = pool.map(_collect_part, *zip(*((options.folder, size, seed) for seed in seeds), strict=True))
        episodes = [episode for part in parts for episode in part]
    save_demonstrations(options.folder / FILE_NAME, episodes)
    score = sum(episode.score for episode in episodes) / len(episodes)
    print(f"{len(episodes)} demonstrations, score {score:.3f}: {options.folder / FILE_NAME}")


if __name__ == "__main__":
    main()
