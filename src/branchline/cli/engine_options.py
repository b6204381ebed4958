"""The options that select and configure an engine, for every command that runs one: `serve` and `run`.

`engines.py` builds the engine from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from branchline.core.option_fields import group, option
from branchline.engines.server_config import ServerConfig
from branchline.gateway.config import GatewayConfig

EngineName = Literal["hf", "vllm", "sglang", "scripted", "openai"]
CodecName = Literal["generic", "renderers"]
ENGINE_KEY_ENV = "BRANCHLINE_ENGINE_KEY"
UPSTREAM_KEY_ENV_PREFIX = "BRANCHLINE_UPSTREAM_KEY_"
OPENAI_KEY_ENV = "OPENAI_API_KEY"
_DEFAULT_MODEL_MAX_TOKENS = 512
_EMBEDDED = {"engine": ("hf",)}
_SERVERS = {"engine": ("vllm", "sglang")}
_ANY_SERVER = {"engine": ("vllm", "sglang", "openai")}
_WITH_TOKENIZER = {"engine": ("hf", "vllm", "sglang", "openai")}


@dataclass(frozen=True)
class EmbeddedOptions:
    """Device and memory of the model in this process."""

    device: str | None = option(None, basic=True, metavar="NAME", needs=_EMBEDDED)
    """cpu, cuda, cuda:1, …; by default cuda if there is one."""
    dtype: str | None = option(None, metavar="NAME", needs=_EMBEDDED)
    """Type of the weights; by default float32 on a CPU, else the model's own."""
    max_batch: int | None = option(None, needs=_EMBEDDED)
    """Requests sampled together; by default 64, or 256 on a GPU."""
    batch_gib: float | None = option(None, metavar="GIB", needs=_EMBEDDED)
    """Keys and values of running requests; by default 4, or half of the free memory on a GPU."""
    cache_gib: float | None = option(None, metavar="GIB", needs=_EMBEDDED)
    """Keys and values kept for later requests; by default 1, or a fifth of the free memory on a GPU."""
    prefill_tokens: int | None = option(None, needs=_EMBEDDED)
    """Prompt tokens computed in one step; by default 512, or 8192 on a GPU."""
    threads: int | None = option(None, needs=_EMBEDDED)
    """CPU threads of a step; by default 1 for models below 20 million parameters, else all cores."""


@dataclass(frozen=True)
class TemplateOptions:
    """Stop ids and template arguments of a codec."""

    stop_id: tuple[str, ...] = option((), metavar="ID_OR_TOKEN", needs=_WITH_TOKENIZER)
    """An id that ends an output, besides those in the model's files and its template."""
    no_stop_id: tuple[str, ...] = option((), metavar="ID_OR_TOKEN", needs=_WITH_TOKENIZER)
    """An id that does not end an output, although the model's files or template name it."""
    default_chat_template_kwargs: dict[str, Any] = option(factory=dict, needs=_WITH_TOKENIZER)
    """Arguments of the chat template for every prompt, which a request's chat_template_kwargs override:
    '{"enable_thinking": true}'."""


@dataclass(frozen=True)
class EngineOptions:
    """What generates, and what writes its prompts."""

    engine: EngineName = option("hf", basic=True)
    """What generates: a model in this process (hf), a server, or a script."""
    model: str | None = option(
        None, basic=True, metavar="DIR|NAME", needs={"engine": ("hf", "vllm", "sglang")}
    )
    """The model: a folder or a Hugging Face name. By default, with --engine hf, SmolLM2, unpacked once."""
    engine_url: tuple[str, ...] = option((), basic=True, metavar="URL", needs=_ANY_SERVER)
    """Address of an engine server, repeated for replicas. Its API key is read from BRANCHLINE_ENGINE_KEY;
    with --engine openai, OPENAI_API_KEY is the fallback."""
    tokenizer: str | None = option(None, basic=True, metavar="DIR|NAME", needs=_WITH_TOKENIZER)
    """The tokenizer and its chat template: a folder or a Hugging Face name; by default the model's. With
    --engine vllm or sglang it is that of the model that the server reports."""
    codec: CodecName = option("generic", needs=_WITH_TOKENIZER)
    """What writes prompts: the tokenizer's chat template (generic), or the renderers package for a named
    --family."""
    family: str | None = option(None, metavar="NAME", needs={"codec": ("renderers",)})
    """The model family of --codec renderers."""
    tool_parser: str | None = option(None, metavar="NAME", needs=_WITH_TOKENIZER)
    """Format of tool calls; by default it is detected."""
    reasoning_parser: str | None = option(None, metavar="NAME", needs=_WITH_TOKENIZER)
    """Format of reasoning; by default it is detected."""
    first_token_timeout_s: float = option(ServerConfig.first_token_timeout_s, metavar="S", needs=_SERVERS)
    """How long a server may take to the first token of an answer, its queue and the prompt included. Then the
    call is sent to another replica."""
    token_timeout_s: float = option(ServerConfig.token_timeout_s, metavar="S", needs=_SERVERS)
    """How long a server may take between two tokens. Then the answer continues on another replica. More is
    needed if weights are updated without POST /policy/pause."""
    allow_special_tokens: bool = option(False, needs=_WITH_TOKENIZER)
    """Let text of messages and tools become control tokens (<|im_end|>). By default it stays text, so that a
    page fetched by a tool cannot open a turn."""
    upstream: tuple[str, ...] = option((), metavar="NAME=URL")
    """An OpenAI-compatible server that rules can name. Its API key is read from BRANCHLINE_UPSTREAM_KEY_NAME,
    else OPENAI_API_KEY."""
    rule: tuple[str, ...] = option((), metavar="KEY=VALUE,…")
    """model=PATTERN, agent=PATTERN, engine=NAME, train=yes|no; the first matching rule applies."""
    template: TemplateOptions = group(TemplateOptions, "template")
    embedded: EmbeddedOptions = group(EmbeddedOptions, "embedded engine (--engine hf)")


def default_max_tokens(engines: EngineOptions, config: GatewayConfig) -> int | None:
    """The option's value; SmolLM2 gets a limit of its own, because it often generates no stop token."""
    if config.default_max_tokens is None and engines.engine == "hf" and not engines.model:
        return _DEFAULT_MODEL_MAX_TOKENS
    return config.default_max_tokens
