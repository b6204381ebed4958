"""Settings of a gateway, which are options of `branchline serve`."""

from __future__ import annotations

from dataclasses import dataclass

from branchline.core.choices import ImageUrlPolicy
from branchline.core.errors import InputError
from branchline.core.option_fields import option


@dataclass(frozen=True)
class GatewayConfig:
    """Keys, limits and timing. The router decides which engine serves a call."""

    admin_key: str = option("", basic=True, secret=True, metavar="KEY")
    """The key for all sessions; generated and printed if it is not given. Better set as the variable, where
    no other user sees it."""
    auth: bool = option(True, basic=True)
    """Clients need keys; with --no-auth they need none, and the gateway listens on loopback only."""
    max_in_flight: int = 2048
    """Concurrent generations; further calls get 429 with Retry-After."""
    max_body_bytes: int = 64 * 1024 * 1024
    """Bytes in the body of a request; longer ones get 413. Images in base64 are most of a long body."""
    max_prompt_characters: int = 4_000_000
    """Text in the messages and tools of a request; about a million tokens."""
    max_messages: int = 10_000
    """Messages in a request."""
    max_tools: int = 1_000
    """Tools in a request."""
    max_json_values: int = 250_000
    """Commas and opening brackets in a body, those in its texts included: a bound on its JSON values.
    Counted in bodies of more than twice as many bytes."""
    max_connections: int = 8192
    """Open connections; further ones replace those that have been idle longest, or get 503. It is lowered to
    what the process may open (`ulimit -n`)."""
    max_header_bytes: int = 64 * 1024
    """Request line and headers of a request; longer ones get 431."""
    header_timeout_s: float = 15.0
    """How long a client may take to send a request line and headers; then it gets 408."""
    body_timeout_s: float = 60.0
    """How long an incomplete body may be silent; then the client gets 408."""
    write_timeout_s: float = 120.0
    """How long a client may leave what was sent unread; then its connection is closed, its call cancelled."""
    connection_idle_s: float = 75.0
    """How long a connection is kept open for the next request. Longer than clients keep it, so that they do
    not send on a connection that is being closed."""
    max_prompt_tokens: int | None = None
    """Tokens of a prompt; longer ones are refused. By default the engine's own limit applies."""
    default_max_tokens: int | None = option(None, basic=True)
    """Limit of an answer if neither client nor session sets one; by default the room that the prompt leaves.
    It is 4096 if the engine does not report its context length, and 512 with the built-in SmolLM2, which
    often generates no stop token."""
    keepalive_s: float = 10.0
    """The longest time without a byte on a stream; then a keepalive is sent."""
    stream_flush_s: float = 0.02
    """Coalescing of streamed tokens: after the first, at most one event in this time; 0: one event for
    every chunk that an engine yields."""
    public_url: str = option("", basic=True, metavar="URL")
    """The URL at which clients reach the gateway, used in base_url; by default that of each request."""
    drain_s: float = 30.0
    """How long a stop (SIGINT, SIGTERM) waits for running calls before it cancels them. A second signal stops
    at once."""
    idle_s: float = 24 * 3600.0
    """Sessions without requests for this long are finalized; 0: never."""
    image_urls: ImageUrlPolicy = "none"
    """Whether images that clients send as http(s) links are fetched: not, from public addresses, or from any,
    local ones too."""
    ignore_unknown_fields: bool = False
    """Ignore fields of requests that are not known or not supported by the engine, log each once and record
    them with the call. By default such a request is refused with 400, which names the field."""
    explain_forks: bool = option(False, basic=True)
    """Log why a request did not continue the last timeline."""

    def __post_init__(self) -> None:
        if self.public_url and not self.public_url.startswith(("http://", "https://")):
            raise InputError(f"public_url: got {self.public_url!r}, expected http://HOST or https://HOST")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise InputError(
                f"default_max_tokens: got {self.default_max_tokens}, expected 1 or more, or None"
            )
        if not 0 <= self.stream_flush_s <= 10:
            raise InputError(f"stream_flush_s: got {self.stream_flush_s:g}, expected 0 to 10")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise InputError(f"{name}: got {getattr(self, name):g}, expected more than 0")


_POSITIVE = (
    "keepalive_s",
    "max_body_bytes",
    "max_prompt_characters",
    "max_messages",
    "max_tools",
    "max_json_values",
    "max_connections",
    "max_header_bytes",
    "header_timeout_s",
    "body_timeout_s",
    "write_timeout_s",
    "connection_idle_s",
)
