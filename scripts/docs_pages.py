"""The pages that `make check-docs` runs: what stands in for what they need, and what is left out, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_VLLM = f"$CHECKOUT_PYTHON {_ROOT}/scripts/stand_in_vllm.py {_ROOT}/.cache/tokenizers/qwen3"
_DEMO_MODEL = '__import__("branchline.train.demo", fromlist=["MODEL_FOLDER"]).MODEL_FOLDER'
_CLIENTS = "needs the client: `make test-clients` pastes this page with the real one"


def _ask(path: str) -> str:
    """A request in place of a client; `make test-clients` pastes the page with the real one."""
    body = '{"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "Say hello."}]}'
    return f"curl --silent http://127.0.0.1:8100/sessions/episode-1/{path} -d '{body}'"


@dataclass(frozen=True)
class Page:
    """A page of the docs that can be pasted."""

    path: str
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """What runs in place of a text of the page. `$CHECKOUT_PYTHON` has the tests' packages."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a block with this text does not run."""
    heavy: bool = False
    """Whether it installs torch or Ray."""


PAGES = (
    Page(
        "README.md",
        left_out={
            "branchline serve --engine vllm": "docs/guides/vllm.md has the same against a stand-in",
        },
    ),
    Page(
        "docs/guides/claude-code.md",
        stand_ins={
            "claude -p 'Say hello.' --allowedTools Bash Read Edit Agent": _ask("v1/messages"),
            "claude -p --continue 'And once more.' --allowedTools Bash Read Edit Agent": _ask("v1/messages"),
        },
    ),
    Page("docs/guides/client.md"),
    Page(
        "docs/guides/clients.md",
        stand_ins={
            "qwen -p 'Say hello.'": _ask("v1/chat/completions"),
            "opencode run --model branchline/branchline 'Say hello.'": _ask("v1/chat/completions"),
            "pi --provider branchline --model branchline -p 'Say hello.'": _ask("v1/chat/completions"),
        },
    ),
    Page("docs/guides/codex.md", left_out={"codex exec": _CLIENTS}),
    Page("docs/guides/context.md"),
    Page(
        "docs/guides/images.md",
        left_out={
            "~/models/Qwen2.5-VL": "needs a GPU and a model from a hub; "
            "tests/gateway/test_images_embedded.py runs a small one of the same architecture",
            "cat.png": "needs that gateway",
        },
        heavy=True,
    ),
    Page("docs/guides/langgraph.md"),
    Page("docs/guides/loop.md"),
    Page(
        "docs/guides/observability.md",
        left_out={"mlflow server": "needs mlflow: `make test-mlflow` sends a session to a real one"},
    ),
    Page(
        "docs/guides/merging.md",
        stand_ins={"examples/three_words.jsonl": f"{_ROOT}/examples/three_words.jsonl"},
    ),
    Page("docs/guides/openai-agents.md"),
    Page(
        "docs/guides/rollouts.md",
        stand_ins={"--steps 200 --model Qwen/Qwen3-0.6B": "--steps 1"},
        heavy=True,
    ),
    Page(
        "docs/guides/scaling.md",
        left_out={
            "--ray auto": "needs vLLM servers; `make test-ray` runs it on a local Ray with a scripted engine",
            "RayCluster(make_engine": "an excerpt: `make test-ray`",
            "GatewayPool([": "an excerpt: tests/rollout/test_gateway_pool.py",
        },
        heavy=True,
    ),
    Page(
        "docs/guides/train-your-agent.md",
        stand_ins={
            '"Qwen/Qwen3-0.6B"': _DEMO_MODEL,
            "steps=200, groups_per_step=8, group_size=8": "steps=1, groups_per_step=1, group_size=2",
            "max_tokens=200": "max_tokens=8",
        },
        left_out={"examples.smollm2_gpu": "needs a GPU: `make train-smollm2`"},
        heavy=True,
    ),
    Page("docs/guides/sessions.md"),
    Page("docs/guides/trajectories.md"),
    Page(
        "docs/guides/vllm.md", stand_ins={"vllm serve Qwen/Qwen3-8B --port 8000": f"{_VLLM} 8000 8001 8002"}
    ),
    Page(
        "docs/coming-from-agentjet.md",
        stand_ins={
            "calls.jsonl": f"{_ROOT}/examples/three_words.jsonl",
            "Qwen/Qwen3-8B": f"{_ROOT}/.cache/tokenizers/qwen3",
        },
    ),
    Page(
        "docs/coming-from-verl.md",
        left_out={"read_verl_config": "an excerpt: tests/loop/test_coming_from_verl.py runs every row"},
    ),
)
