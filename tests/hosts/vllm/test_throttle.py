"""Admission of copies, in virtual time: the loop's clock jumps to the next timer, so every number here is exact."""

import asyncio
import random
from collections.abc import Awaitable
from contextlib import nullcontext

import pytest

from oar_plugin.hosts.vllm.throttle import BESIDE_GENERATION, Throttle


class VirtualLoop(asyncio.SelectorEventLoop):
    """Never waits. Counts its timers, so that a loop that polls is found out."""

    now = 0.0
    timers = 0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()

    def call_at(self, *args, **kwargs):
        self.timers += 1
        return super().call_at(*args, **kwargs)


@pytest.fixture
def loop():
    virtual = VirtualLoop()
    yield virtual
    virtual.close()


@pytest.fixture
def engine(loop):
    return lambda **settings: Engine(loop, Throttle(**settings))


class Engine:
    """Records when copies ran."""

    def __init__(self, loop: VirtualLoop, throttle: Throttle) -> None:
        self.loop, self.throttle = loop, throttle
        self.times: list[float] = []
        self.names: list[str] = []
        self.peak = self._running = 0
        self.busy_s = self._since = 0.0

    async def copy(self, name: str = "", seconds: float = 0.01) -> None:
        async with self.throttle.slot():
            self.times.append(self.loop.time())
            self.names.append(name)
            if not self._running:
                self._since = self.loop.time()
            self._running += 1
            self.peak = max(self.peak, self._running)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._running -= 1
                if not self._running:
                    self.busy_s += self.loop.time() - self._since

    async def generate(self, seconds: float) -> None:
        with self.throttle.generating():
            await asyncio.sleep(seconds)

    def run(self, *awaitables: Awaitable[None], generating: bool = False) -> float:
        """The moment when all of them are through."""

        async def together() -> None:
            with self.throttle.generating() if generating else nullcontext():
                await asyncio.gather(*awaitables)

        self.loop.run_until_complete(together())
        assert self.throttle.in_flight == len(self.throttle._waiters) == 0
        return self.loop.now


def test_an_idle_engine_runs_as_many_as_it_is_told(engine):
    idle = engine(max_in_flight=20, share=0.1)
    assert idle.run(*[idle.copy(str(i)) for i in range(60)]) == pytest.approx(0.03)
    assert idle.peak == 20
    assert idle.names == [str(i) for i in range(60)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("copy_s", "seconds"), [(0.01, 5.0), (0.2, 20.0)])
def test_generation_keeps_its_share(loop, engine, share, copy_s, seconds):
    busy = engine(max_in_flight=64, share=share)
    draw = random.Random(0)

    async def main():
        with busy.throttle.generating():
            more = int(seconds * BESIDE_GENERATION / copy_s)  # than can run
            copies = [asyncio.ensure_future(busy.copy(seconds=copy_s * draw.uniform(0.5, 1.5))) for _ in range(more)]
            await asyncio.sleep(seconds)
            used = busy.busy_s / loop.now
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        assert share - 0.05 < used < share + 0.03

    busy.run(main())
    assert busy.peak <= BESIDE_GENERATION


@pytest.mark.parametrize(("share", "seconds", "wait_s"), [(0.25, 1.0, 3.0), (0.15, 600.0, 10 / 0.15)])
def test_a_debt_is_paid_before_the_next_copy_up_to_a_bound(engine, share, seconds, wait_s):
    """A copy that waited for minutes in the engine's own queue does not keep the others out for an hour."""
    one = engine(max_in_flight=1, share=share)
    one.run(one.copy(seconds=seconds), one.copy(), generating=True)
    first, second = one.times
    assert second - (first + seconds) == pytest.approx(wait_s, rel=0.01)


def test_credit_is_capped(engine):
    one = engine(max_in_flight=1, share=0.5)

    async def late():
        await asyncio.sleep(1000)
        await asyncio.gather(*[one.copy(seconds=0.05) for _ in range(100)])

    # 5 s of copies; a quarter of a second of them was saved up.
    assert one.run(late(), generating=True) - 1000 == pytest.approx((5 - 0.25) / 0.5, abs=0.2)


def test_the_whole_share_limits_number_but_not_time(engine):
    many = engine(max_in_flight=100, share=1.0)
    assert many.run(*[many.copy() for _ in range(80)], generating=True) == pytest.approx(0.1)
    assert many.peak == BESIDE_GENERATION


def test_the_last_request_that_generates_wakes_the_waiters(engine):
    many = engine(max_in_flight=50, share=0.01)
    many.run(many.generate(1.0), many.generate(2.0), *[many.copy(seconds=5.0) for _ in range(50)])
    assert many.peak == 50
    assert max(many.times) == 2.0


def test_waiting_does_not_poll(loop, engine):
    several = engine(max_in_flight=8, share=0.01)
    several.run(several.copy(seconds=1.0), generating=True)  # 99 s of debt
    before = loop.timers
    several.run(several.copy(seconds=0.5), generating=True)
    assert loop.timers - before <= 3
    assert loop.now > 99


def test_cancelling_loses_no_slot(engine):
    three = engine(max_in_flight=3, share=0.3)
    draw = random.Random(1)

    async def main():
        copies = [asyncio.ensure_future(three.copy(seconds=draw.uniform(0.001, 0.05))) for _ in range(300)]
        generation = asyncio.ensure_future(three.generate(4.0))
        for _ in range(200):
            await asyncio.sleep(draw.uniform(0, 0.02))
            draw.choice(copies).cancel()
        await asyncio.gather(*copies, generation, return_exceptions=True)

    three.run(main())
    three.peak = 0
    three.run(*[three.copy() for _ in range(9)])
    assert three.peak == 3


def test_a_turn_given_and_cancelled_at_once_goes_to_the_next(engine):
    one = engine(max_in_flight=1, share=1.0)

    async def main():
        async with one.throttle.slot():
            second, third = asyncio.ensure_future(one.copy("second")), asyncio.ensure_future(one.copy("third"))
            await asyncio.sleep(0)
        assert one.throttle.in_flight == 1, "the second has its turn, and its task has not run since"
        second.cancel()
        await asyncio.gather(second, third, return_exceptions=True)

    one.run(main())
    assert one.names == ["third"]


@pytest.mark.parametrize(
    ("share", "generations", "times", "timers"),
    [(1.0, [2, 2, 5, 9], [2.0, 2.0, 3.0, 3.0], 20), pytest.param(0.5, [100], [100.0], 5, id="with credit")],
)
def test_copies_take_free_seats_only(loop, engine, share, generations, times, timers):
    """A full engine would leave them in its queue; they start when generation leaves a seat, and nobody polls for it."""
    full = engine(max_in_flight=8, share=share, seats=len(generations))
    full.run(*[full.generate(seconds) for seconds in generations], *[full.copy(seconds=1.0) for _ in times])
    assert full.times == times
    assert loop.timers < timers
