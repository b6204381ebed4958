"""ART's own weights and advantages of hand-made trajectories with additional histories, and ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchline import ExportPolicy, GenericCodec, History, Trajectory, TrajectoryGroup, training_rows
from branchline.core.reader import read_message
from branchline.export.credit import group_statistics
from tests.chat.families import load_tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "art" / "bin" / "python"
"""Made by `make test-art`."""
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def codec() -> GenericCodec:
    return GenericCodec(load_tokenizer("qwen3"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def choice(codec: GenericCodec, content: str, *tool_calls: tuple[str, str]) -> dict[str, Any]:
    """Returns a choice with ids in its logprobs, as vLLM writes it for ART."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = [
            {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(tool_calls)
        ]
    ids = codec.encode_reply(read_message(message)).tolist()
    entries = [
        {"token": f"token_id:{token}", "logprob": -0.5, "bytes": [], "top_logprobs": []} for token in ids
    ]
    logprobs = {"content": entries, "refusal": None}
    return {"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs}


def hand_made(codec: GenericCodec) -> list[dict[str, Any]]:
    """Returns the JSON of five trajectories of one group."""
    system = {"role": "system", "content": "You are a helpful assistant."}
    question, follow_up = user("What is 2+2?"), user("What is 3+3?")
    analyse = choice(codec, "", ("analyze_code", '{"task": "Find potential bugs in main.py"}'))
    result = {"role": "tool", "tool_call_id": "c0", "content": "Found 3 potential issues"}
    return [
        # One history.
        {"reward": 0.0, "histories": [[question, choice(codec, "5")]]},
        # One history for each turn, so that the thinking of every turn is trained.
        {
            "reward": 1.0,
            "histories": [
                [question, choice(codec, "<think>\nI need to add 2 and 2\n</think>\n\n4")],
                [
                    question,
                    {"role": "assistant", "content": "4"},
                    follow_up,
                    choice(codec, "<think>\nI need to add 3 and 3\n</think>\n\n6"),
                ],
            ],
        },
        # Sub-agents.
        {
            "reward": 2.0,
            "histories": [
                [
                    user("Analyze this codebase"),
                    analyse,
                    result,
                    choice(codec, "Three issues are fixed now."),
                ],
                [user("Find potential bugs in main.py"), choice(codec, "Found 3 potential issues")],
                [user("Fix the issue on line 42"), choice(codec, "Fixed by adding a null check")],
            ],
        },
        # Compaction.
        {
            "reward": 3.0,
            "histories": [
                [
                    system,
                    user("So far: the user asked about entanglement. Tell me more."),
                    choice(codec, "It was first described in 1935."),
                ],
                [system, user("Explain entanglement"), choice(codec, "Entanglement is a correlation.")],
            ],
        },
        # Several choices in each of several histories.
        {
            "reward": 5.0,
            "histories": [
                [question, choice(codec, "four"), follow_up, choice(codec, "six, as everyone knows")],
                [system, question, choice(codec, "It is 4."), follow_up, choice(codec, "It is 6.")],
                [user("Bye"), choice(codec, "Goodbye!")],
            ],
        },
    ]


def test_weights_and_advantages_of_five_trajectories_are_those_of_art(codec: GenericCodec) -> None:
    raw = hand_made(codec)
    done = subprocess.run(
        [PYTHON, Path(__file__).parent / "print_weights.py", TOKENIZER],
        input=json.dumps(raw),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    policy = ExportPolicy(include_inexact=True, shares="all")
    trajectories = [
        Trajectory.from_messages(
            one["histories"][0],
            additional_histories=[History.read(items) for items in one["histories"][1:]],
            codec=codec,
            reward=one["reward"],
            policy=policy,
        )
        for one in raw
    ]
    group = TrajectoryGroup(trajectories)
    number_of = [index for index, one in enumerate(trajectories) for _ in one.samples]
    rows = training_rows([group], normaliser="trajectory", group_std="population", scale_weights=False)
    std = group_statistics(group, group_std="population").std
    from_our_epsilon = (std + 1e-4) / (std + 1e-6)
    ours: list[list[float]] = [[] for _ in raw]
    for number, row in zip(number_of, rows, strict=True):
        trained = row.sample.response_mask != 0
        ours[number] += row.sample.response_ids[trained].tolist()
        their_rows = [one for one in theirs["rows"] if one["trajectory"] == number]
        np.testing.assert_allclose(row.weights[trained], their_rows[0]["weight"], rtol=1e-5)
        advantages = row.advantages[trained] * from_our_epsilon
        np.testing.assert_allclose(advantages, their_rows[0]["advantage"], rtol=1e-5)
        assert len({(one["weight"], one["advantage"]) for one in their_rows}) == 1
    assert [sorted(ids) for ids in ours] == [
        sorted(token for one in theirs["rows"] if one["trajectory"] == number for token in one["trained_ids"])
        for number in range(len(raw))
    ]
    scaled = np.concatenate([row.weights[row.weights > 0] for row in training_rows([group])])
    np.testing.assert_allclose(np.sort(scaled), np.sort(theirs["packed_weights"]), rtol=1e-5)
