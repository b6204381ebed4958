"""Reading a log of calls for the commands `merge` and `tree`: one merged tree for each session.

A log is read completely before a command prints anything, so a bad line leaves stdout empty. How bad lines
are reported is the same for all commands that read a log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from branchline.chat.base import reply_to_text
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.cli.render import more_lines, pluralize, sanitize
from branchline.core.call import Request
from branchline.core.errors import CodecError, InputError, LogError
from branchline.core.message import Message
from branchline.core.token_arrays import Ids
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.diagnosis import Diagnosis, diagnose
from branchline.timelines.links import CompareLevel, MergePolicy
from branchline.timelines.log import LoggedCall, LogReader, group_by_session, with_encoded_ids
from branchline.timelines.merge import MergeResult, merge

_DEFAULTS = MergePolicy()
_MAX_SKIPPED = 10
_PROGRESS_BAR_BYTES = 5_000_000
"""Size of a log whose reading takes long enough for a progress bar."""

LOG_FORMAT_HELP = """\
one line of CALLS.jsonl (wrapped here):
  {"session": "task-7", "agent": "planner",
   "request": {"messages": [{"role": "user", "content": "Say a word."}]},
   "response": {"prompt_token_ids": [11, 12, 13],
                "choices": [{"message": {"role": "assistant", "content": "Luminous"},
                             "finish_reason": "stop", "token_ids": [21, 22],
                             "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}}]}}
  request and response are those of a chat completion, with token ids in the fields that vLLM fills under
  return_token_ids. session, agent, token ids and logprobs are optional; without token ids and logprobs
  nothing can be trained exactly.

compare levels:
  text   a call continues an output if its messages repeat it: roles, texts and tool calls. If the later
         prompt has other token ids for that text (re-tokenization drift), the sampled ids are put back
         and outputs that were sampled after the other ids are marked inexact. --exact forks instead.
  token  a call continues an output only if its prompt begins with exactly the same token ids.
"""


@dataclass(frozen=True)
class LoggedSession:
    """The calls of one session of a log, and the tree they were merged into."""

    name: str
    calls: list[LoggedCall]
    merged: MergeResult

    @cached_property
    def fork_report(self) -> ForkReport:
        return classify_forks(self.merged.tree)


@dataclass(frozen=True)
class CallLogFile:
    """A log file, read and merged."""

    path: Path
    sessions: list[LoggedSession]
    skipped: list[LogError]
    tokenizer: TokenizerDir | None

    @cached_property
    def codec(self) -> GenericCodec | None:
        """The codec of the tokenizer, if it has a chat template that can be used."""
        if self.tokenizer is None or not self.tokenizer.has_template:
            return None
        try:
            return GenericCodec(self.tokenizer)
        except CodecError:
            return None

    @property
    def calls(self) -> int:
        return sum(len(session.calls) for session in self.sessions)

    def diagnoses(self, session: LoggedSession) -> list[Diagnosis]:
        """A diagnosis of every fork of a session, with decoded text if the log has a tokenizer."""
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        return [diagnose(session.merged.tree, fork, decode) for fork in session.fork_report.forks]


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command that reads a log; their defaults come from MergePolicy."""
    parser.add_argument(
        "calls", type=Path, metavar="CALLS.jsonl", help="the log: one call per line, format below"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR|NAME",
        help="a folder with tokenizer.json, or a Hugging Face name such as Qwen/Qwen3-8B. With it ids are "
        "checked, drift is repaired by comparing bytes, forks are shown as text, and calls "
        "without token ids are encoded",
    )
    parser.add_argument(
        "--compare",
        choices=get_args(CompareLevel),
        default=_DEFAULTS.compare,
        help="what must be equal for one call to continue another (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-tools",
        action="store_false",
        dest="ignore_tools",
        default=_DEFAULTS.ignore_tools,
        help="do not merge calls with different tool lists; by default tool lists are ignored",
    )
    exactness = parser.add_mutually_exclusive_group()
    exactness.add_argument(
        "--exact",
        action="store_const",
        const=False,
        dest="inexact",
        default="context",
        help="continue a call only after exactly the ids it was sampled after; calls that would need a "
        "repair, or have other tools, keep their own prompts. By default they continue, and their tokens "
        "count as inexact",
    )
    exactness.add_argument(
        "--inexact",
        action="store_const",
        const=True,
        dest="inexact",
        help="also continue calls where the end of an answer in the later prompt is only estimated, and "
        "train tokens whose ids or prompts were not logged",
    )
    parser.add_argument(
        "--no-repair",
        action="store_false",
        dest="repair",
        default=_DEFAULTS.repair,
        help="fork where texts are equal and token ids differ; by default the sampled ids are put back",
    )
    parser.add_argument(
        "--dedupe",
        action="store_true",
        dest="deduplicate",
        default=_DEFAULTS.deduplicate,
        help="keep one of several equal answers to the same prompt; by default each becomes a sample",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="skip and count lines that cannot be read; by default they are errors",
    )


def load_call_log(options: argparse.Namespace) -> CallLogFile:
    """Reads and merges the log `options.calls`; raises InputError if it has no calls."""
    tokenizer = TokenizerDir.open(options.tokenizer) if options.tokenizer is not None else None
    policy = MergePolicy(
        compare=options.compare,
        ignore_tools=options.ignore_tools,
        repair=options.repair and options.inexact is not False,
        estimate=options.inexact is True,
        deduplicate=options.deduplicate,
        token_bytes=tokenizer.token_bytes if tokenizer is not None else None,
    )
    reader = LogReader(
        options.calls,
        skip_bad=options.skip_bad,
        check_ids=tokenizer.invalid_id_error if tokenizer is not None else None,
    )
    encoded = reader if tokenizer is None else _encode_missing_ids(reader, tokenizer)
    calls = list(_show_progress(encoded, options.calls))
    reader.errors.sort(key=lambda error: error.line)
    if not calls:
        raise no_calls_error(reader)
    sessions = [
        LoggedSession(name, group, merge(group, policy)) for name, group in group_by_session(calls).items()
    ]
    return CallLogFile(options.calls, sessions, reader.errors, tokenizer)


def no_calls_error(reader: LogReader) -> InputError:
    """The error for a log in which no line could be read."""
    errors = reader.errors
    problem = f"; the first of {len(errors)} bad lines: {errors[0]}" if errors else ""
    return InputError(f"{reader.path}: no calls in it, expected one JSON object a line{problem}")


def skipped_to_json(errors: Sequence[LogError]) -> list[dict[str, Any]]:
    """The lines that --skip-bad left out, as --json lists them."""
    return [{"line": error.line, "problem": error.problem} for error in errors]


def skipped_lines(errors: Sequence[LogError]) -> Iterator[Text]:
    """The number of lines that --skip-bad left out, and the first of them."""
    if not errors:
        return
    yield Text(f"skipped {pluralize(len(errors), 'bad line')}")
    for error in errors[:_MAX_SKIPPED]:
        yield Text(f"  {sanitize(str(error))}")
    yield from more_lines(len(errors) - _MAX_SKIPPED)


def _show_progress(calls: Iterable[LoggedCall], path: Path) -> Iterator[LoggedCall]:
    """Yields the calls, with a progress bar on stderr if that is a terminal and the log is large."""
    if not (sys.stderr.isatty() and path.is_file() and path.stat().st_size > _PROGRESS_BAR_BYTES):
        yield from calls
        return
    with path.open("rb") as file:
        lines = sum(1 for _ in file)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"reading {path.name}", total=lines)
        for call in calls:
            bar.update(task, completed=call.line)
            yield call


def _encode_missing_ids(reader: LogReader, tokenizer: TokenizerDir) -> Iterator[LoggedCall]:
    encoder = _LogEncoder(tokenizer)
    for call in reader:
        try:
            yield _fill_missing_ids(call, encoder)
        except CodecError as error:
            bad_line = LogError(str(reader.path), call.line, f"cannot be encoded: {error}")
            if not reader.skip_bad:
                raise bad_line from error
            reader.errors.append(bad_line)


@dataclass(frozen=True)
class _LogEncoder:
    """Encodes prompts and outputs that were logged without ids."""

    tokenizer: TokenizerDir

    @cached_property
    def _codec(self) -> GenericCodec | None:
        return GenericCodec(self.tokenizer) if self.tokenizer.has_template else None

    def encode_prompt(self, request: Request) -> Ids:
        """The ids of the rendered prompt, or of `role: text` lines if there is no template."""
        if self._codec is not None:
            return self._codec.encode_prompt(request.messages, request.tools, request.chat_template_kwargs)
        lines = [f"{message.role}: {reply_to_text(message)}\n" for message in request.messages]
        return self.tokenizer.encode("".join([*lines, "assistant: "]))

    def encode_output(self, message: Message) -> Ids:
        return self.tokenizer.encode(reply_to_text(message))


def _fill_missing_ids(call: LoggedCall, encoder: _LogEncoder) -> LoggedCall:
    """The call with encoded ids where it has none; logged output ids are kept."""
    if call.prompt_ids is not None and all(output.ids is not None for output in call.outputs):
        return call
    prompt_ids = call.prompt_ids
    if prompt_ids is None:
        prompt_ids = encoder.encode_prompt(call.request)
    output_ids = [
        encoder.encode_output(output.message) if output.ids is None else output.ids for output in call.outputs
    ]
    filled = with_encoded_ids(call, prompt_ids, output_ids)
    # Logged output ids are as sampled only if the prompt before them was logged too.
    outputs = [
        encoded if logged.ids is None else replace(logged, ids_were_sampled=call.prompt_ids is not None)
        for logged, encoded in zip(call.outputs, filled.outputs, strict=True)
    ]
    return replace(filled, outputs=tuple(outputs))
