"""A model's chat template, compiled twice: with jinja2, which is what it means, and minijinja, which is fast.

minijinja is used only where it writes the same: both are compared when the template is loaded and again on
one render in a hundred. The first difference switches it off for good and is kept in `mismatch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from branchline.core.call import CachedJsonDict
from branchline.core.errors import CodecError, TemplateError

if TYPE_CHECKING:
    import jinja2

ChatTemplateKwargs = Mapping[str, Any]
_CHECK_INTERVAL = 100

_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": 'Looks "at" <things> & more.',
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
        },
    }
]
_PROBES: tuple[tuple[list[dict[str, Any]], Any], ...] = (
    ([{"role": "user", "content": "Hé <b>&\"'\n"}], None),
    ([{"role": "system", "content": " S "}, {"role": "user", "content": "ü\n\n"}], _PROBE_TOOLS),
    (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b\n", "reasoning_content": "r"},
            {"role": "user", "content": "c"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "abcdefghi",
                        "type": "function",
                        "function": {"name": "look", "arguments": {"at": 1, "é": [1.5, None, True, "<&>"]}},
                    }
                ],
            },
            {"role": "tool", "content": "seen", "tool_call_id": "abcdefghi", "name": "look"},
        ],
        _PROBE_TOOLS,
    ),
)


class ChatTemplate:
    """Renders conversations as text. Equal input gives equal text: the clock is the caller's.

    >>> ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}\\n{% endfor %}").render(
    ...     [{"role": "user", "content": "hi"}]
    ... )
    'user:hi\\n'
    """

    def __init__(
        self, source: str, tokens: ChatTemplateKwargs | None = None, *, use_minijinja: bool = True
    ) -> None:
        self.source = source
        self._special_tokens = dict(tokens or {})
        self._jinja = _compile_jinja(source)
        self._render_count = 0
        self.fallback_reason = ""
        """Why minijinja is not used, where it was tried."""
        self._minijinja: Callable[[dict[str, Any]], str] | None = None
        if use_minijinja:
            try:
                self._minijinja = _compile_minijinja(source)
            except CodecError as error:
                self.fallback_reason = str(error)
        if self._minijinja is not None:
            for messages, tools in _PROBES:
                with suppress(TemplateError):
                    self._render_both(self._context(messages, tools, {}, None))

    @property
    def uses_minijinja(self) -> bool:
        return self._minijinja is not None

    def render(
        self,
        messages: Sequence[ChatTemplateKwargs],
        tools: Sequence[ChatTemplateKwargs] | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
        *,
        now: datetime | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text; `now` is what its clock shows."""
        context = self._context(messages, tools, chat_template_kwargs or {}, now, add_generation_prompt)
        if self._minijinja is None:
            return self._render_jinja(context)
        self._render_count += 1
        if self._render_count % _CHECK_INTERVAL == 0:
            return self._render_both(context)
        try:
            return self._minijinja(context)
        except Exception:
            # The template raised, or minijinja cannot do what it asks: jinja2 knows which, and says why.
            return self._render_both(context)

    def _context(
        self,
        messages: Sequence[ChatTemplateKwargs],
        tools: Sequence[ChatTemplateKwargs] | None,
        values: ChatTemplateKwargs,
        now: datetime | None,
        generation_prompt: bool = True,
    ) -> dict[str, Any]:
        clock = now or datetime.now()
        context: dict[str, Any] = {
            **self._special_tokens,
            **values,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            "strftime_now": clock.strftime,
            "raise_exception": _raise_exception,
        }
        return context

    def _render_jinja(self, context: dict[str, Any]) -> str:
        import jinja2

        try:
            return self._jinja.render(context)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the conversation: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"the chat template failed on the conversation: {error}") from error

    def _render_both(self, context: dict[str, Any]) -> str:
        """The exact text; minijinja is dropped if it writes another, or fails where jinja2 does not."""
        fast: str | None = None
        problem = ""
        if self._minijinja is not None:
            try:
                fast = self._minijinja(context)
            except Exception as error:
                problem = str(error).splitlines()[0]
        try:
            exact = self._render_jinja(context)
        except TemplateError:
            if fast is not None:
                self._disable_minijinja("minijinja renders what jinja2 refuses")
            raise
        if fast is None and problem:
            self._disable_minijinja(f"minijinja fails: {problem}")
        elif fast is not None and fast != exact:
            self._disable_minijinja("minijinja writes another text")
        return exact

    def _disable_minijinja(self, reason: str) -> None:
        self._minijinja = None
        self.fallback_reason = reason


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
    """The `tojson` of chat templates: plain JSON, nothing escaped for HTML."""
    if type(value) is CachedJsonDict and not (ensure_ascii or indent is not None or separators or sort_keys):
        return value.json_text
    separators = tuple(separators) if separators else None
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _compile_jinja(source: str) -> jinja2.Template:
    try:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise CodecError("chat templates need jinja2: pip install 'branchline[tokenizer]'") from error

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_extension()]
    )
    environment.filters["tojson"] = to_json
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CodecError(f"the chat template does not compile: {error}") from error


def _generation_extension() -> Any:
    """`{% generation %}` marks assistant spans for others; to us it is its body."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=lineno)

    return Generation


def _compile_minijinja(source: str) -> Callable[[dict[str, Any]], str] | None:
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

    def render(context: dict[str, Any]) -> str:
        return environment.render_template("chat", **context)

    return render
