"""Reading a log of calls for the commands `merge` and `tree`: one merged tree for each session.

A log is read completely before a command prints anything, so a bad line leaves stdout empty. How bad lines
are reported is the same for all commands that read a log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.cli.log_encoding import LogEncoder, encode_missing_ids
from branchline.cli.log_options import LogOptions
from branchline.cli.render import more_lines, pluralize, sanitize
from branchline.core.errors import CodecError, InputError, LogError
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.diagnosis import Diagnosis, diagnose
from branchline.timelines.links import MergePolicy
from branchline.timelines.log import LoggedCall, LogReader, group_by_session
from branchline.timelines.merge import MergeResult, merge
from branchline.timelines.responses import join_copies

_MAX_SKIPPED = 10
_PROGRESS_BAR_BYTES = 5_000_000
"""Size of a log whose reading takes long enough for a progress bar."""


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


def load_call_log(
    options: LogOptions, select: Callable[[list[LoggedCall]], list[LoggedCall]] = list
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
    options: LogOptions, tokenizer: TokenizerDir | None, codec: GenericCodec | None
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
        deduplicate=options.dedupe,
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
