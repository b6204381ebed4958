"""The options and texts of `branchline demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from branchline.cli.observability import ObservabilityOptions, quiet_logs
from branchline.cli.options.command import Command
from branchline.core.option_fields import group, option
from branchline.gateway.config import GatewayConfig
from branchline.train.demo.settings import DemoSettings


@dataclass(frozen=True)
class DemoOptions:
    """A run of the demo."""

    run_folder: Path | None = option(None, basic=True, metavar="DIR")
    """The folder of the run; by default runs/demo-TIME."""
    resume: bool = option(False, basic=True, needs={"run_folder": ()})
    """Continue the run in --run-folder; it keeps its seed and its steps."""
    json: bool = option(False, basic=True)
    """Print the outcome as one JSON object."""
    settings: DemoSettings = group(DemoSettings, "training")
    gateway: GatewayConfig = group(GatewayConfig, "gateway", only=("explain_forks",))
    logs: ObservabilityOptions = group(quiet_logs, "logs")


_DESCRIPTION = """\
Trains a tiny language model (0.56 million weights, part of the package) on a task, on a CPU, in minutes.

The task is to name the owner of an item. The agent has to open a catalog, note a key and delete the long page
from its context, and delegate to a sub-agent, which has to call a tool. It is an ordinary program with the
openai package. Its calls go through a gateway over HTTP, which records them as exact tokens; GRPO trains on
them, and the engine of the gateway gets the new weights after each step. Only the final answer is rewarded.
"""
_EXAMPLES = """\
examples:
  branchline demo                          train, draw reward.png, show an episode before and after
  branchline demo --seed 1 --steps 20      another run, shorter
  branchline demo --json                   the last line of stdout is one JSON object
  branchline demo --run-folder runs/demo-… --resume
                                           continue a run that was interrupted with Ctrl-C

The run folder has metrics.jsonl, reward.png, transcripts.md, config.yaml (the options, for --config), and
checkpoints that transformers loads:
  branchline serve --model runs/demo-…/checkpoints/step-…

Exit codes: 0 the run is complete (it says whether the model learned), 2 bad input, 130 interrupted.
"""
COMMAND = Command("demo", DemoOptions, "branchline.cli.demo:run", _DESCRIPTION, _EXAMPLES)
