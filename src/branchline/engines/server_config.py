"""The address of an engine server, and its timeouts."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from branchline.core.errors import InputError


@dataclass(frozen=True)
class ServerConfig:
    """The address of a server, and its timeouts."""

    url: str
    api_key: str = field(default="", repr=False)
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 600.0
    """Between two reads of a response that is not a generation of an engine."""
    first_token_timeout_s: float = 600.0
    """Until the first token of a generation: the server's queue and the whole prefill."""
    token_timeout_s: float = 60.0
    """Between two events of a generation. Calls that are not streamed have up to 32 tokens in an event."""

    def __post_init__(self) -> None:
        try:
            is_valid = urlsplit(self.url).scheme in ("http", "https") and urlsplit(self.url).hostname
            _ = urlsplit(self.url).port
        except ValueError:
            is_valid = False
        if not is_valid:
            raise InputError(f"url: got {self.url!r}, expected http://HOST:PORT")
        for name in ("connect_timeout_s", "read_timeout_s", "first_token_timeout_s", "token_timeout_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}: got {getattr(self, name)}, expected seconds, more than 0")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("api_key: has characters that no header can carry, expected printable ASCII")

    @property
    def base_url(self) -> str:
        """The URL without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def host_port(self) -> str:
        """Host and port, without the credentials that the URL may contain."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def authorization(self) -> str:
        """The value of the `authorization` header; "" for none."""
        if self.api_key:
            return f"Bearer {self.api_key}"
        user, at, _ = urlsplit(self.url).netloc.rpartition("@")
        return f"Basic {base64.b64encode(unquote(user).encode()).decode()}" if at else ""
