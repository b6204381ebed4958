"""Run in ART's own environment: prints the weights and advantages that ART gives trajectories, as JSON.

python print_weights.py TOKENIZER < trajectories.json

The input is the trajectories of one group: their histories as messages and choices, and their rewards.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def read_items(items: list[dict[str, Any]]) -> list[Any]:
    """Messages stay JSON; choices become OpenAI's type, which ART trains."""
    from openai.types.chat.chat_completion import Choice

    return [Choice.model_validate(item) if "message" in item else item for item in items]


def tokenize_group(tokenizer: str, trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows that ART makes of a group, and the weights of its packed tensors."""
    import art
    from art.preprocessing.pack import packed_tensors_from_tokenized_results
    from art.preprocessing.tokenize import tokenize_trajectory_groups
    from art.trajectories import History
    from transformers import AutoTokenizer

    group = art.TrajectoryGroup(
        [
            art.Trajectory(
                messages_and_choices=read_items(raw["histories"][0]),
                additional_histories=[
                    History(messages_and_choices=read_items(items)) for items in raw["histories"][1:]
                ],
                reward=raw["reward"],
                metrics={"number": index},
            )
            for index, raw in enumerate(trajectories)
        ]
    )
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    results = list(tokenize_trajectory_groups(loaded, [group], False, True, shuffle_group_trajectories=False))
    packed = packed_tensors_from_tokenized_results(results, 4096)
    rows = [
        {
            "trajectory": int(result.trajectory.metrics["number"]),
            "trained_ids": [
                token for token, mask in zip(result.token_ids, result.assistant_mask, strict=True) if mask
            ],
            "weight": result.weight,
            "advantage": result.advantage,
        }
        for result in results
    ]
    return {"rows": rows, "packed_weights": packed["weights"][packed["assistant_mask"]].tolist()}


if __name__ == "__main__":
    print(json.dumps(tokenize_group(sys.argv[1], json.load(sys.stdin))))
