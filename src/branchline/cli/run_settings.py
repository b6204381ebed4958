"""What a run of `branchline run` is: the settings that a resumed run must have again.

Left out is what changes how fast a run is, or where: places, time limits, retries, processes, the URLs of
engines and of the judge, device and memory of an embedded engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported late below: they need packages of the `serve` extra
    from branchline.chat.base import Codec
    from branchline.cli.commands.run import RunOptions
    from branchline.rollout.judge import RelativeJudge
    from branchline.rollout.rewards import RewardFunction, VerifierCommand
    from branchline.rollout.runners import Runner

_SAME_ENGINE_OPTIONS = (
    "engine",
    "model",
    "tokenizer",
    "codec",
    "family",
    "tool_parser",
    "reasoning_parser",
    "allow_special_tokens",
    "rule",
)


def describe_run(
    options: RunOptions,
    runners: Mapping[str, Runner],
    reward: RewardFunction | VerifierCommand | None,
    judge: RelativeJudge | None,
    codec: Codec | None,
) -> dict[str, Any]:
    """Returns the settings as JSON values. `codec` is None if gateways of a Ray cluster make their own."""
    from branchline.rollout.run_settings import describe_reward, describe_runners

    judge_model = options.judging.judge_model
    settings = {
        "agents": describe_runners(runners),
        "reward": options.agents.reward or describe_reward(reward),
        "judge": None if judge is None else {"model": judge_model, "rubric": _digest(judge.rubric)},
        "upstreams": sorted(text.partition("=")[0] for text in options.engines.upstream),
        "agent_reward": options.agent_reward,
        "session_options": dict(options.rollout.session),
        "oversample": options.rollout.oversample,
        "require_reward": options.rollout.require_reward,
        "max_staleness": options.rollout.max_staleness,
        **{name: getattr(options.engines, name) for name in _SAME_ENGINE_OPTIONS},
        **asdict(options.engines.template),
        "default_max_tokens": options.gateway.default_max_tokens,
    }
    # The tokenizer that a server reports, if no option names one.
    return settings if codec is None else {**settings, "template": codec.name}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
