"""Fetches images that clients send as http(s) links, if the gateway allows it.

A link is fetched once in a session: later calls use the bytes that the tree has, so an image that changes at
its source does not change a prompt. Each address is checked before the connection is made to exactly that
address, also after a redirect: with the policy `public` a client cannot make the gateway read from its own
network.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, urljoin, urlsplit

import xxhash
from msgspec import structs

from branchline.core.call import Request
from branchline.core.choices import ImageUrlPolicy
from branchline.core.errors import MessageError
from branchline.core.message import Media, Message
from branchline.tree.tree import Tree

"""`none`: links are not fetched. `public`: from public addresses only. `any`: also from local ones."""

_MAX_REDIRECTS = 3
_MAX_CONCURRENT = 8
_READ_BYTES = 65536
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Resolve = Callable[[str, int], list[str]]


def resolve_host(host: str, port: int) -> list[str]:
    """Returns the addresses of a host."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass
class ImageFetcher:
    """Replaces links to images by their data, within limits of size and time."""

    policy: ImageUrlPolicy = "none"
    max_bytes: int = 20 * 2**20
    timeout_s: float = 10.0
    resolve_host: Resolve = resolve_host

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def resolve(self, request: Request, tree: Tree) -> Request:
        """Returns a request with the data of its images. Raises MessageError if one cannot be fetched."""
        if self.policy == "none" or not any(map(_has_links, request.messages)):
            return request
        known = {
            media.url: media
            for node in tree.nodes
            for media in node.message.media
            if media.url and media.payload
        }
        messages: list[Message] = []
        for index, message in enumerate(request.messages):
            if _has_links(message):
                parts = [await self._resolve_part(part, known, index) for part in message.parts]
                message = structs.replace(message, parts=tuple(parts))
            messages.append(message)
        return replace(request, messages=tuple(messages))

    async def _resolve_part(self, part: str | Media, known: dict[str, Media], index: int) -> str | Media:
        if not _is_link(part):
            return part
        assert isinstance(part, Media)
        if part.url not in known:
            try:
                async with self._slots:
                    payload, mime = await asyncio.wait_for(
                        asyncio.to_thread(self.fetch, part.url), self.timeout_s
                    )
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
                raise MessageError(
                    f"messages[{index}]: image url", part.url, f"an image that can be fetched ({reason})"
                ) from error
            digest = xxhash.xxh3_128_hexdigest(payload)
            known[part.url] = structs.replace(part, payload=payload, digest=digest, mime=mime)
        return structs.replace(known[part.url], detail=part.detail)

    def fetch(self, url: str) -> tuple[bytes, str]:
        """Returns the data and the MIME type of a link; blocks. Raises OSError or ValueError if it fails."""
        deadline = time.monotonic() + self.timeout_s
        for _ in range(_MAX_REDIRECTS + 1):
            target = urlsplit(url)
            if target.scheme not in ("http", "https") or not target.hostname:
                raise ValueError(f"got {url[:200]!r}, expected http://HOST or https://HOST")
            with ExitStack() as stack:
                connection = stack.enter_context(closing(self._connect(target, deadline)))
                sock = connection.sock
                path = (target.path or "/") + (f"?{target.query}" if target.query else "")
                connection.request("GET", path, headers={"accept": "image/*", "user-agent": "branchline"})
                # Closed on its own: it takes over the socket of a connection that is not kept alive.
                response = stack.enter_context(closing(connection.getresponse()))
                location = response.getheader("location")
                if response.status in _REDIRECTS and location:
                    url = urljoin(url, location)
                    continue
                if response.status != http.client.OK:
                    raise ValueError(f"status {response.status}")
                data = self._read(response, sock, deadline)
                return data, (response.getheader("content-type") or "").partition(";")[0].strip()
        raise ValueError(f"more than {_MAX_REDIRECTS} redirects")

    def _connect(self, target: SplitResult, deadline: float) -> http.client.HTTPConnection:
        host, port = target.hostname or "", target.port or (443 if target.scheme == "https" else 80)
        addresses = self.resolve_host(host, port)
        if not addresses:
            raise OSError(f"no address of {host}")
        for address in addresses:
            if self.policy != "any" and not is_public_address(address):
                raise ValueError(f"{host} is at {address}, expected a public address")
        connection = http.client.HTTPConnection(host, port)
        sock = socket.create_connection((addresses[0], port), timeout=max(0.01, deadline - time.monotonic()))
        try:
            if target.scheme == "https":
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
        connection.sock = sock
        return connection

    def _read(self, response: http.client.HTTPResponse, sock: socket.socket | None, deadline: float) -> bytes:
        data = bytearray()
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            if sock is not None and sock.fileno() >= 0:
                sock.settimeout(remaining)
            piece = response.read1(_READ_BYTES)
            if not piece:
                return bytes(data)
            data += piece
            if len(data) > self.max_bytes:
                raise ValueError(f"more than {self.max_bytes} bytes")


def is_public_address(text: str) -> bool:
    """Whether an address is one of the public internet.

    >>> [is_public_address(address) for address in ("8.8.8.8", "127.0.0.1", "10.1.2.3", "::ffff:10.0.0.1")]
    [True, False, False, False]
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_public_address(str(inner))
        if address in _NAT64:
            return False
    return address.is_global and not address.is_multicast


def _is_link(part: str | Media) -> bool:
    return isinstance(part, Media) and part.kind == "image" and bool(part.url) and not part.payload


def _has_links(message: Message) -> bool:
    return bool(message.parts) and any(map(_is_link, message.parts))
