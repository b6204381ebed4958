"""Reads logs of calls captured elsewhere, one JSON object per line.

A line is `{"session": str?, "agent": str?, "request": <chat completion request>, "response": <response>}`,
with token ids in vLLM's fields and logprobs in OpenAI's format; the response may be a stream. An invalid line
is rejected with its file, line number and the expectation; nothing is guessed. Half a character in a text is
replaced, as tokenizers do, and such lines are counted.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from branchline.core.call import DEFAULT_AGENT, Request
from branchline.core.errors import InputError, LogError, MessageError
from branchline.core.message import Message
from branchline.core.reader import decode_json_keeping_surrogates, read_message, replace_surrogates
from branchline.core.suggestions import did_you_mean_path
from branchline.core.token_arrays import Floats, Ids, as_ids
from branchline.timelines.streamed import TRUNCATED, join_stream
from branchline.timelines.token_texts import TokenTexts, read_token_texts

_TOKEN_ID_LIMIT = 2**31
_LOGPROB_LIMIT = float(np.finfo(np.float32).max)
_ROUNDING = 0.01
"""By how much a logprob may be above 0."""
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
CANCELLED_REASONS = frozenset(("cancelled", "abort", "error"))
"""Finish reasons of outputs that ended before their end: the stream was cut off, or the request aborted."""
_KEYS = frozenset(("session", "agent", "request", "response"))
_TOKEN_AS_ID = re.compile(r"token_id:\d{1,10}\Z")


@dataclass(frozen=True)
class LoggedOutput:
    """One choice of a logged response."""

    message: Message
    ids: Ids | None = None
    logprobs: Floats | None = None
    finish_reason: str = "stop"
    ids_were_sampled: bool = True
    """False if the log had no ids and these were encoded from its text."""
    index: int = 0
    """The number of the choice in its response, also if it is logged in a line of its own."""

    token_texts: TokenTexts = ()
    """Its tokens as its logprobs name them, if its ids are not known."""

    @property
    def is_cut(self) -> bool:
        """Whether it ended before its end, as far as is known."""
        return self.finish_reason in CANCELLED_REASONS


@dataclass(frozen=True)
class LoggedCall:
    """One logged call; ids are optional."""

    request: Request
    outputs: tuple[LoggedOutput, ...]
    prompt_ids: Ids | None = None
    session: str = ""
    line: int = 0
    id: str = ""
    model: str = ""
    """The model that the response names, else that of the request."""
    choices: int = 1
    """How many choices the response has, as far as the line tells; some may be in other lines."""
    counted_tokens: int | None = None
    """How many tokens of all choices the server counted, or of those of this line."""

    @property
    def agent(self) -> str:
        return self.request.agent

    @property
    def response_key(self) -> tuple[object, ...]:
        """Equal for the lines of one response; lines without an id are responses of their own."""
        config = self.request.prompt_config_digest
        same = (self.session, self.agent, self.model, self.request.message_keys, config, self.id)
        return same if self.id else (*same, self.line)


@dataclass
class LogReader:
    """Reads a log. With `skip_bad`, invalid lines are collected in `errors` instead of raised."""

    path: Path
    skip_bad: bool = False
    check_ids: Callable[[Ids], str | None] | None = None
    """Returns what is wrong with ids (e.g. unknown to the tokenizer), or None."""
    errors: list[LogError] = field(default_factory=list)
    replaced_text: list[int] = field(default_factory=list)
    """Lines with bytes that are not UTF-8, which were replaced."""
    ignored_keys: Counter[str] = field(default_factory=Counter)
    """Keys of lines that nothing reads, with the number of lines."""

    def __iter__(self) -> Iterator[LoggedCall]:
        try:
            with _open(self.path) as file:
                yield from self._read(file)
        except (OSError, EOFError, zlib.error) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            near = did_you_mean_path(self.path) if isinstance(error, FileNotFoundError) else ""
            raise InputError(f"{self.path}: cannot be read: {reason}{near}") from error

    def check_counts(self, calls: Iterable[LoggedCall]) -> list[LoggedCall]:
        """Returns the calls without those whose response has other ids than its server counted, which are
        errors as invalid lines are. A response may have several lines, so this needs all calls."""
        calls = list(calls)
        errors = dict(find_miscounted(calls))
        found = [LogError(str(self.path), line, str(errors[line])) for line in sorted(errors)]
        if found and not self.skip_bad:
            raise found[0]
        self.errors += found
        return [call for call in calls if call.line not in errors]

    def _read(self, lines: Iterable[bytes]) -> Iterator[LoggedCall]:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if not text.strip():
                continue
            try:
                yield self._read_line(text, number)
            except LogError as error:
                if not self.skip_bad:
                    raise
                self.errors.append(error)

    def _read_line(self, line: bytes, number: int) -> LoggedCall:
        try:
            raw = self._decode(line, number)
            call = read_call(raw, number)
            for field_path, ids in _all_ids(call):
                problem = self.check_ids(ids) if self.check_ids else None
                if problem:
                    raise InputError(f"{field_path}: {problem}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            hint = _not_json_hint(line)
            raise LogError(
                str(self.path), number, f"expected one JSON object a line: {error}{hint}"
            ) from error
        except InputError as error:
            raise LogError(str(self.path), number, str(error)) from error
        assert isinstance(raw, dict)
        self.ignored_keys.update(replace_surrogates(key) for key in raw if key not in _KEYS)
        return call

    def _decode(self, line: bytes, number: int) -> object:
        try:
            return decode_json_keeping_surrogates(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            replaced = line.decode("utf-8", "replace").encode()
            if replaced == line:
                raise
        value = decode_json_keeping_surrogates(replaced)
        self.replaced_text.append(number)
        return value


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Opens a log, which may be compressed with gzip."""
    file = path.open("rb")
    if file.peek(2)[:2] != _GZIP:
        return file
    file.close()
    return gzip.open(path, "rb")


