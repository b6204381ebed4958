"""Reads sampling parameters from the fields of a request body, and writes how a call is sampled.

The session's `sampling` overrides the fields of a request, and removes those that it has as None; its
`sampling_defaults` apply to missing ones. What is overridden is recorded with the call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from branchline.core.errors import EngineInputError, MessageError
from branchline.core.reader import decode_json, prefix_error, replace_surrogates
from branchline.engines.base import (
    CONSTRAINT_FIELDS,
    GRAMMAR_FIELDS,
    MIN_TEMPERATURE,
    STOP_FIELDS,
    Engine,
    SamplingParams,
)
from branchline.runtime.call_record import CallRequest
from branchline.runtime.managed_session import SESSION_SAMPLING_FIELDS, SessionOptions
from branchline.runtime.request_fields import SAMPLING_FIELDS, log_ignored

_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
NO_LIMIT = 2**62
"""The `max_tokens` of a request without one: the answer may fill the engine's context."""
FALLBACK_MAX_TOKENS = 4096
"""The limit of an answer if neither the request has one nor the engine's context is known."""
JsonObject = Mapping[str, Any]


def merge_sampling(body: object, options: SessionOptions) -> dict[str, Any]:
    """Returns the fields of a body that are not null, merged with the session's sampling."""
    if not isinstance(body, dict):
        raise MessageError("body", body, "a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    return merge_fields(fields, options)


def merge_fields(fields: JsonObject, options: SessionOptions) -> dict[str, Any]:
    """Returns the fields of a request merged with the session's sampling, without those that are None."""
    merged = {**options.sampling_defaults, **fields, **options.sampling}
    if None in options.sampling.values() or None in options.sampling_defaults.values():
        return {name: value for name, value in merged.items() if value is not None}
    return merged


_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
}
"""Values that ask for what a request without the field gets."""


def find_overridden(fields: JsonObject, options: SessionOptions) -> dict[str, Any]:
    """Returns the fields of a request that the session's sampling changes or removes, as the request has
    them."""
    overridden: dict[str, Any] = {}
    for name, value in options.sampling.items():
        given = fields.get(name)
        is_neutral = value is None and given in _NEUTRAL_VALUES.get(name, ())
        if given is not None and given != value and not is_neutral:
            overridden[name] = given
    return overridden


_SamplingFields = msgspec.defstruct(
    "_SamplingFields", [(name, Any, None) for name in sorted(SESSION_SAMPLING_FIELDS)]
)
_sampling_decoder = msgspec.json.Decoder(_SamplingFields)


def find_overridden_in_body(body: bytes, options: SessionOptions) -> dict[str, Any]:
    """Returns the same for a body that has been read; its long fields are not decoded again."""
    if not options.sampling:
        return {}
    try:
        fields = msgspec.structs.asdict(_sampling_decoder.decode(body))
    except msgspec.DecodeError:  # Such as half an emoji, which other decoders take.
        fields = decode_json(body)
    return find_overridden(fields, options)


def check_session_sampling(options: SessionOptions) -> None:
    """Raises MessageError if a session's sampling has a value that its calls would be refused for."""
    for name in ("sampling", "sampling_defaults"):
        fields = {key: value for key, value in getattr(options, name).items() if value is not None}
        try:
            read_sampling_params(fields, "max_tokens")
            read_int(fields, "n", 1, 1, 2**31)
            read_strings(fields, "stop")
        except MessageError as error:
            raise prefix_error(name, error) from None


def read_sampling_params(
    fields: JsonObject,
    max_tokens_name: str,
    default_max_tokens: int | None = None,
    max_tokens_limit: int | None = None,
) -> SamplingParams:
    """Reads the fields that have the same name in every protocol.

    `max_tokens_name` is the protocol's name for the limit; `max_tokens_limit` caps it, whatever its origin.
    """
    max_tokens = NO_LIMIT if default_max_tokens is None else default_max_tokens
    if max_tokens_name in fields:
        max_tokens = read_int(fields, max_tokens_name, 0, 1, 2**31)
    params: dict[str, Any] = {
        name: _read_number(fields, name, *range) for name, range in _RANGES.items() if name in fields
    }
    if "top_k" in fields:
        params["top_k"] = max(0, read_int(fields, "top_k", 0, -1, 2**31))
    if "seed" in fields:
        params["seed"] = read_int(fields, "seed", 0, -(2**63), 2**63)
    if names := fields.keys() & CONSTRAINT_FIELDS:
        params |= _read_constraints(fields, names, max_tokens)
    return SamplingParams(
        max_tokens=max_tokens if max_tokens_limit is None else min(max_tokens, max_tokens_limit), **params
    )


