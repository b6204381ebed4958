"""The options and texts of `branchline merge`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from branchline.cli.log_options import LOG_FORMAT_HELP, LogOptions
from branchline.cli.options.command import Command
from branchline.core.errors import InputError
from branchline.core.option_fields import group, option

_SAMPLES = {"samples": ()}


@dataclass(frozen=True)
class SelectionOptions:
    """Which calls are trained."""

    train_model: tuple[str, ...] = option((), basic=True, metavar="NAME")
    """Train the calls of this model only. A call's model is the one that its response names, else that of its
    request."""
    rule: tuple[str, ...] = option((), basic=True, metavar="KEY=VALUE,…")
    """model=PATTERN, agent=PATTERN, train=yes|no, as in `branchline serve`; the first matching rule applies,
    and calls without one are trained."""

    def __post_init__(self) -> None:
        if self.train_model and self.rule:
            raise InputError(f"rule: got {self.rule[0]!r}, expected either --rule or --train-model")


@dataclass(frozen=True)
class MergeOptions:
    """A log, and the samples of it."""

    log: LogOptions = group(LogOptions, "log")
    selection: SelectionOptions = group(SelectionOptions, "training")
    samples: Path | None = option(None, basic=True, metavar="FILE")
    """Write the samples to FILE: as Parquet if its name ends in .parquet, else one JSON object per line;
    after an error FILE is left as it was."""
    allow_missing_logprobs: bool = option(False, needs=_SAMPLES)
    """Train tokens without logprobs too, as null; by default they are an error."""
    missing_logprob: float | None = option(None, needs=_SAMPLES)
    """Train tokens without logprobs too, with this number as their logprob."""
    json: bool = option(False, basic=True)
    """Print one JSON object instead of tables."""


_DESCRIPTION = """\
Merges calls that were captured elsewhere into timelines: a call whose messages and token ids repeat the
prompt and the answer of another call continues that call. Prints the timelines, the forks with their causes,
and an account of every sampled token. With --samples, writes training samples to a file.
"""
_EXAMPLES = f"""\
example:
  branchline merge calls.jsonl --tokenizer Qwen/Qwen3-8B --samples samples.jsonl

{LOG_FORMAT_HELP}"""
COMMAND = Command("merge", MergeOptions, "branchline.cli.merge:run", _DESCRIPTION, _EXAMPLES)
