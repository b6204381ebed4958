"""A tiny policy with the demo's tokenizer, and an agent that rewards it for its first characters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from openai import AsyncOpenAI  # noqa: E402

from branchline.rollout.session_gateway import AgentSession  # noqa: E402
from branchline.train.demo import MODEL_FOLDER  # noqa: E402
from branchline.train.policy_update import UpdateConfig  # noqa: E402
from branchline.train.trainer import Trainer, TrainerConfig  # noqa: E402

torch.set_num_threads(1)
QUESTIONS = ("Who?", "What?", "Where?")


def create_policy(folder: Path) -> Path:
    """Writes a model folder: random weights and the tokenizer of the demo."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=520,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder / name)
    return folder


async def ask_twice(question: str, session: AgentSession) -> float:
    """An agent: two turns; the reward is the fraction of even bytes in its answers."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        answers = ""
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            text = reply.choices[0].message.content or ""
            answers += text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    data = answers.encode()
    return sum(byte % 2 == 0 for byte in data) / max(1, len(data))


def small_config(**changes: Any) -> TrainerConfig:
    update = UpdateConfig(**{"learning_rate": 3e-3, "max_batch_tokens": 256, **changes.pop("update", {})})
    defaults: dict[str, Any] = {"steps": 2, "groups_per_step": 2, "group_size": 3}
    return TrainerConfig(update=update, **{**defaults, **changes})


def create_trainer(
    model: Path, run_folder: Path, agent: Any = ask_twice, *, resume: bool = False, **changes: Any
) -> Trainer[str]:
    return Trainer(
        model, agent, QUESTIONS, small_config(**changes), run_folder=run_folder, resume=resume, device="cpu"
    )
