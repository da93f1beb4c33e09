"""Admits masked copies to an engine so that generation keeps it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

BESIDE_GENERATION = 8
"""Copies in flight at most while the engine generates: what is in flight cannot be taken back."""

_MOST_CREDIT_S = 0.25
_MOST_DEBT_S = 10.0  # beyond it copies did not run, but waited in the engine's own queue
_MARGIN_S = 1e-3  # credit has to be positive, not zero up to rounding, when a timer wakes a waiter


class Throttle:
    """Admission control for copies, first come, first served. For one event loop.

    While nothing is generated, `max_in_flight` copies run at once. While something is, copies may be in flight `share` of
    the time at most: an account earns `share` seconds a second and pays one second a second in which any copy is in flight,
    and a copy is admitted while there is credit. It holds in time and not in copies or tokens, so it needs to know nothing
    of model and hardware. Copies that take longer than their credit leave a debt, which is paid off before the next.

    Args:
        max_in_flight: copies at once.
        share: of the time, in `[0, 1]`; 0 keeps copies out while something is generated, 1 does not limit time.
        seats: requests that the engine runs at once (vLLM's `max_num_seqs`); None: any number. Copies take free seats only:
            in a full engine they would wait behind generation, in flight and spending credit without being run.
        clock: seconds, ascending.
    """

    def __init__(
        self, max_in_flight: int, share: float, seats: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_in_flight < 1 or not 0 <= share <= 1:
            raise ValueError(f"max_in_flight={max_in_flight} must be at least 1, share={share} within [0, 1]")
        self._max_in_flight = max_in_flight
        self._share = share
        self._seats = seats
        self._clock = clock
        self._generating = 0
        self.in_flight = 0  # copies that run now
        self._credit_s = 0.0
        self._settled_at = clock()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Copies that wait for their turn."""
        return len(self._waiters)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around every request that generates."""
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
        """Around every copy."""
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        self._admit_waiters()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # another's admission may have dropped it already
                    self._waiters.remove(turn)
                self._admit_waiters()
            else:
                self._release()
            raise

    def _release(self) -> None:
        self._settle()
        self.in_flight -= 1
        self._admit_waiters()

    def _settle(self) -> None:
        """Bring the account up to now. Must come before every change of what is earned or paid."""
        now = self._clock()
        elapsed_s, self._settled_at = now - self._settled_at, now
        if self._generating:
            rate = self._share - (1.0 if self.in_flight else 0.0)
            self._credit_s = max(-_MOST_DEBT_S, min(self._credit_s + elapsed_s * rate, _MOST_CREDIT_S))

    def _admit_waiters(self) -> None:
        self._settle()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiters and self._may_start():
            turn = self._waiters.popleft()
            if not turn.done():  # else cancelled, and its task has not run since
                self.in_flight += 1
                turn.set_result(None)
        # With a copy in flight there is nothing to wait for but its end. In debt without one, credit comes with time.
        if self._waiters and self._generating and not self.in_flight and self._credit_s <= 0 and self._share > 0:
            wait_s = (_MARGIN_S - self._credit_s) / self._share
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._admit_waiters)

    def _may_start(self) -> bool:
        if self._seats is not None and self._generating + self.in_flight >= self._seats:
            return False
        if not self._generating:
            return self.in_flight < self._max_in_flight
        in_time = self._share == 1 or self._credit_s > 0
        return in_time and self.in_flight < min(self._max_in_flight, BESIDE_GENERATION)
