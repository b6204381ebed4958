"""How the rows of an update are computed: packed as trees with one attention mask, or one by one.

A packed tree gives the log-probabilities of its rows only if each layer follows the mask and the positions.
Some models cannot: a recurrent state runs through the whole batch, a bias counts keys, a rotary embedding
depends on the longest row. Most of these fail without an error. So before the first update a tree of random
ids is compared with its rows, and a model that gives other values is trained row by row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from branchline.core.choices import LayoutOption as LayoutOption
from branchline.core.errors import InputError
from branchline.core.sample import Sample
from branchline.core.token_arrays import as_ids
from branchline.export.packing import PackedBatch, TrainingRow, pack_rows
from branchline.train.packed_forward import check_model, forward_packed, forward_row

log = logging.getLogger("branchline.train")
Layout = Literal["tree", "rows"]

FLEX = "flex_attention"
_RECOMPILE_LIMIT = 64
_MAX_WINDOW = 1024
"""The comparison reaches beyond sliding windows up to this many tokens."""
_PROMPT = 4
_FAR_ROW = 64
"""More than the longest row that is moved to far positions."""
# Fractions of what another context changes. A wrong mask or position changes as much as another context does;
# rounding, also in half precision and with experts, changes much less.
_TOLERANCES = {torch.float32: 0.01, torch.float64: 0.01}
_HALF_PRECISION_TOLERANCE = 0.15
_ROUNDING = 64
"""Multiples of the precision of a type that are always rounding."""


def prepare_model(model: Any, option: LayoutOption) -> Layout:
    """Chooses the model's layout, and for trees on a GPU FlexAttention; logs a line for each fallback.

    Raises InputError for a model that is not causal, and for one that cannot follow a tree if `option`
    demands it.
    """
    if option not in get_args(LayoutOption):
        raise InputError(f"layout: got {option!r}, expected one of {', '.join(get_args(LayoutOption))}")
    with torch.no_grad():
        _check_causal(model)
    if option == "rows":
        return "rows"
    before = model.config._attn_implementation
    attention, reason = choose_attention(model)
    if reason:
        log.warning("FlexAttention is not used: %s; a dense mask is slower and needs more memory", reason)
    if attention != before:
        model.set_attn_implementation(attention)
        _raise_recompile_limit()
    problem = find_problem(model)
    if problem and attention != before:
        log.warning("FlexAttention is not used: %s; a dense mask is slower and needs more memory", problem)
        model.set_attn_implementation(before)
        problem = find_problem(model)
    if not problem:
        return "tree"
    if option == "tree":
        raise InputError(f"layout: got 'tree', expected 'rows' or 'auto': {problem}")
    log.warning("the model is trained row by row, which is slower than packed trees: %s", problem)
    return "rows"


def _raise_recompile_limit() -> None:
    """Beyond the limit FlexAttention would run unfused, and out of memory. Kinds of layers and lengths need
    some kernels each."""
    compiler: Any = torch._dynamo.config  # Imported here: it takes seconds, and a CPU does without.
    compiler.recompile_limit = max(compiler.recompile_limit, _RECOMPILE_LIMIT)


def choose_attention(model: Any, device_type: str | None = None) -> tuple[str, str]:
    """Returns the attention that computes packed trees best, and why it is not FlexAttention on a GPU.

    FlexAttention skips the blocks of a tree mask in which nothing is visible, and the mask is never built. It
    has no backward pass on a CPU. An attention other than `sdpa` was chosen by the caller and stays.
    """
    current: str = model.config._attn_implementation
    device_type = device_type or next(model.parameters()).device.type
    if device_type != "cuda" or current != "sdpa":
        return current, ""
    if not getattr(model, "_supports_flex_attn", False):
        return current, f"transformers has no FlexAttention for {type(model).__name__}"
    return FLEX, ""


def find_problem(model: Any) -> str:
    """Returns why a packed tree cannot replace its rows, or an empty text."""
    try:
        check_model(model)
    except InputError as error:
        return str(error)
    rows = list(_probe_rows(model))
    (tree,) = pack_rows(rows)
    with torch.no_grad():
        alone = _row_logprobs(model, rows)
        limit = _limit(model, _context_effect(model, rows, alone))
        batches = {"in a packed tree": tree}
        if (offset := _far_position(model.config)) is not None:
            batches["beside a long row"] = _move_last_row(pack_rows(rows, share_prefixes=False)[0], offset)
        for place, batch in batches.items():
            skipped = len(rows) - 1 if batch is not tree else None
            try:
                off = _difference(model, batch, alone, skipped)
            except Exception as error:
                return f"{type(model).__name__} takes no tree mask: {_describe(error)}"
            if not off <= limit:
                return (
                    f"log-probabilities of {type(model).__name__} are off by {off:.1e} {place}, expected at "
                    f"most {limit:.1e}"
                )
    return _gradient_problem(model, tree)


def _limit(model: Any, context: float) -> float:
    """Returns the largest difference between log-probabilities that is rounding, given how much another
    context changes them."""
    tolerance = _TOLERANCES.get(model.dtype, _HALF_PRECISION_TOLERANCE)
    rounding: float = _ROUNDING * torch.finfo(model.dtype).eps
    return tolerance * context + rounding


def _gradient_problem(model: Any, batch: PackedBatch) -> str:
    """A kernel may have no backward pass on this device, or need more memory than it has."""
    try:
        with torch.enable_grad():
            total: Any = forward_packed(model, batch).logprobs.sum()
            total.backward()
    except Exception as error:
        return f"{type(model).__name__} has no gradient of a packed tree: {_describe(error)}"
    finally:
        model.zero_grad(set_to_none=True)
    return ""


def _describe(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}"


def _probe_rows(model: Any) -> Iterator[TrainingRow]:
    """Yields rows that branch after a prompt, inside an answer and at the root; the last one stands alone."""
    window = getattr(model.config, "sliding_window", None) or 0
    depth = 14 + (window if window <= _MAX_WINDOW else 0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    random = np.random.default_rng(0)

    def draw(length: int) -> NDArray[np.int64]:
        return random.integers(0, vocabulary, length)

    trunk, branch = draw(depth), draw(11)
    for parts in ((trunk, branch), (trunk, branch[:5], draw(9)), (trunk[:7], draw(6)), (draw(12),)):
        yield _make_row(np.concatenate(parts))


def _make_row(ids: NDArray[np.int64]) -> TrainingRow:
    count = len(ids) - _PROMPT
    sample = Sample(
        prompt_ids=as_ids(ids[:_PROMPT]),
        response_ids=as_ids(ids[_PROMPT:]),
        response_mask=np.ones(count, np.int8),
        response_logprobs=np.zeros(count, np.float32),
        response_versions=np.zeros(count, np.int32),
        shares=np.ones(count, np.float32),
    )
    return TrainingRow(sample, np.ones(count, np.float32), np.ones(count, np.float32))


def _row_logprobs(model: Any, rows: list[TrainingRow]) -> list[NDArray[np.float64]]:
    return [
        forward_row(model, batch).logprobs.double().cpu().numpy()
        for row in rows
        for batch in pack_rows([row])
    ]


def _context_effect(model: Any, rows: list[TrainingRow], alone: list[NDArray[np.float64]]) -> float:
    """Returns how much the logprobs of the last tokens change if all ids before them are replaced."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    others = [_make_row(_replace_first_half(row, vocabulary)) for row in rows]
    effects = [
        np.abs(one - other)[len(one) // 2 :].max()
        for one, other in zip(alone, _row_logprobs(model, others), strict=True)
    ]
    return float(max(effects))


def _replace_first_half(row: TrainingRow, vocabulary: int) -> NDArray[np.int64]:
    ids = np.concatenate([row.sample.prompt_ids, row.sample.response_ids]).astype(np.int64)
    half = _PROMPT + (len(ids) - _PROMPT) // 2 - 1
    ids[:half] = (ids[:half] + 1 + vocabulary // 2) % vocabulary
    return ids


def _difference(
    model: Any,
    batch: PackedBatch,
    alone: list[NDArray[np.float64]],
    skipped: int | None,
) -> float:
    """Returns the largest difference between the logprobs of a batch and those of its rows alone."""
    outputs = forward_packed(model, batch)
    values = np.full(len(batch), np.nan)
    values[outputs.places.cpu().numpy()] = outputs.logprobs.double().cpu().numpy()
    differences = [
        np.abs(values[path[_PROMPT:]] - alone[index]).max()
        for index, path in zip(batch.rows, batch.paths, strict=True)
        if index != skipped
    ]
    return float(np.max(differences))


def _move_last_row(batch: PackedBatch, offset: int) -> PackedBatch:
    """Returns the batch with one of its rows at far positions, as a token of a long row would be. The
    others cannot see it."""
    positions = batch.positions.copy()
    positions[batch.paths[batch.rows.index(max(batch.rows))]] += offset
    return replace(batch, positions=positions)


def _far_position(config: Any) -> int | None:
    """Returns how far a row can be moved within the positions of the model; None if that is not known."""
    length = getattr(config, "max_position_embeddings", None)
    return length - _FAR_ROW if isinstance(length, int) and length > _FAR_ROW else None


def _check_causal(model: Any) -> None:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    whole = torch.arange(12, device=next(model.parameters()).device) * 7919 % vocabulary
    other = torch.cat([(whole[:5] + 1) % vocabulary, whole[5:6]])
    predictions = [
        model(input_ids=ids[None], use_cache=False).logits[0, 5].double().log_softmax(-1)
        for ids in (whole, whole[:6], other)
    ]
    off, context = ((value - predictions[1]).abs().max().item() for value in (predictions[0], predictions[2]))
    if not off <= _limit(model, context):
        raise InputError(
            f"model: the prediction of {type(model).__name__} after 6 tokens changes by {off:.1e} with the "
            "tokens after them, expected a causal model"
        )
