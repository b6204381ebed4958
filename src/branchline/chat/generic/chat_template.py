"""A model's chat template, compiled with jinja2, the reference, and with minijinja, which is faster.

No prompt is used that jinja2 would render differently. Probing (`template_probe`) renders every probe
conversation with both. After that each new *shape* of conversation (the roles and their order, the fields
that are set, the types of arguments, the tools, the template arguments) is rendered with both once. The first
difference disables minijinja for this template before the text is used. A conversation with a number that
minijinja prints unlike Python (`21.0`, `1e16`) is rendered by jinja2 alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from branchline.chat.base import ChatTemplateKwargs, Tools
from branchline.chat.generic.tool_schemas import completed_tools
from branchline.core.call import CachedJsonDict
from branchline.core.errors import CodecError, TemplateError
from branchline.core.extras import requires_extra

if TYPE_CHECKING:
    import jinja2

_MAX_SHAPES = 4096
_MAX_EXACT_INT = 2**53
_MAX_DEPTH = 4
"""Values below this depth have the same shape."""
_FLOAT = re.compile(r"\d(?:\.\d+)?[eE]|\d\.0|NaN|Infinity")
"""Occurs in every JSON text with a float that minijinja prints unlike Python."""
_PYTHON_WHITESPACE = "\x1c\x1d\x1e\x1f"
"""Characters that jinja2 trims as whitespace and minijinja does not."""
_EXCERPT_CHARS = 60
_TEMPLATE_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises if it uses a value that the conversation does not have."""


