"""The options and texts of `branchline run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from branchline.cli.agents import AGENT_HELP, AgentOptions, JudgeOptions
from branchline.cli.engine_options import EngineOptions
from branchline.cli.observability import ObservabilityOptions, quiet_logs
from branchline.cli.options.command import Command
from branchline.core.choices import TrackerName
from branchline.core.option_fields import group, option
from branchline.gateway.config import GatewayConfig
from branchline.rollout.config import RolloutConfig

_RAY = {"ray": ()}


@dataclass(frozen=True)
class ClusterOptions:
    """Gateways and agents in the processes of a Ray cluster."""

    ray: str | None = option(None, metavar="auto|HOST:PORT")
    """Run gateways and agents in processes of a Ray cluster; auto: the cluster of this machine, or a new one
    on it. A gateway that dies is started again and continues its sessions; agents whose connection failed
    meanwhile are run again (--retry connection=2 is the default here)."""
    gateways: int | None = option(None, needs=_RAY)
    """Gateways in the cluster; by default one for each machine."""
    ray_runners: int | None = option(None, needs=_RAY)
    """Processes in the cluster that run agents, up to 1000 each; by default as many as gateways."""
    ray_journals: Path | None = option(None, metavar="DIR", needs=_RAY)
    """A folder on each machine's own disk for journals; by default journals are in the run folder."""


def _gateway() -> GatewayConfig:
    return GatewayConfig(drain_s=1.0)


@dataclass(frozen=True)
class RunOptions:
    """Agents on tasks, with a gateway and its engine."""

    run_folder: Path | None = option(None, basic=True, metavar="DIR")
    """The folder of the run; by default runs/run-TIME."""
    resume: bool = option(False, basic=True, needs={"run_folder": ()})
    """Continue the run in --run-folder, with the same tasks, agents, reward, engine and formats."""
    limit: int | None = option(None, basic=True)
    """Run the first N tasks only."""
    agent_reward: bool = False
    """The session's API key may post rewards, too."""
    sample_format: Literal["jsonl", "parquet"] = "jsonl"
    """Format of samples."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that get the metrics, too."""
    json: bool = option(False, basic=True)
    """Print the figures as one JSON object."""
    agents: AgentOptions = group(AgentOptions, "agent and reward")
    judging: JudgeOptions = group(JudgeOptions, "judge")
    rollout: RolloutConfig = group(RolloutConfig, "sessions")
    cluster: ClusterOptions = group(ClusterOptions, "more than one process or machine (needs ray)")
    engines: EngineOptions = group(EngineOptions, "engine")
    gateway: GatewayConfig = group(
        _gateway, "gateway", only=("max_in_flight", "default_max_tokens", "explain_forks")
    )
    logs: ObservabilityOptions = group(quiet_logs, "logs")


_DESCRIPTION = """\
Runs agents on tasks, n sessions for each. Every call of an agent goes through a gateway of this process and
is recorded as exact tokens. Each session is scored and written when it ends. An interrupted run continues
with --resume; no finished session is run again.
"""
_EXAMPLES = """\
examples:
  branchline run tasks.jsonl --agent my_agent:run --reward my_agent:score --n 8 --run-folder runs/first
      the model in this process; see --engine
  branchline run tasks.jsonl --command 'pi -p "$BRANCHLINE_PROMPT"' --reward-command 'python check.py' \\
      --engine vllm --engine-url http://127.0.0.1:8000 --n 4 --timeout-s 600 --run-folder runs/pi
      an external agent, a vLLM server, a verifier
  branchline run tasks.jsonl --agent my_agent:run --run-folder runs/first --resume
"""
_DETAILS = f"""\
more examples:
  branchline run tasks.jsonl --agent my_agent:run --judge-url http://host/v1 --judge-model big
  branchline run tasks.jsonl --agent my_agent:run --ray auto --gateways 4 \\
      --engine vllm --engine-url http://10.0.0.9:8000
      gateways and agents in processes of a Ray cluster, spread over its machines

{AGENT_HELP}\
  --judge-url, --judge-model  an LLM that scores the sessions of each task relative to each other

The run folder gets trajectories.jsonl (a line for each session: task, agent_name, session, status, reward,
histories, metrics), samples.jsonl or samples/*.parquet, stats.json, config.yaml (the options, for --config),
the journal, and logs of commands. The status of a session is finished, failed (the agent, the reward or the
judge broke) or aborted (stopped early, too old, interrupted). Failed and aborted sessions keep their
histories and have no samples.

Exit codes: 0 at least one session finished, 1 none did, 2 bad input, 130 interrupted.
"""
COMMAND = Command(
    "run",
    RunOptions,
    "branchline.cli.run:run",
    _DESCRIPTION,
    _EXAMPLES,
    _DETAILS,
    renamed={"out": "run_folder", "samples": "sample_format"},
)
