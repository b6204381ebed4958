"""The task of the examples: find the owner in a record. The tool, the tasks and the reward.

python -m examples.rollout.records > examples/rollout/records.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from branchline import Trajectory

SYSTEM = "Find a record."
MAX_TURNS = 6
_COLORS = ("red", "blue", "green", "black", "white", "gold", "pink", "gray")
_ANIMALS = ("fox", "owl", "bear", "crow", "deer", "frog", "goat", "swan")
_NAMES = ("Rosa", "Omar", "Lena", "Hugo", "Ines", "Karl", "Mina", "Nils", "Tara", "Yuri")


def draw_tasks(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows with a key, its record and the expected answer."""
    rng = Random(seed)
    tasks: list[dict[str, Any]] = []
    for index in range(count):
        key = f"{rng.choice(_COLORS)}-{rng.choice(_ANIMALS)}"
        owner, keeper = rng.sample(_NAMES, 2)
        tasks.append(
            {
                "id": f"record{index}",
                "prompt": f"find {key}",
                "key": key,
                "record": f"keeper: {keeper}\nowner: {owner}",
                "answer": f"owner: {owner}",
            }
        )
    return tasks


def look_up(task: Mapping[str, Any], key: str) -> str:
    """The tool."""
    return str(task["record"]) if key == task["key"] else "no record"


def score(task: Mapping[str, Any], trajectory: Trajectory) -> float:
    """The reward: 1 if the last answer is the owner."""
    return float(trajectory.answer.strip() == task["answer"])


if __name__ == "__main__":
    for row in draw_tasks(200):
        print(json.dumps(row))
