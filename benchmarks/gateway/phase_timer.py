"""Wall time of the phases of a call, from its first byte to its last.

If only one call runs, its phases are sequential, also across threads: each ends where the next begins, so
they add up to the total, including waits. Phases inside another phase are timed separately.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from branchline.chat.generic.chat_template import ChatTemplate
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.template_traits import TemplateTraits
from branchline.chat.tokenizer import TokenizerDir
from branchline.engines.base import Chunk
from branchline.gateway import model_api
from branchline.gateway.access import AccessControl
from branchline.gateway.asgi import AsgiRequest
from branchline.gateway.model_api import ModelApi
from branchline.gateway.server_connection import ServerConnection
from branchline.runtime import call_lifecycle
from branchline.tree.match import PathMatcher
from branchline.tree.session import Session

ENGINE = "engine (not counted)"
_ROUTING, _COMMIT = "headers, routing, key", "commit: plan, encode, apply"
PARTS = (
    _ROUTING,
    "body: read",
    "body: decode, parse",
    "thread hop, parser",
    "prepare",
    ENGINE,
    "generate: parse the output",
    _COMMIT,
    "journal: until written",
    "response: build",
    "response: encode, send",
)
NESTED_PARTS = (
    "match",
    "template messages",
    "template.render",
    "tokenizers",
    "codec, rest",
    "prepare, rest",
)
"""Parts of `prepare`."""


class PhaseTimer:
    """The seconds of each phase of each call."""

    def __init__(self) -> None:
        self._calls: list[dict[str, float]] = []
        self._spent: defaultdict[str, float] | None = None
        self._since = 0.0

    def begin(self) -> None:
        if self._spent is None:
            self._spent = defaultdict(float)
            self._since = time.perf_counter()

    def end_phase(self, part: str) -> None:
        """Adds the time since the end of the last phase to this one."""
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
        """The calls since the last `drain`."""
        calls, self._calls = self._calls, []
        return calls


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def timed(engine: type) -> Iterator[PhaseTimer]:
    """Times every call of this process while the block runs."""
    timer = PhaseTimer()
    cycle = import_module(AutoHTTPProtocol.__module__).RequestResponseCycle
    wraps: list[tuple[Any, str, Wrap]] = [
        (ServerConnection, "data_received", partial(_before, timer.begin)),
        (AccessControl, "model_session", partial(_around, timer, None, _ROUTING)),
        (model_api, "read_body_parts", partial(_awaited, timer, None, "body: read")),
        (ModelApi, "_parse", partial(_around, timer, None, "body: decode, parse")),
        (Session, "prepare", partial(_around, timer, "thread hop, parser", "prepare")),
        (engine, "generate", partial(_generating, timer)),
        (Session, "commit", partial(_around, timer, "generate: parse the output", _COMMIT)),
        (call_lifecycle, "commit_call", partial(_awaited, timer, None, "journal: until written")),
        (AsgiRequest, "send_json", partial(_awaited, timer, "response: build", None)),
        (cycle, "send", partial(_sending, timer)),
        (PathMatcher, "find", partial(_inside, timer, "match")),
        (GenericCodec, "extend", partial(_inside, timer, "codec")),
        (TemplateTraits, "to_template_messages", partial(_inside, timer, "template messages")),
        (ChatTemplate, "render", partial(_inside, timer, "template.render")),
        (TokenizerDir, "encode", partial(_inside, timer, "tokenizers")),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wraps]
    for owner, name, wrap in wraps:
        setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield timer
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def with_remainders(spent: dict[str, float]) -> dict[str, float]:
    """The seconds of one call, with the remainders of phases that have nested ones."""
    codec = spent.get("codec", 0.0)
    known = sum(spent.get(part, 0.0) for part in ("template messages", "template.render", "tokenizers"))
    rest = spent["prepare"] - codec - spent.get("match", 0.0)
    return {**spent, "codec, rest": codec - known, "prepare, rest": rest}


def _before(callback: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        callback()
        return function(*args, **options)

    return wrapped


def _around(
    timer: PhaseTimer, before: str | None, phase: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Ends a phase where a function begins and another where it returns."""

    def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            timer.end_phase(before)
        try:
            return function(*args, **options)
        finally:
            timer.end_phase(phase)

    return wrapped


def _awaited(
    timer: PhaseTimer, before: str | None, phase: str | None, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`_around` for a coroutine."""

    async def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            timer.end_phase(before)
        try:
            return await function(*args, **options)
        finally:
            if phase is not None:
                timer.end_phase(phase)

    return wrapped


def _inside(timer: PhaseTimer, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            timer.add_nested(part, time.perf_counter() - start)

    return wrapped


def _generating(timer: PhaseTimer, function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(*args: Any, **options: Any) -> AsyncGenerator[Chunk, None]:
        timer.end_phase("thread hop, parser")
        async for chunk in function(*args, **options):
            timer.end_phase(ENGINE)
            yield chunk

    return wrapped


def _sending(timer: PhaseTimer, function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(self: Any, message: dict[str, Any]) -> None:
        await function(self, message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            timer.end_phase("response: encode, send")
            timer.finish_call()

    return wrapped
