"""Knocking at a gateway that is busy: how long to wait before the next time, and when to give up.

It says itself how long; between two knocks there is a pause all the same, a longer one each time, so that
one that says "at once" is not asked without end.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime

BUSY = 429
_PAUSE_S = 1.0
"""Where it does not say for how long. A pause of ours grows no further than this."""
_LEAST_S = 0.1


class Patience:
    """Of one request, for so many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self._until = asyncio.get_running_loop().time() + seconds
        self._least_s = _LEAST_S

    async def allows(self, status: int, retry_after: str) -> bool:
        """Whether to ask again after such an answer; waits until it is time to."""
        if status != BUSY:
            return False
        pause_s = self.pause_s(retry_after)
        if asyncio.get_running_loop().time() + pause_s > self._until:
            return False
        await asyncio.sleep(pause_s)
        return True

    def pause_s(self, retry_after: str) -> float:
        """How long to wait before the next knock; each time it is asked, one was in vain."""
        least_s, self._least_s = self._least_s, min(2 * self._least_s, _PAUSE_S)
        return max(said_s(retry_after), least_s)


def said_s(retry_after: str) -> float:
    """The seconds that a header says, as a number or as the date they end at.

    >>> said_s("2"), said_s("Wed, 21 Oct 2015 07:28:00 GMT"), said_s("soon")
    (2.0, 0.0, 1.0)
    """
    try:
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return _PAUSE_S
