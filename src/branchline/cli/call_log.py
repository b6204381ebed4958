"""Reading a log of calls for the commands `merge` and `tree`: one merged tree for each session.

A log is read completely before a command prints anything, so a bad line leaves stdout empty. How bad lines
are reported is the same for all commands that read a log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.cli.log_encoding import LogEncoder, encode_missing_ids
from branchline.cli.render import more_lines, pluralize, sanitize
from branchline.core.errors import CodecError, InputError, LogError
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.diagnosis import Diagnosis, diagnose
from branchline.timelines.links import CompareLevel, MergePolicy
from branchline.timelines.log import LoggedCall, LogReader, group_by_session
from branchline.timelines.merge import MergeResult, merge
from branchline.timelines.responses import join_copies

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
  nothing can be trained exactly. Other keys of a line are ignored, and named in the account; samples have the
  reward null, and their session to find it by.

  A choice without a finish_reason (null, "" or no such key) was cut off: it is counted (dropped, cancelled)
  and not trained. If the logger leaves finish_reason out, write the server's: "stop", "length", "tool_calls".
  usage is optional; its prompt_tokens and completion_tokens must be the numbers of the token ids.

  response may also be a stream: a list of chunks, or the text of server-sent events. A response with several
  choices may be logged as one line per choice, each with its index and the usage of itself or of the whole
  response. Lines with one response id and index are one answer, with all that any of them tells; lines that
  contradict each other are counted and stay apart. CALLS.jsonl may be compressed with gzip.

what is merged:
  By default a call continues an answer if its messages repeat it (roles, texts and tool calls) and its logged
  prompt begins with exactly the ids of the earlier prompt and answer. So every token is in the context that
  was logged for its call, and every sample is exact. Calls of different sessions, agents or models never
  continue each other. Three options allow one thing each, and the tokens behind it count as inexact:
  --repair        other ids for the same text, where the bytes of tokens or a known stop token tell the end
  --ignore-tools  another tool list or other template arguments at the beginning of the prompt
  --inexact       equal text only, whatever the ids are, and ids that were not logged at all
  Calls that are kept apart because one of them is missing are counted, with the option.
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
    repeated: list[LoggedCall]
    """Calls with the outputs that are left out because another line has them."""
    skipped: list[LogError]
    replaced_text: list[int]
    """Lines with bytes that are not UTF-8."""
    other_tokens: list[int]
    """Lines of encoded answers whose logprobs name other tokens."""
    ignored_keys: dict[str, int]
    tokenizer: TokenizerDir | None
    codec: GenericCodec | None
    """The codec of the tokenizer, if it has a chat template that can be used."""

    @cached_property
    def all_calls(self) -> list[LoggedCall]:
        """Every line once, also one that is in parts or repeats another."""
        calls = [*self.repeated, *(call for session in self.sessions for call in session.calls)]
        return list({call.line: call for call in calls}.values())

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
        "without token ids are encoded: prompts and answers as the chat template writes them",
    )
    parser.add_argument(
        "--compare",
        choices=get_args(CompareLevel),
        default=_DEFAULTS.compare,
        help="what must be equal for one call to continue another: messages and ids (text), or nothing "
        "but ids (token) (default: %(default)s)",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        default=_DEFAULTS.repair,
        help="continue calls whose prompts have other ids for the same text, and put the sampled ids back; "
        "needs --tokenizer or --stop-id",
    )
    parser.add_argument(
        "--ignore-tools",
        action="store_true",
        default=_DEFAULTS.ignore_tools,
        help="continue calls with other tools or template arguments, whose prompts differ at the beginning",
    )
    parser.add_argument(
        "--inexact",
        action="store_true",
        default=_DEFAULTS.inexact,
        help="merge by text: continue every call whose messages agree, also where the end of an answer in "
        "the later prompt is only estimated, and train tokens whose ids or prompts were not logged. With "
        "--tokenizer answers without ids are encoded with reasoning, tool calls and stop token; an answer of "
        "which the chat template leaves out or changes a part is counted (not_encoded) and not trained",
    )
    parser.add_argument(
        "--stop-id",
        action="append",
        default=[],
        metavar="ID_OR_TOKEN",
        help="an id that ends an answer, besides those of --tokenizer; repeatable. No other id does",
    )
    parser.add_argument(
        "--dedupe",
        action="store_true",
        dest="deduplicate",
        default=_DEFAULTS.deduplicate,
        help="keep one of several equal answers to equal prompts (with --inexact: of equal text); by default "
        "each becomes a sample",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="skip and count lines that cannot be read; by default they are errors",
    )


def load_call_log(
    options: argparse.Namespace, select: Callable[[list[LoggedCall]], list[LoggedCall]] = list
) -> CallLogFile:
    """Reads and merges the log `options.calls`; raises InputError if it has no calls. `select` returns the
    calls with what is known about their training."""
    tokenizer = TokenizerDir.open(options.tokenizer) if options.tokenizer is not None else None
    codec = _template_codec(tokenizer)
    policy = _read_policy(options, tokenizer, codec)
    reader = LogReader(
        options.calls,
        skip_bad=True,
        check_ids=tokenizer.invalid_id_error if tokenizer is not None else None,
    )
    logged = reader.check_counts(_show_progress(reader, options.calls, "reading"))
    # Joined before anything is encoded: what one line of a response lacks, another may have.
    copies = join_copies(logged)
    calls = copies.calls
    encoder = LogEncoder(tokenizer) if tokenizer is not None else None
    if encoder is not None:
        encoded = encode_missing_ids(calls, reader, encoder)
        calls = list(_show_progress(encoded, options.calls, "encoding"))
    reader.errors.sort(key=lambda error: error.line)
    if reader.errors and not options.skip_bad:
        raise _bad_lines_error(reader.errors)
    if not calls:
        raise no_calls_error(reader)
    selected = select([*calls, *copies.left_out])
    sessions = [
        LoggedSession(name, group, merge(group, policy))
        for name, group in group_by_session(selected[: len(calls)]).items()
    ]
    repeated = [*selected[len(calls) :], *(call for session in sessions for call in session.merged.repeated)]
    return CallLogFile(
        options.calls,
        sessions,
        repeated,
        reader.errors,
        reader.replaced_text,
        encoder.other_tokens if encoder is not None else [],
        dict(sorted(reader.ignored_keys.items())),
        tokenizer,
        codec,
    )


def _read_policy(
    options: argparse.Namespace, tokenizer: TokenizerDir | None, codec: GenericCodec | None
) -> MergePolicy:
    stop_ids = frozenset(_read_stop_id(value, tokenizer) for value in options.stop_id)
    if options.repair and not options.inexact and tokenizer is None and not stop_ids:
        raise InputError(
            "--repair: nothing tells where an answer ends in a later prompt; expected --tokenizer or "
            "--stop-id as well"
        )
    if tokenizer is not None:
        stop_ids |= tokenizer.stop_ids if codec is None else codec.stop_ids
    return MergePolicy(
        compare=options.compare,
        repair=options.repair,
        ignore_tools=options.ignore_tools,
        inexact=options.inexact,
        deduplicate=options.deduplicate,
        token_bytes=tokenizer.token_bytes if tokenizer is not None else None,
        stop_ids=stop_ids,
    )


def _read_stop_id(value: str, tokenizer: TokenizerDir | None) -> int:
    if tokenizer is not None:
        return tokenizer.find_id(value, "--stop-id")
    if not value.isdecimal():
        raise InputError(f"--stop-id: got {value!r}, expected an id, or --tokenizer for the text of a token")
    return int(value)


def _template_codec(tokenizer: TokenizerDir | None) -> GenericCodec | None:
    """Returns the codec of a tokenizer, if it has a chat template that can be used."""
    if tokenizer is None or not tokenizer.has_template:
        return None
    try:
        return GenericCodec(tokenizer)
    except CodecError:
        return None


def _bad_lines_error(errors: Sequence[LogError]) -> LogError:
    """Returns the error of the first bad line, with the number of the others."""
    first, others = errors[0], len(errors) - 1
    more = f" (and {pluralize(others, 'other bad line')})" if others else ""
    return LogError(first.file, first.line, f"{first.problem}{more}; --skip-bad reads the other lines")


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


def _show_progress(calls: Iterable[LoggedCall], path: Path, verb: str) -> Iterator[LoggedCall]:
    """Yields the calls, with a progress bar on stderr if that is a terminal and the log is large."""
    if not (sys.stderr.isatty() and path.is_file() and path.stat().st_size > _PROGRESS_BAR_BYTES):
        yield from calls
        return
    with path.open("rb") as file:
        lines = sum(1 for _ in file)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{verb} {path.name}", total=lines)
        for call in calls:
            bar.update(task, completed=call.line)
            yield call