def _not_json_hint(line: bytes) -> str:
    """Names the most frequent fault: Python writes missing numbers as NaN, which is not JSON."""
    found: list[str] = []
    try:
        json.loads(line, parse_constant=found.append)
    except (ValueError, RecursionError):
        return ""
    return f"; got {found[0]}, expected a number or null" if found else ""


def read_log(path: str | Path) -> list[LoggedCall]:
    """Returns all calls of a log; raises LogError at the first invalid line."""
    reader = LogReader(Path(path))
    return reader.check_counts(reader)


def read_call(raw: object, line: int = 0) -> LoggedCall:
    """Reads one decoded line of a log."""
    if not isinstance(raw, dict):
        raise MessageError("line", raw, "an object with request and response")
    response = raw.get("response")
    if isinstance(response, list | str):
        response = join_stream(response)
    for key, value in (("request", raw.get("request")), ("response", response)):
        if not isinstance(value, dict):
            raise MessageError(key, value, f"an object (a chat completion {key})")
    assert isinstance(response, dict)
    agent = _read_name(raw, "agent", "") or DEFAULT_AGENT
    request = Request.read(raw["request"], agent=agent)
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise MessageError("response.choices", choices, "a non-empty list")
    outputs = tuple(
        read_choice(choice, f"response.choices[{index}]", response.get("id"), index)
        for index, choice in enumerate(choices)
    )
    for index, output in enumerate(outputs):
        if output.ids is not None and not len(output.ids) and not output.message.is_empty:
            raise MessageError(f"response.choices[{index}].token_ids", [], "the ids of its text, or null")
    prompt_ids = _read_prompt_ids(response)
    check_prompt_count(response, "response", prompt_ids, request)
    asked = raw["request"].get("n")
    model = _read_name(response, "model", "response.") or _read_name(raw["request"], "model", "request.")
    return LoggedCall(
        request,
        outputs,
        prompt_ids,
        session=_read_name(raw, "session", ""),
        line=line,
        id=_read_name(response, "id", "response."),
        model=model,
        choices=max(asked if type(asked) is int else 1, len(outputs)),
        counted_tokens=read_count(response, "response", "completion_tokens"),
    )


def _read_prompt_ids(response: Mapping[str, Any]) -> Ids | None:
    """Returns the ids of the prompt, which some servers write on the choices."""
    path, found = "response.prompt_token_ids", response.get("prompt_token_ids")
    for index, choice in enumerate(response["choices"]):
        on_choice = choice.get("prompt_token_ids")
        if on_choice is None:
            continue
        if found is not None and on_choice != found:
            raise MessageError(f"response.choices[{index}].prompt_token_ids", on_choice, f"those of {path}")
        path, found = (path, found) if found is not None else (f"response.choices[{index}]", on_choice)
    if found == []:
        raise MessageError(path, found, "the ids of the messages, or null")
    return read_token_ids(found, path)


