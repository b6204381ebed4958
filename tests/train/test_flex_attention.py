"""FlexAttention on a GPU gives the losses and gradients of the dense mask, and is what a GPU trains with.

Run by `make test-gpu`. It prints the times of both on a forest of agents' turns.
"""

from __future__ import annotations

import logging
import time
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from branchline.export.packing import PackedBatch, TrainingRow, pack_rows  # noqa: E402
from branchline.train.layouts import prepare_model  # noqa: E402
from branchline.train.losses import LossConfig  # noqa: E402
from branchline.train.packed_forward import forward_packed  # noqa: E402
from branchline.train.policy_loss import policy_loss  # noqa: E402
from branchline.train.policy_update import PolicyUpdater, UpdateConfig  # noqa: E402
from tests.export.packed_rows import make_row, random_rows  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
VOCABULARY = 32_000
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16_384,
}


def create_model(name: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    if name == "mistral":
        config = transformers.MistralConfig(**SHAPE, sliding_window=700)
    elif name == "gemma3":
        types = ["sliding_attention", "full_attention"] * 3
        config = transformers.Gemma3TextConfig(**SHAPE, sliding_window=700, layer_types=types)
    else:
        config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to("cuda", dtype).eval()


def stripped_turns(trees: int, turns: int) -> list[TrainingRow]:
    """Returns the rows of agents whose template drops the reasoning of earlier turns."""
    rng = Random(0)

    def draw(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    rows: list[TrainingRow] = []
    for _ in range(trees):
        context = draw(900)
        for _ in range(turns):
            reasoning, reply = draw(200), draw(80)
            advantages = [rng.choice([-1.0, 0.5])] * 280
            rows.append(make_row(context, reasoning + reply, advantages=advantages, logprobs=[-10.0] * 280))
            context = context + reply + draw(150)
    return rows


def step(model: Any, batches: list[PackedBatch]) -> tuple[float, Any]:
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for batch in batches:
        outputs = forward_packed(model, batch, with_entropy=True)
        config = LossConfig("reinforce", entropy_coefficient=0.01)
        value: Any = policy_loss(outputs, batch, config, normalizer=1000.0).loss
        value.backward()
        loss += value.item()
    torch.cuda.synchronize()
    return loss, torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone()


def measure(model: Any, batches: list[PackedBatch]) -> tuple[float, float]:
    """Returns seconds of the fastest of three steps, and GiB."""
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step(model, batches)
        seconds.append(time.perf_counter() - start)
    return min(seconds), torch.cuda.max_memory_allocated() / 2**30


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3"])
def test_flex_attention_gives_the_loss_and_gradient_of_the_dense_mask(name: str) -> None:
    model = create_model(name)
    # Other lengths than the first must not need a kernel each.
    forests = [stripped_turns(2, 6), stripped_turns(1, 5), random_rows(Random(3), 40, vocabulary=VOCABULARY)]
    for rows in forests:
        batches = pack_rows(rows, 8192)
        found = {}
        for attention in ("sdpa", "flex_attention"):
            model.set_attn_implementation(attention)
            found[attention] = step(model, batches)
        (dense_loss, dense), (flex_loss, flex) = found["sdpa"], found["flex_attention"]
        off = ((flex - dense).norm() / dense.norm()).item()
        print(f"{name}, {sum(map(len, batches)):,} tokens: loss {dense_loss:.6f} and {flex_loss:.6f}, "
              f"gradients differ by {off:.1e}")  # fmt: skip
        assert flex_loss == pytest.approx(dense_loss, rel=1e-5, abs=1e-6)
        assert off < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_times_of_flex_attention_and_of_the_dense_mask(dtype: Any) -> None:
    model = create_model("qwen3", dtype)
    batches = pack_rows(stripped_turns(4, 8), 16_384)
    tokens = sum(map(len, batches))
    for attention in ("sdpa", "flex_attention"):
        model.set_attn_implementation(attention)
        step(model, batches)
        seconds, memory = measure(model, batches)
        print(f"{attention}, {dtype}, {tokens:,} tokens: {seconds * 1000:,.0f} ms, {memory:.1f} GiB")


def test_a_gpu_trains_with_flex_attention(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "branchline.train"):
        model = create_model("qwen3")
        assert prepare_model(model, "auto") == "tree"
    assert model.config._attn_implementation == "flex_attention"
    assert not [record for record in caplog.records if record.name == "branchline.train"]
    rows = stripped_turns(1, 3)
    flex = PolicyUpdater(create_model("qwen3"), UpdateConfig(max_batch_tokens=2048)).update(rows)
    alone = PolicyUpdater(create_model("qwen3"), UpdateConfig(layout="rows")).update(rows)
    for name in ("loss", "grad_norm", "entropy"):
        assert flex[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)
