"""What every command starts from: a log on disk, read whole, one merged tree for each session.

Nothing is printed before all of it is read, so a bad line leaves stdout empty.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from branchline.chat.base import reply_to_text
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
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
_PROGRESS_BAR_BYTES = 5_000_000
"""Bytes of a log from which reading takes long enough to watch."""

LOG_FORMAT_HELP = """\
one line of CALLS.jsonl (broken here to fit):
  {"session": "task-7", "agent": "planner",
   "request": {"messages": [{"role": "user", "content": "Say a word."}]},
   "response": {"prompt_token_ids": [11, 12, 13],
                "choices": [{"message": {"role": "assistant", "content": "Luminous"},
                             "finish_reason": "stop", "token_ids": [21, 22],
                             "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}}]}}
  request and response are those of a chat completion. session and agent may be left out; so may ids
  (they stand where vLLM puts them with return_token_ids) and logprobs, but then nothing can be trained
  exactly.

compare levels:
  text   a call continues an output when its messages repeat it: roles, texts, tool calls. Where the log
         shows that text as other ids (drift), the sampled ids are put back, and what was sampled behind
         the others is marked inexact; --no-repair keeps such calls apart.
  token  a call continues an output only when its prompt begins with the very ids of it.
"""


@dataclass(frozen=True)
class LoggedSession:
    """One session of a log, merged."""

    name: str
    calls: list[LoggedCall]
    merged: MergeResult

    @cached_property
    def fork_report(self) -> ForkReport:
        return classify_forks(self.merged.tree)

    @cached_property
    def line_of_call(self) -> list[int]:
        """The log line of each call of the tree."""
        return self.merged.line_of_call


@dataclass(frozen=True)
class CallLogFile:
    """A log as the commands see it."""

    path: Path
    sessions: list[LoggedSession]
    skipped: list[LogError]
    tokenizer: TokenizerDir | None

    @property
    def calls(self) -> int:
        return sum(len(session.calls) for session in self.sessions)

    def diagnoses(self, session: LoggedSession) -> list[Diagnosis]:
        """Every fork of a session explained, decoded where there is a tokenizer."""
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        return [diagnose(session.merged.tree, fork, decode) for fork in session.fork_report.forks]


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that reads a log; their defaults are MergePolicy's."""
    parser.add_argument("calls", type=Path, metavar="CALLS.jsonl", help="the log: one call a line, see below")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="a model's directory with tokenizer.json: checks that ids decode, makes repairs certain, "
        "shows forks as text, and encodes calls that were logged without ids",
    )
    parser.add_argument(
        "--compare",
        choices=get_args(CompareLevel),
        default=_DEFAULTS.compare,
        help="how alike two calls must be for one to continue the other (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-tools",
        action="store_false",
        dest="ignore_tools",
        default=_DEFAULTS.ignore_tools,
        help="keep calls with different tool lists apart; by default they merge",
    )
    parser.add_argument(
        "--no-repair",
        action="store_false",
        dest="repair",
        default=_DEFAULTS.repair,
        help="fork where texts agree and ids do not, instead of putting the sampled ids back",
    )
    parser.add_argument(
        "--dedupe",
        action="store_true",
        dest="deduplicate",
        default=_DEFAULTS.deduplicate,
        help="keep one of several answers to one prompt that are equal; by default each is a sample",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out lines that cannot be read, and count them"
    )


def load_call_log(options: argparse.Namespace) -> CallLogFile:
    """Reads and merges the log that the options name."""
    tokenizer = TokenizerDir.open(options.tokenizer) if options.tokenizer is not None else None
    policy = MergePolicy(
        compare=options.compare,
        ignore_tools=options.ignore_tools,
        repair=options.repair,
        deduplicate=options.deduplicate,
        token_bytes=tokenizer.token_bytes if tokenizer is not None else None,
    )
    reading = LogReader(
        options.calls,
        skip_bad=options.skip_bad,
        check_ids=tokenizer.invalid_id_error if tokenizer is not None else None,
    )
    with _progress(options.calls, reading) as calls:
        read = list(_encode_missing_ids(calls, tokenizer, reading) if tokenizer is not None else calls)
    reading.errors.sort(key=lambda error: error.line)
    if not read:
        bad = reading.errors
        problem = f"; the first of {len(bad)} bad lines: {bad[0]}" if bad else ""
        raise InputError(f"{options.calls}: no calls in it, expected one JSON object a line{problem}")
    sessions = [
        LoggedSession(name, calls, merge(calls, policy)) for name, calls in group_by_session(read).items()
    ]
    return CallLogFile(options.calls, sessions, reading.errors, tokenizer)


def _encode_missing_ids(
    calls: Iterable[LoggedCall], tokenizer: TokenizerDir, reading: LogReader
) -> Iterator[LoggedCall]:
    encoder = _LogEncoder(tokenizer)
    for call in calls:
        try:
            yield _fill_missing_ids(call, encoder)
        except CodecError as error:
            bad = LogError(str(reading.path), call.line, f"cannot be encoded: {error}")
            if not reading.skip_bad:
                raise bad from error
            reading.errors.append(bad)


@dataclass(frozen=True)
class _LogEncoder:
    """Encodes prompts and outputs that were logged without ids."""

    tokenizer: TokenizerDir

    @cached_property
    def _codec(self) -> GenericCodec | None:
        return GenericCodec(self.tokenizer) if self.tokenizer.has_template else None

    def encode_prompt(self, request: Request) -> Ids:
        """Returns the ids of the rendered prompt, or of `role: text` lines if there is no template."""
        if self._codec is not None:
            return self._codec.encode_prompt(request.messages, request.tools, request.chat_template_kwargs)
        lines = [f"{message.role}: {reply_to_text(message)}\n" for message in request.messages]
        return self.tokenizer.encode("".join([*lines, "assistant: "]))

    def encode_output(self, message: Message) -> Ids:
        return self.tokenizer.encode(reply_to_text(message))


def _fill_missing_ids(call: LoggedCall, encoder: _LogEncoder) -> LoggedCall:
    """The call with ids where it had none; an output keeps those it was logged with."""
    if call.prompt_ids is not None and all(output.ids is not None for output in call.outputs):
        return call
    prompt_ids = call.prompt_ids
    if prompt_ids is None:
        prompt_ids = encoder.encode_prompt(call.request)
    output_ids = [
        encoder.encode_output(output.message) if output.ids is None else output.ids
        for output in call.outputs
    ]
    made = with_encoded_ids(call, prompt_ids, output_ids)
    # Ids that were logged are real; behind a prompt that was not logged, their place is not.
    outputs = [
        made_up if logged.ids is None else replace(logged, ids_were_sampled=call.prompt_ids is not None)
        for logged, made_up in zip(call.outputs, made.outputs, strict=True)
    ]
    return replace(made, outputs=tuple(outputs))


@contextmanager
def _progress(path: Path, reading: LogReader) -> Iterator[Iterable[LoggedCall]]:
    """The calls of a log, with a bar on stderr where somebody watches and it takes a while."""
    if not (sys.stderr.isatty() and path.is_file() and path.stat().st_size > _PROGRESS_BAR_BYTES):
        yield reading
        return
    from rich.console import Console
    from rich.progress import Progress

    with path.open("rb") as file:
        lines = sum(1 for _ in file)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"reading {path.name}", total=lines)

        def watched() -> Iterator[LoggedCall]:
            for call in reading:
                bar.update(task, completed=call.line)
                yield call

        yield watched()
