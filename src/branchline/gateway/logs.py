"""Structured logs: one line per call, however it ended, and lines of sessions, as text or JSON.

Message contents appear in a line only if they were enabled; keys never do. An error's text may quote a
message, so without contents a line has only the error's type and field, tracebacks show code and types, and
of other libraries' messages only the first line is kept.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from branchline.core.choices import LogFormat, LogLevel
from branchline.core.reader import write_message
from branchline.runtime.call_record import CallObserver, CallRecord, CallRequest, CallResult, cause_chain
from branchline.runtime.session_store import SessionStore
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.diagnosis import diagnose

log = logging.getLogger("branchline.calls")
fork_log = logging.getLogger("branchline.forks")
session_log = logging.getLogger("branchline.sessions")


_MAX_VALUE_CHARACTERS = 200
"""Longer values are cut: clients choose the names of models and agents."""
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_UNQUOTED_VALUE = re.compile(r"[\w.:/@+,*<>-]+")


def configure_logging(
    format: LogFormat = "text", level: LogLevel = "info", contents: bool = False, stream: TextIO | None = None
) -> CallObserver:
    """Sets up the logs of this process, on standard error; returns the observer that logs calls.

    Branchline's own loggers log from `level` on, all others from `warning` on.
    """
    handler = _BranchlineHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(contents) if format == "json" else TextFormatter(contents))
    reset_logging()
    logging.getLogger().addHandler(handler)
    logging.getLogger("branchline").setLevel(level.upper())
    return CallLogger(contents).record_call


def reset_logging() -> None:
    """Undoes `configure_logging`."""
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, _BranchlineHandler)]:
        root.removeHandler(handler)
    logging.getLogger("branchline").setLevel(logging.NOTSET)


class CallLogger:
    """Writes a line for each call."""

    def __init__(self, contents: bool = False) -> None:
        self._contents = contents

    def record_call(self, record: CallRecord) -> None:
        """Logs a finished call: `failed` as a warning, everything else as information."""
        level = logging.WARNING if record.outcome == "failed" else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "call", extra=call_fields(record, self._contents))


class ForkLogger:
    """`--explain-forks`: logs the cause of each fork when it happens, once.

    It classifies the whole tree after every call, which is slow; it is meant for debugging an agent.
    """

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self._logged: set[tuple[str, int]] = set()

    def record_call(self, record: CallRecord) -> None:
        if record.result is None:
            return
        managed = self._sessions.get(record.session_id)
        tree = managed.session.snapshot()
        for fork in classify_forks(tree).forks:
            if (record.session_id, fork.branch.id) in self._logged:
                continue
            self._logged.add((record.session_id, fork.branch.id))
            fork_log.warning(
                "fork in session %s by call %s: %s",
                record.session_id,
                fork.call.id,
                diagnose(tree, fork, managed.session.codec.decode),
                extra={"session": record.session_id, "call": fork.call.id, "cause": str(fork.cause)},
            )


_warned_of_names: list[str] = []


def warn_unnamed_conversations(session_id: str, report: ForkReport) -> None:
    """Warns of the first session with conversations that no name tells from the main one."""
    if report.unnamed_conversations and not _warned_of_names:
        _warned_of_names.append(session_id)
        session_log.warning(
            "session %s: %d conversations beside the first have no agent name; under another system prompt "
            "they are left out of the main history, under the same one they are taken for its continuation. "
            "Name agents in the URL (/agents/NAME/v1) or in x-branchline-agent. Further sessions are not "
            "logged: see `unnamed_conversations` in their reports.",
            session_id,
            report.unnamed_conversations,
            extra={"session": session_id},
        )


def call_fields(record: CallRecord, contents: bool = False) -> dict[str, Any]:
    """A call as the fields of a line; unknown values are left out."""
    fields: dict[str, Any] = {
        "outcome": record.outcome,
        "status": record.status,
        "session": record.session_id,
        "group": record.group,
        "agent": record.agent,
        "model": record.model,
        "engine": record.engine,
        "protocol": record.protocol,
        "streamed": record.streamed,
        "call": record.call_id,
    }
    if record.failure is not None:
        fields["error"] = record.failure.error_type
        fields["field"] = record.failure.field
        if contents or not record.failure.may_quote_messages:
            fields["reason"] = record.failure.message
    if record.result is not None:
        fields |= _result_fields(record.result)
    fields |= {f"{phase}_s": spent for phase, spent in record.phase_s.items()}
    fields["total_s"] = record.total_s
    if contents:
        fields |= _content_fields(record.call_request, record.result)
    return fields


def _result_fields(result: CallResult) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "sampled_tokens": result.sampled_tokens,
        "reused_tokens": result.reused_tokens,
        "encoded_tokens": result.encoded_tokens,
        "finish_reasons": [answer.finish_reason for answer in result.answers],
        "versions": result.version_range,
        "not_applied": list(result.not_applied) or None,
    }


def _content_fields(call_request: CallRequest | None, result: CallResult | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if call_request is not None:
        fields["messages"] = [write_message(message) for message in call_request.request.messages]
        fields["tools"] = [dict(tool) for tool in call_request.request.tools]
    if result is not None:
        fields["answers"] = [write_message(answer.message) for answer in result.answers]
    return fields


class _BranchlineHandler(logging.StreamHandler[TextIO]):
    """The handler of `configure_logging`; a second call replaces it."""


class JsonFormatter(logging.Formatter):
    """A line is one JSON object: time, level, logger, message, then the fields."""

    def __init__(self, contents: bool = False) -> None:
        super().__init__()
        self._contents = contents

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record, self._contents),
            **_fields(record, self._contents),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = exception_text(record.exc_info[1], self._contents)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line is text: time, level, logger, message, then `field=value`."""

    def __init__(self, contents: bool = False) -> None:
        super().__init__()
        self._contents = contents

    def format(self, record: logging.LogRecord) -> str:
        words = [_timestamp(record), f"{record.levelname:<7}", record.name, _message(record, self._contents)]
        words += [_format_field(name, value) for name, value in _fields(record, self._contents).items()]
        line = " ".join(words)
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + exception_text(record.exc_info[1], self._contents).rstrip()
        return line


