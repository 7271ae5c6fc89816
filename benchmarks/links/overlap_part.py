"""Part 'overlap': share of waiting that overlap hides, over links with which half of a step is waiting."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from common.tables import table

from hosts import Hosts
from links import shapes, training
from links.rank_pool import on_hosts, start_ranks
from links.timing import FIRST_MBIT, Measured, Options, asker, find_rate, in_turns
from links.variants import Layout, Variant, Window
from meseta.spec.stages import OVERLAPS

HALF = (0.45, 0.55)
"""Share of waiting in a flat fp32 step, relative to links without a limit. Contention for processors does not count."""
UNLIMITED = "20000mbit"
OFF = Variant()
ON = Variant(overlap=OVERLAPS)
LATE = Variant(overlap=OVERLAPS, stale=True)
IN_PARTS = Variant(accumulate_steps=4)
FEWER_BYTES = Variant(precision="int8", exchange="hierarchical", overlap=OVERLAPS)
HIDDEN_AT_LEAST = 0.80
NAMES = {
    "ids": ("counts", "ids", "weights", "counts intra-host", "ids intra-host", "weights intra-host"),
    "embeddings": ("embeddings", "embeddings inter-host"),
    "gradients": ("gradients", "gradients inter-host"),
    "dense": ("dense",),
    "agree": ("agree",),
}


def measure_overlap(layout: Layout, options: Options) -> bool:
    shape = shapes.training(512 if options.quick else shapes.BATCH)
    parts_on = replace(IN_PARTS, overlap=OVERLAPS)
    chosen = [OFF, ON, LATE, IN_PARTS, parts_on, FEWER_BYTES]
    with ExitStack() as held:
        hosts = held.enter_context(Hosts(layout.hosts, ranks=layout.per_host, across=f"{FIRST_MBIT}mbit"))
        ranks = held.enter_context(start_ranks(layout.size, on_hosts(hosts)))
        ranks.ask(training.build, shape=shape, layout=layout, variants=chosen)
        ask, num_steps = asker(ranks, training.window, OFF.name), 2 if options.quick else 6
        hosts.reshape(UNLIMITED)
        ask(2)
        at_once_s = statistics.median(_step_s(ask(num_steps)) for _ in range(3))
        rate, share = find_rate(hosts, lambda: ask(num_steps), HALF, lambda window: 1 - at_once_s / _step_s(window))
        print(f"{layout}: links of {rate}, for which {share:.1%} of a flat fp32 step is waiting; without a limit it "
              f"takes {1e3 * at_once_s:.0f} ms", flush=True)  # fmt: skip
        measured = Measured()
        turns = {one.name: asker(ranks, training.window, one.name) for one in chosen}
        in_turns(turns, options.rounds, options.window_s, measured)
        before_s = ranks.ask(training.time_before, name=OFF.name, num_calls=5)
    _tell_steps(layout, rate, chosen, measured, options)
    return _tell_hidden(layout, rate, measured, statistics.mean(before_s), options)


def _step_s(window: Sequence[Window]) -> float:
    return window[0].seconds / window[0].num_steps


def hideable(window: Sequence[Window], before_s: float) -> dict[str, tuple[float, float]]:
    """Return (waiting seconds, hideable seconds) by overlap, for a step without overlap.

    A second of a transfer can be hidden by a second of computation, which hides nothing else:

        computed   | score, first half of backward | rest of backward | update       | lookup
        transferred  ids, agreement                  gradients          dense sums     dense sums
    """
    seconds_by_overlap = [_of_rank(rank, before_s) for rank in window]
    return {
        name: (
            statistics.mean(one[name][0] for one in seconds_by_overlap),
            statistics.mean(one[name][1] for one in seconds_by_overlap),
        )
        for name in OVERLAPS
    }


def _of_rank(rank: Window, before_s: float) -> dict[str, tuple[float, float]]:
    waits = {name: sum(rank.waits.get(one, 0.0) for one in of_name) for name, of_name in NAMES.items()}
    busy = {name: max(seconds - _waits_in(name, rank.waits), 0.0) for name, seconds in rank.stages.items()}
    back = 2.0 * before_s  # of the layers of `before`, whose products are twice as many on the way back
    hidden = {"embeddings": min(waits["embeddings"], before_s), "gradients": min(waits["gradients"], back)}
    rest = back - hidden["gradients"] + busy.get("table_update", 0.0) + busy.get("lookup", 0.0)
    hidden["dense"] = min(waits["dense"], rest)
    left = max(sum(busy.values()) - sum(hidden.values()), 0.0)
    hidden["ids"] = min(waits["ids"], left)
    hidden["agree"] = min(waits["agree"], left - hidden["ids"])
    return {name: (waits[name], hidden[name]) for name in OVERLAPS}


def _waits_in(stage: str, waits: Mapping[str, float]) -> float:
    names = {
        "input_dist": ("counts", "counts intra-host"),
        "lookup": ("ids", "weights", "ids intra-host", "weights intra-host"),
        "output_dist": NAMES["embeddings"],
        "agree": NAMES["agree"],
        "backward": NAMES["dense"],
        "gradient_dist": NAMES["gradients"],
    }
    return sum(waits.get(name, 0.0) for name in names.get(stage, ()))


def _tell_hidden(layout: Layout, rate: str, measured: Measured, before_s: float, options: Options) -> bool:
    each = [hideable(window, before_s) for window in measured.windows[OFF.name]]
    rows = []
    for name in OVERLAPS:
        waited, room = (statistics.median(one[name][k] for one in each) for k in (0, 1))
        rows.append([name, f"{1e3 * waited:.1f}", f"{1e3 * room:.1f}"])
    possible = sum(statistics.median(one[name][1] for one in each) for name in OVERLAPS)
    gone = measured.step_s(OFF.name) - measured.step_s(ON.name)
    table(f"What can be hidden, {layout}, links of {rate}", ("overlap", "waited, ms", "can be hidden, ms"), rows)
    good = gone >= HIDDEN_AT_LEAST * possible
    print(f"{layout}: {1e3 * gone:.0f} ms of {1e3 * possible:.0f} ms that can be hidden are gone: "
          f"{gone / possible:.0%}, of {HIDDEN_AT_LEAST:.0%} asked: {'yes' if good else 'NO'}", flush=True)  # fmt: skip
    options.record(f"{layout} overlap", "hidden", gone, "s", peer="can be hidden", peer_value=possible)
    return good


def _tell_steps(layout: Layout, rate: str, chosen: Sequence[Variant], measured: Measured, options: Options) -> None:
    rows = []
    for variant in chosen:
        base = replace(IN_PARTS if variant.accumulate_steps > 1 else OFF, precision="fp32")
        ratio = measured.step_s(variant.name) / measured.step_s(base.name)
        rows.append([
            variant.name, f"{1e3 * measured.step_s(variant.name):.0f}", f"{ratio:.3f}",
            f"{measured.waiting(variant.name):.0%}", f"{measured.busy(variant.name, os.cpu_count() or 1):.0%}",
        ])  # fmt: skip
        options.record(f"{layout} {variant.name}, {rate}", "step", measured.step_s(variant.name), "s",
                       peer=base.name, peer_value=measured.step_s(base.name))  # fmt: skip
    head = ("variant", "step, ms", "over off", "waiting", "processors busy")
    table(f"Overlapped steps, {layout}, links of {rate}, medians of {options.rounds} rounds in turns", head, rows)
