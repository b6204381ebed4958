"""Which key may do what: a session's api_key opens its model API and completes the session, its control_key
opens the whole session, the admin key everything.

Keys are compared in constant time, before any other work, and stored only as hashes. Without keys, access is
limited to this machine: the gateway listens on loopback only, and requests that a browser sends for a page
from another origin are refused.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from branchline.core.errors import InputError, SessionError
from branchline.runtime.managed_session import ManagedSession, SessionOpened, hash_key
from branchline.runtime.session_store import SessionStore

ControlAction = Literal["control", "reward", "complete"]


@dataclass(frozen=True)
class AccessControl:
    """Checks the keys of one gateway. All methods raise SessionError if the key does not suffice."""

    sessions: SessionStore
    admin_key: str = ""
    auth: bool = True

    def require_admin(self, key: str) -> None:
        if not self._is_admin(key):
            raise _denied(key, "this needs the admin key")

    def model_session(self, session_id: str | None, key: str) -> ManagedSession:
        """The session whose model API a key opens; without an id the key alone identifies it."""
        if session_id is None:
            managed = self.sessions.by_api_key(key) if key else None
            if managed is None and not self.auth:
                managed = self.sessions.default_session()
            if managed is None:
                raise _denied(key, "this key opens no session")
            return managed
        refusal = f"this key does not open session {session_id}"
        try:
            found = self.sessions.find_keys(session_id)
        except SessionError:
            raise self._unknown(key, session_id, refusal) from None
        is_api_key = hmac.compare_digest(hash_key(key), found.api_key_hash)
        if not is_api_key and not self._is_control_key(found, key):
            raise _denied(key, refusal)
        return found if isinstance(found, ManagedSession) else self.sessions.get(session_id)

    def control_session(self, session_id: str, key: str, action: ControlAction = "control") -> ManagedSession:
        """The session that a key may control. An api_key may complete its own session and, with
        `agent_reward`, reward it."""
        refusal = f"this key does not open the control of session {session_id}"
        try:
            found = self.sessions.find_keys(session_id)
        except SessionError:
            raise self._unknown(key, session_id, refusal) from None
        may_act = action == "complete" or (action == "reward" and found.options.agent_reward)
        if self._is_control_key(found, key) or (
            may_act and hmac.compare_digest(hash_key(key), found.api_key_hash)
        ):
            return self.sessions.get(session_id)
        raise _denied(key, refusal)

    def may_read(self, managed: ManagedSession, key: str) -> bool:
        """Whether a key that may act on a session may also see its rewards and metadata."""
        return self._is_control_key(managed, key)

    def _unknown(self, key: str, session_id: str, refusal: str) -> SessionError:
        """The error for a session that does not exist. Only the admin key may learn that: for any other key
        it is that of a session which the key does not open."""
        if self._is_admin(key):
            return SessionError("unknown", f"no session {session_id!r}")
        return _denied(key, refusal)

    def _is_admin(self, key: str) -> bool:
        if not self.auth:
            return True
        return bool(self.admin_key) and hmac.compare_digest(
            key.encode("utf-8", "surrogatepass"), self.admin_key.encode()
        )

    def _is_control_key(self, found: ManagedSession | SessionOpened, key: str) -> bool:
        return self._is_admin(key) or hmac.compare_digest(hash_key(key), found.control_key_hash)


def require_loopback(host: str) -> None:
    """Raises InputError if a gateway without keys would be reachable from other machines."""
    if not _is_loopback(host):
        raise InputError(
            f"no auth: got host {host!r}, expected loopback, because any client could use the model"
        )


def require_local_origin(headers: Mapping[str, str], public_url: str = "") -> None:
    """Refuses requests of a page from another origin: by `origin`, and by `host` against DNS rebinding."""
    public_host = urlsplit(public_url).hostname
    for name, prefix in (("host", "//"), ("origin", "")):
        value = headers.get(name)
        if value is None:
            continue
        try:
            host = urlsplit(prefix + value).hostname or ""
        except ValueError:
            host = ""
        if not _is_loopback(host) and (not host or host != public_host):
            raise SessionError(
                "forbidden", f"{name}: got {value!r}, expected loopback, because no keys are required"
            )


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _denied(key: str, message: str) -> SessionError:
    return SessionError("forbidden" if key else "no_key", message)
