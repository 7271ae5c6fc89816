"""Steps of variants in turns over links of one rate, which is set such that steps wait for them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record import ROOT, record

from hosts import Hosts
from links.crew import Crew
from links.variants import Layout, Variant, Window

WAITING = (0.75, 0.80)
"""Share of a flat fp32 step in which a rank stands still, between which the rate is set."""
NEAR_MIDDLE = 0.01
"""How near to the middle of WAITING the share is brought, where tries are left: a ratio to that step changes by 0.03
between the ends."""
FIRST_MBIT = 200.0
MAX_TRIES = 12
BENCHMARK = "links"
OF_BAGS = ("embeddings", "embeddings inter-host", "gradients", "gradients inter-host")
"""Names of transfers."""


@dataclass
class Measured:
    """Windows of every variant, a list of the ranks' for each round."""

    windows: dict[str, list[list[Window]]] = field(default_factory=dict)

    def step_s(self, name: str) -> float:
        """Median over rounds of rank 0's seconds of a step."""
        return statistics.median(one[0].seconds / one[0].num_steps for one in self.windows[name])

    def waiting(self, name: str) -> float:
        """Median over rounds of the share of a step in which a rank stands still, on average over ranks."""
        return statistics.median(waiting_share(one) for one in self.windows[name])

    def busy(self, name: str, num_processors: int) -> float:
        """The same of processors that ranks keep busy."""
        return statistics.median(
            sum(rank.busy_s for rank in one) / one[0].seconds / num_processors for one in self.windows[name]
        )

    def link_bytes(self, name: str, layout: Layout) -> list[float]:
        """Payload that leaves each host in a step, over all rounds."""
        rounds = self.windows[name]
        steps = sum(one[0].num_steps for one in rounds)
        return [sum(one[host * layout.per_host].sent_bytes for one in rounds) / steps for host in range(layout.hosts)]

    def bag_bytes(self, name: str) -> float:
        """Of bags, rows and their gradients alone, that ranks meant to send to other hosts in a step."""
        return sum(rank.across.get(key, 0.0) for rank in self.windows[name][-1] for key in OF_BAGS)


def waiting_share(ranks: Sequence[Window]) -> float:
    """Of one window, on average over ranks."""
    return statistics.mean(one.waited_s / one.seconds for one in ranks)


def find_rate(
    hosts: Hosts,
    measure: Callable[[], Sequence[Window]],
    waiting: tuple[float, float] = WAITING,
    share_of: Callable[[Sequence[Window]], float] = waiting_share,
) -> tuple[str, float]:
    """The rate under which `measure` finds a waiting share, as `share_of` tells it, within `waiting`, as near to its
    middle as NEAR_MIDDLE or as MAX_TRIES have brought it, and that share; the links have it then.

    What a step waits besides for the links, a + b / rate, tells where to look next, inside of what is known to be too
    fast and too slow.
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
    """`num_rounds` windows of each, the first one of a round another one every time. `ask` times so many steps; those
    of a window fill `window_s`, and are one at least."""
    names = list(ask)
    num_steps = {}
    for name in names:
        ask[name](1)
        once = ask[name](1)[0].seconds
        num_steps[name] = max(1, round(window_s / once))
    for turn in range(num_rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            into.windows.setdefault(name, []).append(list(ask[name](num_steps[name])))


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print one, in Markdown."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    print(f"\n{title}\n")
    print(
        "\n".join([lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]) + "\n", flush=True
    )


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    quick: bool
    rounds: int
    window_s: float
    keep: bool
    """Whether figures are appended to benchmarks/results.csv."""
    peer_python: str | None = None
    before: Path | None = None
    seeds: int = 10
    folder: Path = ROOT / "build" / "links"

    def record(self, case: str, metric: str, value: float, unit: str, *, peer: str, peer_value: float) -> None:
        """One line of results.csv, unless this is a trial."""
        if self.keep:
            record(BENCHMARK, case, metric, value, unit, peer=peer, peer_value=peer_value)


def asker(crew: Crew, function: Callable[..., Window], variant: Variant) -> Callable[[int], list[Window]]:
    """Times so many steps of a variant on a crew."""

    def ask(num_steps: int) -> list[Any]:
        return crew.ask(function, name=variant.name, num_steps=num_steps)

    return ask