def explicit_sampling(fields: JsonObject, max_tokens_name: str) -> dict[str, Any]:
    """Returns the sampling fields that are set, for an upstream that has defaults of its own."""
    explicit = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    if max_tokens_name in fields:
        explicit["max_tokens"] = fields[max_tokens_name]
    return explicit


# -- constraints -------------------------------------------------------------------------------------

_GRAMMAR_KEYS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
"""The fields that have one kind of grammar, and its name in `structured_outputs`."""
_MAX_TOKEN_ID = 2**31 - 1


def _read_constraints(fields: JsonObject, names: Collection[str], max_tokens: int) -> dict[str, Any]:
    """The parameters of the CONSTRAINT_FIELDS of a request; values that ask for nothing are left out."""
    params: dict[str, Any] = {}
    effective: dict[str, str] = {}
    for name in sorted(names):
        value: Any
        if name in GRAMMAR_FIELDS:
            value = _read_grammar(name, fields[name])
            if value and "grammar" in params:
                raise MessageError(name, fields[name], f"no second grammar besides {effective['grammar']}")
            parameter = "grammar"
        else:
            parameter = name
            value = _read_constraint(fields, name, max_tokens)
        if value:
            if parameter in ("vllm_xargs", "custom_params", "custom_logit_processor"):
                params["extra"] = {**params.get("extra", {}), parameter: value}
            else:
                params[parameter] = value
            effective[parameter] = name
    return {**params, "requested_fields": tuple(effective.values())} if params else {}


