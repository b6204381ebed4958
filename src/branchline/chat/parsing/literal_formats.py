"""Formats whose calls are expressions: Python's `[f(a=1)]` (LFM2, Llama 4) and Gemma's `call:f{a:1}`.

The arguments are converted to JSON. A call whose name is readable but whose arguments are not literals keeps
the generated text as arguments.
"""

from __future__ import annotations

import json
import re

from branchline.chat.parsing.base import FormatParser, MessageDelta, ParseProblem, Tools
from branchline.chat.parsing.framed import CallFormat
from branchline.chat.parsing.json_scan import is_json_object, parse_call, split_sequence
from branchline.chat.parsing.literals import GEMMA_LITERALS, PYTHON_LITERALS, skip_space
from branchline.core.message import ToolCall

_CALL_OPENING = re.compile(r"\s*([^\W\d][\w.-]*)\s*\(")
_KEYWORD = re.compile(r"([^\s=,()'\"]+)\s*=(?!=)")
_GEMMA_OPENING = re.compile(r"\s*call:([^\s{}:]+)\s*(?=\{)")


# -- Python calls ------------------------------------------------------------------------------------------


def parse_python_calls(text: str) -> list[ToolCall]:
    """Returns the calls in `[f(a=1), g()]` or `f(a=1)`. Raises ValueError if the text is anything else.

    >>> [(call.name, call.arguments) for call in parse_python_calls("[f(a=1, b='x'), g()]")]
    [('f', '{"a": 1, "b": "x"}'), ('g', '{}')]
    """
    at = skip_space(text, 0)
    closer = "]" if text.startswith("[", at) else ""
    at += len(closer)
    calls: list[ToolCall] = []
    while True:
        call, at = _read_call(text, at)
        calls.append(call)
        at = skip_space(text, at)
        if text[at : at + 1] != ",":
            break
        at += 1
    if not text.startswith(closer, at) or text[at + len(closer) :].strip():
        raise ValueError("not a list of calls")
    return calls


def _read_call(text: str, at: int) -> tuple[ToolCall, int]:
    opening = _CALL_OPENING.match(text, at)
    if opening is None:
        raise ValueError("not a call")
    at = skip_space(text, opening.end())
    members: dict[str, str] = {}
    while text[at : at + 1] != ")":
        keyword = _KEYWORD.match(text, at)
        if keyword is None or keyword[1] in members:
            raise ValueError("not a keyword argument")
        members[keyword[1]], at = PYTHON_LITERALS.read(text, keyword.end())
        at = skip_space(text, at)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
        elif text[at : at + 1] != ")":
            raise ValueError("expected a comma or )")
    return ToolCall(opening[1], _write_object(members)), at + 1


def _write_object(members: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in members.items()) + "}"


def _parse_python_body(body: str, _: Tools) -> list[ToolCall]:
    """Returns the calls of a block. Calls that are not readable are one call: the first name, with all that
    follows as arguments."""
    try:
        return parse_python_calls(body)
    except ValueError:
        text = body.strip().removeprefix("[")
        opening = _CALL_OPENING.match(text)
        if opening is None:
            return []
        rest = text[opening.end() :].strip()
        arguments = rest.removesuffix("]").rstrip().removesuffix(")").rstrip()
        if not arguments or is_json_object(arguments):
            arguments = rest
        return [ToolCall(opening[1], arguments)] if arguments else []


# -- Gemma 4 -----------------------------------------------------------------------------------------------


def _parse_gemma_body(body: str, _: Tools) -> list[ToolCall]:
    opening = _GEMMA_OPENING.match(body)
    if opening is None:
        return []
    arguments = body[opening.end() :].strip()
    try:
        converted, end = GEMMA_LITERALS.read(arguments)
        if end == len(arguments):
            return [ToolCall(opening[1], converted)]
    except ValueError:
        pass
    return [ToolCall(opening[1], arguments)]


LITERAL_FORMATS: dict[str, CallFormat] = {
    "lfm2": CallFormat(("<|tool_call_start|>", "<|tool_call_end|>"), _parse_python_body),
    "gemma4": CallFormat(("<|tool_call>", "<tool_call|>"), _parse_gemma_body),
}


# -- Llama 4 -----------------------------------------------------------------------------------------------

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_POSSIBLE_START = re.compile(
    r"""\[\s*(?:[^\W\d][\w.-]*\s*)?$ | \{\s*(?:"(?:n(?:a(?:me?)?)?)?)?$""", re.VERBOSE
)
"""The start of a text that may still become calls."""
_START = re.compile(r"""\[\s*[^\W\d][\w.-]*\s*\( | \{\s*"name\" """, re.VERBOSE)


class Llama4Parser(FormatParser):
    """Llama 4: the complete output is `[f(a=1), g()]`, or `{"name": "f", "parameters": {…}}` once or more.

    `<|python_start|>` and `<|python_end|>` may stand around it, or around text before it. Only the end of the
    output ends the calls, so an output that starts like calls is held until then; any other output is text.
    """

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._may_be_calls = True
        self._starts_call = False

    def feed(self, text: str) -> list[MessageDelta]:
        if self._may_be_calls:
            self._block.append(text)
            if not self._starts_call:
                self._check_start()
        else:
            self._emit(text)
        return self._pop_deltas()

    def _check_start(self) -> None:
        held = "".join(self._block)
        self._block = [held]
        body = held.lstrip()
        if body != PYTHON_START and PYTHON_START.startswith(body):
            return
        self._starts_call = body.startswith(PYTHON_START) or _START.match(body) is not None
        if not self._starts_call and not _POSSIBLE_START.match(body):
            self._may_be_calls = False
            self._emit(held)
            self._block.clear()

    def _close(self) -> None:
        if not self._block:
            return
        text = "".join(self._block)
        content, calls = _parse_llama4_reply(text) if self._starts_call else ("", [])
        if calls:
            self._emit(content)
            self._add_calls(*calls)
            return
        if self._starts_call:
            self.problems.append(ParseProblem.CUT_CALL if self._truncated else ParseProblem.MALFORMED_CALL)
        self._block.clear()
        self._emit(text)


def _parse_llama4_reply(text: str) -> tuple[str, list[ToolCall]]:
    """Returns the text and the calls of a reply."""
    body = text.strip()
    if not body.startswith(PYTHON_START):
        return "", _parse_llama4_calls(body)
    body = body.removeprefix(PYTHON_START)
    calls = _parse_llama4_calls(body.removesuffix(PYTHON_END).strip())
    if calls:
        return "", calls
    content, _, body = body.partition(PYTHON_END)
    return content, _parse_llama4_calls(body.strip())


def _parse_llama4_calls(body: str) -> list[ToolCall]:
    if body.startswith("["):
        try:
            return parse_python_calls(body)
        except ValueError:
            return []
    calls = [parse_call(item, "parameters", "arguments") for item in split_sequence(body) or ()]
    # A name alone is not a call: an answer in JSON may contain one.
    return [call for call in calls if call] if all(call and call.arguments for call in calls) else []
