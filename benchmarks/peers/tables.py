"""Terminal tables with the results of bench_ops.py and bench_e2e.py."""

from __future__ import annotations

from rich.table import Table

from meseta.measure.harness.worker_group import TargetSpec
from peers.e2e import E2eResult
from peers.ops import BASE_OPTIMIZER, MAX_STEP_RATIO, OperatorMeasurement, OpsResult


def ops_table(result: OpsResult) -> Table:
    """Create a table with one row per target and number of threads."""
    traffic = result.workload
    table = Table(title=f"{traffic.name}: {_describe_workload(result)}", title_justify="left")
    for name in ("", "threads", "lookup M/s", "GB/s", "of limit", "operator M/s", "of limit", "train M/s", "step ms"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("compared")
    for line in result.measurements:
        rates = (line.lookups_per_s, line.operator_lookups_per_s)
        gigabytes = line.lookups_per_s * line.bytes_per_id / 1e9 if line.lookups_per_s else None
        cells = [
            line.target.title + " (noisy)" * line.is_noisy,
            str(line.num_threads),
            _format_number(line.lookups_per_s, 1e6),
            _format_number(gigabytes),
            *(
                _format_share(rates[0], line.gather_limit_per_s),
                _format_number(rates[1], 1e6),
                _format_share(rates[1], line.gather_limit_per_s),
            ),
            _format_number(line.trained_lookups_per_s, 1e6),
            _format_number(line.step_s, 1e-3),
            _comparison_text(result, line),
        ]
        table.add_row(*cells)
    for title, text in result.timing_result.failures.items():
        table.add_row(title, *[""] * 8, text)
    return table


def e2e_table(result: E2eResult) -> Table:
    """Create a table with one row per target.

    The last column has the speedup of Meseta: over the peer of the row, or over the best peer.
    """
    table = Table(title=f"{result.workload.name}: global batch {result.workload.lookups.batch_size}")
    table.title_justify = "left"
    table.add_column("")
    for name in ("processes x threads", "samples/s", "step ms", "compared"):
        table.add_column(name, justify="right", no_wrap=True)
    for member in result.targets:
        rate = result.samples_per_s(member)
        if rate is None:
            continue
        timing = result.timing_result.timings[member.title, "step", member.thread_counts[0]]
        title = " ".join((member.name, *member.variant[:-1])) + " (noisy)" * timing.is_noisy
        table.add_row(
            title,
            member.variant[-1],
            f"{rate:,.0f}",
            _format_number(timing.seconds, 1e-3),
            _best_peer_text(result, rate, member),
        )
    for title, text in result.timing_result.failures.items():
        table.add_row(title, "", "", "", text)
    return table


def _describe_workload(result: OpsResult) -> str:
    traffic = result.workload
    widths = sorted(set(traffic.dims))
    dims = f"D {widths[0]}" if len(widths) == 1 else f"D {widths[0]} to {widths[-1]}"
    bags = f"0 to {2 * traffic.bag_size} ids" if traffic.ragged else f"{traffic.bag_size} ids"
    facts = [facts for facts in result.timing_result.facts.values() if "unique_share" in facts]
    unique = f", unique rows per id {facts[0]['unique_share']:.2f}" if facts else ""
    more = " with weights" * traffic.weighted + " averaged" * (traffic.pooling == "mean")
    return (
        f"{len(traffic.rows)} tables, {sum(traffic.rows):,} rows, {dims}, batch {traffic.batch_size}, "
        f"bags of {bags}{more}, {traffic.id_distribution}{unique}"
    )


def _comparison_text(result: OpsResult, line: OperatorMeasurement) -> str:
    base, share = result.baseline(line), result.step_ratio(line)
    if line.target.name != "ours":
        if base is None:
            return ""
        return (
            f"ours {_format_ratio(base.lookups_per_s, line.lookups_per_s)} lookup, "
            f"{_format_ratio(base.trained_lookups_per_s, line.trained_lookups_per_s)} train"
        )
    text = []
    if base is not None and base is not line:
        text.append(
            f"{_format_ratio(line.lookups_per_s, base.lookups_per_s)} lookup, "
            f"{_format_ratio(line.trained_lookups_per_s, base.trained_lookups_per_s)} of float32"
        )
    alone = result.single_thread(line)
    if alone is not None:
        text.append(
            f"{_format_ratio(line.trained_lookups_per_s, alone.trained_lookups_per_s)} of 1 thread (limit "
            f"{_format_ratio(line.gather_limit_per_s, alone.gather_limit_per_s)})"
        )
    if share is not None:
        text.append(f"step {share:.2f} x {BASE_OPTIMIZER} scaled by bytes (limit {MAX_STEP_RATIO})")
    return "; ".join(text)


def _best_peer_text(result: E2eResult, rate: float, member: TargetSpec) -> str:
    """Format the speedup of Meseta: in float32 over a peer `member`, or of `member` over the best peer."""
    if member.name == "ours":
        best = result.best_peer(member.num_ranks)
        return f"{_format_ratio(rate, result.samples_per_s(best))} the best peer, {best.title}" if best else ""
    # Peers train with different optimizers and variants. All are compared with Meseta's SGD in float32.
    for ours in result.targets:
        if (ours.name, ours.variant) == ("ours", ("sgd", "float32", member.variant[-1])):
            return f"ours {_format_ratio(result.samples_per_s(ours), rate)}"
    return ""


def _format_number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.2f}"


def _format_share(value: float | None, limit: float | None) -> str:
    return f"{value / limit:.0%}" if value and limit else ""


def _format_ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}x" if value and other else "-"
