"""Steps of variants, timed alternately over links whose rate is set for a waiting share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from record import ROOT, record

from hosts import Hosts
from links.rank_pool import RankPool
from links.variants import Layout, Window

WAITING = (0.75, 0.80)
"""Required waiting share of a flat fp32 step."""
NEAR_MIDDLE = 0.01
"""Distance to the middle of WAITING at which the search for a rate ends."""
FIRST_MBIT = 200.0
MAX_TRIES = 12
BENCHMARK = "links"


@dataclass
class Measured:
    """Windows of all ranks by variant and round."""

    windows: dict[str, list[list[Window]]] = field(default_factory=dict)

    def step_s(self, name: str) -> float:
        return statistics.median(one[0].seconds / one[0].num_steps for one in self.windows[name])

    def waiting(self, name: str) -> float:
        return statistics.median(waiting_share(one) for one in self.windows[name])

    def busy(self, name: str, num_processors: int) -> float:
        return statistics.median(
            sum(rank.busy_s for rank in one) / one[0].seconds / num_processors for one in self.windows[name]
        )

    def link_bytes(self, name: str, layout: Layout) -> list[float]:
        """Return the payload that leaves each host in a step."""
        rounds = self.windows[name]
        steps = sum(one[0].num_steps for one in rounds)
        return [sum(one[host * layout.per_host].sent_bytes for one in rounds) / steps for host in range(layout.hosts)]


def waiting_share(ranks: Sequence[Window]) -> float:
    return statistics.mean(one.waited_s / one.seconds for one in ranks)


def find_rate(
    hosts: Hosts,
    measure: Callable[[], Sequence[Window]],
    waiting: tuple[float, float] = WAITING,
    share_of: Callable[[Sequence[Window]], float] = waiting_share,
) -> tuple[str, float]:
    """Find the rate at which the waiting share is in `waiting`, and keep it. Returns (rate, share).

    Waiting for links takes a + b / rate. This determines the next rate between the known bounds.
    """
    slow, fast, mbit, middle = 1.0, 20_000.0, FIRST_MBIT, sum(waiting) / 2
    within: list[tuple[float, float]] = []
    for _ in range(MAX_TRIES):
        hosts.reshape(f"{mbit:.1f}mbit")
        ranks = measure()
        share = share_of(ranks)
        print(f"  {mbit:.1f} Mbit/s: a flat fp32 step takes {1e3 * ranks[0].seconds / ranks[0].num_steps:.0f} ms, "
              f"{share:.1%} of it waiting", flush=True)  # fmt: skip
        if waiting[0] <= share <= waiting[1]:
            within.append((share, mbit))
        if abs(share - middle) <= NEAR_MIDDLE:
            break
        slow, fast = (slow, mbit) if share < middle else (mbit, fast)
        guess = mbit * (share / (1 - share)) / (middle / (1 - middle))
        mbit = guess if slow * 1.02 < guess < fast / 1.02 else (slow * fast) ** 0.5
    if not within:
        raise SystemExit(
            f"no rate of the links lets a flat fp32 step wait {waiting[0]:.0%} to {waiting[1]:.0%} of its time"
        )
    share, mbit = min(within, key=lambda one: abs(one[0] - middle))
    hosts.reshape(f"{mbit:.1f}mbit")
    return f"{mbit:.1f}mbit", share


def in_turns(
    ask: Mapping[str, Callable[[int], Sequence[Window]]], num_rounds: int, window_s: float, into: Measured
) -> None:
    """Time `num_rounds` windows of each, in a rotating order. A window has at least one step."""
    names = list(ask)
    num_steps = {}
    for name in names:
        ask[name](1)
        once = ask[name](1)[0].seconds
        num_steps[name] = max(1, round(window_s / once))
    for turn in range(num_rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            into.windows.setdefault(name, []).append(list(ask[name](num_steps[name])))


@dataclass(frozen=True)
class Options:
    quick: bool
    rounds: int
    window_s: float
    peer_python: str | None = None
    seeds: int = 10
    folder: Path = ROOT / "build" / "links"

    def record(self, case: str, metric: str, value: float, unit: str, *, peer: str, peer_value: float) -> None:
        record(BENCHMARK, case, metric, value, unit, peer=peer, peer_value=peer_value)


def asker(ranks: RankPool, function: Callable[..., Window], name: str) -> Callable[[int], list[Window]]:
    """Return a function that times steps of a model on all ranks."""
    return lambda num_steps: ranks.ask(function, name=name, num_steps=num_steps)
