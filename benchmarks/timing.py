"""Turns a replay of known work into a median and its spread."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call of the operator, over repeats of a replay."""

    median_ms: float
    min_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int
    calls: int


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        repeats: Measured repeats, at least 7.
        target_ms: Least time of one repeat.
        max_replays: Most replays of one repeat; more than 32 programs in flight would block JAX's dispatch.
    """

    repeats: int = 9
    target_ms: float = 25.0
    max_replays: int = 32

    def __post_init__(self):
        if self.repeats < 7:
            raise ValueError(f"measure: repeats must be at least 7, got {self.repeats}")


def measure(replay: Callable[[int], float], calls: int, settings: Settings) -> Timing:
    """Times `replay(n)`, which runs `n` replays of `calls` calls each and returns their milliseconds."""
    replay(1)
    once = max(replay(1), 1e-3)
    replays = max(1, min(settings.max_replays, math.ceil(settings.target_ms / once)))
    replay(replays)
    times = sorted(replay(replays) / (replays * calls) for _ in range(settings.repeats))
    return Timing(
        median_ms=statistics.median(times),
        min_ms=times[0],
        p20_ms=quantile(times, 0.2),
        p80_ms=quantile(times, 0.8),
        repeats=settings.repeats,
        calls=replays * calls,
    )


def quantile(ordered: list[float], share: float) -> float:
    """The value at `share` of an ascending list, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Latency:
    """Microseconds of one call from Python on an idle device: until it returns, and until its result is there."""

    host_us: float
    call_us: float


def latency(call: Callable[[], object], wait: Callable[[object], None], count: int = 20) -> Latency:
    """Medians over `count` calls, fewer where a call is long."""
    returned, done = [], []
    deadline = time.perf_counter() + 0.5
    wait(call())
    for _ in range(count):
        start = time.perf_counter()
        result = call()
        returned.append(time.perf_counter() - start)
        wait(result)
        done.append(time.perf_counter() - start)
        if time.perf_counter() > deadline and len(done) >= 3:
            break
    return Latency(statistics.median(returned) * 1e6, statistics.median(done) * 1e6)
