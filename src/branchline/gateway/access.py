"""Who may do what: a session's api_key opens its model API and nothing else, its control_key everything of
that session, the admin key everything. Keys are compared in constant time and never written down, and
compared first: nothing is done for those who have none.

Without keys it is the machine that is the lock: only loopback is listened on, and what a browser there sends
for a page from elsewhere is refused, for a browser runs anybody's programs.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from branchline.core.errors import InputError, SessionError
from branchline.runtime.managed_session import ManagedSession, SessionOpened, key_matches
from branchline.runtime.session_store import SessionStore


@dataclass(frozen=True)
class AccessControl:
    """The locks of one gateway."""

    sessions: SessionStore
    admin_key: str = ""
    auth: bool = True

    def is_admin(self, key: str) -> bool:
        if not self.auth:
            return True
        return bool(self.admin_key) and hmac.compare_digest(
            key.encode("utf-8", "surrogatepass"), self.admin_key.encode()
        )

    def require_admin(self, key: str) -> None:
        if not self.is_admin(key):
            raise _denied(key, "this needs the admin key")

    def model_session(self, session_id: str | None, key: str) -> ManagedSession:
        """The session whose model API a key opens; without an id the key alone names it."""
        if session_id is None:
            live = self.sessions.by_api_key(key) if key else None
            if live is None and not self.auth:
                live = self.sessions.default_session()
            if live is None:
                raise _denied(key, "this key opens no session")
            return live
        opened = self.sessions.opening_record(session_id)
        if key_matches(key, opened.api_key_hash) or self._is_control_key(opened, key):
            return self.sessions.get(session_id)
        raise _denied(key, f"this key does not open session {session_id}")

    def control_session(self, session_id: str, key: str, *, is_reward: bool = False) -> ManagedSession:
        """The session a key may read and steer; an agent may pay itself only where that was allowed."""
        opened = self.sessions.opening_record(session_id)
        if self._is_control_key(opened, key) or (
            is_reward and opened.options.agent_reward and key_matches(key, opened.api_key_hash)
        ):
            return self.sessions.get(session_id)
        raise _denied(key, f"this key does not open the control of session {session_id}")

    def _is_control_key(self, opened: SessionOpened, key: str) -> bool:
        return self.is_admin(key) or key_matches(key, opened.control_key_hash)


def require_loopback(host: str) -> None:
    """Without keys nobody else may come by."""
    if not _is_loopback(host):
        raise InputError(f"no auth: got host {host!r}, expected loopback: anybody could use the model")


def require_local_origin(headers: Mapping[str, str], public_url: str = "") -> None:
    """Refuses what a page from elsewhere has sent: under its own name (`origin`), or one that it gave us."""
    known = urlsplit(public_url).hostname
    for name, before in (("host", "//"), ("origin", "")):
        given = headers.get(name)
        if given is None:
            continue
        try:
            host = urlsplit(before + given).hostname or ""
        except ValueError:
            host = ""
        if not _is_loopback(host) and (not host or host != known):
            raise SessionError(
                "forbidden", f"{name}: got {given!r}, expected loopback, because no keys are asked for"
            )


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _denied(key: str, message: str) -> SessionError:
    return SessionError("forbidden" if key else "no_key", message)