def read_count(response: Mapping[str, Any], field_path: str, name: str) -> int | None:
    """Returns a count of tokens in the usage of a response; None if there is none."""
    usage = response.get("usage")
    if not isinstance(usage, dict | None):
        raise MessageError(f"{field_path}.usage", usage, "an object or null")
    count = usage.get(name) if usage else None
    if count is not None and (type(count) is not int or count < 0):
        raise MessageError(f"{field_path}.usage.{name}", count, "an integer from 0 on, or null")
    return count


def check_prompt_count(
    response: Mapping[str, Any], field_path: str, prompt_ids: Ids | None, request: Request
) -> None:
    """Raises MessageError if a prompt has another number of ids than its server counted. Images are not
    compared: servers count them in ways of their own."""
    counted = read_count(response, field_path, "prompt_tokens")
    if prompt_ids is None or counted in (None, len(prompt_ids)):
        return
    if not any(message.parts and message.media for message in request.messages):
        expected = f"{len(prompt_ids)}, the number of prompt_token_ids"
        raise MessageError(f"{field_path}.usage.prompt_tokens", counted, expected)


def find_miscounted(calls: Iterable[LoggedCall]) -> Iterator[tuple[int, MessageError]]:
    """Yields the lines, with the error, of responses with other numbers of ids than the server counted.

    The count is that of a line's choices or of all choices of its response; what is counted and may be in
    lines that are not logged is not compared, nor the count of a stream that was cut off before its end.
    """
    responses: dict[tuple[object, ...], list[LoggedCall]] = {}
    for call in calls:
        responses.setdefault(call.response_key, []).append(call)
    for lines in responses.values():
        lengths: dict[tuple[int, int], int | None] = {}
        keys_of_line: list[list[tuple[int, int]]] = []
        for call in lines:
            keys_of_line.append([])
            numbers: Counter[int] = Counter()  # A line may have several choices of one index.
            for output in call.outputs:
                key = output.index, numbers[output.index]
                numbers[output.index] += 1
                keys_of_line[-1].append(key)
                length = lengths.get(key)
                lengths[key] = length if output.ids is None else max(length or 0, len(output.ids))
        expected = max(max(lengths)[0] + 1, *(call.choices for call in lines))
        total = sum(length or 0 for length in lengths.values())
        is_complete = len(lengths) >= expected and None not in lengths.values()
        for call, keys in zip(lines, keys_of_line, strict=True):
            counted, ids = call.counted_tokens, [output.ids for output in call.outputs]
            own = sum(len(one) for one in ids if one is not None)
            if counted is None or (own == counted and all(one is not None for one in ids)):
                continue
            known = [lengths[key] for key in keys]  # of this line's choices, from any line
            if None not in known and counted == sum(length or 0 for length in known):
                continue
            is_cut = any(output.is_cut for output in call.outputs)
            if counted < own and not is_cut:
                yield call.line, _count_error(counted, own)
            elif counted > own and is_complete and counted != total:
                yield call.line, _count_error(counted, total)


def _count_error(counted: int, known: int) -> MessageError:
    return MessageError("response.usage.completion_tokens", counted, f"{known}, the number of token_ids")


def _read_name(raw: Mapping[str, Any], key: str, prefix: str) -> str:
    value = raw.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MessageError(prefix + key, value, "a string")
    return replace_surrogates(value)


