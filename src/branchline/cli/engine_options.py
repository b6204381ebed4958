"""The options that select and configure an engine, for every command that runs one: `serve`, `run`, `doctor`.

`engines.py` builds the engine from them.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from branchline.gateway.config import GatewayConfig
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS

ENGINE_NAMES = ("hf", "vllm", "sglang", "scripted", "openai")
CODEC_NAMES = ("generic", "renderers")
ENGINE_KEY_ENV = "BRANCHLINE_ENGINE_KEY"
UPSTREAM_KEY_ENV_PREFIX = "BRANCHLINE_UPSTREAM_KEY_"
OPENAI_KEY_ENV = "OPENAI_API_KEY"
_DEFAULT_MODEL_MAX_TOKENS = 512


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine",
        choices=ENGINE_NAMES,
        default="hf",
        help="what generates: a model in this process (hf), a server, or a script (default: %(default)s)",
    )
    group.add_argument(
        "--model",
        metavar="DIR|NAME",
        help="the model: a folder or a Hugging Face name (default with --engine hf: SmolLM2, unpacked once)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="DIR|NAME",
        help="the tokenizer and its chat template: a folder or a Hugging Face name (default: the model's; "
        "with --engine vllm or sglang, that of the model that the server reports)",
    )
    group.add_argument(
        "--codec",
        choices=CODEC_NAMES,
        default="generic",
        help="what writes prompts: the tokenizer's chat template (generic), or the renderers package for a "
        "named --family (default: %(default)s)",
    )
    group.add_argument("--family", metavar="NAME", help="the model family of --codec renderers")
    group.add_argument("--tool-parser", metavar="NAME", help="format of tool calls (default: detected)")
    group.add_argument("--reasoning-parser", metavar="NAME", help="format of reasoning (default: detected)")
    add_template_options(group)
    add_timeout_options(group)
    group.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="let text of messages and tools become control tokens (<|im_end|>); by default it stays text, "
        "so that a page fetched by a tool cannot open a turn",
    )
    group.add_argument(
        "--engine-url",
        action="append",
        default=[],
        metavar="URL",
        help=f"address of an engine server; repeat for replicas. Its API key is read from {ENGINE_KEY_ENV}; "
        f"with --engine openai, {OPENAI_KEY_ENV} is the fallback",
    )
    group.add_argument(
        "--upstream",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="an OpenAI-compatible server that rules can name. Its API key is read from "
        f"{UPSTREAM_KEY_ENV_PREFIX}NAME, else {OPENAI_KEY_ENV}",
    )
    group.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="KEY=VALUE,…",
        help="model=PATTERN, agent=PATTERN, engine=NAME, train=yes|no; the first matching rule applies",
    )
    group.add_argument(
        "--max-in-flight",
        type=int,
        default=GatewayConfig.max_in_flight,
        metavar="N",
        help="concurrent generations; further calls get 429 with Retry-After (default: %(default)s)",
    )
    group.add_argument(
        "--default-max-tokens",
        type=int,
        default=GatewayConfig.default_max_tokens,
        metavar="N",
        help="max_tokens if neither client nor session sets it (default: the rest of the context window; "
        f"{FALLBACK_MAX_TOKENS} if the engine does not report its size; {_DEFAULT_MODEL_MAX_TOKENS} with the "
        "built-in SmolLM2)",
    )


def add_embedded_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1, … (default: cuda if there is one)"
    )
    group.add_argument(
        "--dtype",
        metavar="NAME",
        help="type of the weights (default: float32 on a CPU, else the model's own)",
    )
    group.add_argument(
        "--max-batch", type=int, metavar="N", help="requests sampled together (default: 64; 256 on a GPU)"
    )
    group.add_argument(
        "--batch-gib",
        type=float,
        metavar="GIB",
        help="keys and values of running requests (default: 4; half of the free memory on a GPU)",
    )
    group.add_argument(
        "--cache-gib",
        type=float,
        metavar="GIB",
        help="keys and values kept for later requests (default: 1; a fifth of the free memory on a GPU)",
    )
    group.add_argument(
        "--prefill-tokens",
        type=int,
        metavar="N",
        help="prompt tokens computed in one step (default: 512; 8192 on a GPU)",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of a step (default: 1 for models below 20 million parameters, else all cores)",
    )


def add_template_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options that change the stop ids and the template arguments of a codec."""
    parser.add_argument(
        "--stop-id",
        action="append",
        default=[],
        metavar="ID_OR_TOKEN",
        help="an id that ends an output, besides those in the model's files and its template; repeatable",
    )
    parser.add_argument(
        "--no-stop-id",
        action="append",
        default=[],
        metavar="ID_OR_TOKEN",
        help="an id that does not end an output, although the model's files or template name it; repeatable",
    )
    parser.add_argument(
        "--default-chat-template-kwargs",
        type=parse_json_object,
        default={},
        metavar="JSON",
        help="arguments of the chat template for every prompt, which a request's chat_template_kwargs "
        "override: '{\"enable_thinking\": true}'",
    )


def add_timeout_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options that say how long an engine server may be silent."""
    parser.add_argument(
        "--first-token-timeout-s",
        type=float,
        metavar="SECONDS",
        help="how long a server may take to the first token of an answer, its queue and the prompt included; "
        "then the call is sent to another replica (default: 600)",
    )
    parser.add_argument(
        "--token-timeout-s",
        type=float,
        metavar="SECONDS",
        help="how long a server may take between two tokens; then the answer continues on another replica. "
        "More is needed if weights are updated without POST /policy/pause (default: 60)",
    )


def parse_json_object(text: str) -> dict[str, Any]:
    """Reads the JSON object of an option."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object")
    return value


def default_max_tokens(options: argparse.Namespace) -> int | None:
    """The option's value; SmolLM2 gets a limit of its own, because it often generates no stop token."""
    if options.default_max_tokens is None and options.engine == "hf" and not options.model:
        return _DEFAULT_MODEL_MAX_TOKENS
    limit: int | None = options.default_max_tokens
    return limit
