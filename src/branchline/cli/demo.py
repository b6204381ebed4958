"""`branchline demo`: a tiny model learns a task with a tool, a sub-agent and a context deletion."""

from __future__ import annotations

import sys

from rich.console import Console

from branchline.cli.commands.demo import DemoOptions
from branchline.cli.observability import configure_observability
from branchline.cli.run_folders import keep_config, new_run_folder


def run(options: DemoOptions) -> str:
    """Runs the demo; progress goes to stderr with --json, else to stdout."""
    from branchline.rollout.run_folder import check_run_folder
    from branchline.train.demo.demo import choose_settings, run_demo

    folder = options.run_folder or new_run_folder("demo")
    check_run_folder(folder, resume=options.resume)
    settings = choose_settings(options.settings, folder, resume=options.resume)
    if not options.resume:
        keep_config(folder, options)
    console = Console(file=sys.stderr if options.json else None)
    observability = configure_observability(options.logs)
    try:
        result = run_demo(
            settings,
            folder,
            console,
            resume=options.resume,
            gateway=options.gateway,
            observers=observability.observers,
            on_session_end=observability.on_end,
        )
    except KeyboardInterrupt:
        command = f"branchline demo --run-folder {folder} --resume"
        console.print(f"interrupted; continue with: {command}", highlight=False)
        raise
    finally:
        observability.close()
    return result.to_json() + "\n" if options.json else ""
