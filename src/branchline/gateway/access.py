"""Who may do what: a session's api_key opens its model API and nothing else, its control_key everything of
that session, the admin key everything. Keys are compared in constant time and never written down."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from branchline.core.errors import SessionError
from branchline.gateway.live import LiveSession, keys_match
from branchline.gateway.sessions import Sessions


@dataclass(frozen=True)
class Access:
    """The locks of one gateway."""

    sessions: Sessions
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
            raise _closed_to(key, "this needs the admin key")

    def model(self, session_id: str | None, key: str) -> LiveSession:
        """The session whose model API a key opens; without an id the key alone names it."""
        if session_id is None:
            live = self.sessions.by_api_key(key) if key else None
            if live is None and not self.auth:
                live = self.sessions.default()
            if live is None:
                raise _closed_to(key, "this key opens no session")
            return live
        live = self.sessions.get(session_id)
        if keys_match(key, live.api_key_hash) or self._is_control(live, key):
            return live
        raise _closed_to(key, f"this key does not open session {session_id}")

    def control(self, session_id: str, key: str, *, is_reward: bool = False) -> LiveSession:
        """The session a key may read and steer; an agent may pay itself only where that was allowed."""
        live = self.sessions.get(session_id)
        if self._is_control(live, key) or (
            is_reward and live.options.agent_reward and keys_match(key, live.api_key_hash)
        ):
            return live
        raise _closed_to(key, f"this key does not open the control of session {session_id}")

    def _is_control(self, live: LiveSession, key: str) -> bool:
        return self.is_admin(key) or keys_match(key, live.control_key_hash)


def _closed_to(key: str, message: str) -> SessionError:
    return SessionError("forbidden" if key else "no_key", message)
