"""Structured logs: one line a call, however it ended; lines of sessions; as text to read or JSON to collect.

What agents and models said stands in no line unless that was asked for, and no key ever does. An error's
words may quote a message, so without contents a line names its kind and its field, tracebacks show code and
types, and of what other libraries have to say only the first line is kept.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO

from branchline.core.reader import write_message
from branchline.gateway.record import CallRecord, Observer, causes_of

if TYPE_CHECKING:
    from branchline.gateway.calls import Asked, Done

log = logging.getLogger("branchline.calls")

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

_LONGEST = 200
"""Letters of a value; clients name their models and agents as they like."""
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_WORD = re.compile(r"[\w.:/@+,*<>-]+")


def configure_logs(
    format: Format = "text", level: Level = "info", contents: bool = False, stream: TextIO | None = None
) -> Observer:
    """Sets up the logs of this process, on standard error; gives the observer that writes the calls' lines.

    Branchline's own loggers speak from `level` on, all others from `warning` on.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(contents) if format == "json" else TextFormatter(contents))
    root = logging.getLogger()
    for earlier in [one for one in root.handlers if isinstance(one, _Handler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    logging.getLogger("branchline").setLevel(level.upper())
    return CallLog(contents).note


class CallLog:
    """Writes a line for each call."""

    def __init__(self, contents: bool = False) -> None:
        self._contents = contents

    def note(self, record: CallRecord) -> None:
        """A call that is over. Only what went wrong on our side is more than information."""
        level = logging.WARNING if record.outcome == "failed" else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "call", extra=call_fields(record, self._contents))


def call_fields(record: CallRecord, contents: bool = False) -> dict[str, Any]:
    """A call as the fields of a line; what is not known is left out."""
    fields: dict[str, Any] = {
        "outcome": record.outcome,
        "status": record.status,
        "session": record.session,
        "group": record.group,
        "agent": record.agent,
        "model": record.model,
        "engine": record.engine,
        "protocol": record.protocol,
        "streamed": record.streamed,
        "call": record.call_id,
    }
    if record.failure is not None:
        fields["error"] = record.failure.kind
        fields["field"] = record.failure.field
        if contents or not record.failure.may_quote:
            fields["reason"] = record.failure.words
    if record.done is not None:
        fields |= _done_fields(record.done)
    fields |= {f"{phase}_s": spent for phase, spent in record.seconds.items()}
    fields["total_s"] = record.total_s
    if contents:
        fields |= _contents(record.asked, record.done)
    return fields


def _done_fields(done: Done) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "sampled_tokens": done.sampled_tokens,
        "reused_tokens": done.reused_tokens,
        "encoded_tokens": done.call.encoded_tokens,
        "finish_reasons": [answer.finish for answer in done.answers],
        "versions": done.version_range,
    }


def _contents(asked: Asked | None, done: Done | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if asked is not None:
        fields["messages"] = [write_message(message) for message in asked.request.messages]
        fields["tools"] = [dict(tool) for tool in asked.request.tools]
    if done is not None:
        fields["answers"] = [write_message(answer.message) for answer in done.answers]
    return fields


class _Handler(logging.StreamHandler[TextIO]):
    """The one this module set up: setting up again replaces it."""


class JsonFormatter(logging.Formatter):
    """A line is one JSON object: time, level, logger, message, then the fields."""

    def __init__(self, contents: bool = False) -> None:
        super().__init__()
        self._contents = contents

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record, self._contents),
            **_fields(record, self._contents),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = exception_text(record.exc_info[1], self._contents)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line to read: time, level, logger, message, then `field=value`."""

    def __init__(self, contents: bool = False) -> None:
        super().__init__()
        self._contents = contents

    def format(self, record: logging.LogRecord) -> str:
        words = [_time(record), f"{record.levelname:<7}", record.name, _message(record, self._contents)]
        words += [_pair(name, value) for name, value in _fields(record, self._contents).items()]
        line = " ".join(words)
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + exception_text(record.exc_info[1], self._contents).rstrip()
        return line


def exception_text(error: BaseException, contents: bool = False) -> str:
    """A traceback; without contents it leaves out what the errors say, which may quote anything."""
    if contents:
        return "".join(traceback.format_exception(error))
    told = [
        "".join(traceback.format_tb(cause.__traceback__)) + type(cause).__name__
        for cause in reversed(causes_of(error, contexts=True))
    ]
    return "\nwhich led to\n".join(told)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _message(record: logging.LogRecord, contents: bool) -> str:
    message = record.getMessage()
    if contents or record.name.startswith("branchline"):
        return message
    # asyncio's lines go on with the task that failed, and that with what it failed by.
    return message.partition("\n")[0]


def _fields(record: logging.LogRecord, contents: bool) -> Mapping[str, Any]:
    given = {
        name: value
        for name, value in vars(record).items()
        if name not in _KNOWN and value not in ("", None, [])
    }
    return given if contents else {name: _short(value) for name, value in given.items()}


def _short(value: Any) -> Any:
    return value[:_LONGEST] + "…" if isinstance(value, str) and len(value) > _LONGEST else value


def _pair(name: str, value: Any) -> str:
    """A field to read; seconds, as the name says, in a unit that fits.

    >>> _pair("total_s", 0.00123), _pair("model", "two words"), _pair("finish_reasons", ["stop", "length"])
    ('total=1.2ms', 'model="two words"', 'finish_reasons=stop,length')
    """
    if name.endswith("_s") and isinstance(value, float):
        return f"{name[:-2]}=" + (f"{value:.1f}s" if value >= 10 else f"{value * 1000:.1f}ms")
    if isinstance(value, list | tuple) and all(isinstance(one, int | str) for one in value):
        value = ",".join(str(one) for one in value)
    if isinstance(value, str) and _WORD.fullmatch(value):
        return f"{name}={value}"
    # A terminal obeys some letters that are not ASCII; who reads other scripts wants to see the rest.
    return f"{name}={json.dumps(value, default=str, ensure_ascii=not str(value).isprintable())}"