def _read_constraint(fields: JsonObject, name: str, max_tokens: int) -> Any:
    value = fields[name]
    if name == "ignore_eos":
        return read_bool(fields, name)
    if name == "min_tokens":
        minimum = read_int(fields, name, 0, 0, 2**31)
        if minimum > max_tokens:
            raise MessageError(name, minimum, f"at most max_tokens, which is {max_tokens}")
        return minimum
    if name == "bad_words":
        if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
            raise MessageError(name, value, "a list of non-empty strings")
        return tuple([replace_surrogates(text) for text in value])
    if name in ("allowed_token_ids", "stop_token_ids"):
        is_list = isinstance(value, list) and (value or name == "stop_token_ids")
        if not is_list or not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in value):
            raise MessageError(name, value, "a list of token ids")
        return tuple(value)
    if name == "custom_logit_processor":
        if not isinstance(value, str):
            raise MessageError(name, value, "a string")
        return value
    if not isinstance(value, dict):
        raise MessageError(name, value, "an object")
    if name != "logit_bias":
        return value
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and int(token) <= _MAX_TOKEN_ID):
            raise MessageError(name, token, "token ids as keys")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise MessageError(f"{name}.{token}", bias, "a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


def _read_grammar(name: str, value: Any) -> dict[str, Any] | None:
    """A field that constrains an answer to a grammar, in the form of `SamplingParams.grammar`."""
    if name == "response_format":
        return _read_response_format(value)
    if name == "structured_outputs":
        if not isinstance(value, dict):
            raise MessageError(name, value, "an object")
        given = {key: item for key, item in value.items() if item is not None and item is not False}
        if not given:
            return None
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        if len(given) > 1 or given.keys() - set(kinds):
            raise MessageError(name, value, "one of " + ", ".join(kinds))
        ((key, value),) = given.items()
        path = f"{name}.{key}"
    else:
        key, path = _GRAMMAR_KEYS[name], name
    if key == "json_object":
        return {"type": key}
    if key == "json":
        schema = _parse_schema(path, value)
        return {"type": "json_schema", "json_schema": {"schema": schema}}
    if key == "structural_tag":
        tag = _parse_schema(path, value)
        return {**tag, "type": key}
    if key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise MessageError(path, value, "a list of strings with at least one")
        return {"type": key, key: [replace_surrogates(text) for text in value]}
    if not isinstance(value, str):
        raise MessageError(path, value, "a string")
    return {"type": key, key: replace_surrogates(value)} if value else None


def _parse_schema(path: str, value: Any) -> dict[str, Any]:
    """An object, which may be written as JSON text."""
    if isinstance(value, str):
        try:
            value = decode_json(value.encode("utf-8", "surrogatepass"))
        except ValueError:
            raise MessageError(path, value, "an object, or its JSON text") from None
    if not isinstance(value, dict):
        raise MessageError(path, value, "an object, or its JSON text")
    return value


def _read_response_format(value: Any) -> dict[str, Any] | None:
    if not value:
        return None
    if not isinstance(value, dict):
        raise MessageError("response_format", value, "an object")
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object" | "structural_tag"}:
            return value
        case {"type": "json_schema", "json_schema": {"schema": dict()}}:
            return value
        case {"type": "json_schema"}:
            expected = "an object with a schema"
            raise MessageError("response_format.json_schema", value.get("json_schema"), expected)
    expected = "text, json_object, json_schema or structural_tag"
    raise MessageError("response_format.type", value.get("type"), expected)


def drop_constraints(params: SamplingParams, names: Collection[str]) -> SamplingParams:
    """The parameters without these CONSTRAINT_FIELDS."""
    reset: dict[str, Any] = {"extra": {key: item for key, item in params.extra.items() if key not in names}}
    for name in names:
        if name in GRAMMAR_FIELDS:
            reset["grammar"] = None
        elif name not in params.extra:
            reset[name] = getattr(_DEFAULTS, name)
    kept = tuple([name for name in params.requested_fields if name not in names])
    return replace(params, **reset, requested_fields=kept)


_DEFAULTS = SamplingParams()


# -- the record ---------------------------------------------------------------------------------------

_CONSTRAINT_PARAMS = (
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "grammar",
    "extra",
)
"""Parameters that are recorded only if they are set."""


def sampling_record(engine: Engine, params: SamplingParams) -> dict[str, Any]:
    """How a call is sampled and its logprobs are measured, for the record: `LogprobMeasurement` reads it."""
    is_raw, is_greedy = engine.logprob_kind == "raw", params.temperature < MIN_TEMPERATURE
    processed_temperature = engine.greedy_logprob_temperature if is_greedy else params.temperature
    record: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
        "max_tokens": None if params.max_tokens == NO_LIMIT else params.max_tokens,
        # A grammar masks tokens before logprobs are measured, even in an engine whose logprobs are raw.
        "logprobs": "processed" if params.grammar is not None else engine.logprob_kind,
        "measured_temperature": 1.0 if is_raw else processed_temperature,
        "is_truncated": False if is_raw else engine.logprobs_after_truncation,
        "engine": engine.name,
    }
    if params.requested_fields:
        values = {name: getattr(params, name) for name in _CONSTRAINT_PARAMS}
        record |= {name: value for name, value in values.items() if value}
        if params.logit_bias:
            record["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if constraints := [name for name in params.requested_fields if name not in STOP_FIELDS]:
            record["constraints"] = constraints
            if engine.constrains_raw_logprobs:
                record["logprobs"] = "processed"
    return record


def check_supported(engine: Engine, call_request: CallRequest) -> CallRequest:
    """Returns the call without the fields that its engine does not support, if they are to be ignored.

    Raises EngineInputError for the first of them otherwise.
    """
    params, sent = call_request.params, call_request.other_fields
    unsupported = [name for name in params.requested_fields if name not in engine.supported_fields]
    if not unsupported:
        return call_request
    ignored = {name: sent.get(name, "a value of another field or of the session") for name in unsupported}
    if not call_request.ignores_unsupported:
        name = unsupported[0]
        expected = f"no such field: {engine.name} does not support it"
        raise EngineInputError(str(MessageError(name, ignored[name], expected)), name)
    log_ignored(ignored)
    params = drop_constraints(params, unsupported)
    ignored = {**call_request.ignored_fields, **ignored}
    return replace(call_request, params=params, ignored_fields=ignored)


# -- values ------------------------------------------------------------------------------------------


def _read_number(fields: JsonObject, name: str, minimum: float, maximum: float) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise MessageError(name, value, f"a number from {minimum:g} to {maximum:g}")
    return float(value)


def read_int(fields: JsonObject, name: str, default: int, minimum: int, maximum: int) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise MessageError(name, value, f"a whole number from {minimum} to {maximum}")
    return value


def read_bool(fields: JsonObject, name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise MessageError(name, value, "true or false")
    return value


def read_tool_choice(fields: JsonObject, name: str = "tool_choice") -> object:
    """The `tool_choice` of Chat Completions; None for `auto`."""
    choice = fields.get(name, "auto")
    if choice not in ("auto", "none", "required") and not isinstance(choice, dict):
        raise MessageError(name, choice, "none, auto, required or a tool's name in an object")
    return None if choice == "auto" else choice


def read_strings(fields: JsonObject, name: str) -> tuple[str, ...]:
    value = fields.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MessageError(name, value, "a string or a list of strings")
    return tuple(text for text in value if text)
