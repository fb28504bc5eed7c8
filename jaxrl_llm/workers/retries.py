"""How long to wait before a server is asked again, and whether that can help."""

import random
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

FIRST_WAIT_S = 0.5  # before the second try; each wait after it is twice as long
MAX_WAIT_S = 60.0  # before a try, also where a server asks for more

PASSING = (408, 425, 429)
"""HTTP statuses, besides those from 500 on, after which a request may succeed later."""

LOST_CONNECTIONS = (
    ("httpx2", "TransportError"),
    ("httpx", "TransportError"),
    ("openai", "APIConnectionError"),
    ("anthropic", "APIConnectionError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("requests", "ConnectionError"),
)
"""Packages, and the error that each raises where a connection fails or is lost."""


def wait_before_retry(error: BaseException, tries: int) -> float | None:
    """Return the seconds to wait before a call is tried again; None where that can't help.

    It can after a lost connection, a time limit, and the HTTP statuses 408, 425, 429 and from 500
    on, which the errors of the usual clients have as `status_code`, `status` or in `response`. The
    wait doubles with each try, and differs from call to call, so that they do not come all at once;
    it is as long as `Retry-After` at least.

    Args:
        error: that the call raised.
        tries: of this call so far.

    >>> wait_before_retry(ValueError("a bug"), 1)
    >>> 0.25 <= wait_before_retry(ConnectionResetError(), 1) <= 0.75
    True
    """
    response = getattr(error, "response", None)
    given = [
        getattr(o, name, None) for o in (error, response) for name in ("status_code", "status")
    ]
    status = next((s for s in given if isinstance(s, int)), None)
    if status is None:
        kinds = [getattr(sys.modules.get(p), name, None) for p, name in LOST_CONNECTIONS]
        lost = [kind for kind in kinds if isinstance(kind, type)]
        if not isinstance(error, (ConnectionError, TimeoutError, *lost)):
            return None
    elif status not in PASSING and status < 500:
        return None
    asked = max(_asked_wait(o) for o in (error, response))
    doubled = FIRST_WAIT_S * 2.0 ** min(tries - 1, 30) * random.uniform(0.5, 1.5)
    return min(max(doubled, asked), MAX_WAIT_S)


def _asked_wait(answered: Any) -> float:
    """Return the seconds of a Retry-After, which may be a date; 0 where there is none."""
    headers = getattr(answered, "headers", None)
    if not isinstance(headers, Mapping):
        return 0.0
    value = str(headers.get("retry-after") or headers.get("Retry-After") or "0")
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # no date, or one without a zone
        return 0.0
