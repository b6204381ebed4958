"""Scores a model on new archive tasks, and shows one of its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

from openai import AsyncOpenAI

from branchline.chat.base import Codec
from branchline.core.message import Message
from branchline.gateway.server import Gateway
from branchline.rollout.session_gateway import AgentSession
from branchline.train.demo.archive import ArchiveTask, run_archive_agent
from branchline.train.seeded_engine import SeededEngine
from branchline.tree.tree import Tree

_TASK_SEED = "evaluation"
"""Tasks of the evaluation are not those of any training step."""


@dataclass(frozen=True)
class Evaluation:
    """The mean score on new tasks, and the transcript of the first."""

    score: float
    transcript: str


async def evaluate(
    model: Any, codec: Codec, count: int, *, seed: int = 0, has_lookup: bool = True
) -> Evaluation:
    """Runs the agent on `count` tasks, sampled as in training. `has_lookup=False` is the control."""
    rng = Random(f"{_TASK_SEED} {seed}")
    tasks = [ArchiveTask.draw(rng) for _ in range(count)]
    engine = SeededEngine(deepcopy(model), name="evaluation", run_seed=seed)
    async with (
        Gateway(engine=engine, codec=codec) as gateway,
        AsyncOpenAI(api_key="-", base_url=gateway.url) as client,
    ):
        sessions = [await gateway.session(id=f"{_TASK_SEED}-{index}", eval=True) for index in range(count)]
        answers = await asyncio.gather(
            *(
                run_archive_agent(session_client(client, session), task, has_lookup=has_lookup)
                for session, task in zip(sessions, tasks, strict=True)
            )
        )
        scores = [task.score(answer) for task, answer in zip(tasks, answers, strict=True)]
        transcript = describe_episode(sessions[0].managed.session.tree)
    answer = answers[0] or "none: the conversation no longer fits the window"
    transcript += f"\nanswer: {answer}\nexpected: {tasks[0].answer}, score {scores[0]:g}"
    return Evaluation(sum(scores) / count, transcript)


def session_client(client: AsyncOpenAI, session: AgentSession) -> AsyncOpenAI:
    """Returns a client of a session that shares the connections of another client."""
    return client.with_options(base_url=session.base_url, api_key=session.api_key)


def describe_episode(tree: Tree) -> str:
    """Returns the messages of all calls in order, each once: what was sent, and what was sampled."""
    lines: list[str] = []
    shown: set[int] = set()
    for call in tree.calls:
        for node in tree.nodes[call.prompt_node].path():
            if node.id not in shown and not node.is_sampled and node.message.role in ("user", "tool"):
                lines.append(f"  {node.message.role}: {_shorten(node.message.content)}")
            shown.add(node.id)
        lines += [
            f"{call.agent or 'main'}: {_describe_answer(tree.nodes[id].message)}" for id in call.outputs
        ]
    return "\n".join(lines)


def _describe_answer(message: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join([*([message.content] if message.content else []), *calls])


def _shorten(text: str, lines: int = 3) -> str:
    parts: Sequence[str] = text.splitlines()
    return " / ".join(parts[:lines]) + (f" / … {len(parts) - lines} lines more" if len(parts) > lines else "")