def exception_text(error: BaseException, contents: bool = False) -> str:
    """A traceback; without contents it leaves out the errors' texts, which may quote messages."""
    if contents:
        return "".join(traceback.format_exception(error))
    causes = [
        "".join(traceback.format_tb(cause.__traceback__)) + type(cause).__name__
        for cause in reversed(cause_chain(error, include_context=True))
    ]
    return "\nwhich led to\n".join(causes)


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _message(record: logging.LogRecord, contents: bool) -> str:
    message = record.getMessage()
    if contents or record.name.startswith("branchline"):
        return message
    # asyncio's further lines show the failed task and its exception, which may quote messages.
    return message.partition("\n")[0]


def _fields(record: logging.LogRecord, contents: bool) -> Mapping[str, Any]:
    fields = {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD_ATTRIBUTES and value not in ("", None, [])
    }
    return fields if contents else {name: _truncate(value) for name, value in fields.items()}


def _truncate(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > _MAX_VALUE_CHARACTERS
    return value[:_MAX_VALUE_CHARACTERS] + "…" if is_long else value


def _format_field(name: str, value: Any) -> str:
    """A field as text; seconds (`…_s`) in a unit that fits.

    >>> _format_field("total_s", 0.00123), _format_field("model", "two words"), _format_field("ids", [1, 2])
    ('total=1.2ms', 'model="two words"', 'ids=1,2')
    """
    if name.endswith("_s") and isinstance(value, float):
        return f"{name[:-2]}=" + (f"{value:.1f}s" if value >= 10 else f"{value * 1000:.1f}ms")
    if isinstance(value, list | tuple) and all(isinstance(one, int | str) for one in value):
        value = ",".join(str(one) for one in value)
    if isinstance(value, str) and _UNQUOTED_VALUE.fullmatch(value):
        return f"{name}={value}"
    # Terminals interpret some characters, so those are escaped; printable ones of any script are not.
    return f"{name}={json.dumps(value, default=str, ensure_ascii=not str(value).isprintable())}"
