"""The tool interface: a name, a schema, and one instance per trajectory.

`create` makes the instance, `execute` runs one call on it, `calc_reward` scores it when the trajectory ends,
`release` frees it. A `ToolSession` calls each at the right time. A tool's author may
leave out all of them but `execute`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import xxhash

from branchline.core.errors import InputError
from branchline.core.message import Media, MediaKind, Message
from branchline.loop.persistence import Restorable, encode_hook
from branchline.loop.task import ToolMethod

_MAGIC_BYTES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"),
)


class ToolResult(msgspec.Struct, frozen=True):
    """The result of one tool call: what the model is shown and what the trainer gets.

    A tool sets the first five fields; the tool session sets the others.
    """

    content: str = ""
    media: tuple[Media, ...] = ()
    """Images, video and audio; they follow the text."""
    reward: float | None = None
    extras: Mapping[str, Any] = {}
    """JSON data for the trainer."""
    is_error: bool = False
    """Whether the call failed; the model is shown `content` unchanged."""
    tool: str = ""
    turn: int = 0
    """The assistant turn that made the call, from 1."""
    tool_call_id: str = ""
    seconds: float = 0.0
    """How long the tool took; waiting for other calls does not count."""

    @property
    def message(self) -> Message:
        """The tool message that the model is shown."""
        parts: tuple[str | Media, ...] = self.media
        if self.media and self.content:
            parts = (self.content, *self.media)
        return Message("tool", self.content, tool_call_id=self.tool_call_id, name=self.tool, parts=parts)

    @property
    def error(self) -> str | None:
        return self.content if self.is_error else None


class Tool(Restorable, Protocol):
    """A tool. `execute` may be called again before an earlier call on the same instance has returned."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """`{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`"""

    @property
    def is_repeatable(self) -> bool:
        """Whether a call that was cancelled while it ran can run again without its effect counting twice."""

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        """An instance for one trajectory; the arguments are those of the task.

        If it is cancelled it cleans up after itself: only what it returns is released.
        """

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs one call, whose arguments fit the schema. The model is shown the text of an exception.

        A task may have further arguments for `execute`, `calc_reward` and `release`
        (`tool_method_arguments`); they are passed by name to a tool that takes them.
        """

    async def calc_reward(self, instance: Any) -> float | None:
        """The instance's final reward, in addition to the rewards of its calls; None for none."""

    async def release(self, instance: Any) -> None:
        """Frees the instance. Called exactly once, however the trajectory ended."""


class BaseTool:
    """Defaults for all methods but `execute`: an instance is its arguments, has no reward, needs no release.

    class Echo(BaseTool):
        name = "echo"
        schema = function_schema("echo", "Repeats its arguments.", {"type": "object"})

        async def execute(self, instance, arguments):
            return ToolResult(str(arguments))
    """

    name: str
    schema: Mapping[str, Any]
    is_repeatable: bool = False

    @property
    def is_stateful(self) -> bool:
        """True if a subclass overrides `create`, `calc_reward` or `save`."""
        cls, base = type(self), BaseTool
        return (cls.create, cls.calc_reward, cls.save) != (base.create, base.calc_reward, base.save)

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        return arguments

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance: Any) -> float | None:
        return None

    async def release(self, instance: Any) -> None:
        return None

    def save(self, instance: Any) -> Any:
        return None

    async def restore(self, trajectory: str, saved: Any, **arguments: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.restore")


@dataclass(frozen=True)
class ToolSelection:
    """The tools of one task, and the arguments each instance is created with.

    Raises InputError if two tools share a name or if arguments belong to no tool.
    """

    tools: tuple[Tool, ...] = ()
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    method_arguments: Mapping[str, Mapping[ToolMethod, Mapping[str, Any]]] = field(default_factory=dict)
    """Further arguments of `execute`, `calc_reward` and `release`."""

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"tools: got {name!r} twice, expected distinct names")
        for name, arguments in self.arguments.items():
            if name not in names:
                raise InputError(f"tool_arguments: got {name!r}, expected one of the task's tools, {names}")
            if not isinstance(arguments, Mapping):
                raise InputError(f"tool_arguments[{name!r}]: got {arguments!r}, expected an object")
        for name, methods in self.method_arguments.items():
            if name not in names:
                raise InputError(
                    f"tool_method_arguments: got {name!r}, expected one of the task's tools, {names}"
                )
            for method, extra in methods.items():
                _check_accepts(self.tools[names.index(name)], method, extra)


def _check_accepts(tool: Tool, method: ToolMethod, arguments: Mapping[str, Any]) -> None:
    """Raises InputError if a method does not take these arguments: the model must not see that error."""
    positional = ("instance", "arguments") if method == "execute" else ("instance",)
    try:
        inspect.signature(getattr(tool, method)).bind(*positional, **arguments)
    except TypeError as error:
        raise InputError(f"tool_method_arguments[{tool.name!r}].{method}: {error}") from error


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema in the form that chat templates and APIs share."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def to_tool_result(value: Any) -> ToolResult:
    """A result from what a function returned: text unchanged, data as JSON, bytes and Media as media.

    >>> to_tool_result({"price": 3}).content
    '{"price":3}'
    """
    if isinstance(value, ToolResult):
        return value
    is_mixed = isinstance(value, list | tuple) and any(isinstance(item, Media | bytes) for item in value)
    items = value if is_mixed else (value,)
    media = [item for item in items if isinstance(item, Media | bytes)]
    texts = [_text(item) for item in items if not isinstance(item, Media | bytes)]
    return ToolResult(
        "\n".join(texts), tuple(item if isinstance(item, Media) else media_from_bytes(item) for item in media)
    )


def media_from_bytes(payload: bytes, mime: str = "") -> Media:
    """Media from bytes; without a MIME type it is detected from their first bytes.

    Raises TypeError if it cannot be detected: a guess could show the model something the tool did not mean.
    """
    mime = mime or _detect_mime(payload)
    return Media(_media_kind(mime), xxhash.xxh3_128_hexdigest(payload), payload, mime=mime)


_json_encoder = msgspec.json.Encoder(enc_hook=encode_hook)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return _json_encoder.encode(value).decode()
    except InputError as error:
        raise TypeError(
            f"the tool's result: {error}, expected a text, values that JSON can hold, or media"
        ) from None


def _detect_mime(payload: bytes) -> str:
    for offset, magic, mime in _MAGIC_BYTES:
        if payload.startswith(magic, offset):
            return mime
    raise TypeError(f"bytes that begin {payload[:8]!r}: expected a PNG, JPEG, GIF, WebP, MP4 or WebM")


def _media_kind(mime: str) -> MediaKind:
    kind = mime.partition("/")[0]
    return kind if kind in ("image", "video", "audio") else "file"  # type: ignore[return-value]
