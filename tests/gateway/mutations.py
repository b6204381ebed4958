"""Valid requests for every route of the gateway, and mutations of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from copy import copy
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

# -- valid requests ----------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stream": False,
    "user": "me",
    "metadata": {"a": "b"},
}
CHAT = {
    **SAMPLING,
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "look"}], "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a door"},
    ],
    "tools": [CHAT_TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "n": 1,
    "stop": ["zzz"],
    "max_tokens": 50,
    "logprobs": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"enable_thinking": True},
}
RESPONSES = {
    **SAMPLING,
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": [],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a door"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "ok"}],
        },
    ],
    "tools": [
        {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "go", "parameters": {}}]},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_output_tokens": 50,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "truncation": "disabled",
    "service_tier": "auto",
}
MESSAGES = {
    **SAMPLING,
    "model": "m",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a door"}]},
                {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"},
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}, {"type": "bash_20250124"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "stop_sequences": ["zzz"],
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "thread": {"type": "create"},
}
COMPLETIONS = {
    **SAMPLING,
    "model": "m",
    "prompt": "once upon",
    "max_tokens": 50,
    "n": 2,
    "stop": "zzz",
    "logprobs": 1,
    "echo": False,
    "best_of": 2,
    "stream_options": {"include_usage": True},
}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "chat/completions/count_tokens": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "responses/input_tokens": RESPONSES,
    "messages": MESSAGES,
    "messages/count_tokens": MESSAGES,
}
OPTIONS = {
    "id": "",
    "agent": "main",
    "group": "g",
    "metadata": {"a": [1, "b"]},
    "sampling": {"temperature": 0.5, "max_tokens": 20, "stop": ["zzz"]},
    "sampling_defaults": {"top_p": 0.9, "seed": 1},
    "limits": {"calls": 5, "tokens": 500},
    "eval": False,
    "agent_reward": True,
}
CONTROL: list[tuple[str, str, Any]] = [
    ("GET", "/", None),
    ("GET", "/healthz", None),
    ("GET", "/readyz", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("POST", "/sessions", OPTIONS),
    ("GET", "/sessions", None),
    ("GET", "/sessions/{id}", None),
    ("GET", "/sessions/{id}/tree", None),
    ("GET", "/sessions/{id}/timelines", None),
    ("GET", "/sessions/{id}/samples", None),
    ("GET", "/sessions/{id}/report", None),
    ("GET", "/sessions/{id}/snapshot", None),
    ("POST", "/sessions/{id}/reward", {"score": 1.0, "why": {"a": [1]}, "turn": 1}),
    ("POST", "/sessions/{id}/complete", {"reason": "done"}),
    ("POST", "/sessions/{id}/finalize", {"reason": "done"}),
    ("POST", "/sessions/{id}/abort", {"reason": "no"}),
    ("POST", "/policy/pause", None),
    ("POST", "/policy/resume", {"version": 3}),
    ("GET", "/engines", None),
    ("POST", "/engines", {"url": "http://127.0.0.1:1"}),
    ("DELETE", "/engines", {"name": "scripted"}),
    ("DELETE", "/sessions/{id}", None),
]


# -- mutations ---------------------------------------------------------------------------------------


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


HOSTILE_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    2**64,
    10**400,
    float("nan"),
    "",
    "wizard",
    "\ud800",
    "ü🙂\u2028\x00",
    "x" * 5000,
    "data:image/png;base64,AAAA",
    [],
    {},
    [None],
    [["x"]],
    {"type": "wizard"},
    {"\udfff": "\ud800"},
    {"role": "user", "content": "x"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    _deep(40),
    "@deep",
]
JsonPath = tuple[str | int, ...]


def json_paths(value: Any, here: JsonPath = ()) -> Iterator[JsonPath]:
    """The path of every value in a JSON value, its own first, down to a depth of 8."""
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items if len(here) < 8 else ():
        yield from json_paths(inner, (*here, key))


def replaced_at(body: Any, path: JsonPath, value: Any) -> Any:
    """A body with another value at a path."""
    if not path:
        return value
    changed = copy(body)
    changed[path[0]] = replaced_at(body[path[0]], path[1:], value)
    return changed


def encode_body(body: Any) -> bytes:
    """The body as JSON; "@deep" becomes a value that is nested deeper than Python can encode."""
    text = json.dumps(body)
    return text.replace('"@deep"', '{"a":[' * 3000 + "1" + "]}" * 3000).encode()


@st.composite
def _mutated_fields(draw: st.DrawFn, body: Any) -> bytes:
    for _ in range(draw(st.integers(0, 4))):
        body = replaced_at(
            body, draw(st.sampled_from(list(json_paths(body)))), draw(st.sampled_from(HOSTILE_VALUES))
        )
    return encode_body(body)


@st.composite
def _mutated_bytes(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The body with damaged bytes, in one or more chunks."""
    how = draw(st.sampled_from(["not", "not", "cut", "flip", "garbage", "bom", "gzip", "utf-16", "none"]))
    offset = draw(st.integers(0, max(0, len(data) - 1)))
    if how == "cut":
        data = data[:offset]
    elif how == "flip":
        data = data[:offset] + bytes([draw(st.integers(0x7F, 0xFF))]) + data[offset + 1 :]
    elif how == "garbage":
        data += draw(st.binary(min_size=1, max_size=8))
    elif how == "bom":
        data = b"\xef\xbb\xbf" + data
    elif how == "gzip":
        data = gzip.compress(data, mtime=0)
    elif how == "utf-16":
        data = data.decode().encode("utf-16")
    elif how == "none":
        data = b""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    edges = [0, *cuts, len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


_names = st.sampled_from(
    [
        b"content-type",
        b"content-encoding",
        b"x-branchline-agent",
        b"x-branchline-parent-agent",
        b"x-branchline-resume",
        b"x-claude-code-agent-id",
        b"x-stainless-retry-count",
        b"x-api-key",
        b"anthropic-beta",
        b"traceparent",
        b"content-length",
        b"authorization",
        b"idempotency-key",
    ]
)
_values = st.sampled_from(
    [
        b"",
        b"x",
        b"-1",
        b"1e9",
        b"\xff\xfe",
        b"Bearer",
        b"Bearer \xff",
        b"Basic eA==",
        b"text/plain",
        b"9" * 400,
        b"application/json; charset=utf-16",
        "é".encode(),
        "²".encode("latin-1"),
        b"00-zz-zz-01",
        b"a\x00b",
        b"\xe9" * 20,
        b"0123456789abcdef",
    ]
)
_headers = st.lists(st.tuples(_names, _values), max_size=3)
_queries = st.sampled_from(
    [b"", b"beta=true", b"timeout_s=0", b"%ff=%00&&=", b"a" * 2000, b"state=open&group=%ed%a0%80"]
)
_methods = st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD", "PATCH", "OPTIONS", "TRACE", "WIZARD"])
_ids = st.sampled_from(
    [
        "default",
        "..",
        "%2e%2e",
        "a%2Fb",
        "%00",
        "%ff",
        "%F0%9F%99%82",
        "%ed%a0%80",
        "x" * 3000,
        "%20",
        "v1",
        "{id}",
    ]
)


@st.composite
def model_requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request to some path of the model API, mutated in any way."""
    endpoint = draw(
        st.sampled_from([*BODIES, "models", "models/x", "models//", "wizard", "", "chat/../responses"])
    )
    body = draw(_mutated_fields({**BODIES.get(endpoint, CHAT), "stream": draw(st.booleans())}))
    before = draw(
        st.sampled_from(["", "", "/sessions/{own}", "/sessions/{own}/agents/a%2Fb", "/agents/{odd}"])
    )
    before = draw(st.sampled_from([before, before, before, "/sessions/{odd}", "/sessions", "/wizard/{odd}"]))
    return {
        "method": draw(st.just("POST") | _methods),
        "path": before.replace("{odd}", draw(_ids)) + f"/v1/{endpoint}",
        "body": draw(_mutated_bytes(body)),
        "headers": draw(_headers),
        "query": draw(_queries),
    }


@st.composite
def control_requests(draw: st.DrawFn) -> dict[str, Any]:
    method, path, body = draw(st.sampled_from(CONTROL))
    id = draw(st.sampled_from(["{own}", "{own}", "{own}"]) | _ids)
    return {
        "method": draw(st.just(method) | _methods),
        "path": draw(st.sampled_from(["", "", "", "/", "/v1"])).join([path.replace("{id}", id), ""]),
        "body": draw(_mutated_bytes(draw(_mutated_fields(body)) if body is not None else b"")),
        "headers": draw(_headers),
        "query": draw(_queries),
        "key": draw(st.sampled_from(["{admin}", "{admin}", "{api}", "{control}", ""])),
    }
