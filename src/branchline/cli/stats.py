"""`branchline stats`: the figures of a run, computed from the lines of its sessions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from branchline.cli.commands.stats import StatsOptions
from branchline.cli.render import format_count, pluralize, sanitize, to_text

_MAX_REASONS = 10


def run(options: StatsOptions) -> str:
    """The figures, as a table or as JSON."""
    from branchline.rollout.run_folder import find_run_folder
    from branchline.rollout.stats import RolloutStats

    stats = RolloutStats.from_lines(find_run_folder(options.run_folder).read_trajectory_lines()).to_json()
    if options.json:
        return msgspec.json.encode(stats).decode() + "\n"
    return render_stats(stats, options.run_folder)


def render_stats(stats: Mapping[str, Any], folder: Path) -> str:
    """The figures as text."""
    table = Table.grid(padding=(0, 2))
    if stats["runs"] > 1:
        table.add_row("runs", format_count(stats["runs"]))
    counts = ", ".join(f"{format_count(stats[name])} {name}" for name in ("finished", "failed", "aborted"))
    table.add_row("sessions", f"{format_count(stats['sessions'])}: {counts}")
    prompts = stats["prompts"]
    table.add_row(
        "tasks", f"{format_count(prompts['finished'])} finished, {format_count(prompts['failure'])} failed"
    )
    finished, rewarded = stats["finished"], stats["rewarded"]
    which = "finished sessions" if rewarded == finished else f"the {rewarded} finished sessions that have one"
    if rewarded:
        table.add_row("reward", f"{stats['reward_mean']:.4f} (mean of {which})")
    elif finished:
        table.add_row("reward", "no finished session has one")
    sampled, delivered = stats["sampled_tokens"], stats["delivered_tokens"]
    percent = f" ({delivered / sampled:.1%})" if sampled else ""
    samples = pluralize(stats["samples"], "sample")
    table.add_row(
        "tokens",
        f"{format_count(sampled)} sampled, {format_count(delivered)} delivered{percent} in {samples}",
    )
    causes = ", ".join(f"{cause} {format_count(count)}" for cause, count in stats["fork_causes"].items())
    table.add_row("forks", format_count(stats["forks"]) + (f": {causes}" if causes else ""))
    dropped = ", ".join(
        f"{reason} {format_count(count)}" for reason, count in stats["dropped_tokens"].items()
    )
    if dropped:
        table.add_row("dropped tokens", dropped)
    lines: list[RenderableType] = [table]
    titles = {"failure_reasons": "failed", "abort_reasons": "aborted", "refused": "not written"}
    for name, title in titles.items():
        reasons = list(stats.get(name, {}).items())
        lines += [
            Text(f"  {title} {count} × {sanitize(reason, 200)}") for reason, count in reasons[:_MAX_REASONS]
        ]
        if len(reasons) > _MAX_REASONS:
            lines.append(Text(f"  {len(reasons) - _MAX_REASONS} more reasons; --json lists them all"))
    lines.append(Text(f"folder: {folder}"))
    return to_text(*lines)
