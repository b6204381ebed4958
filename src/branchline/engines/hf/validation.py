"""Validates requests and weights of the embedded engine, before anything is computed or changed."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite

import numpy as np
from torch import Tensor

from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import Ids
from branchline.engines.base import SamplingParams


def check_request(prompt_ids: Ids, params: SamplingParams, vocab_size: int, max_context: int | None) -> None:
    """Raises EngineInputError for a request that the engine cannot serve."""
    size = len(prompt_ids)
    if not size:
        raise EngineInputError("prompt_ids: got none, expected at least one")
    low, high = int(np.min(prompt_ids)), int(np.max(prompt_ids))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise EngineInputError(f"prompt_ids: got {wrong}, expected ids from 0 to {vocab_size - 1}")
    for field, is_valid, expected in (
        ("max_tokens", params.max_tokens >= 1, "1 or more"),
        ("temperature", 0 <= params.temperature < inf, "a number, 0 or more"),
        ("top_p", 0 <= params.top_p <= 1, "a number from 0 to 1"),
        ("min_p", 0 <= params.min_p <= 1, "a number from 0 to 1"),
        ("top_k", params.top_k >= 0, "0 or more"),
        ("presence_penalty", isfinite(params.presence_penalty), "a number"),
        ("frequency_penalty", isfinite(params.frequency_penalty), "a number"),
        ("repetition_penalty", 0 < params.repetition_penalty < inf, "a number above 0"),
        ("grammar", params.grammar is None, "none: this engine supports no grammar"),
        ("bad_words", not params.bad_words, "none: this engine does not support them"),
    ):
        if not is_valid:
            raise EngineInputError(f"{field}: got {getattr(params, field)!r}, expected {expected}")
    for field, ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise EngineInputError(f"{field}: got {wrong}, expected ids from 0 to {vocab_size - 1}", field)
    if (
        params.min_tokens
        and params.allowed_token_ids
        and not {*params.allowed_token_ids} - {*params.stop_ids}
    ):
        raise EngineInputError(
            f"allowed_token_ids: got only stop ids, expected others for min_tokens {params.min_tokens}",
            "allowed_token_ids",
        )
    if max_context is not None and size + params.max_tokens > max_context:
        raise EngineInputError(
            f"prompt_ids and max_tokens: got {size} + {params.max_tokens} ids,"
            f" expected at most {max_context} together"
        )


def check_weights(weights: Mapping[str, Tensor], model_weights: Mapping[str, Tensor]) -> None:
    """Raises EngineInputError unless names and shapes fit, no weight is a meta tensor or a DTensor, and tied
    weights have equal values. Types may differ.

    A weight that is tied to another one may be left out.
    """
    if unknown := sorted(weights.keys() - model_weights.keys()):
        raise EngineInputError(f"weights: got {unknown[0]!r}, expected names of the model's state_dict")
    updated = {model_weights[key].data_ptr() for key in weights}
    if missing := sorted(
        key for key in model_weights.keys() - weights.keys() if model_weights[key].data_ptr() not in updated
    ):
        raise EngineInputError(f"weights: got no {missing[0]!r}, expected all {len(model_weights)}")
    for key, value in weights.items():
        if value.is_meta:
            raise EngineInputError(f"weights[{key!r}]: got a meta tensor, expected one with data")
        if hasattr(value, "full_tensor"):
            raise EngineInputError(
                f"weights[{key!r}]: got a DTensor, expected a plain tensor: call full_tensor() on every rank"
            )
        if value.shape != model_weights[key].shape:
            expected = tuple(model_weights[key].shape)
            raise EngineInputError(f"weights[{key!r}]: got {tuple(value.shape)}, expected {expected}")
    first: dict[int, str] = {}
    for key, value in weights.items():
        other = first.setdefault(model_weights[key].data_ptr(), key)
        if not _equal(value, weights[other]):
            raise EngineInputError(
                f"weights[{key!r}]: got other values than weights[{other!r}], expected the same: the model "
                "ties them"
            )


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.data_ptr() == right.data_ptr() and left.device == right.device:
        return True
    return bool((left.to(right.device, right.dtype) == right).all())