def read_choice(raw: object, field_path: str, response_id: object = None, position: int = 0) -> LoggedOutput:
    """Reads a choice of a chat completion. Its ids are `token_ids`, or the tokens of its logprobs if the
    server wrote them as `token_id:N`. Without a finish reason it was cut off; without an index, `position` is
    its index."""
    if not isinstance(raw, dict):
        raise MessageError(field_path, raw, "an object with a message")
    body = raw.get("message")
    if isinstance(body, dict):
        body = {"role": "assistant", **body}
    message = read_message(body, f"{field_path}.message")
    if message.role != "assistant":
        raise MessageError(f"{field_path}.message.role", message.role, "assistant")
    if isinstance(response_id, str) and response_id and not message.id:
        message = msgspec.structs.replace(message, id=replace_surrogates(response_id))
    ids = read_token_ids(raw.get("token_ids"), f"{field_path}.token_ids")
    named = _ids_of_tokens(raw.get("logprobs"), f"{field_path}.logprobs")
    if ids is None:
        ids = named
    elif named is not None and len(named) == len(ids) and (different := np.flatnonzero(named != ids)).size:
        first = int(different[0])
        raise MessageError(
            f"{field_path}.logprobs.content[{first}].token",
            f"token_id:{named[first]}",
            f"token_id:{ids[first]}",
        )
    logprobs = _read_logprobs(raw.get("logprobs"), f"{field_path}.logprobs")
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        raise MessageError(
            f"{field_path}.logprobs", f"{len(logprobs)} entries", f"one for each of {len(ids)} token_ids"
        )
    texts: TokenTexts = ()
    if ids is None and logprobs is not None:
        texts = read_token_texts(raw["logprobs"], f"{field_path}.logprobs")
    reason = raw.get("finish_reason")
    if not isinstance(reason, str | None):
        raise MessageError(f"{field_path}.finish_reason", reason, "a string or null")
    index = raw.get("index")
    if index is not None and type(index) is not int:
        raise MessageError(f"{field_path}.index", index, "an integer")
    return LoggedOutput(
        message,
        ids,
        logprobs,
        replace_surrogates(reason or TRUNCATED),
        index=position if index is None else index,
        token_texts=texts,
    )


def _ids_of_tokens(logprobs: object, field_path: str) -> Ids | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    entries = content if isinstance(content, list) else []
    tokens = [str(entry.get("token")) for entry in entries if isinstance(entry, dict)]
    if not tokens or not all(_TOKEN_AS_ID.match(token) for token in tokens):
        return None
    return read_token_ids([int(token.partition(":")[2]) for token in tokens], f"{field_path}.content")


def read_token_ids(raw: object, field_path: str) -> Ids | None:
    """Reads a list of token ids; None for null."""
    if raw is None:
        return None
    if not isinstance(raw, list):
        raise MessageError(field_path, raw, "a list of token ids")
    try:
        ids = np.array(raw) if raw else np.empty(0, np.int64)
    except (ValueError, OverflowError):
        ids = np.empty(0, np.float64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or any(type(one) is bool for one in raw):
        raise MessageError(field_path, raw, "a list of token ids (integers)")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= _TOKEN_ID_LIMIT):
        bad = int(np.flatnonzero((ids < 0) | (ids >= _TOKEN_ID_LIMIT))[0])
        raise MessageError(f"{field_path}[{bad}]", raw[bad], "a token id from 0 to 2147483647")
    return as_ids(ids)


def _read_logprobs(raw: object, field_path: str) -> Floats | None:
    if raw is None:
        return None
    content = raw.get("content") if isinstance(raw, dict) else raw
    if content is None:
        return None
    if not isinstance(content, list):
        raise MessageError(f"{field_path}.content", content, "a list with one entry per token")
    try:
        values = [entry["logprob"] for entry in content]
    except (TypeError, KeyError):
        raise MessageError(f"{field_path}.content", content, "entries with a logprob (a number)") from None
    for index, value in enumerate(values):
        is_number = type(value) in (int, float) and -_LOGPROB_LIMIT < value < _ROUNDING
        if value is not None and not is_number:
            raise MessageError(
                f"{field_path}.content[{index}].logprob", value, "a finite number up to 0, or null"
            )
    return np.array([np.nan if value is None else value for value in values], np.float32)


def _all_ids(call: LoggedCall) -> Iterator[tuple[str, Ids]]:
    if call.prompt_ids is not None:
        yield "response.prompt_token_ids", call.prompt_ids
    for index, output in enumerate(call.outputs):
        if output.ids is not None:
            yield f"response.choices[{index}].token_ids", output.ids


def group_by_session(calls: Iterable[LoggedCall]) -> dict[str, list[LoggedCall]]:
    """Returns the calls of each session, in the order in which sessions first appear."""
    sessions: dict[str, list[LoggedCall]] = {}
    for call in calls:
        sessions.setdefault(call.session, []).append(call)
    return sessions