class ChatTemplate:
    """Renders conversations as text. Equal input gives equal text: the caller sets the clock.

    >>> ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}\\n{% endfor %}").render(
    ...     [{"role": "user", "content": "hi"}]
    ... )
    'user:hi\\n'
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, use_minijinja: bool = True
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._jinja = _compile_jinja(source)
        self._verified_shapes: set[Hashable] = set()
        """Shapes that both engines rendered to the same text."""
        self._completed_tools: dict[tuple[str, ...], Tools] = {}
        """Tools that the template fails on, by their JSON, with the fields that they lack."""
        self.fallback_reason = ""
        """Why minijinja is not used, if it was tried."""
        self._minijinja: Callable[..., str] | None = None
        if use_minijinja:
            try:
                self._minijinja = _compile_minijinja(source)
            except CodecError as error:
                self.fallback_reason = str(error)

    @property
    def uses_minijinja(self) -> bool:
        return self._minijinja is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
        *,
        now: datetime | None = None,
        add_generation_prompt: bool = True,
        verify: bool = False,
    ) -> str:
        """Returns the conversation as text; `now` is the time that its clock functions return.

        With `verify` both engines render, even if the shape of the conversation was verified before. Tools
        that the template fails on are rendered with the optional fields that they lack. Raises TemplateError
        if the template refuses the conversation.
        """
        key = tuple([to_json(tool) for tool in tools]) if tools and self._completed_tools else ()
        tools = self._completed_tools.get(key, tools)
        render = partial(
            self._render,
            messages,
            kwargs=chat_template_kwargs or {},
            now=now or datetime.now(),
            add_generation_prompt=add_generation_prompt,
            verify=verify,
        )
        try:
            return render(tools)
        except TemplateError:
            for completed in completed_tools(tools or ()):
                if completed == list(tools or ()):
                    continue
                try:
                    text = render(completed)
                except TemplateError:
                    continue
                self._completed_tools[tuple([to_json(tool) for tool in tools or ()])] = completed
                return text
            raise

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        kwargs: ChatTemplateKwargs,
        now: datetime,
        add_generation_prompt: bool,
        verify: bool,
    ) -> str:
        import jinja2

        context: dict[str, Any] = {
            **self._special_tokens,
            **kwargs,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
            "raise_exception": _raise_exception,
        }
        minijinja, fast, problem = self._minijinja, None, ""
        shape: Hashable = None
        if minijinja is not None:
            tools_json = tuple([to_json(tool) for tool in tools or ()])
            shape = _shape(messages, tools_json, kwargs, add_generation_prompt)
        if shape is None:
            minijinja = None
        if minijinja is not None:
            try:
                fast = minijinja(**context)
            except Exception as error:
                # Either the template refuses the conversation or minijinja fails; jinja2 decides.
                problem = f"minijinja fails: {str(error).partition(chr(10))[0]}"
            if fast is not None and shape in self._verified_shapes and not verify:
                return fast
        try:
            exact = self._jinja.render(context)
        except (jinja2.TemplateError, *_TEMPLATE_FAILURES) as error:
            if fast is not None:
                self._disable_minijinja("minijinja renders a conversation that jinja2 refuses")
            verb = "refused" if isinstance(error, jinja2.TemplateError) else "failed on"
            raise TemplateError(f"the chat template {verb} the conversation: {error}") from error
        if fast is not None and fast != exact:
            problem = _describe_difference(exact, fast)
        if problem:
            self._disable_minijinja(problem)
        elif minijinja is not None:
            if len(self._verified_shapes) >= _MAX_SHAPES:
                self._verified_shapes.clear()
            self._verified_shapes.add(shape)
        return exact

    def _disable_minijinja(self, reason: str) -> None:
        self._minijinja = None
        self.fallback_reason = reason


def _shape(
    messages: Sequence[Mapping[str, Any]],
    tools_json: tuple[str, ...],
    chat_template_kwargs: ChatTemplateKwargs,
    add_generation_prompt: bool,
) -> Hashable | None:
    """Returns a signature of what a template may branch on, or None if a number is one that minijinja prints
    unlike Python.

    It stays the same while a conversation grows in the same pattern: messages count by their kind and by the
    kind of their predecessor, not by position, and values in arguments by their type and depth, up to three.
    """
    if any(map(_has_unequal_number, tools_json)):
        return None
    kinds: list[Hashable] = ["start"]
    texts: list[str] = []
    values: list[tuple[int, Any]] = [(0, value) for value in chat_template_kwargs.values()]
    for message in messages:
        content, calls = message["content"], message.get("tool_calls") or ()
        content_kind: Hashable = bool(content)
        if not isinstance(content, str):
            content_kind = None if content is None else tuple(part["type"] for part in content)
            parts = [part.get("text", part.get("thinking")) for part in content or ()]
            texts += [text for text in parts if isinstance(text, str)]
        kinds.append((message["role"], content_kind, tuple(message), min(len(calls), 2)))
        texts += [value for value in message.values() if isinstance(value, str)]
        values += [(0, call["function"]["arguments"]) for call in calls]
    kinds.append("end")
    value_types: set[Hashable] = set()
    while values:
        depth, value = values.pop()
        value_types.add((depth, type(value)))
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, float) and _is_unequal(value):
            return None
        elif isinstance(value, int) and not -_MAX_EXACT_INT < value < _MAX_EXACT_INT:
            value_types.add((depth, "large"))
        elif isinstance(value, (dict, list)):
            texts += value if isinstance(value, dict) else ()
            inner = value.values() if isinstance(value, dict) else value
            values += [(min(depth + 1, _MAX_DEPTH), item) for item in inner]
    text = "".join(texts)
    kwargs = frozenset((key, repr(value)) for key, value in chat_template_kwargs.items())
    return (
        frozenset(pairwise(kinds)),
        frozenset(value_types),
        text.isascii(),
        any(char in text for char in _PYTHON_WHITESPACE),
        tuple(map(hash, tools_json)),
        kwargs,
        add_generation_prompt,
    )


def _is_unequal(number: float) -> bool:
    """Whether minijinja prints a number unlike Python, by itself or as JSON.

    It passes integral floats to filters as integers, and it prints no exponents. Shortest digits are unique,
    so other floats are printed alike.
    """
    return number.is_integer() or "e" in repr(number) or number - number != 0


@lru_cache(maxsize=4096)
def _has_unequal_number(json_text: str) -> bool:
    """Whether a JSON text contains a float that minijinja prints unlike Python."""
    numbers: list[str] = []
    if _FLOAT.search(json_text):
        json.loads(json_text, parse_float=numbers.append, parse_constant=numbers.append)
    return any(_is_unequal(float(number)) for number in numbers)


def first_difference(one: str, other: str) -> int:
    """Returns the length of the common prefix, by bisection."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _describe_difference(exact: str, fast: str) -> str:
    start = first_difference(exact, fast)
    one, other = (
        text[max(0, start - _EXCERPT_CHARS // 2) : start + _EXCERPT_CHARS] for text in (exact, fast)
    )
    return f"minijinja renders {other!r} where jinja2 renders {one!r}"


def _raise_exception(message: str) -> str:
    import jinja2

    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter of chat templates: plain JSON without HTML escapes."""
    if type(value) is CachedJsonDict and not (ensure_ascii or indent is not None or separators or sort_keys):
        return value.json_text
    separators = tuple(separators) if separators else None
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _compile_jinja(source: str) -> jinja2.Template:
    with requires_extra():
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_extension()]
    )
    environment.filters["tojson"] = to_json
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CodecError(f"the chat template does not compile: {error}") from error


def _generation_extension() -> Any:
    """Supports `{% generation %}`, which marks assistant spans: only its body is rendered."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=lineno)

    return Generation


def _compile_minijinja(source: str) -> Callable[..., str] | None:
    try:
        import minijinja
    except ImportError:
        return None
    environment = minijinja.Environment(
        templates={"chat": source}, trim_blocks=True, lstrip_blocks=True, pycompat=True
    )
    environment.add_filter("tojson", to_json)
    try:
        environment.undeclared_variables_in_template("chat")
    except minijinja.TemplateError as error:
        raise CodecError(f"minijinja does not compile it: {str(error).splitlines()[0]}") from error
    return partial(environment.render_template, "chat")
