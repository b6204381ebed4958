"""The options and texts of `branchline doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from branchline.cli.engine_options import TemplateOptions
from branchline.cli.options.command import Command
from branchline.core.choices import HistoryPolicy
from branchline.core.option_fields import group, option


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """A template, and a log to replay."""

    calls: Path | None = option(None, positional=True, metavar="CALLS.jsonl")
    """A log to replay, one call per line."""
    tokenizer: str = option(basic=True, metavar="DIR|NAME")
    """A folder with tokenizer.json and the chat template, or a Hugging Face name."""
    history: HistoryPolicy = option("template", basic=True)
    """The policy to judge; figures are given for both."""
    skip_bad: bool = option(False, basic=True, needs={"calls": ()})
    """Skip lines that cannot be read, and count them."""
    json: bool = option(False, basic=True)
    """Print one JSON object instead of lines."""
    template: TemplateOptions = group(TemplateOptions, "template")


_DESCRIPTION = """\
Checks a model's chat template: whether it is append-only, strips thinking, moves the system text, drops text
next to tool calls or prints dates, and whether the model's replies can be parsed. With a log, its
conversations are replayed under both history policies, to show how often each forks and what that costs in
tokens. Ends with safe (exit code 0) or unsafe (1), and one sentence of advice.
"""
_EXAMPLES = """\
example:
  branchline doctor --tokenizer Qwen/Qwen3-8B
  branchline doctor --tokenizer ~/models/Qwen3-8B calls.jsonl --history verbatim
  branchline doctor --tokenizer ~/models/Qwen3-8B --json | jq '.findings[] | select(.ok | not)'

history policies:
  template  a prompt shows what the chat template shows for the conversation. If the template leaves out or
            moves something, the prompt forks from the path that was sampled.
  verbatim  the path stays as it was sampled, and only new messages are rendered after it.

`branchline merge --help` shows what a line of CALLS.jsonl looks like.
"""
COMMAND = Command("doctor", DoctorOptions, "branchline.cli.doctor:run", _DESCRIPTION, _EXAMPLES)
