"""The OpenAPI document of the gateway, with schemas made from the types of its operations.

`GET /openapi.json` needs no key: the document is the same for every gateway, apart from its public URL.
"""

from __future__ import annotations

import msgspec

from branchline.export.columns import SAMPLE_COLUMNS, Column, ColumnKind
from branchline.gateway.config import GatewayConfig
from branchline.gateway.control_types import ErrorResponse, SessionStateView, TrajectoryView
from branchline.gateway.openapi_operations import (
    CONTROL_OPERATIONS,
    PATH_PARAMETERS,
    SAMPLES_SCHEMA,
    TEXT,
    KeyName,
    Operation,
    Schema,
    model_operations,
    policy_properties,
    schema_ref,
    type_schemas,
)

API_VERSION = "1"
"""The version of the API, which is not that of the library."""
_LINE_TYPES = ("text/event-stream", "application/jsonl")
"""Bodies whose lines are JSON."""
_KEYS: dict[KeyName, str] = {
    "adminKey": "The gateway's admin key opens everything.",
    "controlKey": "The control key of a session reads, rewards and ends it.",
    "apiKey": "The API key of a session opens its model API and completes it; with `agent_reward`, it also"
    " rewards it. It may be sent as `x-api-key` too.",
}


def build_document(config: GatewayConfig) -> bytes:
    """Returns the document as JSON."""
    operations = (*CONTROL_OPERATIONS, *model_operations())
    types = {
        schema: None
        for operation in operations
        for schema in (operation.answer, operation.body)
        if isinstance(schema, type)
    }
    schemas = type_schemas(*types, SessionStateView, TrajectoryView, ErrorResponse)
    schemas |= {
        "Sample": _sample_schema(),
        "FinalizeRequest": _finalize_request_schema(),
        "FinalizedSession": _finalized_schema(schemas["SessionView"]),
        "AnthropicError": {
            "type": "object",
            "properties": {"type": TEXT, "error": {"type": "object"}, "request_id": {}},
            "required": ["type", "error"],
        },
    }
    paths: dict[str, Schema] = {}
    for operation in operations:
        item = paths.setdefault(operation.path, {})
        names = [name for name in PATH_PARAMETERS if f"{{{name}}}" in operation.path]
        if names:
            item["parameters"] = [PATH_PARAMETERS[name] for name in names]
        item[operation.method.lower()] = _operation_json(operation)
    errors = {"Error": "ErrorResponse", "AnthropicError": "AnthropicError"}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Branchline gateway",
            "version": API_VERSION,
            "description": "The model API for agents, and the control API for the programs that run them.",
        },
        "servers": [{"url": config.public_url.rstrip("/") or "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {
                name: {
                    "description": "The request was refused or failed.",
                    "content": {"application/json": {"schema": schema_ref(schema)}},
                }
                for name, schema in errors.items()
            },
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": description}
                for name, description in _KEYS.items()
            },
        },
    }
    return msgspec.json.encode(document)


def _operation_json(operation: Operation) -> Schema:
    answer: Schema = {"description": operation.summary}
    if operation.answer is not None:
        schemas = {
            kind: TEXT if kind in _LINE_TYPES else _schema_of(operation.answer)
            for kind in operation.media_types
        }
        answer["content"] = {kind: {"schema": schema} for kind, schema in schemas.items()}
    result: Schema = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "security": [{name: []} for name in operation.keys],
        "responses": {
            **{str(status): answer for status in (operation.status, *operation.other_statuses)},
            "default": {"$ref": f"#/components/responses/{operation.error}"},
        },
    }
    if operation.parameters:
        result["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = {"application/json": {"schema": _schema_of(operation.body)}}
        result["requestBody"] = {"required": operation.needs_body, "content": content}
    return result


def _schema_of(schema: type | Schema) -> Schema:
    return schema_ref(schema.__name__) if isinstance(schema, type) else schema


def _finalize_request_schema() -> Schema:
    return {
        "type": "object",
        "properties": {
            "reason": TEXT,
            "return": {"enum": ["samples", "trajectory", "session"], "default": "samples"},
            "policy": {
                "type": "object",
                "properties": policy_properties(),
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    }


def _finalized_schema(session: Schema) -> Schema:
    """The session, and what `return` asked for."""
    more = {**SAMPLES_SCHEMA["properties"], "trajectory": schema_ref("TrajectoryView")}
    return {**session, "title": "FinalizedSession", "properties": {**session["properties"], **more}}


_COLUMN_SCHEMAS: dict[ColumnKind, Schema] = {
    "text": TEXT,
    "texts": {"type": "array", "items": TEXT},
    "integer": {"type": ["integer", "null"]},
    "number": {"type": ["number", "null"]},
    "flag": {"type": ["boolean", "null"]},
    "json": {"type": "string", "contentMediaType": "application/json"},
    "binary": {"type": "string", "contentEncoding": "base64"},
    "int8s": {"type": "array", "items": {"type": "integer"}},
    "int32s": {"type": "array", "items": {"type": "integer"}},
    "float32s": {"type": "array", "items": {"type": ["number", "null"]}},
}


def _sample_schema() -> Schema:
    schema = _columns_schema(SAMPLE_COLUMNS)
    schema["description"] = "One training row, with the group and the metadata of its session."
    schema["properties"] |= {"group": TEXT, "metadata": {"type": "object"}}
    return schema


def _columns_schema(columns: tuple[Column, ...]) -> Schema:
    properties: dict[str, Schema] = {}
    for column in columns:
        if column.kind in ("struct", "structs"):
            fields = _columns_schema(column.fields)
            properties[column.name] = (
                fields if column.kind == "struct" else {"type": "array", "items": fields}
            )
        else:
            properties[column.name] = _COLUMN_SCHEMAS[column.kind]
    # The data of a medium is written once.
    required = [column.name for column in columns if column.kind != "binary"]
    return {"type": "object", "properties": properties, "required": required}
