"""Knocking at a gateway that is busy: how long to wait before the next time, and when to give up.

It says itself how long; between two knocks there is a pause all the same, a longer one each time, so that
one that says "at once" is not asked without end.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime

TOO_MANY_REQUESTS = 429
_DEFAULT_DELAY_S = 1.0
"""Where it does not say for how long. A pause of ours grows no further than this."""
_MIN_DELAY_S = 0.1


class Retry:
    """Of one request, for so many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._min_delay_s = _MIN_DELAY_S

    async def wait_to_retry(self, status: int, retry_after: str) -> bool:
        """Whether to ask again after such an answer; waits until it is time to."""
        if status != TOO_MANY_REQUESTS:
            return False
        pause_s = self.next_delay_s(retry_after)
        if asyncio.get_running_loop().time() + pause_s > self._deadline:
            return False
        await asyncio.sleep(pause_s)
        return True

    def next_delay_s(self, retry_after: str) -> float:
        """How long to wait before the next knock; each time it is asked, one was in vain."""
        least_s, self._min_delay_s = self._min_delay_s, min(2 * self._min_delay_s, _DEFAULT_DELAY_S)
        return max(parse_retry_after(retry_after), least_s)


def parse_retry_after(retry_after: str) -> float:
    """The seconds that a header says, as a number or as the date they end at.

    >>> parse_retry_after("2"), parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), parse_retry_after("soon")
    (2.0, 0.0, 1.0)
    """
    try:
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return _DEFAULT_DELAY_S
