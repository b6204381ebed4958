"""How a gateway behaves; the command line's defaults are these."""

from __future__ import annotations

from dataclasses import dataclass

from branchline.core.errors import InputError


@dataclass(frozen=True)
class GatewayConfig:
    """Keys and limits. Which engine a call goes to is the fleet's business."""

    admin_key: str = ""
    auth: bool = True
    max_in_flight: int = 2048
    """Generations at once; above, 429 with Retry-After."""
    max_body_bytes: int = 64 * 1024 * 1024
    max_messages: int = 10_000
    """Of one request."""
    max_prompt_tokens: int | None = None
    """Longer prompts are refused; None leaves it to what the engine can hold."""
    default_max_tokens: int | None = None
    """How long an answer may be where neither client nor session says. None: as long as the prompt leaves
    room, or UNKNOWN_ROOM where the engine does not say how much it can hold."""
    keepalive_s: float = 10.0
    """The longest that a stream says nothing; then it says that it is still there."""
    stream_flush_s: float = 0.02
    """Tokens of a stream are coalesced: after the first, at most one event in this time; 0: one event for
    every chunk that an engine yields."""
    public_url: str = ""
    """Where clients reach the gateway, if it is not where it listens; empty: the address each came by."""
    drain_s: float = 30.0
    """How long running calls may go on when the gateway stops; then they are kept as cancelled ones."""
    idle_s: float = 24 * 3600
    """Sessions that nobody has used for this long are finalized; 0: never."""
    explain_forks: bool = False
    """Log why a request did not go on where the last one ended, as it happens."""

    def __post_init__(self) -> None:
        if self.public_url and not self.public_url.startswith(("http://", "https://")):
            raise InputError(f"public_url: got {self.public_url!r}, expected http://HOST or https://HOST")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise InputError(
                f"default_max_tokens: got {self.default_max_tokens}, expected 1 or more, or None"
            )
        if not 0 <= self.stream_flush_s <= 10:
            raise InputError(f"stream_flush_s: got {self.stream_flush_s:g}, expected 0 to 10")
        if self.keepalive_s <= 0:
            raise InputError(f"silence_s: got {self.keepalive_s:g}, expected more than 0")
