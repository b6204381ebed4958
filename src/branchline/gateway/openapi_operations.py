"""The operations of both APIs, as the OpenAPI document lists them: keys, parameters, bodies and answers.

Tests compare this table with the routes, and the answer of every operation with its schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from branchline.core.sample import ExportReport
from branchline.export.samples import ExportPolicy
from branchline.gateway.control_types import (
    AddEngineRequest,
    EndRequest,
    EngineList,
    GatewayIndex,
    HealthState,
    ModelSession,
    OpenedSession,
    PolicyView,
    ReadyState,
    RemoveEngineRequest,
    ResumeRequest,
    SessionList,
    SessionView,
    TimelineList,
    TreeView,
)
from branchline.gateway.export_options import SampleFormat
from branchline.gateway.model_api import COUNT_PROTOCOLS, PROTOCOLS
from branchline.runtime.headers import IDEMPOTENCY_HEADER
from branchline.runtime.managed_session import SessionOptions

Schema = dict[str, Any]
KeyName = Literal["adminKey", "controlKey", "apiKey"]
_ADMIN: tuple[KeyName, ...] = ("adminKey",)
_CONTROL: tuple[KeyName, ...] = ("adminKey", "controlKey")
_ANY_KEY: tuple[KeyName, ...] = ("adminKey", "controlKey", "apiKey")
_REF = "#/components/schemas/{name}"


def schema_ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    name: str
    method: str
    path: str
    summary: str
    keys: tuple[KeyName, ...]
    answer: type | Schema | None
    """The schema of a successful response; None if it has no content."""
    status: int = 200
    body: type | Schema | None = None
    parameters: tuple[Schema, ...] = ()
    media_types: tuple[str, ...] = ("application/json",)
    error: str = "Error"
    needs_body: bool = False
    other_statuses: tuple[int, ...] = ()
    """Further statuses with the same answer."""
    tag: str = "control"


def _parameter(name: str, schema: Schema, description: str, place: str = "query") -> Schema:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "description": description, "schema": schema, **required}


TEXT: Schema = {"type": "string"}
PATH_PARAMETERS = {
    "id": _parameter("id", TEXT, "The id of a session.", "path"),
    "agent": _parameter("agent", TEXT, "The name of an agent of the session.", "path"),
    "response": _parameter("response", TEXT, "The id of a response of the session.", "path"),
    "model": _parameter("model", TEXT, "The name of a model; any name is accepted.", "path"),
}
_IDEMPOTENCY = _parameter(
    IDEMPOTENCY_HEADER,
    {"type": "string", "minLength": 16, "maxLength": 255},
    "Random text. Requests with the same one have one effect, so that a request can be sent again.",
    "header",
)


def policy_properties() -> dict[str, Schema]:
    """The fields of an export, as `gateway/export_options.py` reads them."""
    properties: dict[str, Schema] = dict(type_schemas(ExportPolicy)["ExportPolicy"]["properties"])
    del properties["keep_calls"]
    names: Schema = {"type": "array", "items": TEXT}
    return {
        name: {key: value for key, value in schema.items() if key != "default"}
        for name, schema in {**properties, "keep_call": names, "include_aborted": {"type": "boolean"}}.items()
    }


def type_schemas(*types: type) -> dict[str, Schema]:
    return msgspec.json.schema_components(types, ref_template=_REF)[1]


_EXPORT_PARAMETERS = tuple(
    _parameter(name, schema, "A field of ExportPolicy; without it, the session's default.")
    for name, schema in policy_properties().items()
)
_FORMAT = _parameter(
    "format",
    {"enum": list(get_args(SampleFormat))},
    "One object, a line for each sample, or a line for each node with shared prefixes once.",
)
_SCORE: Schema = {"type": ["number", "boolean"], "description": "true is 1, false is 0."}
_REWARD: Schema = {
    "type": "object",
    "description": "`call`, `turn`, `timeline`, `tool` and `agent` name the part that it is for.",
    "properties": {
        "score": _SCORE,
        "call": {**TEXT, "minLength": 1},
        "turn": {"type": "integer", "minimum": 1},
        "timeline": {"type": "integer", "minimum": 1},
        "tool": {**TEXT, "minLength": 1},
        "agent": {**TEXT, "minLength": 1},
        "id": {
            "type": ["string", "integer"],
            "description": "A reward with the same id, unchanged, is added once.",
        },
        "extras": {"type": "object", "description": "What is kept with the reward, in samples too."},
    },
    "additionalProperties": False,
    "required": ["score"],
}
_ANY_SESSION: Schema = {"anyOf": [schema_ref("SessionView"), schema_ref("SessionStateView")]}
SAMPLES_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "samples": {"type": "array", "items": schema_ref("Sample")},
        "report": schema_ref("ExportReport"),
    },
    "required": ["samples", "report"],
}

_S = "/sessions/{id}"
CONTROL_OPERATIONS = (
    Operation("index", "GET", "/", "Says what this is and where its documents are.", (), GatewayIndex),
    Operation("health", "GET", "/healthz", "Says that the gateway is alive.", (), HealthState),
    Operation(
        "ready",
        "GET",
        "/readyz",
        "Says whether a call would be taken now; 503 if not.",
        (),
        ReadyState,
        other_statuses=(503,),
    ),
    Operation("metrics", "GET", "/metrics", "Prometheus metrics.", (), TEXT, media_types=("text/plain",)),
    Operation("openapi", "GET", "/openapi.json", "This document.", (), {"type": "object"}),
    Operation(
        "openSession",
        "POST",
        "/sessions",
        "Opens a session.",
        _ADMIN,
        OpenedSession,
        201,
        SessionOptions,
        (_IDEMPOTENCY,),
    ),
    Operation(
        "listSessions",
        "GET",
        "/sessions",
        "Lists the sessions in memory, oldest first.",
        _ADMIN,
        SessionList,
        parameters=(
            _parameter("state", {"enum": ["open", "completed", "finalized", "aborted"]}, "Only this state."),
            _parameter("group", TEXT, "Only this group."),
        ),
    ),
    Operation("readSession", "GET", _S, "Options, state and counts of a session.", _CONTROL, SessionView),
    Operation(
        "deleteSession",
        "DELETE",
        _S,
        "Removes a closed session from memory; the journal keeps it.",
        _CONTROL,
        None,
        204,
    ),
    Operation(
        "readTree", "GET", f"{_S}/tree", "Every node, with the cause of its branch.", _CONTROL, TreeView
    ),
    Operation("readTimelines", "GET", f"{_S}/timelines", "Every root-to-leaf path.", _CONTROL, TimelineList),
    Operation(
        "readSamples",
        "GET",
        f"{_S}/samples",
        "The samples of the session as it is now, and the report on every sampled token.",
        _CONTROL,
        SAMPLES_SCHEMA,
        parameters=(_FORMAT, *_EXPORT_PARAMETERS),
        media_types=("application/json", "application/jsonl"),
    ),
    Operation(
        "readReport",
        "GET",
        f"{_S}/report",
        "The report on every sampled token.",
        _CONTROL,
        ExportReport,
        parameters=_EXPORT_PARAMETERS,
    ),
    Operation(
        "readSnapshot",
        "GET",
        f"{_S}/snapshot",
        "The whole session as MessagePack; `SessionSnapshot.decode` reads it.",
        _CONTROL,
        {},
        media_types=("application/vnd.msgpack",),
    ),
    Operation(
        "waitForSession",
        "GET",
        f"{_S}/wait",
        "Answers when the session is no longer open, or after the timeout.",
        _CONTROL,
        SessionView,
        parameters=(
            _parameter("timeout_s", {"type": "number", "minimum": 0, "maximum": 3600}, "60 without it."),
        ),
    ),
    Operation(
        "postReward",
        "POST",
        f"{_S}/reward",
        "Adds a reward, or a list of them; to a finalized session too, with its control key.",
        _ANY_KEY,
        _ANY_SESSION,
        body={"anyOf": [_SCORE, _REWARD, {"type": "array", "items": _REWARD, "minItems": 1}]},
        parameters=(_IDEMPOTENCY,),
        needs_body=True,
    ),
    Operation(
        "completeSession",
        "POST",
        f"{_S}/complete",
        "Marks the agent as done.",
        _ANY_KEY,
        _ANY_SESSION,
        body=EndRequest,
    ),
    Operation(
        "abortSession",
        "POST",
        f"{_S}/abort",
        "Ends a session as failed.",
        _CONTROL,
        SessionView,
        body=EndRequest,
    ),
    Operation(
        "finalizeSession",
        "POST",
        f"{_S}/finalize",
        "Ends a session and returns it, with its samples or its trajectory.",
        _CONTROL,
        schema_ref("FinalizedSession"),
        body=schema_ref("FinalizeRequest"),
    ),
    Operation(
        "pausePolicy", "POST", "/policy/pause", "Pauses generation for a weight update.", _ADMIN, PolicyView
    ),
    Operation(
        "resumePolicy",
        "POST",
        "/policy/resume",
        "Resumes generation with new weights or the old ones.",
        _ADMIN,
        PolicyView,
        body=ResumeRequest,
    ),
    Operation("listEngines", "GET", "/engines", "The policy and its engines.", _ADMIN, EngineList),
    Operation(
        "addEngine",
        "POST",
        "/engines",
        "Adds a replica when its server answers.",
        _ADMIN,
        EngineList,
        201,
        AddEngineRequest,
        (_IDEMPOTENCY,),
        needs_body=True,
    ),
    Operation(
        "removeEngine",
        "DELETE",
        "/engines",
        "Removes a replica; its calls continue on others.",
        _ADMIN,
        EngineList,
        200,
        RemoveEngineRequest,
        (_IDEMPOTENCY,),
        needs_body=True,
    ),
)

_MODEL_PREFIXES = {
    "": "/v1",
    "OfAgent": "/agents/{agent}/v1",
    "OfSession": f"{_S}/v1",
    "OfSessionAgent": f"{_S}/agents/{{agent}}/v1",
}
"""Suffixes of operation ids and beginnings of paths: without a session in the path, the key identifies it."""
_ANSWER_SUMMARIES = {
    "chat/completions": ("createChatCompletion", "OpenAI Chat Completions.", "messages"),
    "completions": ("createCompletion", "OpenAI Completions.", "prompt"),
    "responses": ("createResponse", "OpenAI Responses.", "input"),
    "messages": ("createMessage", "Anthropic Messages.", "messages"),
}
_COUNT_SUMMARIES = {
    "chat/completions/count_tokens": ("countChatTokens", "prompt_tokens"),
    "responses/input_tokens": ("countResponseTokens", "input_tokens"),
    "messages/count_tokens": ("countMessageTokens", "input_tokens"),
}


def model_operations() -> Iterator[Operation]:
    for suffix, prefix in _MODEL_PREFIXES.items():
        for endpoint, protocol in PROTOCOLS.items():
            name, summary, content = _ANSWER_SUMMARIES[endpoint]
            yield Operation(
                name + suffix,
                "POST",
                f"{prefix}/{endpoint}",
                summary,
                _ANY_KEY,
                {"type": "object"},
                body=_model_body(content),
                media_types=("application/json", "text/event-stream"),
                error="AnthropicError" if protocol.name == "messages" else "Error",
                needs_body=True,
                tag="model",
            )
        for endpoint, protocol in COUNT_PROTOCOLS.items():
            name, counted = _COUNT_SUMMARIES[endpoint]
            answer = {"type": "object", "properties": {counted: {"type": "integer"}}, "required": [counted]}
            yield Operation(
                name + suffix,
                "POST",
                f"{prefix}/{endpoint}",
                "The number of tokens of a prompt; nothing is sampled.",
                _ANY_KEY,
                answer | {"additionalProperties": True},
                body={"type": "object"},
                error="AnthropicError" if protocol.name == "messages" else "Error",
                needs_body=True,
                tag="model",
            )
        models = f"{prefix}/models"
        anything: Schema = {"type": "object"}
        yield Operation(
            "readResponse" + suffix,
            "GET",
            f"{prefix}/responses/{{response}}",
            "A response as it was answered, or, with `from_record`, as far as the record has it.",
            _ANY_KEY,
            anything,
            tag="model",
        )
        yield Operation(
            "listModels" + suffix, "GET", models, "Names of engines.", _ANY_KEY, anything, tag="model"
        )
        yield Operation(
            "readModel" + suffix, "GET", models + "/{model}", "A model.", _ANY_KEY, anything, tag="model"
        )
        yield Operation(
            "readModelSession" + suffix,
            "GET",
            f"{prefix}/session",
            "The session that the key opens, and its calls.",
            _ANY_KEY,
            ModelSession,
            tag="model",
        )


def _model_body(content: str) -> Schema:
    return {
        "type": "object",
        "properties": {"model": TEXT, content: {}, "stream": {"type": ["boolean", "null"]}},
        "additionalProperties": True,
    }
