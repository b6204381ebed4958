"""Attention that does not repeat keys and values for every query head.

Under grouped-query attention transformers' `sdpa` copies all keys and values once per query head as soon as
there is a mask, and rows of different lengths have one. Over long rows that copy is most of a step. Here the
query heads of one group stand beside each other as if they were queries, or torch groups them itself.

Its invariant: the result is that of `sdpa`; a model that is trained beside the engine notices nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION_NAME = "branchline"


def install(model: Any) -> None:
    """Has a model that uses `sdpa` attend this way."""
    if model.device.type == "cuda":
        # cuDNN's kernel is planned anew for every length, and rows grow by one each step: on an H200 that
        # made a step of 25 ms one of 80 to 170. The switch is the process's; flash and the rest stay on.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION_NAME)


def grouped_sdpa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers: [batch, heads, tokens, dim] in, [batch, tokens, heads, dim] out."""
    batch, heads, width, _ = query.shape
    is_plain = kwargs.get("position_bias") is None and kwargs.get("is_causal") is None and not dropout
    is_one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if heads == key.shape[1] or not is_plain or not is_one_mask:
        pass
    elif width == 1:
        grouped = query.reshape(batch, key.shape[1], -1, query.shape[-1])
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return output.reshape(batch, 1, heads, -1), None
    elif query.device.type == "cpu":  # elsewhere a mask and groups together would mean the slowest kernel
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return output.transpose(1, 2).contiguous(), None
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result


AttentionInterface.register(ATTENTION_NAME, grouped_sdpa_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
