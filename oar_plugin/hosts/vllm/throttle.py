"""Limits when masked copies may run in an engine, so that generation has priority."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

BESIDE_GENERATION = 8  # most copies in flight while the engine generates. Generation that needs a seat stops none
_MOST_CREDIT_S = 0.25
_MOST_DEBT_S = 10.0  # a larger debt means that copies waited in the engine's own queue and did not run
_MARGIN_S = 1e-3  # so that credit is positive, despite rounding, when a timer admits a copy


class Throttle:
    """Admission control for copies, in first-in, first-out order. For one event loop.

    While nothing is generated, `max_in_flight` copies run at once. During generation, copies may be in flight for at
    most a fraction `share` of the time. An account earns `share` seconds per second, and pays one second per second in
    which any copy is in flight. A copy is admitted if the credit is positive. The limit is on time, not on copies or
    tokens, so it does not depend on model or hardware. If copies use more than the credit, the next one waits.

    Args:
        share: above 0; 1 does not limit time.
        seats: number of requests that the engine runs at once (vLLM's `max_num_seqs`); None: no limit. A copy needs a
            free seat: in a full engine it would wait for generation, and spend credit although it does not run.
    """

    def __init__(self, max_in_flight: int, share: float, seats: int | None = None) -> None:
        self._max_in_flight, self._share, self._seats = max_in_flight, share, seats
        self._generating = 0
        self.in_flight = 0  # copies that run now
        self._credit_s = 0.0
        self._settled_at = 0.0  # the account is empty until something is generated
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Return a context. Hold it during every request that generates."""
        self._settle()
        self._generating += 1
        try:
            yield
        finally:
            self._settle()
            self._generating -= 1
            self._admit_waiters()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Return a context. Entering it waits for a turn; hold it while a copy runs."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        self._admit_waiters()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._settle()
                self.in_flight -= 1
            self._admit_waiters()

    def _settle(self) -> None:
        """Update the account to the current time. Call this before every change of `_generating` or `in_flight`."""
        now = asyncio.get_running_loop().time()
        elapsed_s, self._settled_at = now - self._settled_at, now
        if self._generating:
            rate = self._share - (1.0 if self.in_flight else 0.0)
            self._credit_s = max(-_MOST_DEBT_S, min(self._credit_s + elapsed_s * rate, _MOST_CREDIT_S))

    def _admit_waiters(self) -> None:
        self._settle()
        if self._timer is not None:
            self._timer.cancel()
        while self._waiters and (self._waiters[0].done() or self._may_start()):
            turn = self._waiters.popleft()
            if not turn.done():  # otherwise it was cancelled
                self.in_flight += 1
                turn.set_result(None)
        # If a copy is in flight, its end admits the next one. Otherwise a timer waits until there is credit.
        if self._waiters and self._generating and not self.in_flight and self._credit_s <= 0:
            wait_s = (_MARGIN_S - self._credit_s) / self._share
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._admit_waiters)

    def _may_start(self) -> bool:
        if self._seats is not None and self._generating + self.in_flight >= self._seats:
            return False
        if not self._generating:
            return self.in_flight < self._max_in_flight
        in_time = self._share == 1 or self._credit_s > 0
        return in_time and self.in_flight < min(self._max_in_flight, BESIDE_GENERATION)
