"""`meseta plan CONFIG` and `meseta plan diff A B`: where tables will lie, why, and what that costs. Workloads need no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.errors import MesetaError

if TYPE_CHECKING:
    from rich.console import Console

    from meseta.config import RunConfig
    from meseta.planner import DoesNotFitError, PlanResult
    from meseta.planner.explain.table_choices import TableChoice
    from meseta.report.record import RunRecord
    from meseta.spec import CostModel, TableSpec, Topology
    from meseta.spec.constraints import Constraints
    from meseta.telemetry.summary import RunSummary

MAX_RANKS = 16
"""Ranks that are printed; of more, the fullest and the busiest."""
MAX_TABLES = 40
"""Tables that are printed without --all."""


def plan(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG [KEY=VALUE]... | diff A B [CONFIG] | check RUN",
            help="Config of a run whose data are prepared, or a workload file; or two plan files to compare; or the "
            "folder of a run whose plan is held against what it measured.",
        ),
    ],
    topology: Annotated[Path | None, typer.Option(help="YAML file of the machines.")] = None,
    cost: Annotated[
        Path | None, typer.Option(help="YAML file that `meseta calibrate` wrote; else documented constants.")
    ] = None,
    constraints: Annotated[Path | None, typer.Option(help="YAML file of what the plan has to keep to.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan, for `plan:` of a config.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that draws the plan.")] = None,
    all_tables: Annotated[
        bool, typer.Option("--all", help="Print every table, not only the 40 that cost most.")
    ] = False,
) -> None:
    """Choose a scheme, a tier and ranks for every table, and say why; or compare two plans: `meseta plan diff A B`."""
    if what[0] == "diff":
        _print_difference(what[1:])
        return
    if what[0] == "check":
        _print_check(what[1:])
        return
    from meseta.planner import DoesNotFitError
    from meseta.planner.explain.table_choices import explain_tables

    console = _console()
    task = _read_request(what[0], what[1:], topology, cost, constraints)
    if task.note is not None:
        console.print(task.note, soft_wrap=True)
    try:
        planned = _find_plan(task)
    except DoesNotFitError as error:
        raise MesetaError(_infeasible_message(error)) from None
    if out is not None:
        planned.plan.save(out)
    found = explain_tables(planned)
    if html is not None:
        from meseta.report.plan_page import write_plan_page

        write_plan_page(planned, found, html, task.note)
    _print_plan(console, planned, found, MAX_TABLES if not all_tables else len(found))
    for path in (out, html):
        if path is not None:
            console.print(f"written: {path}", soft_wrap=True)


@dataclass(frozen=True)
class _PlanRequest:
    """What is planned for which machines."""

    path: str
    config: RunConfig | None
    """`None` if `path` is a workload file."""
    topology: Topology
    note: str | None
    """Where the memory of the devices comes from, unless the topology names it."""
    cost_model: CostModel | None
    constraints: Constraints | None


def _read_request(
    path: str, overrides: list[str], topology: Path | None, cost: Path | None, rules: Path | None
) -> _PlanRequest:
    """Read a workload file or a config; files that are not named are those of the config."""
    from meseta.planner.explain.memory import with_device_memory
    from meseta.spec import CostModel, Topology
    from meseta.spec.constraints import Constraints

    config = _read_config(path, overrides)
    if config is not None:
        topology, cost = topology or config.planner.topology, cost or config.planner.cost_model
        rules = rules or config.planner.constraints
    if topology is None:
        raise MesetaError("plan: name the machines with --topology FILE; `meseta topology detect` describes this one")
    machines, note = with_device_memory(Topology.load(topology), f"topology file {str(topology)!r}")
    cost_model = None if cost is None else CostModel.load(cost)
    constraints = None if rules is None else Constraints.load(rules)
    return _PlanRequest(path, config, machines, note, cost_model, constraints)


def _find_plan(task: _PlanRequest) -> PlanResult:
    """The plan of a workload file, or the one that the run of a config makes on these machines."""
    machines = task.topology, task.cost_model, task.constraints
    if task.config is None:
        from meseta.planner import find_plan
        from meseta.spec.workload import load_workload

        return find_plan(load_workload(task.path), *machines)
    from meseta.train.setup.planning import find_run_plan

    return find_run_plan(task.config, *machines)


def _read_config(path: str, overrides: list[str]) -> RunConfig | None:
    """None where the file describes a workload."""
    from meseta.config import load_config
    from meseta.spec.documents import read_mapping
    from meseta.spec.workload import is_workload_document

    try:
        document = read_mapping(path)
    except MesetaError as error:
        raise MesetaError(f"config {path!r}: {error}") from None
    if not is_workload_document(document):
        return load_config(path, overrides)
    if overrides:
        raise MesetaError(f"plan: {overrides[0]!r} overrides a key of a config, but {path!r} is a workload file")
    return None


def _load_tables(path: str) -> Sequence[TableSpec]:
    """Of a config, or of a workload file."""
    from meseta.spec.workload import load_workload
    from meseta.train.setup.source import make_row_source
    from meseta.train.setup.specs import make_specs

    config = _read_config(path, [])
    if config is None:
        return load_workload(path).tables
    return make_specs(config, make_row_source(config.data).dataset().with_labels(config.data.labels))[0]


def _infeasible_message(error: DoesNotFitError) -> str:
    """The certificate, and one line per change."""
    lines = [f"{error.certificate}."]
    if error.fixes:
        lines.append("What would make it fit, each by itself:")
        lines += [f"  {1e3 * fix.step_s:>9.4g} ms a step: {fix.description}" for fix in error.fixes]
    else:
        lines.append("No single change makes it fit; use more or larger machines, or smaller tables.")
    return "\n".join(lines)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000  # a file or a pipe has no edge to break lines at
    return console


def _table(title: str, columns: list[str]) -> Any:
    """Text columns fold on a narrow terminal, numbers stay whole."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        is_text = not number or name in ("scheme", "runner-up", "ranks", "before", "after")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def _print_plan(console: Console, planned: PlanResult, found: list[TableChoice], num_tables: int) -> None:
    """Headline, ranks, tables."""
    from meseta.planner.explain.difference import format_ranks

    prediction, problem, bound = planned.prediction, planned.problem, planned.bound
    topology, step_s = problem.topology, planned.prediction.step_s
    samples = problem.workload.batch_size / step_s
    origin = "measured here" if problem.cost_model.is_measured else f"documented for {problem.cost_model.device}"
    alone = ""
    if problem.cost_model.neural is not None:
        origin += ", corrected by networks"
        alone = f" by the constants alone, which give this one {1e3 * planned.constants_step_s:.4g} ms"
    lines = [
        f"{len(planned.plan.tables):,} tables on {topology.num_hosts} x {topology.devices_per_host} {topology.device} "
        f"ranks{_exchange_text(planned)}; constants {origin}",
        f"step {1e3 * step_s:.4g} ms, {samples:,.0f} samples/s; rank {prediction.bottleneck} has the most lookup and "
        f"update; found by: {planned.origin}",
        f"bound {1e3 * bound.step_s:.4g} ms: no plan of these schemes takes less ({bound.reason}){alone}; gap "
        f"{100 * bound.relative_gap(planned.constants_step_s):.1f} %",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    _print_ranks(console, planned)
    _print_cache(console, planned)
    _print_overlap(console, planned)
    _print_codecs(console, planned)
    table = _table("tables", ["table", "scheme", "ranks", "ms of a rank", "MB", "runner-up", "ms a step with it"])
    for one in found[:num_tables]:
        other = ("none", "") if one.runner_up is None else (one.runner_up, f"{1e3 * one.runner_up_s:.4g}")
        size = f"{one.num_bytes / 1e6:,.1f}"
        table.add_row(
            " + ".join(one.tables), one.scheme, format_ranks(one.ranks), f"{1e3 * one.rank_s:.3g}", size, *other
        )
    console.print(table)
    if len(found) > num_tables:
        console.print(f"{len(found) - num_tables:,} tables more that cost less: --all prints them", soft_wrap=True)


def _exchange_text(planned: PlanResult) -> str:
    """Which way rows and sums take between hosts, where they have a choice."""
    names = [name for name in (planned.plan.exchange, planned.plan.dense_exchange) if name is not None]
    return f", exchange {' with sums by '.join(names)}" if names else ""


def _print_ranks(console: Console, planned: PlanResult) -> None:
    """Milliseconds by component and the most megabytes by tier, of all ranks or of the fullest and busiest."""
    from meseta.planner.explain.memory import describe_fullest_ranks
    from meseta.spec.stages import STEP_COMPONENTS

    prediction = planned.prediction
    ranks = prediction.most_loaded_ranks(MAX_RANKS)
    title = "ranks: ms of a step, and the most MB held" + (
        f"; the fullest and busiest {len(ranks)} of {prediction.num_ranks:,}"
        if len(ranks) < prediction.num_ranks
        else ""
    )
    tiers = list(prediction.fullest_ranks())
    console.print(f"fullest ranks: {describe_fullest_ranks(planned)}", soft_wrap=True)
    table = _table(title, ["rank", *STEP_COMPONENTS, *(f"{tier} MB" for tier in tiers)])
    for rank in ranks:
        times = [f"{1e3 * prediction.seconds[name][rank]:.3g}" for name in STEP_COMPONENTS]
        table.add_row(str(rank), *times, *(f"{prediction.peak_bytes(tier)[rank] / 1e6:,.1f}" for tier in tiers))
    console.print(table)


def _print_cache(console: Console, planned: PlanResult) -> None:
    """Rows that a step brings, by table, and what a step takes with more or fewer rows near; nothing where none are
    brought."""
    from meseta.planner.explain.cache import MISS_HEADERS, STEP_HEADERS, miss_rows, step_rows_by_share

    missed = miss_rows(planned)
    if not missed:
        return
    for title, heads, rows in (
        ("rows that a step brings from where they lie far", MISS_HEADERS, missed),
        ("a step with other shares of all these tables' bytes near", STEP_HEADERS, step_rows_by_share(planned)),
    ):
        table = _table(title, list(heads))
        for cells in rows:
            table.add_row(*cells)
        console.print(table)


def _print_overlap(console: Console, planned: PlanResult) -> None:
    """What of the transfers is hidden; nothing where none is."""
    from meseta.planner.explain.overlap import OVERLAP_HEADERS, overlap_rows, overlap_title

    rows = overlap_rows(planned.prediction)
    if not rows or not planned.problem.workload.overlap:
        return
    table = _table(overlap_title(planned), list(OVERLAP_HEADERS))
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


def _print_check(names: list[str]) -> None:
    """Predicted and measured milliseconds of a run, by component and rank, and by transfer with its bytes."""
    from meseta.report.prediction import compare_components
    from meseta.report.record import read_run

    if len(names) != 1:
        raise MesetaError(f"plan check: name the folder of one run, got {len(names)} names")
    record = read_run(Path(names[0]))
    summary = record.summary
    found = compare_components(summary)
    if not found or summary is None or summary.predicted is None:
        raise MesetaError(
            f"plan check: run {names[0]!r} has no predicted and measured times in its summary.json; they are written "
            "when a run of this version ends"
        )
    console = _console()
    table = _table("ms of a step", ["component", "rank", "predicted", "measured", "times as long"])
    for one in found:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        times = f"{1e3 * one.predicted_s:.3g}", f"{1e3 * one.measured_s:.3g}", ratio
        table.add_row(one.component, str(one.rank), *times)
    console.print(table)
    _print_transfers(console, summary)
    _print_misses(console, record)
    measured: dict[int, float] = {}
    for one in found:
        measured[one.rank] = measured.get(one.rank, 0.0) + one.measured_s
    console.print(
        f"step predicted {1e3 * summary.predicted.step_s:.4g} ms, timed {1e3 * max(measured.values()):.4g} ms on the "
        f"slowest rank; constants {summary.predicted.constants}{_overlap_text(summary)}",
        soft_wrap=True,
    )


def _overlap_text(summary: RunSummary) -> str:
    """What is hidden in a run, and where its prediction is of another step."""
    hidden = [] if summary.overlap is None else summary.overlap.hidden
    predicted = summary.predicted.overlap if summary.predicted is not None else None
    told = f"; hidden: {', '.join(hidden)}" if hidden else ""
    if hidden and predicted is None:
        told += ", which a prediction of a former version does not know"
    return told


def _print_transfers(console: Console, summary: RunSummary) -> None:
    """Seconds and bytes of a step by transfer; nothing where ranks exchanged nothing."""
    from meseta.report.prediction import compare_transfers

    found = compare_transfers(summary)
    if not found:
        return
    whats = ("ms", "ms exposed", "kB inside", "kB across")
    heads = ["transfer", *(f"{what} {who}" for what in whats for who in ("pred.", "meas."))]
    table = _table("transfers of a step, mean over ranks", heads)
    knows_waits = summary.predicted is not None and summary.predicted.overlap is not None
    for one in found:
        both = (one.predicted, one.measured)
        cells = [f"{1e3 * means.seconds:.3g}" for means in both]
        waits = [f"{1e3 * means.wait_s:.3g}" for means in both]
        cells += waits if knows_waits else ["", waits[1]]
        cells += [f"{means.intra_host_bytes / 1e3:,.4g}" for means in both]
        cells += [f"{means.inter_host_bytes / 1e3:,.4g}" for means in both]
        table.add_row(one.name, *cells)
    console.print(table)


def _print_misses(console: Console, record: RunRecord) -> None:
    """Rows that a step brings from where they lie far, by table; nothing where none does."""
    from meseta.report.prediction import compare_cache_misses

    found = compare_cache_misses(record)
    if not found:
        return
    table = _table("misses of a step, over all ranks", ["table", "predicted", "measured", "times as many"])
    whole = [sum(values) for values in zip(*found.values(), strict=True)]
    for name, (predicted, measured) in {**found, "all": (whole[0], whole[1])}.items():
        ratio = f"{measured / predicted:.2f}" if predicted >= 0.5 else ""  # of hardly any it says nothing
        table.add_row(name, f"{predicted:,.1f}", f"{measured:,.1f}", ratio)
    console.print(table)


def _print_codecs(console: Console, planned: PlanResult) -> None:
    """What each codec, and each way between hosts, would make of the step."""
    from meseta.planner.explain.codec_predictions import codec_headers, codec_rows, predict_codecs

    found = predict_codecs(planned)
    if found:
        table = _table("the same plan with other codecs (comm.precision); * as chosen", codec_headers(found))
        for cells in codec_rows(found):
            table.add_row(*cells)
        console.print(table)


def _print_difference(files: list[str]) -> None:
    """Rows and bytes that move between two plan files."""
    from meseta.planner.explain.difference import diff_plans
    from meseta.planner.search.kept_tables import read_plan_file

    if len(files) not in (2, 3):
        raise MesetaError(
            f"plan diff: name two plan files, and perhaps the config of their tables, got {len(files)} names"
        )
    (before, old_tables), (after, new_tables) = read_plan_file(files[0]), read_plan_file(files[1])
    specs = {table.name: table for table in (*old_tables, *new_tables)}
    if len(files) == 3:
        specs = {table.name: table for table in _load_tables(files[2])}
    found = diff_plans(before, after, specs)
    console = _console()
    table = _table("", ["table", "before", "after", "rows moved", "MB moved"])
    for one in found:
        table.add_row(
            one.table, one.before or "-", one.after or "-", f"{one.num_rows:,}", f"{one.num_bytes / 1e6:,.1f}"
        )
    if found:
        console.print(table)
    total = sum(one.num_bytes for one in found)
    taken = "" if len(files) == 3 else ", as float32 rows with row-wise Adagrad; name the config for their own types"
    console.print(
        f"{len(found):,} of {len(after.tables):,} tables differ; {sum(one.num_rows for one in found):,} rows and "
        f"{total / 1e6:,.1f} MB move{taken}",
        soft_wrap=True,
    )
