"""The training of SmolLM2: its task, its template, its demonstrations, and a run with a tiny model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from examples.smollm2_gpu import train  # noqa: E402
from examples.smollm2_gpu.shop import MAX_TURNS, TOOLS, ShopTask, calculate, run_tool  # noqa: E402
from examples.smollm2_gpu.warm_start import (  # noqa: E402
    PERFECT,
    collect_demonstrations,
    train_warm_start,
    write_tool_folder,
)
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from branchline.chat.generic.codec import GenericCodec  # noqa: E402
from branchline.core.message import Message, ToolCall  # noqa: E402
from branchline.train.demo import MODEL_FOLDER  # noqa: E402
from branchline.train.metrics import read_metrics  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: random weights and the tokenizer of the demo."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=520, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def codec(source: Path, tmp_path_factory: pytest.TempPathFactory) -> GenericCodec:
    folder = tmp_path_factory.mktemp("tools")
    write_tool_folder(source, folder)
    return GenericCodec.open(folder)


def run_script(source: Path, out: Path, *options: str) -> int:
    small = ("--demonstrations", "6", "--warm-start-passes", "1", "--evaluation-tasks", "4", "--groups", "2",
             "--group-size", "2", "--device", "cpu")  # fmt: skip
    return train.main(["--run-folder", str(out), "--model", str(source), *small, *options])


@given(st.randoms(use_true_random=False))
def test_two_to_four_calls_give_the_answer(rng: Random) -> None:
    task = ShopTask.draw(rng)
    prices = [run_tool(task, "price", json.dumps({"item": item})) for item in task.items]
    parts = [str(task.count), *prices] if len(prices) == 1 else prices
    expression = (" * " if len(prices) == 1 else " + ").join(parts)
    total = run_tool(task, "calculate", json.dumps({"expression": expression}))
    assert task.score(f" {total}\n") == 1
    assert task.score(str(int(total) + 1)) == task.score("") == task.score(f"{total} coins") == 0
    assert 2 <= len(prices) + 1 <= 4 < MAX_TURNS


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * 3 + 4", "10"), ("2+3*4", "14"), ("7", "7"), ("007 + 1", "8"), ("2 ** 3", None), ("", None),
     ("__import__('os')", None), ("1 +", None), ("9" * 99, None), ("1 - 1", None)],
)  # fmt: skip
def test_only_sums_of_products_are_computed(expression: str, value: str | None) -> None:
    assert calculate(expression) == (value or "error: expected numbers, + and *")


@pytest.mark.parametrize(
    ("name", "arguments"), [("price", "[1]"), ("price", "{"), ("sell", "{}"), ("price", '{"item": "sun"}')]
)
def test_a_wrong_tool_call_gets_an_error_that_the_model_can_read(name: str, arguments: str) -> None:
    assert run_tool(ShopTask.draw(Random(0)), name, arguments).startswith("error: ")


def test_the_calls_that_the_template_shows_are_parsed_again(codec: GenericCodec) -> None:
    calls = (ToolCall("price", '{"item": "lamp"}'), ToolCall("calculate", '{"expression": "1 + 2"}'))
    for content, tool_calls in (("", calls), ("12", ()), ("I look.", calls[:1])):
        ids = codec.encode_reply(Message("assistant", content, tool_calls=tool_calls))
        message = codec.parse(ids, tools=TOOLS)
        assert message.content == content
        assert [(call.name, call.arguments) for call in message.tool_calls] == [
            (call.name, call.arguments) for call in tool_calls
        ]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_template_shows_the_system_message_once_and_all_tools(
    codec: GenericCodec, tools: Any, system: str | None
) -> None:
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(codec.tokenizer.path)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "7"}]
    text = tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
    assert text.count("Be brief.") == (1 if system else 0)
    assert text.count("<|im_start|>system") == (1 if system or tools else 0)
    assert text.count('"name": "price"') == (1 if tools else 0)
    assert text.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>tool\n<tool_response>7</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_demonstrations_are_exact_and_perfect_ones_solve_every_task(codec: GenericCodec) -> None:
    perfect = asyncio.run(collect_demonstrations(codec, 12, 0, PERFECT))
    assert perfect.score == 1
    mixed = asyncio.run(collect_demonstrations(codec, 100, 0))
    assert 0.15 < mixed.score < 0.45
    for sample in [*perfect.samples, *mixed.samples]:
        assert sample.exact
        assert sample.shares.sum() == sample.response_mask.sum() > 0
    # One row for each episode: the conversation only grows.
    assert len(perfect.samples) == 12
    assert len(mixed.samples) == 100
    text = codec.decode(perfect.samples[0].response_ids)
    assert text.count("<tool_call>") == text.count("<tool_response>") >= 2


def test_the_warm_start_learns_the_demonstrations(codec: GenericCodec, source: Path) -> None:
    demonstrations = asyncio.run(collect_demonstrations(codec, 8, 1))
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    losses = train_warm_start(model, demonstrations.samples, passes=16, learning_rate=1e-2, max_tokens=2048)
    assert losses[-1] < losses[0] - 1


def test_a_run_writes_metrics_a_table_and_an_account_of_all_tokens(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Random weights solve no task; a reward that differs within a group makes some tokens trained.
    monkeypatch.setattr(ShopTask, "score", lambda _, answer: float(len(answer) % 2))
    out = tmp_path / "run"
    assert run_script(source, out, "--steps", "2") == 0
    assert len(read_metrics(out / "metrics.jsonl")) == 2
    summary = json.loads((out / "summary.json").read_text())
    counts = [summary[name] for name in ("trained_tokens", "tokens_without_advantage", "dropped_tokens")]
    assert summary["sampled_tokens"] == summary["client_tokens"] == sum(counts) > 0
    assert summary["dropped_tokens"] == 0
    assert summary["trained_tokens"] > 0
    assert summary["first_gap_mean"] <= summary["first_gap_max"] <= summary["gap_max"] < 1e-4
    assert summary["steps"] == 2
    assert summary["score_after"] is not None
    table = (out / "table.md").read_text()
    assert "| of these dropped | 0 |" in table
    assert table in capsys.readouterr().out
    assert not (out / "checkpoints").exists()
    assert run_script(source, out, "--steps", "2") == 2
    assert f"--run-folder: {out} has a run" in capsys.readouterr().err


def test_a_run_stops_after_its_time_with_a_full_table(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run_script(source, out, "--steps", "50", "--max-seconds", "0.1", "--save-checkpoint") == 0
    assert len(read_metrics(out / "metrics.jsonl")) == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["score_after"] is not None
    assert summary["score_without_prices"] is not None
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert (checkpoint / "model.safetensors").exists()


def test_an_interrupted_run_leaves_the_table_of_its_steps(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(metrics: dict[str, float]) -> str:
        if metrics["step"] == 2:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(train, "describe_step", interrupt)
    out = tmp_path / "run"
    assert run_script(source, out, "--steps", "50") == 130
    table = (out / "table.md").read_text()
    assert "| steps | 2 of 2 groups × 2 episodes" in table
    assert "→ not measured of 4" in table


def test_the_curve_of_a_run_is_drawn_from_its_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert train.main(["--plot", str(tmp_path)]) == 2
    assert f"--plot: got {tmp_path}, expected a folder with metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.1}\n{"step": 2, "reward": 0.4}\n')
    assert train.main(["--plot", str(tmp_path)]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
