"""Admission of copies, in virtual time: the loop's clock jumps to the next timer, so every number here is exact."""

from __future__ import annotations

import asyncio
import random

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


class Engine:
    """Records when copies ran."""

    def __init__(self, loop: VirtualLoop, max_in_flight: int, share: float) -> None:
        self.loop = loop
        self.throttle = Throttle(max_in_flight, share, clock=loop.time)
        self.started: list[tuple[float, str]] = []
        self.peak = 0
        self.busy_s = 0.0
        self._running = 0
        self._since = 0.0

    async def copy(self, name: str = "", seconds: float = 0.01) -> None:
        async with self.throttle.slot():
            self.started.append((self.loop.time(), name))
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


def test_an_idle_engine_runs_as_many_as_it_is_told(loop):
    engine = Engine(loop, max_in_flight=20, share=0.1)

    async def main():
        await asyncio.gather(*[engine.copy(str(i)) for i in range(60)])

    loop.run_until_complete(main())
    assert engine.peak == 20
    assert loop.now == pytest.approx(0.03)
    assert [name for _, name in engine.started] == [str(i) for i in range(60)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("copy_s", [0.01, 0.2])
def test_generation_keeps_its_share(loop, share, copy_s):
    engine = Engine(loop, max_in_flight=64, share=share)
    draw = random.Random(0)

    async def main():
        with engine.throttle.generating():
            copies = [asyncio.ensure_future(engine.copy(seconds=copy_s * draw.uniform(0.5, 1.5))) for _ in range(20000)]
            await asyncio.sleep(20.0)
            used = engine.busy_s / loop.now
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        return used

    used = loop.run_until_complete(main())
    assert share - 0.05 < used < share + 0.03
    assert engine.peak <= BESIDE_GENERATION
    assert engine.throttle.in_flight == engine.throttle.waiting == 0


def test_a_debt_is_paid_before_the_next_copy(loop):
    engine = Engine(loop, max_in_flight=1, share=0.25)

    async def main():
        with engine.throttle.generating():
            await asyncio.gather(engine.copy("a", 1.0), engine.copy("b", 1.0))

    loop.run_until_complete(main())
    (first, _), (second, _) = engine.started
    assert second - (first + 1.0) == pytest.approx(3.0, abs=0.02)


def test_credit_is_capped(loop):
    engine = Engine(loop, max_in_flight=1, share=0.5)

    async def main():
        with engine.throttle.generating():
            await asyncio.sleep(1000)
            await asyncio.gather(*[engine.copy(seconds=0.05) for _ in range(100)])

    loop.run_until_complete(main())
    # 5 s of copies; a quarter of a second of them was saved up.
    assert loop.now - 1000 == pytest.approx((5 - 0.25) / 0.5, abs=0.2)


def test_nothing_of_a_share_keeps_copies_out_until_generation_ends(loop):
    engine = Engine(loop, max_in_flight=2, share=0.0)

    async def main():
        await asyncio.gather(engine.generate(3.0), *[engine.copy() for _ in range(2)])

    loop.run_until_complete(main())
    assert [at for at, _ in engine.started] == [3.0, 3.0]


def test_the_whole_share_limits_number_but_not_time(loop):
    engine = Engine(loop, max_in_flight=100, share=1.0)

    async def main():
        with engine.throttle.generating():
            await asyncio.gather(*[engine.copy() for _ in range(80)])

    loop.run_until_complete(main())
    assert engine.peak == BESIDE_GENERATION
    assert loop.now == pytest.approx(0.1)


def test_the_last_request_that_generates_wakes_the_waiters(loop):
    engine = Engine(loop, max_in_flight=50, share=0.01)

    async def main():
        await asyncio.gather(engine.generate(1.0), engine.generate(2.0), *[engine.copy(seconds=5.0) for _ in range(50)])

    loop.run_until_complete(main())
    assert engine.peak == 50
    assert max(at for at, _ in engine.started) == 2.0


def test_waiting_does_not_poll(loop):
    engine = Engine(loop, max_in_flight=8, share=0.01)

    async def main():
        with engine.throttle.generating():
            await engine.copy(seconds=1.0)  # 99 s of debt
            before = loop.timers
            await engine.copy(seconds=0.5)
            return loop.timers - before

    assert loop.run_until_complete(main()) <= 3
    assert loop.now > 99


def test_cancelling_loses_no_slot(loop):
    engine = Engine(loop, max_in_flight=3, share=0.3)
    draw = random.Random(1)

    async def main():
        copies = [asyncio.ensure_future(engine.copy(seconds=draw.uniform(0.001, 0.05))) for _ in range(300)]
        generation = asyncio.ensure_future(engine.generate(4.0))
        for _ in range(200):
            await asyncio.sleep(draw.uniform(0, 0.02))
            draw.choice(copies).cancel()
        # A turn that was given and cancelled before its task ran.
        late = asyncio.ensure_future(engine.copy())
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(*copies, late, generation, return_exceptions=True)
        assert engine.throttle.in_flight == engine.throttle.waiting == 0
        engine.peak = 0
        await asyncio.gather(*[engine.copy() for _ in range(9)])

    loop.run_until_complete(main())
    assert engine.peak == 3


def test_a_turn_given_and_cancelled_at_once_goes_to_the_next(loop):
    engine = Engine(loop, max_in_flight=1, share=1.0)

    async def main():
        async with engine.throttle.slot():
            second, third = asyncio.ensure_future(engine.copy("second")), asyncio.ensure_future(engine.copy("third"))
            await asyncio.sleep(0)
        assert engine.throttle.in_flight == 1, "the second has its turn, and its task has not run since"
        second.cancel()
        await asyncio.gather(second, third, return_exceptions=True)

    loop.run_until_complete(main())
    assert [name for _, name in engine.started] == ["third"]
    assert engine.throttle.in_flight == 0


@pytest.mark.parametrize(("max_in_flight", "share"), [(0, 0.5), (1, -0.1), (1, 1.1)])
def test_nonsense_is_refused(max_in_flight, share):
    with pytest.raises(ValueError, match="max_in_flight"):
        Throttle(max_in_flight, share)


def test_copies_take_free_seats_only(loop):
    """A full engine would leave them in its queue; they start when generation leaves a seat, and nobody polls for it."""
    throttle = Throttle(8, 1.0, seats=4, clock=loop.time)
    started = []

    async def generate(seconds):
        with throttle.generating():
            await asyncio.sleep(seconds)

    async def copy():
        async with throttle.slot():
            started.append(loop.time())
            await asyncio.sleep(1.0)

    async def run():
        await asyncio.gather(*[generate(seconds) for seconds in (2, 2, 5, 9)], *[copy() for _ in range(4)])

    loop.run_until_complete(run())
    assert started == [2.0, 2.0, 3.0, 3.0]
    assert loop.timers < 20


def test_no_timer_runs_while_a_seat_is_what_is_missing(loop):
    throttle = Throttle(8, 0.5, seats=1, clock=loop.time)

    async def run():
        async def copy():
            async with throttle.slot():
                return loop.time()

        with throttle.generating():
            waiting = asyncio.ensure_future(copy())
            await asyncio.sleep(100.0)  # credit all the time, and no seat
            timers = loop.timers
        return await waiting, timers

    started, timers = loop.run_until_complete(run())
    assert started == 100.0
    assert timers < 5


def test_a_debt_is_bounded(loop):
    """A copy that waited for minutes in the engine's own queue does not keep the others out for an hour."""
    throttle = Throttle(8, 0.15, clock=loop.time)

    async def run():
        async def copy(seconds):
            async with throttle.slot():
                begun = loop.time()
                await asyncio.sleep(seconds)
                return begun

        with throttle.generating():
            await asyncio.sleep(1.0)
            await copy(600.0)
            return await copy(0.0)

    assert loop.run_until_complete(run()) == pytest.approx(601 + 10 / 0.15, rel=0.01)
