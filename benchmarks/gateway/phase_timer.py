"""Where the time of a call goes, on the wall, from its first byte to its last.

A call alone in the gateway is a sequence, threads or not: each part ends where the next one begins, so the
parts add up to the whole, waiting included. Parts of a part are timed beside it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.template_traits import TemplateTraits
from branchline.chat.tokenizer import TokenizerDir
from branchline.engines.base import Chunk
from branchline.gateway.asgi_request import AsgiRequest
from branchline.gateway.model_api import ModelApi
from branchline.runtime import call_lifecycle
from branchline.runtime.session_store import SessionStore
from branchline.tree.match import PathMatcher
from branchline.tree.session import Session

ENGINE = "the engine (not counted)"
_ROUTING, _COMMIT = "headers, routing, key", "commit: plan, encode, apply"
PARTS = (
    _ROUTING,
    "body: read, decode",
    "messages, parameters",
    "thread hop, parser",
    "prepare",
    ENGINE,
    "generate: parse the output",
    _COMMIT,
    "journal: until it is safe",
    "response: build",
    "response: encode, send",
)
NESTED_PARTS = (
    "match",
    "dialect.write",
    "template.render",
    "tokenizers",
    "codec, the rest",
    "prepare, the rest",
)
"""Parts of `prepare`."""


class PhaseTimer:
    """The seconds of each part of each call."""

    def __init__(self) -> None:
        self._calls: list[dict[str, float]] = []
        self._spent: defaultdict[str, float] | None = None
        self._since = 0.0

    def begin(self) -> None:
        if self._spent is None:
            self._spent = defaultdict(float)
            self._since = time.perf_counter()

    def end_phase(self, part: str) -> None:
        """Everything since the last mark was this part."""
        now = time.perf_counter()
        if self._spent is not None:
            self._spent[part] += now - self._since
        self._since = now

    def add_nested(self, part: str, spent_s: float) -> None:
        if self._spent is not None:
            self._spent[part] += spent_s

    def finish_call(self) -> None:
        if self._spent is not None and _COMMIT in self._spent:
            self._calls.append(dict(self._spent))
        self._spent = None

    def drain(self) -> list[dict[str, float]]:
        """The calls since the last take."""
        calls, self._calls = self._calls, []
        return calls


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def timed(engine: type) -> Iterator[PhaseTimer]:
    """Marks every call of this process while the block runs."""
    marks = PhaseTimer()
    cycle = import_module(AutoHTTPProtocol.__module__).RequestResponseCycle
    wraps: list[tuple[Any, str, Wrap]] = [
        (AutoHTTPProtocol, "data_received", lambda run: _before(run, marks.begin)),
        (SessionStore, "get", lambda run: _around(marks, run, None, _ROUTING)),
        (AsgiRequest, "read_json", lambda run: _awaited(marks, run, None, "body: read, decode")),
        (ModelApi, "_read_request", lambda run: _around(marks, run, None, "messages, parameters")),
        (Session, "prepare", lambda run: _around(marks, run, "thread hop, parser", "prepare")),
        (engine, "generate", lambda run: _generating(marks, run)),
        (Session, "commit", lambda run: _around(marks, run, "generate: parse the output", _COMMIT)),
        (call_lifecycle, "commit_call", lambda run: _awaited(marks, run, None, "journal: until it is safe")),
        (AsgiRequest, "send_json", lambda run: _awaited(marks, run, "response: build", None)),
        (cycle, "send", lambda run: _sending(marks, run)),
        (PathMatcher, "find", lambda run: _inside(marks, run, "match")),
        (GenericCodec, "extend", lambda run: _inside(marks, run, "codec")),
        (TemplateTraits, "to_template_messages", lambda run: _inside(marks, run, "dialect.write")),
        (ChatTemplate, "render", lambda run: _inside(marks, run, "template.render")),
        (TokenizerDir, "encode", lambda run: _inside(marks, run, "tokenizers")),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wraps]
    for owner, name, wrap in wraps:
        setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield marks
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def with_remainders(spent: dict[str, float]) -> dict[str, float]:
    """The seconds of one call with what is left of each part that has parts."""
    codec = spent.get("codec", 0.0)
    known = sum(spent.get(part, 0.0) for part in ("dialect.write", "template.render", "tokenizers"))
    rest = spent["prepare"] - codec - spent.get("match", 0.0)
    return {**spent, "codec, the rest": codec - known, "prepare, the rest": rest}


def _before(run: Callable[..., Any], mark: Callable[[], None]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        mark()
        return run(*args, **options)

    return wrapped


def _around(
    marks: PhaseTimer, run: Callable[..., Any], before: str | None, itself: str
) -> Callable[..., Any]:
    """Marks where a function begins and ends."""

    def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            marks.end_phase(before)
        try:
            return run(*args, **options)
        finally:
            marks.end_phase(itself)

    return wrapped


def _awaited(
    marks: PhaseTimer, run: Callable[..., Any], before: str | None, itself: str | None
) -> Callable[..., Any]:
    """The same for a coroutine."""

    async def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            marks.end_phase(before)
        try:
            return await run(*args, **options)
        finally:
            if itself is not None:
                marks.end_phase(itself)

    return wrapped


def _inside(marks: PhaseTimer, run: Callable[..., Any], part: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(*args, **options)
        finally:
            marks.add_nested(part, time.perf_counter() - start)

    return wrapped


def _generating(marks: PhaseTimer, run: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(*args: Any, **options: Any) -> AsyncGenerator[Chunk, None]:
        marks.end_phase("thread hop, parser")
        async for chunk in run(*args, **options):
            marks.end_phase(ENGINE)
            yield chunk

    return wrapped


def _sending(marks: PhaseTimer, run: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(self: Any, message: dict[str, Any]) -> None:
        await run(self, message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            marks.end_phase("response: encode, send")
            marks.finish_call()

    return wrapped
