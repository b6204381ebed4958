"""`--explain-forks`: says why a request did not go on where an earlier one ended, as it happens.

Reading a whole tree after every call is dear; this is for finding out what an agent does to its history.
"""

from __future__ import annotations

import logging

from branchline.gateway.record import CallRecord
from branchline.gateway.sessions import Sessions
from branchline.timelines.causes import judge
from branchline.timelines.diagnosis import diagnose

log = logging.getLogger("branchline.forks")


class ForkWatch:
    """Logs each fork of each session once."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._told: set[tuple[str, int]] = set()

    def note(self, record: CallRecord) -> None:
        """Looks at the tree a call left behind."""
        if record.done is None:
            return
        live = self._sessions.get(record.session)
        with live.session.reading() as tree:
            for fork in judge(tree).forks:
                if (record.session, fork.branch.id) in self._told:
                    continue
                self._told.add((record.session, fork.branch.id))
                told = diagnose(tree, fork, live.session.codec.decode)
                log.warning(
                    "fork in session %s by call %s: %s",
                    record.session,
                    fork.call.id,
                    told,
                    extra={"session": record.session, "call": fork.call.id, "cause": str(fork.cause)},
                )
