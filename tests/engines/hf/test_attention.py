from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-hf")
pytest.importorskip("transformers", reason="transformers is not installed: make test-hf")

from transformers.integrations.sdpa_attention import sdpa_attention_forward

from branchline.engines.hf import attention
from tests.engines.tiny_model import prompt, reference_ids, tiny_model, torch


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("has_mask", [True, False])
def test_grouped_attention_equals_that_of_transformers(width: int, has_mask: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    query, key, value = torch.randn(2, 6, width, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    if not has_mask and width > 1:
        key, value = key[:, :, :width], value[:, :, :width]
    mask = torch.randn(2, 1, width, 11) if has_mask else None
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    output, _ = attention.grouped_sdpa_attention(module, query, key, value, mask, scaling=0.3)
    assert output.shape == (2, width, 6, 8)
    assert torch.allclose(output, expected, atol=1e-6)


def test_model_with_grouped_attention_computes_and_trains_as_before() -> None:
    ids = torch.from_numpy(prompt(1, 40).astype(np.int64))[None]
    models = [tiny_model(), tiny_model()]
    attention.install(models[0])
    assert models[0].config._attn_implementation == attention.ATTENTION_NAME
    losses = [model(ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)
    assert reference_ids(models[0], prompt(1, 40), 8) == reference_ids(models[1], prompt(1, 40), 8)
