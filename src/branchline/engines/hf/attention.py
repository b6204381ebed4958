"""Grouped-query attention without a copy of keys and values for every query head.

With a mask, transformers' `sdpa` copies all keys and values once per query head, and rows of different
lengths need a mask. For long rows that copy is most of a step. Here the query heads of one group are treated
as queries of one head, or torch groups them itself.

Invariant: the result is that of `sdpa`, so a trainer can share the model.
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
    """Replaces the attention function of a model that uses `sdpa`."""
    if model.device.type == "cuda":
        # cuDNN plans its kernel for every length, and rows grow by one each step: on an H200 a step of 25 ms
        # took 80 to 170 ms. The switch is global to the process; flash and the other kernels stay on.
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
    elif query.device.type == "cpu":  # Elsewhere a mask with groups selects the slowest kernel.
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
