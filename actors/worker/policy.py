"""The worker's rhythm: limits of the protocol, and when to try to connect again.

All times are seconds.
"""

from __future__ import annotations

HANDSHAKE_LIMIT = 5.0
PING_AFTER = 5.0
LOST_AFTER = 10.0
REQUEST_EVERY = 10.0
METRICS_EVERY = 10.0
LOADED_PCT = 50.0
SETTLE = 0.5
"""After the last job of a loaded machine, until it is measured again: a time long enough to tell
of what is left, and short enough to be lost after every job."""
EVAL_PROGRESS_EVERY = 1.0
DEFAULT_OUTAGE_LIMIT = 120.0  # where the server's heartbeat timeout is 0

# Together within the 5 s that a worker has to leave.
DRAIN_LIMIT = 4.0
CONFIRM_LIMIT = 1.0

CLOSE_TRIES_FOR = 60.0
CLOSE_TRIES_APART = 2.0
TRIES_APART_AT_MOST = 60.0
_MAX_DOUBLINGS = 6  # 2 s, or 1 s, doubled so often is past the most


def retry_delay(outage: float, late_tries: int, refusals: int, jitter: float) -> float:
    """How long after the start of a failed try the next one starts.

    Args:
        outage: since when no server served us.
        late_tries: tries that failed after the first minute of the outage.
        refusals: how often in a row a server said no.
        jitter: 0 to 1; spreads workers that lost the same server.
    """
    if refusals:
        delay = 2.0 ** min(refusals - 1, _MAX_DOUBLINGS)
    elif outage > CLOSE_TRIES_FOR:
        delay = CLOSE_TRIES_APART * 2.0 ** min(late_tries, _MAX_DOUBLINGS)
    else:
        delay = CLOSE_TRIES_APART
    delay = min(delay, TRIES_APART_AT_MOST)
    # A refused try must not come back at once; a lost one may.
    least = 0.5 if refusals else 0.05
    return delay * (least + (1 - least) * jitter)


def outage_limit(heartbeat_timeout: float) -> float:
    """How long a running job may be without a server that would take its outcome."""
    return heartbeat_timeout if heartbeat_timeout > 0 else DEFAULT_OUTAGE_LIMIT
