"""Part 'lanes': exchanges during sums, and two ranks without slow links compared with another checkout."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from hosts import Hosts
from links import plain_steps, shapes
from links.rank_pool import RankPool, on_hosts, on_this_machine, start_ranks
from links.timing import Options, table

LIMIT = 1.5
LEAST = 0.97
ROWS_BYTES, SUM_BYTES = 1_000_000, 64_000_000
RATE = "500mbit"
NAME = "measurement"


def measure_lanes(options: Options, why: str | None) -> bool:
    """Measure overlap of an all-to-all with a sum, and steps without slow links. Returns whether both meet their
    requirements."""
    good = True
    if why is None:
        good &= _measure_beside_sums(options)
    else:
        print(f"lanes: left out, since this machine makes no slow links: {why}")
    if options.before is None:
        print("lanes: two ranks without slow links are left out; name a checkout of the commit before with --before")
        return good
    return _measure_beside_before(options.before.resolve(), options) and good


def _measure_beside_sums(options: Options) -> bool:
    num_rounds = 2 if options.quick else 7
    with Hosts(2, across=RATE) as hosts, start_ranks(2, on_hosts(hosts)) as ranks:
        timings = [ranks.ask(exchange_beside_sum)[0] for _ in range(num_rounds)]
    alone, beside = (statistics.median(one[place] for one in timings) for place in (0, 1))
    under_way = statistics.median(one[2] for one in timings)
    row = [f"{1e3 * alone:.1f}", f"{1e3 * beside:.1f}", f"{beside / alone:.2f}", LIMIT, f"{under_way:.0f}"]
    head = ("1 MB of rows alone, ms", "during a sum of 64 MB, ms", "ratio", "at most", "exchanges while it ran")
    table(f"Lanes: 2 hosts, links of {RATE}, medians of {num_rounds} rounds", head, [row])
    options.record(f"2 x 1, {RATE}", "1 MB beside a sum", beside, "s", peer="alone", peer_value=alone)
    return beside <= LIMIT * alone


def exchange_beside_sum() -> tuple[float, float, int]:
    """Return the median seconds of an all-to-all alone and during a sum, and the number of the latter."""
    import time

    import torch

    from meseta.comm import World

    torch.set_num_threads(1)
    world = World.current()
    rows, buffer = torch.zeros(ROWS_BYTES // 4), torch.zeros(SUM_BYTES // 4)
    splits = [0 if rank == world.rank else rows.numel() for rank in range(world.size)]

    def exchange() -> float:
        start_s = time.perf_counter()
        world.all_to_all(rows, splits, splits, NAME).wait()
        return time.perf_counter() - start_s

    alone = []
    for _ in range(5):
        world.barrier()
        time.sleep(0.05)
        alone.append(exchange())
    world.barrier()
    beside, pending = [], world.start_all_reduce(buffer, NAME)
    # Minimum duration of a sum. Exchanges run in its first half.
    sum_s = SUM_BYTES / ROWS_BYTES * statistics.median(alone)
    stop = time.perf_counter() + sum_s / 2
    for _ in range(8):
        time.sleep(sum_s / 20)
        beside.append((time.perf_counter() < stop, exchange()))
    pending.wait()
    under_way = [spent for is_in_time, spent in beside if is_in_time]
    return statistics.median(alone), statistics.median(under_way), len(under_way)


def _measure_beside_before(before: Path, options: Options) -> bool:
    """Compare steps of this checkout and of another one."""
    shape = asdict(shapes.training(1024 if options.quick else shapes.BATCH))
    spent: dict[str, list[float]] = {"now": [], "before": []}
    with ExitStack() as held:
        pythons = {"now": {}, "before": {"python": str(before / ".venv" / "bin" / "python")}}
        crews: dict[str, RankPool] = {}
        for name, python in pythons.items():
            crews[name] = held.enter_context(start_ranks(2, on_this_machine(2, bind=False), **python))
            crews[name].ask(plain_steps.build, shape=shape)
        num_steps = 2 if options.quick else 8
        for turn in range(3 * options.rounds):
            for name in list(crews)[:: 1 if turn % 2 else -1]:
                spent[name].append(crews[name].ask(plain_steps.time_steps, num_steps=num_steps)[0])
    ratios = [b / a for a, b in zip(spent["now"], spent["before"], strict=True)]
    now, former, ratio = (statistics.median(one) for one in (spent["now"], spent["before"], ratios))
    table(
        f"Two ranks without slow links, DLRM d64, fp32, {len(ratios)} rounds in turns",
        ("now, ms a step", "before, ms", "speed now over before", "at least"),
        [[f"{1e3 * now:.1f}", f"{1e3 * former:.1f}", f"{ratio:.3f}", LEAST]],
    )
    options.record("2 ranks fp32, no slow links", "step", now, "s", peer="the commit before", peer_value=former)
    return ratio >= LEAST
