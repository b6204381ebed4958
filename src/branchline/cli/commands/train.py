"""The options and texts of `branchline train`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from branchline.cli.agents import AGENT_HELP, AgentOptions
from branchline.cli.observability import ObservabilityOptions, quiet_logs
from branchline.cli.options.command import Command
from branchline.core.option_fields import group, option
from branchline.gateway.config import GatewayConfig
from branchline.train.config import Schedule, TrainerConfig, UpdateConfig


@dataclass(frozen=True)
class TrainOptions:
    """A run of the trainer."""

    model: str | None = option(None, basic=True, metavar="DIR|NAME")
    """A folder or a Hugging Face name; by default the demo's small model."""
    run_folder: Path | None = option(None, basic=True, metavar="DIR")
    """The folder of the run; by default runs/train-TIME."""
    resume: bool = option(False, basic=True, needs={"run_folder": ()})
    """Continue the run in --run-folder, as what it was."""
    device: str | None = option(None, metavar="NAME")
    """cpu or cuda; by default cuda if there is one."""
    eval: str | None = option(None, basic=True, metavar="FILE")
    """Tasks that are not trained: the model is scored on them before the first step, every --eval-every steps
    and at the end, greedily and as it samples in training."""
    json: bool = option(False, basic=True)
    """Print the outcome as one JSON object."""
    agents: AgentOptions = group(AgentOptions, "agent and reward")
    training: TrainerConfig = group(TrainerConfig, "training")
    learning_rate: float | None = option(None, basic=True, metavar="RATE")
    """The step size of the optimizer; by default 5e-4 for the demo's model, else 1e-6."""
    max_batch_tokens: int | None = None
    """Tokens of one forward pass; by default 384 for the demo's model, else 4096. Less needs less memory; a
    longer row has a pass of its own."""
    schedule: Schedule | None = None
    """linear: the learning rate falls to 0 over the steps of the run; by default so for the demo's model,
    else constant."""
    update: UpdateConfig = group(
        UpdateConfig, "update", without=("learning_rate", "max_batch_tokens", "schedule")
    )
    gateway: GatewayConfig = group(GatewayConfig, "gateway", only=("explain_forks",))
    logs: ObservabilityOptions = group(quiet_logs, "logs")

    def __post_init__(self) -> None:
        self.update_config()

    def update_config(self) -> UpdateConfig:
        """The settings of updates, with what suits the model where none was given."""
        rate, tokens = (1e-6, 4096) if self.model else (5e-4, 384)
        schedule: Schedule = "constant" if self.model else "linear"
        return replace(
            self.update,
            learning_rate=rate if self.learning_rate is None else self.learning_rate,
            max_batch_tokens=tokens if self.max_batch_tokens is None else self.max_batch_tokens,
            schedule=self.schedule or schedule,
        )


_DESCRIPTION = """\
Trains a model with GRPO on the rewards of an agent. The agent runs as it is: each session is a URL and a key.
Its calls are recorded as exact tokens, every sampled token is trained once, and the engine gets the new
weights after each step.
"""
_EXAMPLES = """\
examples:
  branchline train examples/rollout/records.jsonl --agent examples.rollout.script_agent:run \\
      --reward examples.rollout.records:score --steps 30
      the demo's model (0.56 million weights), on a CPU, in a minute or two
  branchline train tasks.jsonl --agent my_agent:run --reward my_agent:score --steps 200 \\
      --model Qwen/Qwen3-0.6B --learning-rate 1e-6
  branchline train … --run-folder runs/first --resume
"""
_DETAILS = f"""\
{AGENT_HELP}
The run folder has metrics.jsonl, reward.png, config.json, config.yaml (the options, for --config) and
checkpoints that transformers and `branchline serve --model` load. However a run ends, its last complete step
is saved: by Ctrl-C, a failed agent, an error in an update. --resume continues from it, with its settings.

Exit codes: 0 trained, 1 no episode of a step finished, 2 bad input, 130 interrupted.
"""
COMMAND = Command("train", TrainOptions, "branchline.cli.train:run", _DESCRIPTION, _EXAMPLES, _DETAILS)
