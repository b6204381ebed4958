"""Settings of the embedded engine. They do not need torch, so that commands can offer them as options."""

from __future__ import annotations

from dataclasses import dataclass

from branchline.core.choices import LogprobKind
from branchline.core.errors import EngineInputError


@dataclass(frozen=True)
class HfConfig:
    """Limits of the embedded engine. None: a value that suits the device of the model."""

    max_batch: int | None = None
    """Maximum number of requests decoded together; others wait. 64 on a CPU, 256 on a GPU."""
    batch_bytes: int | None = None
    """Keys and values of running requests (rows × the longest row); beyond it the latest requests wait. 4 GiB
    on a CPU, half of the memory that the model leaves free on a GPU."""
    cache_bytes: int | None = None
    """Keys and values kept for later requests. 1 GiB on a CPU, a fifth of the free memory on a GPU."""
    prefill_tokens: int | None = None
    """Prompt ids computed in one step. 512 on a CPU, 8192 on a GPU."""
    threads: int | None = None
    """CPU threads of a step. One for models below 20 million parameters, for which the threads cost more
    than they save; else as many as torch uses."""
    logprob_kind: LogprobKind = "raw"

    def __post_init__(self) -> None:
        for field in ("max_batch", "batch_bytes", "prefill_tokens", "threads"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise EngineInputError(f"{field}: got {value}, expected 1 or more")
        if self.cache_bytes is not None and self.cache_bytes < 0:
            raise EngineInputError(f"cache_bytes: got {self.cache_bytes}, expected 0 or more")
