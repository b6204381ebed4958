"""Which models follow packed trees is found by comparing; the others are trained row by row, exactly."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from branchline.core.errors import InputError  # noqa: E402
from branchline.export.packing import TrainingRow, pack_rows  # noqa: E402
from branchline.train import layouts, packed_forward  # noqa: E402
from branchline.train.demo import MODEL_FOLDER  # noqa: E402
from branchline.train.layouts import choose_attention, find_problem, prepare_model  # noqa: E402
from branchline.train.losses import LossConfig  # noqa: E402
from branchline.train.packed_forward import forward_row  # noqa: E402
from branchline.train.policy_update import PolicyUpdater, UpdateConfig  # noqa: E402
from tests.export.packed_rows import make_row, random_rows  # noqa: E402
from tests.train.test_packed_forward import row_logprobs  # noqa: E402
from tests.train.test_trainer import run_steps  # noqa: E402
from tests.train.tiny_models import SHAPES, VOCABULARY, tiny_model  # noqa: E402
from tests.train.tiny_policy import create_trainer  # noqa: E402

torch.set_num_threads(1)
# Transformers reports defaults of these configurations that do not matter here.
pytestmark = pytest.mark.filterwarnings("ignore")
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_ROPE: dict[str, Any] = {"rope_theta": 10000.0}
_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    **_ROPE,
}


def rope_shape(**parameters: Any) -> dict[str, Any]:
    return {**_SHAPE, "max_position_embeddings": 16, "rope_parameters": {**_ROPE, **parameters}}


CONFIGS: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3_5": (lambda: transformers.Qwen3_5TextConfig(**_SHAPE, **_LINEAR), "linear_attention"),
    "qwen3_next": (lambda: transformers.Qwen3NextConfig(**_SHAPE, **_LINEAR, **_EXPERTS), "linear_attention"),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
        "linear_attention",
    ),
    "jamba": (
        lambda: transformers.JambaConfig(
            **_SHAPE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            num_experts=2, mamba_d_state=8, mamba_dt_rank=4,
        ),
        "linear_attention",
    ),
    "recurrent_gemma": (
        lambda: transformers.RecurrentGemmaConfig(
            **{key: value for key, value in _SHAPE.items() if key != "max_position_embeddings"},
            lru_width=32, attention_window_size=16, head_dim=8,
        ),
        "linear_attention",
    ),
    "mpt": (
        lambda: transformers.MptConfig(
            vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64
        ),
        "off by .* in a packed tree",
    ),
    "bloom": (
        lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_head=4, n_layer=2),
        "takes no tree mask",
    ),
    "llama with dynamic rope": (
        lambda: transformers.LlamaConfig(**rope_shape(rope_type="dynamic", factor=4.0)),
        "depend on the longest row",
    ),
    "phi3 with longrope": (
        lambda: transformers.Phi3Config(
            **{**_SHAPE, "rope_parameters": _LONG_ROPE}, pad_token_id=0, original_max_position_embeddings=16
        ),
        "depend on the longest row",
    ),
}  # fmt: skip
every_other_model = pytest.mark.parametrize("name", CONFIGS)


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name][0]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "branchline.train"]


@every_other_model
def test_a_model_that_cannot_follow_a_tree_is_trained_by_rows_and_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(name)
    assert prepare_model(model, "auto") == "rows"
    (line,) = lines_of(caplog)
    assert line.startswith("the model is trained row by row, which is slower than packed trees: ")
    with pytest.raises(InputError, match=CONFIGS[name][1]):
        prepare_model(model, "tree")
    caplog.clear()
    assert prepare_model(model, "rows") == "rows"
    assert not lines_of(caplog)


@every_other_model
def test_training_by_rows_gives_the_gradients_of_single_rows(name: str) -> None:
    model, reference = random_model(name), random_model(name)
    rows = random_rows(Random(1), 4, vocabulary=VOCABULARY)
    updater = PolicyUpdater(model, UpdateConfig(max_grad_norm=1e9, learning_rate=0.0, loss=LossConfig()))
    metrics = updater.update(rows)
    total = sum(float(row.weights.sum()) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        # A model of its own for each row: none has computed another row before.
        alone = fresh(reference)
        new = row_logprobs(alone, row)
        factors = torch.from_numpy((row.weights * row.advantages).astype(np.float64))
        loss = loss - (torch.exp(new - new.detach()) * factors).sum() / total
        alone.zero_grad()
        (-(new * factors).sum() / total).backward()
        for kept, used in zip(reference.parameters(), alone.parameters(), strict=True):
            if used.grad is not None:
                kept.grad = used.grad.clone() if kept.grad is None else kept.grad + used.grad
    expected = flat_gradient(reference)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["tree_reuse"] == 1
    found = flat_gradient(updater.model)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-4


def fresh(model: Any) -> Any:
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    copied = copy.deepcopy(model)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return copied


def flat_gradient(model: Any) -> Any:
    return torch.cat(
        [parameter.grad.double().flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def test_a_row_is_computed_with_its_own_frequencies_after_a_longer_one() -> None:
    rows = [make_row([1, 2], list(range(3, 3 + length))) for length in (40, 30, 10, 20, 45)]
    model = random_model("llama with dynamic rope")
    for row in rows:
        (batch,) = pack_rows([row])
        alone = row_logprobs(random_model("llama with dynamic rope"), row)
        found = forward_row(model, batch).logprobs
        assert torch.allclose(found.double(), alone, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_that_follows_trees_is_trained_on_them_without_a_word(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = tiny_model(shape, dtype)
        assert prepare_model(model, "auto") == "tree"
        assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not lines_of(caplog)


def test_weights_of_a_fresh_model_hide_no_problem() -> None:
    # Their logprobs are nearly uniform, and a wrong context changes them by less than 0.1.
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["mpt"][0]()).eval()
    assert "in a packed tree" in find_problem(model)


def test_a_model_that_ignores_positions_is_found() -> None:
    model = tiny_model("llama", torch.float32)
    forward = model.model.forward
    model.model.forward = lambda position_ids=None, **options: forward(**options)
    assert "in a packed tree" in find_problem(model)


def test_a_window_that_the_mask_does_not_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = packed_forward._dense_mask
    monkeypatch.setattr(
        packed_forward, "_dense_mask", lambda ends, positions, _: dense(ends, positions, None)
    )
    assert "in a packed tree" in find_problem(tiny_model("mistral", torch.float32))


def test_a_model_that_depends_on_far_positions_of_others_is_found() -> None:
    model = tiny_model("llama", torch.float32)
    forward = model.model.rotary_emb.forward

    def scale_with_the_longest_row(hidden: Any, position_ids: Any, **options: Any) -> Any:
        return forward(hidden, position_ids / (1 + (position_ids.max() > 256)), **options)

    model.model.rotary_emb.forward = scale_with_the_longest_row
    assert "beside a long row" in find_problem(model)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    model = transformers.BertLMHeadModel(config).eval()
    for option in ("auto", "tree", "rows"):
        with pytest.raises(InputError, match="with the tokens after them, expected a causal model"):
            prepare_model(model, option)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="layout: got 'trees', expected one of auto, tree, rows"):
        prepare_model(model, "trees")  # type: ignore[arg-type]


def test_both_layouts_give_the_same_update() -> None:
    rows: list[TrainingRow] = random_rows(Random(6), 6, vocabulary=VOCABULARY)
    found = []
    for layout in ("tree", "rows"):
        config = UpdateConfig(learning_rate=0.01, passes=2, layout=layout)  # type: ignore[arg-type]
        updater = PolicyUpdater(tiny_model("qwen3"), config)
        metrics = updater.update(rows)
        assert updater.layout == layout
        found.append({name: value for name, value in metrics.items() if name != "tree_reuse"})
    assert found[0] == pytest.approx(found[1], rel=1e-8)


def test_the_trainer_trains_a_model_by_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = transformers.MptConfig(
        vocab_size=520,
        d_model=32,
        n_heads=2,
        n_layers=2,
        max_seq_len=256,
        initializer_range=0.2,
        eos_token_id=1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, tmp_path / "model" / name)
    with caplog.at_level(logging.WARNING):
        trainer = create_trainer(tmp_path / "model", tmp_path / "run", steps=2)
    assert caplog.text.count("the model is trained row by row") == 1
    results = run_steps(trainer)
    assert [result.metrics["tree_reuse"] for result in results] == [1, 1]
    assert results[0].metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert results[0].metrics["grad_norm"] > 0


# -- attention ---------------------------------------------------------------------------------------


def test_a_gpu_gets_flex_attention_and_a_cpu_does_not() -> None:
    model = tiny_model("qwen3", torch.float32)
    assert choose_attention(model, "cuda") == ("flex_attention", "")
    assert choose_attention(model, "cpu") == choose_attention(model) == ("sdpa", "")
    assert choose_attention(tiny_model("qwen3", torch.float32, "eager"), "cuda") == ("eager", "")
    model._supports_flex_attn = False
    chosen, reason = choose_attention(model, "cuda")
    assert (chosen, reason) == ("sdpa", "transformers has no FlexAttention for Qwen3ForCausalLM")


def test_flex_attention_that_does_not_work_here_is_replaced_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_with_flex(model: Any, batch: Any, **options: Any) -> Any:
        if model.config._attn_implementation == "flex_attention":
            raise RuntimeError("out of resource: shared memory\n  and many more lines")
        return packed_forward.forward_packed(model, batch, **options)

    monkeypatch.setattr(layouts, "choose_attention", lambda _: ("flex_attention", ""))
    monkeypatch.setattr(layouts, "forward_packed", fail_with_flex)
    model = tiny_model("qwen3", torch.float32)
    assert prepare_model(model, "auto") == "tree"
    assert model.config._attn_implementation == "sdpa"
    (line,) = lines_of(caplog)
    assert line.startswith(
        "FlexAttention is not used: Qwen3ForCausalLM takes no tree mask: RuntimeError: out"
    )
    assert "\n" not in line
