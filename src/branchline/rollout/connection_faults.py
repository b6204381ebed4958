"""Whether an error says that a server could not be reached, lost the connection, or sent nothing in time.

Clients raise such errors under types of their own, often chained (`raise … from`) or in exception groups. The
types are compared by the names of their packages and classes, so that no optional package is imported.

An error counts by its own type or by the error that it was raised from or during. Raised `from None`, or for
an answer with an error status, it does not: then the server was reached. A group counts if each of its
errors does. A `TimeoutError` counts if a socket raised it, and not if the agent's own time limit did.
"""

from __future__ import annotations

import errno
import re
import ssl
from socket import gaierror, herror

from branchline.core.errors import EngineUnavailableError, GatewayError

_FAULTS = frozenset(
    f"{package}.{name}"
    for package, names in {
        "aiohttp": "ClientConnectionError ClientPayloadError",
        "anthropic": "APIConnectionError",
        "anyio": "BrokenResourceError EndOfStream IncompleteRead",
        "asyncio": "IncompleteReadError",
        "http": "BadStatusLine IncompleteRead",
        "httpcore": "NetworkError ProxyError RemoteProtocolError TimeoutException",
        "httpx": "NetworkError ProxyError RemoteProtocolError TimeoutException",
        "openai": "APIConnectionError",
        "requests": "ChunkedEncodingError ConnectionError Timeout",
        "urllib3": "ProtocolError ProxyError SSLError TimeoutError",
        "websockets": "ConnectionClosed",
    }.items()
    for name in names.split()
)
"""Each with its subclasses."""
_STATUS_ERRORS = frozenset(
    {
        "aiohttp.ClientResponseError",
        "anthropic.APIStatusError",
        "httpx.HTTPStatusError",
        "openai.APIStatusError",
        "requests.HTTPError",
        "urllib.HTTPError",
    }
)
_ERRNOS = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
    }
)
_SOCKET_TIMEOUT = re.compile(r"(_ssl\.c:\d+: )?(The \w+ operation )?timed out")
_SEVERAL_ADDRESSES = "Multiple exceptions: [Errno "
"""What asyncio raises if no address of a host answers."""


def is_connection_fault(error: BaseException) -> bool:
    """Returns whether an error is that of a connection.

    >>> try:
    ...     raise ValueError("no answer") from ConnectionRefusedError()
    ... except ValueError as error:
    ...     is_connection_fault(error)
    True
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, BaseExceptionGroup):
            return all(is_connection_fault(inner) for inner in current.exceptions)
        names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(current).__mro__}
        if names & _STATUS_ERRORS or (isinstance(current, GatewayError) and current.status):
            return False
        if names & _FAULTS or _is_fault(current):
            return True
        current = _inner_error(current)
    return False


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, TimeoutError) and not error.errno:
        return _SOCKET_TIMEOUT.fullmatch(str(error)) is not None
    if isinstance(error, OSError) and (error.errno in _ERRNOS or str(error).startswith(_SEVERAL_ADDRESSES)):
        return True
    if isinstance(error, GatewayError):
        return error.__cause__ is None  # which says whether it was no connection or no gateway
    return isinstance(error, ConnectionError | gaierror | herror | ssl.SSLError | EngineUnavailableError)


def _inner_error(error: BaseException) -> BaseException | None:
    """Returns the error that another one was raised from or during, or that it has as its reason."""
    reason = getattr(error, "reason", None)  # of urllib and urllib3
    if isinstance(reason, BaseException):
        return reason
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__
