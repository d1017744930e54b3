"""When a webhook is sent again, and what an answer means.

The schedule is Standard Webhooks' recommendation: 0, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h after the
attempt before it, each with jitter, so that a receiver that comes back is not met by everything at once.
"""

import email.utils
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

RETRY_AFTER_S: tuple[float, ...] = (0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
MAX_ATTEMPTS = len(RETRY_AFTER_S)
_JITTER = 0.2
# a receiver may ask for a longer pause than the schedule's, not for a forgotten message
_MAX_RETRY_AFTER_S = 86400.0


class Verdict(StrEnum):
    """What becomes of a message after one attempt."""

    DELIVERED = "delivered"
    RETRY = "retry"
    GIVEN_UP = "given_up"
    DISABLED = "disabled"


@dataclass(frozen=True)
class Outcome:
    """The verdict, and for RETRY how many seconds to wait."""

    verdict: Verdict
    wait_s: float | None = None


def judge(attempt: int, status: int | None, headers: Mapping[str, str], now: float, jitter: random.Random) -> Outcome:
    """Judge attempt number `attempt` (from 1); `status` is None if no answer came.

    2xx delivers, 410 disables the endpoint, everything else, a redirect included, is tried again until the schedule
    ends. `now` is unix seconds, for a Retry-After that is a date.
    """
    if status is not None and 200 <= status < 300:
        return Outcome(Verdict.DELIVERED)
    if status == 410:
        return Outcome(Verdict.DISABLED)
    if attempt >= MAX_ATTEMPTS:
        return Outcome(Verdict.GIVEN_UP)
    wait_s = RETRY_AFTER_S[attempt] * (1 + _JITTER * jitter.random())
    asked_s = read_retry_after(headers.get("retry-after"), now)
    return Outcome(Verdict.RETRY, max(wait_s, min(asked_s or 0.0, _MAX_RETRY_AFTER_S)))


def read_retry_after(value: str | None, now: float) -> float | None:
    """Read a Retry-After header, seconds or an HTTP date, as seconds from `now`; None if there is none to read."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        # a zone that no clock has is no number of C
        return None
