"""Loss of NE by kills and restores, relative to the floor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common.paired import difference
from common.tables import table
from record import record

from restores.run_results import DATA, FORECAST, KINDS, UNDISTURBED, RunResults

MEAN_LIMIT, END_LIMIT = 0.0001, 0.0003
"""Limits of the increase of NE relative to the floor: for the mean, and for the end of its 95 % interval."""
BENCHMARK = "quality"


@dataclass(frozen=True)
class Loss:
    """Relative differences of NE to the floor."""

    name: str
    baseline: str
    num_seeds: int
    ne: float
    base_ne: float
    mean: float
    half: float

    @property
    def end(self) -> float:
        return self.mean + self.half

    @property
    def is_wide(self) -> bool:
        """Whether the interval is too wide for the limit."""
        return self.half >= END_LIMIT

    @property
    def is_met(self) -> bool:
        return self.mean <= MEAN_LIMIT and self.end < END_LIMIT


def loss(results: RunResults, seeds: Sequence[int], name: str, baseline: str) -> Loss | None:
    """Return the loss over seeds with both results, or `None`."""
    values = [(results.find(seed, name), results.find(seed, baseline)) for seed in seeds]
    pairs = [(float(one["ne"]), float(other["ne"])) for one, other in values if one is not None and other is not None]
    if not pairs:
        return None
    some, base = zip(*pairs, strict=True)
    base_ne = statistics.mean(base)
    mean, half = (figure / base_ne for figure in difference(some, base))
    return Loss(name, baseline, len(pairs), statistics.mean(some), base_ne, mean, half)


def show(results: RunResults, seeds: Sequence[int], num_test_rows: int) -> tuple[list[Loss], bool]:
    """Print the table. Returns all losses, and whether all limits are met that the interval can resolve."""
    forecast = results.find(seeds[0], FORECAST) or {}
    losses, rows, notes, good = list[Loss](), list[list[str]](), list[str](), True
    for floor in (name for name, kind in KINDS.items() if kind.restores and kind.bits is None):
        of_floor = loss(results, seeds, floor, UNDISTURBED)
        if of_floor is not None:
            losses.append(of_floor)
            rows.append([*_cells(of_floor), "", "the floor"])
            if of_floor.is_wide:
                notes.append(f"{floor}: the floor's own interval, +-{of_floor.half:.4%}, is wider than the limit, "
                            f"{END_LIMIT:.2%}: so missed limits are inconclusive")  # fmt: skip
        for name, kind in KINDS.items():
            if kind.restores != KINDS[floor].restores or kind.bits is None:
                continue
            of_bits = loss(results, seeds, name, floor)
            if of_bits is None:
                continue
            losses.append(of_bits)
            expected = f"{forecast[name]:+.4%}" if name in forecast else ""
            if kind.adaptive:
                verdict, is_good = "yes" if of_bits.is_met else "NO", of_bits.is_met
            else:
                is_good = of_floor is not None and of_bits.mean - of_bits.half > of_floor.end
                verdict = "visibly worse" if is_good else "NOT visibly worse: the measure is blind"
            good &= is_good or (of_floor is not None and of_floor.is_wide)
            rows.append([*_cells(of_bits), expected, verdict])
    head = ("", "seeds", "mean test NE", "baseline", "mean difference", "95 %, from", "to", "forecast", "met")
    table(f"{DATA}: normalised entropy over paired seeds, {num_test_rows:,} test rows; at most "
          f"{MEAN_LIMIT:.2%} in the mean, the interval ends below {END_LIMIT:.2%}", head, rows)  # fmt: skip
    if forecast:
        notes.append(f"forecast: advise's measure of these bits in all tables of seed {seeds[0]}'s undisturbed run, on "
                    f"the split {forecast['split']}")  # fmt: skip
    if notes:
        print("\n".join(notes), flush=True)
    return losses, good


def keep(losses: Sequence[Loss]) -> None:
    for one in losses:
        record(BENCHMARK, f"{DATA} {one.name}", "test NE", one.ne, "of theirs", peer=one.baseline,
               peer_value=one.base_ne)  # fmt: skip


def _cells(one: Loss) -> list[str]:
    return [one.name, str(one.num_seeds), f"{one.ne:.6f}", one.baseline, f"{one.mean:+.4%}",
            f"{one.mean - one.half:+.4%}", f"{one.end:+.4%}"]  # fmt: skip
