"""Results of `meseta bench` as tables on a terminal."""

from __future__ import annotations

from rich.table import Table

from meseta.measure.bench.e2e import E2eResult
from meseta.measure.bench.ops import BASE, MODEL_LIMIT, Line, OpsResult
from meseta.measure.contest.team import Member


def ops_table(result: OpsResult) -> Table:
    """One row per member and number of threads."""
    traffic = result.traffic
    table = Table(title=f"{traffic.name}: {_describe(result)}", title_justify="left")
    for name in ("", "threads", "lookup M/s", "GB/s", "of limit", "operator M/s", "of limit", "train M/s", "step ms"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("beside")
    for line in result.lines:
        rates = (line.lookups, line.operator)
        gigabytes = line.lookups * line.bytes_per_id / 1e9 if line.lookups else None
        cells = [
            line.member.title + " (noisy)" * line.is_noisy,
            str(line.num_threads),
            _number(line.lookups, 1e6),
            _number(gigabytes),
            *(_share(rates[0], line.limit), _number(rates[1], 1e6), _share(rates[1], line.limit)),
            _number(line.trained, 1e6),
            _number(line.step_s, 1e-3),
            _beside(result, line),
        ]
        table.add_row(*cells)
    for title, text in result.outcome.failures.items():
        table.add_row(title, *[""] * 8, text)
    return table


def e2e_table(result: E2eResult) -> Table:
    """One row per member; peers say how much faster ours is, ours how much faster than the best peer."""
    table = Table(title=f"{result.training.name}: global batch {result.training.traffic.batch_size}")
    table.title_justify = "left"
    table.add_column("")
    for name in ("processes x threads", "samples/s", "step ms", "beside"):
        table.add_column(name, justify="right", no_wrap=True)
    for member in result.members:
        rate = result.samples_per_s(member)
        if rate is None:
            continue
        timing = result.outcome.timings[member.title, "step", member.num_threads[0]]
        title = " ".join((member.name, *member.variant[:-1])) + " (noisy)" * timing.is_noisy
        table.add_row(
            title, member.variant[-1], f"{rate:,.0f}", _number(timing.seconds, 1e-3), _best(result, rate, member)
        )
    for title, text in result.outcome.failures.items():
        table.add_row(title, "", "", "", text)
    return table


def _describe(result: OpsResult) -> str:
    traffic = result.traffic
    widths = sorted(set(traffic.dims))
    dims = f"D {widths[0]}" if len(widths) == 1 else f"D {widths[0]} to {widths[-1]}"
    bags = f"0 to {2 * traffic.bag_size} ids" if traffic.ragged else f"{traffic.bag_size} ids"
    facts = [facts for facts in result.outcome.facts.values() if "unique_share" in facts]
    unique = f", unique rows per id {facts[0]['unique_share']:.2f}" if facts else ""
    more = " with weights" * traffic.weighted + " averaged" * (traffic.pooling == "mean")
    return (
        f"{len(traffic.rows)} tables, {sum(traffic.rows):,} rows, {dims}, batch {traffic.batch_size}, "
        f"bags of {bags}{more}, {traffic.law}{unique}"
    )


def _beside(result: OpsResult, line: Line) -> str:
    """What the line shows beside our own line with the same optimizer."""
    base, share = result.base(line), result.model_share(line)
    if line.member.name != "ours":
        if base is None:
            return ""
        return f"ours {_ratio(base.lookups, line.lookups)} lookup, {_ratio(base.trained, line.trained)} train"
    text = []
    if base is not None and base is not line:
        text.append(f"{_ratio(line.lookups, base.lookups)} lookup, {_ratio(line.trained, base.trained)} of float32")
    alone = result.alone(line)
    if alone is not None:
        text.append(f"{_ratio(line.trained, alone.trained)} of 1 thread (limit {_ratio(line.limit, alone.limit)})")
    if share is not None:
        text.append(f"step {share:.2f} x bytes of {BASE} (at most {MODEL_LIMIT})")
    return "; ".join(text)


def _best(result: E2eResult, rate: float, member: Member) -> str:
    """Of a peer, how much faster our float32 run is; of ours, how much faster it is than the best peer."""
    if member.name == "ours":
        best = result.best_peer(member.num_ranks)
        return f"{_ratio(rate, result.samples_per_s(best))} the best peer, {best.title}" if best else ""
    for twin in result.members:
        if (twin.name, twin.variant) == ("ours", ("sgd", "float32", member.variant[-1])):
            return f"ours {_ratio(result.samples_per_s(twin), rate)}"
    return ""


def _number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.2f}"


def _share(value: float | None, limit: float | None) -> str:
    return f"{value / limit:.0%}" if value and limit else ""


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}x" if value and other else "-"
