"""Measure what one gradient norm over layers and tables (`train.clip_norm`) adds to a step on two ranks.

    python benchmarks/bench_clip_norm.py [--rounds 150] [--workloads d16_2k,d16_8k]

Each round times a few steps of one DLRM in turn without clipping, with the norm of each rank alone, and with the sum
over the ranks. The limit is so high that nothing is scaled. Ratios of steps compare the fastest tenth, which other
processes hardly interrupt, with 95 % intervals by resampling of rounds. Ratios of processor time are those of both
ranks together, with 95 % intervals over rounds. They hold on a busy machine, but leave out waiting. The sum may add
2 % to the step. It takes ten minutes on two free cores.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace

import numpy as np
from common.command import make_parser
from common.paired import interval
from common.tables import table
from links import clipped_steps
from links.clipped_steps import VARIANTS
from links.rank_pool import RankPool, on_this_machine, start_ranks
from peers.workloads import E2E_WORKLOADS, shrink

from meseta.measure.synthetic_batches import DlrmWorkload

NUM_RANKS, NUM_ROUNDS, NUM_STEPS = 2, 150, 6
MAX_ROWS, QUICK_ROWS = 1_000_000, 1000
MAX_SUM_RATIO = 1.02
FASTEST_SHARE, NUM_RESAMPLES = 0.1, 1000
OPTIMIZERS = ("sgd", "rowwise_adagrad")
PAIRS = {"sum": ("sum", "no sum"), "norm of each rank": ("no sum", "no clipping"), "clip_norm": ("sum", "no clipping")}
"""Variants to compare, by the name of what the first has in addition."""
Ratio = tuple[float, float, float]
"""Ratio with the ends of its 95 % interval."""


@dataclass(frozen=True)
class Rounds:
    """Measurements of one variant."""

    step_s: list[list[float]] = field(default_factory=list)
    """Seconds of each step of each round."""
    busy_s: list[float] = field(default_factory=list)
    """Mean processor time of a step of all ranks, per round."""

    def fast_step_s(self, picks: slice | list[int] = slice(None)) -> float:
        """Return the seconds of the fastest steps of some rounds."""
        return float(np.quantile(np.array(self.step_s)[picks], FASTEST_SHARE))


def measure(ranks: RankPool, shape: DlrmWorkload, optimizer: str, num_rounds: int) -> dict[str, Rounds]:
    ranks.ask(clipped_steps.build, shape=shape, optimizer=optimizer)
    rounds = {variant: Rounds() for variant in VARIANTS}
    for turn in range(num_rounds):
        first = turn % len(VARIANTS)
        for variant in VARIANTS[first:] + VARIANTS[:first]:
            answers = ranks.ask(clipped_steps.time_steps, variant=variant, num_steps=NUM_STEPS)
            rounds[variant].step_s.append(answers[0][0])
            rounds[variant].busy_s.append(sum(busy_s for _, busy_s in answers))
    return rounds


def step_ratio(some: Rounds, base: Rounds) -> Ratio:
    draw, num_rounds = np.random.default_rng(0), len(some.step_s)
    picks = draw.integers(0, num_rounds, (NUM_RESAMPLES, num_rounds)).tolist()
    low, high = np.quantile([some.fast_step_s(pick) / base.fast_step_s(pick) for pick in picks], (0.025, 0.975))
    return some.fast_step_s() / base.fast_step_s(), float(low), float(high)


def busy_ratio(some: Rounds, base: Rounds) -> Ratio:
    mean, low, high = interval([math.log(a / b) for a, b in zip(some.busy_s, base.busy_s, strict=True)])
    return math.exp(mean), math.exp(low), math.exp(high)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--workloads", default="d16_2k,d16_8k", help="names of workloads of bench_e2e.py")
    parser.add_argument("--quick", action="store_true", help="small tables and batches, to try the command")
    options = parser.parse_args()
    names = options.workloads.split(",")
    rows, good = [], True
    with start_ranks(NUM_RANKS, on_this_machine(NUM_RANKS)) as ranks:
        for workload in (one for one in E2E_WORKLOADS if one.name in names):
            size = (QUICK_ROWS, 64) if options.quick else (MAX_ROWS, workload.lookups.batch_size)
            shape = replace(workload, lookups=shrink(workload.lookups, max_rows=size[0], max_batch=size[1]))
            for optimizer in OPTIMIZERS:
                rounds = measure(ranks, shape, optimizer, options.rounds)
                plain_ms = f"{1e3 * rounds['no clipping'].fast_step_s():.1f}"
                for part, (some, base) in PAIRS.items():
                    ratios = [ratio(rounds[some], rounds[base]) for ratio in (step_ratio, busy_ratio)]
                    cells = [f"{middle:.4f} ({low:.4f} to {high:.4f})" for middle, low, high in ratios]
                    rows.append((workload.name, optimizer, plain_ms, part, *cells))
                    print(*rows[-1], sep=", ", flush=True)
                    good &= part != "sum" or ratios[0][0] <= MAX_SUM_RATIO
    head = (
        "workload",
        "optimizer of tables",
        "step without clipping, ms",
        "added",
        "ratio of steps",
        "of processor time",
    )
    table(f"Steps with and without each part, {options.rounds} rounds on {NUM_RANKS} ranks", head, rows)
    sys.exit(0 if good or options.quick else f"the sum adds more than {MAX_SUM_RATIO - 1:.0%} to a step")


if __name__ == "__main__":
    main()
