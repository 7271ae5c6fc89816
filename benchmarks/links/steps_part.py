"""Parts 'step' and 'predicted': measured and predicted steps of all variants relative to flat fp32."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from common.tables import table

from hosts import Hosts
from links import model, peer_part, shapes, training
from links.rank_pool import on_hosts, start_ranks
from links.timing import FIRST_MBIT, Measured, Options, asker, find_rate, in_turns
from links.variants import Layout, Variant
from meseta.planner import predict
from meseta.spec import CostModel, Topology
from meseta.spec.stages import OVERLAPS

FLAT = Variant()
TIMED = (
    FLAT,
    *(Variant(precision=name) for name in ("fp16", "bf16", "int8", "paper")),
    *(Variant(precision=name, exchange="hierarchical") for name in ("fp32", "bf16", "int8")),
    Variant(sharding="row_wise"),
    Variant(sharding="row_wise", exchange="hierarchical"),
)
TOGETHER = (
    Variant(overlap=OVERLAPS),
    Variant(precision="int8", overlap=OVERLAPS),
    Variant(precision="int8", exchange="hierarchical", overlap=OVERLAPS),
)
"""Variants with overlap."""
MATRIX = (
    Variant(sharding="column_wise"),
    *(Variant(sharding="row_wise", precision=name) for name in ("bf16", "int8")),
    *(Variant(sharding="column_wise", precision=name) for name in ("bf16", "int8")),
    *(Variant(sharding="row_wise", precision=name, exchange="hierarchical") for name in ("bf16", "int8")),
    *(Variant(sharding="column_wise", precision=name, exchange="hierarchical") for name in ("fp32", "bf16", "int8")),
)
"""Variants for predictions, in addition to TIMED."""
AUTO_LIMIT = 1.03


def measure_steps(layout: Layout, parts: Sequence[str], options: Options) -> bool:
    chosen = [*TIMED, *(MATRIX if "predicted" in parts else ()), *(TOGETHER if "step" in parts else ())]
    shape, good = shapes.training(512 if options.quick else shapes.BATCH), True
    print(f"\n{layout}: DLRM d64, tables of at most {shapes.MAX_ROWS:,} rows, global batch {shape.lookups.batch_size}; "
          f"{layout.size} ranks of one thread on {os.cpu_count()} processors", flush=True)  # fmt: skip
    with ExitStack() as held:
        hosts = held.enter_context(Hosts(layout.hosts, ranks=layout.per_host, across=f"{FIRST_MBIT}mbit"))
        ranks = held.enter_context(start_ranks(layout.size, on_hosts(hosts)))
        ranks.ask(training.build, shape=shape, layout=layout, variants=[FLAT])
        ask = asker(ranks, training.window, FLAT.name)
        ask(2)
        rate, share = find_rate(hosts, lambda: ask(2 if options.quick else 4))
        print(f"{layout}: links of {rate}, at which a flat fp32 step waits {share:.1%} of its time", flush=True)
        measured = Measured()
        if "step" in parts or "predicted" in parts:
            ranks.ask(training.build, shape=shape, layout=layout, variants=chosen)
            calls = {one.name: asker(ranks, training.window, one.name) for one in chosen}
            in_turns(calls, options.rounds, options.window_s, measured)
            _tell_steps(layout, rate, chosen, measured, options)
            calibrated = model.calibrated(ranks, hosts, shape, layout, options)
            good &= _tell_auto(shape, layout, calibrated, measured, options)
            if "predicted" in parts:
                in_turn = [one for one in chosen if not one.overlap]
                _tell_predicted(shape, layout, rate, calibrated, in_turn, measured, options)
        if "peer" in parts:
            good &= peer_part.measure_peer(hosts, ranks, shape, layout, rate, options)
    return good


def _tell_steps(layout: Layout, rate: str, chosen: Sequence[Variant], measured: Measured, options: Options) -> None:
    rows = []
    for variant in chosen:
        base, name = variant.base.name, variant.name
        ratio = measured.step_s(name) / measured.step_s(base)
        sent, of_base = (sum(measured.link_bytes(one, layout)) for one in (name, base))
        rounds = zip(measured.windows[name], measured.windows[base], strict=True)
        each = [a[0].seconds / a[0].num_steps / (b[0].seconds / b[0].num_steps) for a, b in rounds]
        rows.append([
            name, f"{1e3 * measured.step_s(name):.0f}", f"{ratio:.3f}", f"{min(each):.2f} to {max(each):.2f}",
            f"{measured.waiting(name):.0%}", f"{measured.busy(name, os.cpu_count() or 1):.0%}",
            f"{sent / layout.hosts / 1e6:.2f}", f"{sent / of_base:.3f}",
        ])  # fmt: skip
        options.record(
            f"{layout} {name}, {rate}", "step", measured.step_s(name), "s", peer=base, peer_value=measured.step_s(base)
        )
    head = ("variant", "step, ms", "over its base", "by round", "waiting", "processors busy",
            "MB a host and step", "bytes over base")  # fmt: skip
    table(f"Steps, {layout}, links of {rate}, medians of {options.rounds} rounds in turns", head, rows)


def _predicted_s(
    shape: shapes.DlrmWorkload, layout: Layout, variant: Variant, calibrated: tuple[CostModel, Topology]
) -> float:
    plan, workload = shapes.plan(shape, variant, layout), shapes.workload(shape, variant)
    return predict(plan, workload, calibrated[1], calibrated[0]).step_s


def _tell_auto(
    shape: shapes.DlrmWorkload,
    layout: Layout,
    calibrated: tuple[CostModel, Topology],
    measured: Measured,
    options: Options,
) -> bool:
    """Print and record which algorithm is predicted to be faster, and which one was."""
    rows, good = [], True
    for sharding in ("table_wise", "row_wise"):
        ways = [Variant(sharding=sharding, exchange=way) for way in ("flat", "hierarchical")]
        chosen = min(ways, key=lambda one: _predicted_s(shape, layout, one, calibrated))
        best = min(measured.step_s(one.name) for one in ways)
        ratio = measured.step_s(chosen.name) / best
        good &= ratio <= AUTO_LIMIT
        rows.append(
            [sharding, chosen.exchange, f"{ratio:.3f}", f"{AUTO_LIMIT}", "yes" if ratio <= AUTO_LIMIT else "NO"]
        )
        options.record(f"{layout} {sharding} auto", "step", measured.step_s(chosen.name), "s", peer="the better way",
                       peer_value=best)  # fmt: skip
    table(f"Exchange auto, {layout}", ("tables", "takes", "over the better way", "at most", "met"), rows)
    return good


def _tell_predicted(
    shape: shapes.DlrmWorkload,
    layout: Layout,
    rate: str,
    calibrated: tuple[CostModel, Topology],
    chosen: Sequence[Variant],
    measured: Measured,
    options: Options,
) -> None:
    seconds = {one.name: _predicted_s(shape, layout, one, calibrated) for one in chosen}
    base, rows = FLAT.name, []
    errors: dict[str, float] = {}
    for name, alone_s in seconds.items():
        said, took = alone_s / seconds[base], measured.step_s(name) / measured.step_s(base)
        errors[name] = said / took - 1
        rows.append([name, f"{1e3 * alone_s:.0f}", f"{1e3 * measured.step_s(name):.0f}", f"{said:.3f}",
                     f"{took:.3f}", f"{errors[name]:+.1%}"])  # fmt: skip
    head = ("variant", "predicted, ms", "measured, ms", "predicted over flat fp32", "measured", "error")
    table(f"Predicted and measured, {layout}, links of {rate}; {calibrated[0].exchange.source}", head, rows)
    sizes = [abs(error) for name, error in errors.items() if name != base]
    median, largest = statistics.median(sizes), max(sizes)
    print(f"{layout}: error of predicted ratios to flat fp32: median {median:.1%}, largest {largest:.1%}")
    for name, value in (("median", median), ("largest", largest)):
        options.record(f"{layout} predicted", f"{name} error", value, "of theirs", peer="asked", peer_value=0.1)
