"""What kills and restores cost: each kind of checkpoint beside its floor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from links.timing import table
from paired import difference
from record import record

from quality.cells import FORECAST, KINDS, UNDISTURBED, Cells

MEAN_LIMIT, END_LIMIT = 0.0001, 0.0003
"""Of the floor's NE: what the mean may lose, and where its 95 % interval ends at the latest."""
BENCHMARK = "quality"


@dataclass(frozen=True)
class Loss:
    """Of one kind beside another, as parts of the other's NE."""

    name: str
    beside: str
    num_seeds: int
    ne: float
    base_ne: float
    mean: float
    half: float
    """Of the 95 % interval."""

    @property
    def end(self) -> float:
        """Of the interval."""
        return self.mean + self.half

    @property
    def is_wide(self) -> bool:
        """Whether chance alone moves the mean by more than an interval may end at."""
        return self.half >= END_LIMIT

    @property
    def is_met(self) -> bool:
        """Whether no more is lost than may be."""
        return self.mean <= MEAN_LIMIT and self.end < END_LIMIT


def loss(cells: Cells, seeds: Sequence[int], name: str, beside: str) -> Loss | None:
    """Over the seeds that have both; None where none has."""
    found = [(cells.find(seed, name), cells.find(seed, beside)) for seed in seeds]
    pairs = [(float(one["ne"]), float(other["ne"])) for one, other in found if one is not None and other is not None]
    if not pairs:
        return None
    some, base = zip(*pairs, strict=True)
    base_ne = statistics.mean(base)
    mean, half = (figure / base_ne for figure in difference(some, base))
    return Loss(name, beside, len(pairs), statistics.mean(some), base_ne, mean, half)


def show(cells: Cells, seeds: Sequence[int], num_test_rows: int) -> tuple[list[Loss], bool]:
    """Print the table and what follows from it; all losses, and whether nothing is missed that could have been seen."""
    forecast = cells.find(seeds[0], FORECAST) or {}
    losses, rows, told, good = list[Loss](), list[list[str]](), list[str](), True
    for floor in (name for name, kind in KINDS.items() if kind.restores and kind.bits is None):
        of_floor = loss(cells, seeds, floor, UNDISTURBED)
        if of_floor is not None:
            losses.append(of_floor)
            rows.append([*_cells(of_floor), "", "the floor"])
            if of_floor.is_wide:
                told.append(f"{floor}: the floor's own interval, +-{of_floor.half:.4%}, is wider than the limit, "
                            f"{END_LIMIT:.2%}: that is the result; what is missed beside it says nothing")  # fmt: skip
        for name, kind in KINDS.items():
            if kind.restores != KINDS[floor].restores or kind.bits is None:
                continue
            of_bits = loss(cells, seeds, name, floor)
            if of_bits is None:
                continue
            losses.append(of_bits)
            expected = f"{forecast[name]:+.4%}" if name in forecast else ""
            if kind.adaptive:
                met, is_good = "yes" if of_bits.is_met else "NO", of_bits.is_met
            else:
                is_good = of_floor is not None and of_bits.mean - of_bits.half > of_floor.end
                met = "visibly worse" if is_good else "NOT visibly worse: the measure is blind"
            good &= is_good or (of_floor is not None and of_floor.is_wide)
            rows.append([*_cells(of_bits), expected, met])
    head = ("", "seeds", "mean test NE", "beside", "mean difference", "95 %, from", "to", "forecast", "met")
    table(f"{cells.data}: normalised entropy over paired seeds, {num_test_rows:,} test rows; at most {MEAN_LIMIT:.2%} "
          f"in the mean, the interval ends below {END_LIMIT:.2%}", head, rows)  # fmt: skip
    if forecast:
        told.append(f"forecast: advise's measure of these bits in all tables of seed {seeds[0]}'s undisturbed run, on "
                    f"the split {forecast['split']}")  # fmt: skip
    if told:
        print("\n".join(told), flush=True)
    return losses, good


def keep(cells: Cells, losses: Sequence[Loss]) -> None:
    """Append all of them to benchmarks/results.csv."""
    for one in losses:
        record(BENCHMARK, f"{cells.data} {one.name}", "test NE", one.ne, "of theirs", peer=one.beside,
               peer_value=one.base_ne)  # fmt: skip


def _cells(one: Loss) -> list[str]:
    return [one.name, str(one.num_seeds), f"{one.ne:.6f}", one.beside, f"{one.mean:+.4%}",
            f"{one.mean - one.half:+.4%}", f"{one.end:+.4%}"]  # fmt: skip
