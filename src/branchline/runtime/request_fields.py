"""What is done with each field of a request: one table for all protocols.

A field has one use (`FieldUse`): it is *done* by its protocol, *passed* to the engine (`CONSTRAINT_FIELDS` of
`engines/base.py`), a *hint* that cannot change an answer, *counted* (accepted, because a refusal would stop
real clients, and not applied: `runtime/not_applied.py`), or *refused*. Nothing that a client asks for is
dropped silently, and a field that is in no table is refused by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from branchline.core.errors import MessageError
from branchline.engines.base import CONSTRAINT_FIELDS as CONSTRAINT_FIELDS

log = logging.getLogger("branchline.gateway")

FieldUse = Literal["done", "passed", "hint", "counted", "refused"]

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
"""Fields that every engine and every protocol has."""
_COMMON = frozenset({*SAMPLING_FIELDS, "model", "stream", "stop", "max_tokens"})
_CONVERSATION = _COMMON | {"tools", "tool_choice", "chat_template_kwargs"}
READ_FIELDS: Mapping[str, frozenset[str]] = {
    "chat/completions": _CONVERSATION
    | {
        "messages",
        "functions",
        "function_call",
        "parallel_tool_calls",
        "max_completion_tokens",
        "n",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
    },
    "completions": _COMMON
    | {"prompt", "echo", "suffix", "best_of", "n"}
    | {"stream_options", "logprobs", "return_token_ids"},
    "responses": _CONVERSATION
    | {
        "input",
        "instructions",
        "previous_response_id",
        "conversation",
        "prompt",
        "background",
        "parallel_tool_calls",
        "max_output_tokens",
        "text",
        "include",
        "top_logprobs",
    },
    "messages": _CONVERSATION | {"messages", "system", "stop_sequences", "thread", "output_format"},
}
"""The fields that each protocol reads itself."""
LOOP_FIELDS = frozenset(
    {*SAMPLING_FIELDS, "stop", "max_tokens", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
)
"""The fields that a model of the agent loop reads; the others are those of Chat Completions."""
PARTLY_APPLIED_FIELDS = frozenset({"tool_choice", "function_call", "top_logprobs", "include"})
"""Fields that protocols read, of which some values are counted."""
REFUSED_WHERE_READ: Mapping[str, frozenset[str]] = {
    "chat/completions": frozenset(),
    "completions": frozenset({"echo", "suffix", "best_of"}),
    "responses": frozenset({"background", "conversation", "prompt"}),
    "messages": frozenset({"thread"}),
}
"""Fields that a protocol reads to refuse all values but those that ask for nothing."""

COUNTED_FIELDS = frozenset(
    {
        "reasoning_effort",
        "reasoning",
        "verbosity",
        "thinking",
        "thinking_budget",
        "enable_thinking",
        "output_config",
        "context_management",
        "compaction",
        "truncation",
        "max_tool_calls",
        "container",
        "speed",
        "fallbacks",
        "task",
    }
)
"""What clients ask of a vendor's model and no engine here knows: accepted, recorded with the call as
`requested`, and counted as not applied."""

HINT_FIELDS = frozenset(
    {
        # names, labels, billing and storage of a vendor
        *("user", "metadata", "client_metadata", "safety_identifier", "user_profile_id", "workspace_id"),
        *("store", "service_tier", "inference_geo", "access_programs", "fallback_credit_token"),
        *("betas", "anthropic_beta", "anthropic_version", "diagnostics", "billing_policy"),
        # caches and speed
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"),
        *("cache_salt", "extra_key", "prediction", "priority", "stream_interval", "stream_options"),
        # ids and placement of requests at a server
        *("request_id", "rid", "session_id", "routed_dp_rank", "data_parallel_rank"),
        # routing between vendors
        *("provider", "route", "models", "usage"),
    }
)
"""Hints that change no token of an answer by their definition: labels, billing, caches, speed, placement."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    # other ways to sample
    "use_beam_search": (False,),
    "num_beams": (1,),
    "best_of": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "do_sample": (True,),
    "top_a": (0,),
    "typical_p": (1,),
    "tfs": (1,),
    "tfs_z": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "no_repeat_ngram_size": (0,),
    "watermarking": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "logits_processors": ([],),
    "stop_regex": ("", []),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    # other prompts
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "input_ids": (),
    "prompt_embeds": (),
    "lora_path": (),
    "session_params": ({},),
    "mcp_servers": ([],),
    "web_search_options": (),
    "moderation": (),
    # other answers
    "echo": (False,),
    "suffix": ("",),
    "n": (1,),
    "modalities": (["text"],),
    "audio": (),
    "image": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "parallel_tool_calls": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_prompt_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_meta_info": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
"""Known fields that are refused where the protocol does not read them, and the values that ask for nothing.
A server that is not this one has the last values as its default."""

_logged_names: set[str] = set()
_MAX_LOGGED_NAMES = 1000
"""Clients choose the names, so their number is limited."""


def field_use(protocol: str, name: str) -> FieldUse:
    """What a protocol does with a field.

    >>> [field_use("messages", name) for name in ("system", "thinking", "temprature")]
    ['done', 'counted', 'refused']
    """
    if name in READ_FIELDS[protocol]:
        if name in PARTLY_APPLIED_FIELDS:
            return "counted"
        return "refused" if name in REFUSED_WHERE_READ[protocol] else "done"
    if name in CONSTRAINT_FIELDS:
        return "passed"
    if name in COUNTED_FIELDS:
        return "counted"
    return "hint" if name in HINT_FIELDS else "refused"


def review_fields(
    other_fields: Mapping[str, Any], *, ignore_unknown: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields to record, and those that are ignored because `ignore_unknown` allows it.

    `other_fields` are the fields of a request that its protocol does not read. Raises MessageError for the
    first one that is not supported.
    """
    requested: dict[str, Any] = {}
    unsupported: dict[str, Any] = {}
    for name, value in other_fields.items():
        if name in COUNTED_FIELDS:
            requested[name] = value
        elif name not in CONSTRAINT_FIELDS and name not in HINT_FIELDS and not _is_neutral(name, value):
            unsupported[name] = value
    if unsupported and not ignore_unknown:
        name, value = next(iter(unsupported.items()))
        neutral = " or ".join([repr(value) for value in NEUTRAL_VALUES.get(name, ())])
        expected = (
            f"{neutral}, the only supported value" if neutral else "no such field: it has no effect here"
        )
        raise MessageError(name, value, expected)
    log_ignored(unsupported)
    return requested, unsupported


def check_recordable(sampling: Mapping[str, Any]) -> None:
    """Raises MessageError for a field of a call's `sampling` that a journal cannot hold."""
    for name, value in sampling.items():
        if name in ("requested", "ignored_fields", "overridden"):
            check_recordable(value)
            continue
        try:
            msgspec.msgpack.encode(value)
        except (OverflowError, RecursionError, TypeError, ValueError):
            raise MessageError(name, value, "JSON with integers of 64 bits and less nesting") from None


def log_ignored(names: Mapping[str, Any]) -> None:
    """Logs each field that is ignored, once in a process."""
    for name in names.keys() - _logged_names:
        if len(_logged_names) < _MAX_LOGGED_NAMES:
            _logged_names.add(name)
            log.warning("%.80r: a request has this field, which is not supported; it is ignored", name)


def _is_neutral(name: str, value: object) -> bool:
    """Whether a value asks for nothing; true is not 1."""
    is_flag = isinstance(value, bool)
    neutral_values = NEUTRAL_VALUES.get(name, ())
    return any(isinstance(neutral, bool) == is_flag and value == neutral for neutral in neutral_values)
