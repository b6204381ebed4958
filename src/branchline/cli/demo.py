"""`branchline demo`: a tiny model learns a task with a tool, a sub-agent and a context deletion."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from branchline.core.errors import InputError

_DESCRIPTION = """\
Trains a tiny language model (0.56 million weights, part of the package) on a task, on a CPU, in minutes.

The task is to name the owner of an item. The agent has to open a catalog, note a key and delete the long page
from its context, and delegate to a sub-agent, which has to call a tool. It is an ordinary program with the
openai package. Its calls go through a gateway over HTTP, which records them as exact tokens; GRPO trains on
them, and the engine of the gateway gets the new weights after each step. Only the final answer is rewarded.
"""
_EPILOG = """\
examples:
  branchline demo                          train, draw reward.png, show an episode before and after
  branchline demo --seed 1 --steps 20      another run, shorter
  branchline demo --json                   the last line of stdout is one JSON object
  branchline demo --resume runs/demo-…     continue a run that was interrupted with Ctrl-C

The run folder has metrics.jsonl, reward.png, transcripts.md and checkpoints that transformers loads:
  branchline serve --model runs/demo-…/checkpoints/step-…

Exit codes: 0 the run is complete (it says whether the model learned), 2 bad input, 130 interrupted.
"""


def add_demo(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="train a tiny model on a CPU and watch it learn",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of tasks and sampling (default: 0)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: 60)")
    parser.add_argument(
        "--run-folder", type=Path, metavar="DIR", help="folder of a new run (default: runs/demo-TIME)"
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in this folder")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Runs the demo; progress goes to stderr with --json, else to stdout."""
    if options.resume is not None:
        for name in ("seed", "steps", "run_folder"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"--{name.replace('_', '-')}: expected none with --resume: a run keeps its own"
                )
    from branchline.train.demo.demo import DemoSettings, run_demo

    given = {name: getattr(options, name) for name in ("seed", "steps") if getattr(options, name) is not None}
    folder = options.resume or options.run_folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    console = Console(file=sys.stderr if options.json else None)
    try:
        result = run_demo(DemoSettings(**given), folder, console, resume=options.resume is not None)
    except KeyboardInterrupt:
        console.print(f"interrupted; continue with: branchline demo --resume {folder}", highlight=False)
        raise
    return result.to_json() + "\n" if options.json else ""
