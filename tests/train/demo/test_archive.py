"""The archive task: each of its parts is needed, and the reward reads the outcome only."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from branchline.chat.generic.codec import GenericCodec
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.server import Gateway
from branchline.timelines.causes import classify_forks
from branchline.train.demo.archive import CHANCE, NAMES, WINDOW_TOKENS, ArchiveTask, run_archive_agent
from branchline.train.demo.demonstrations import (
    PERFECT,
    Demonstrator,
    DemonstratorConfig,
    collect_demonstrations,
)
from branchline.train.demo.tokenizer import RespellingCodec, build_tokenizer

EPISODES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(path)
    return path


def mean_score(
    folder: Path, config: DemonstratorConfig, *, has_lookup: bool = True, count: int = EPISODES
) -> float:
    codec = GenericCodec.open(folder)
    episodes = asyncio.run(collect_demonstrations(codec, count, 3, config, has_lookup=has_lookup))
    return sum(episode.score for episode in episodes) / count


def test_the_right_steps_always_find_the_owner(folder: Path) -> None:
    assert mean_score(folder, PERFECT) == 1


def test_without_the_tool_the_right_steps_score_at_chance(folder: Path) -> None:
    # 40 draws with probability 0.1: 0.34 would be five standard deviations above it.
    assert 1 / len(NAMES) == CHANCE
    assert mean_score(folder, PERFECT, has_lookup=False, count=40) < 0.34


@pytest.mark.parametrize("step", ["opens_catalog", "deletes_page", "delegates", "looks_up"])
def test_without_one_of_the_steps_the_score_is_at_chance(folder: Path, step: str) -> None:
    # 12 draws with probability 0.1: 0.55 would be five standard deviations above it.
    assert mean_score(folder, replace(PERFECT, **{step: 0.0})) < 0.55


def test_the_demonstrations_score_far_below_the_right_steps(folder: Path) -> None:
    assert mean_score(folder, DemonstratorConfig(), count=40) < 0.4


def test_an_episode_has_a_sub_agent_and_a_context_deletion_and_loses_no_token(folder: Path) -> None:
    async def run_episode() -> None:
        codec = RespellingCodec.open(folder)
        engine = ScriptedEngine(codec, Demonstrator(Random(1), PERFECT), max_context=WINDOW_TOKENS)
        async with Gateway(engine=engine, codec=codec) as gateway:
            from openai import AsyncOpenAI

            session = await gateway.session(agent="main")
            async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
                task = ArchiveTask.draw(Random(1))
                assert task.score(await run_archive_agent(client, task)) == 1
            export = await session.finalize()
        causes = Counter(fork.cause for fork in classify_forks(session.managed.session.tree).forks)
        assert causes == {"sub_agent": 1, "context_delete": 1}
        assert export.report.is_balanced
        assert export.report.trained_tokens == export.report.sampled_tokens
        assert len(export.samples) == 3
        assert all(sample.exact for sample in export.samples)

    asyncio.run(run_episode())


def test_only_the_exact_answer_scores() -> None:
    task = ArchiveTask.draw(Random(0))
    assert task.score(f" {task.answer}\n") == 1
    assert task.score("") == task.score(task.answer[:-1]) == task.score(f"{task.answer} {task.answer}") == 0


def test_replies_are_sometimes_spelled_with_other_ids(folder: Path) -> None:
    codec, plain = RespellingCodec.open(folder), GenericCodec.open(folder)
    engine_rule = Demonstrator(Random(0), PERFECT)
    message = engine_rule._call("lookup", key="red-fox")
    spellings = {codec.encode_reply(message).tobytes() for _ in range(40)}
    assert len(spellings) > 1
    texts = {plain.decode(plain.encode_reply(message))}
    assert texts == {codec.decode(codec.encode_reply(message)) for _ in range(40)}
