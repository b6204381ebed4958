"""How a gateway behaves; the command line's defaults are these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatewayConfig:
    """Keys and limits. Which engine a call goes to is the fleet's business."""

    admin_key: str = ""
    auth: bool = True
    max_in_flight: int = 256
    """Generations at once; above, 429 with Retry-After."""
    max_body_bytes: int = 64 * 1024 * 1024
    max_messages: int = 10_000
    """Of one request."""
    max_prompt_tokens: int | None = None
    """Longer prompts are refused; None leaves it to what the engine can hold."""
    default_max_tokens: int = 4096
    """Where neither client nor session says."""
    idle_s: float = 24 * 3600
    """Sessions that nobody has used for this long are finalized; 0: never."""
    explain_forks: bool = False
    """Log why a request did not go on where the last one ended, as it happens."""
