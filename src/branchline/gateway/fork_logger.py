"""`--explain-forks`: says why a request did not go on where an earlier one ended, as it happens.

Reading a whole tree after every call is dear; this is for finding out what an agent does to its history.
"""

from __future__ import annotations

import logging

from branchline.runtime.call_record import CallRecord
from branchline.runtime.session_store import SessionStore
from branchline.timelines.causes import classify_forks
from branchline.timelines.diagnosis import diagnose

log = logging.getLogger("branchline.forks")


class ForkLogger:
    """Logs each fork of each session once."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self._logged: set[tuple[str, int]] = set()

    def record_call(self, record: CallRecord) -> None:
        """Looks at the tree a call left behind."""
        if record.result is None:
            return
        live = self._sessions.get(record.session_id)
        tree = live.session.snapshot()
        for fork in classify_forks(tree).forks:
            if (record.session_id, fork.branch.id) in self._logged:
                continue
            self._logged.add((record.session_id, fork.branch.id))
            told = diagnose(tree, fork, live.session.codec.decode)
            log.warning(
                "fork in session %s by call %s: %s",
                record.session_id,
                fork.call.id,
                told,
                extra={"session": record.session_id, "call": fork.call.id, "cause": str(fork.cause)},
            )
