"""`meseta plan`: makes, compares and checks sharding plans, with reasons and costs. Workload files need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from meseta.cli.report import plain_console
from meseta.errors import MesetaError

if TYPE_CHECKING:
    from rich.console import Console

    from meseta.config import RunConfig
    from meseta.planner import DoesNotFitError, PlanResult
    from meseta.planner.explain.tables import TableChoice
    from meseta.report.record import RunRecord
    from meseta.spec import CostModel, TableSpec, Topology
    from meseta.spec.constraints import Constraints
    from meseta.telemetry.summary import RunSummary

MAX_RANKS = 16
"""Maximum number of ranks to print. If there are more, the fullest and the busiest ones are printed."""
MAX_TABLES = 40
"""Maximum number of tables to print without --all."""


class _PlanGroup(TyperGroup):
    """Group of the commands of `meseta plan`. A first word that names none of them belongs to `create`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["create", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_PlanGroup,
    short_help="Choose a sharding type, a tier and ranks for each table; compare plans, and check them with a run.",
    help="Create, check and compare plans. `meseta plan CONFIG` is short for `meseta plan create CONFIG`.",
    subcommand_metavar="COMMAND|CONFIG [ARGS]...",
    no_args_is_help=True,
)


@app.command("create")
def plan(
    config: Annotated[str, typer.Argument(help="Config of a run with prepared data, or a workload file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings such as train.batch_size=4096.")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option(help="YAML file of hosts and devices. Default: planner.topology of the config.")
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(help="YAML file of `meseta calibrate`. Default: that of the config, else documented constants."),
    ] = None,
    constraints: Annotated[
        Path | None, typer.Option(help="YAML file of constraints. Default: planner.constraints of the config.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="YAML file to write the plan to, for `plan:` of a config. Default: none.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="HTML page to write, which shows the plan. Default: none.")] = None,
    all_tables: Annotated[
        bool, typer.Option("--all", help="Print all tables. Default: the 40 with the highest cost.")
    ] = False,
) -> None:
    """Choose a sharding type, a tier and ranks for each table, and explain the choices."""
    from meseta.planner import DoesNotFitError
    from meseta.planner.explain.tables import explain_tables

    console = plain_console()
    task = _read_request(config, overrides or [], topology, cost, constraints)
    if task.note is not None:
        console.print(task.note, soft_wrap=True)
    try:
        planned = _find_plan(task)
    except DoesNotFitError as error:
        raise MesetaError(_infeasible_message(error)) from None
    if out is not None:
        planned.plan.save(out)
    choices = explain_tables(planned)
    if html is not None:
        from meseta.report.plan_page import write_plan_page

        write_plan_page(planned, choices, html, task.note)
    _print_plan(console, planned, choices, MAX_TABLES if not all_tables else len(choices))
    for path in (out, html):
        if path is not None:
            console.print(f"wrote {path}", soft_wrap=True)


@dataclass(frozen=True)
class _PlanRequest:
    """Arguments of a planning command: the workload, the topology and the inputs of the planner."""

    path: str
    config: RunConfig | None
    """`None` if `path` is a workload file."""
    topology: Topology
    note: str | None
    """Source of the devices' memory sizes. `None` if the topology specifies them."""
    cost_model: CostModel | None
    constraints: Constraints | None


def _read_request(
    path: str, overrides: list[str], topology: Path | None, cost: Path | None, rules: Path | None
) -> _PlanRequest:
    """Read a workload file or a config. Files that are not given on the command line are those of the config."""
    from meseta.planner.explain.memory import with_device_memory
    from meseta.spec import CostModel, Topology
    from meseta.spec.constraints import Constraints

    config = _read_config(path, overrides)
    if config is not None:
        topology, cost = topology or config.planner.topology, cost or config.planner.cost_model
        rules = rules or config.planner.constraints
    if topology is None:
        raise MesetaError("plan: specify the hosts with --topology FILE; `meseta topology detect` describes this one")
    machines, note = with_device_memory(Topology.load(topology), f"topology file {str(topology)!r}")
    cost_model = None if cost is None else CostModel.load(cost)
    constraints = None if rules is None else Constraints.load(rules)
    return _PlanRequest(path, config, machines, note, cost_model, constraints)


def _find_plan(task: _PlanRequest) -> PlanResult:
    """Return the plan of a workload file, or the plan that a run with this config makes on these hosts."""
    machines = task.topology, task.cost_model, task.constraints
    # Workload files are planned without an import of torch.
    if task.config is None:
        from meseta.planner import find_plan
        from meseta.spec.workload import load_workload

        return find_plan(load_workload(task.path), *machines)
    from meseta.train.setup.planning import find_run_plan

    return find_run_plan(task.config, *machines)


def _read_config(path: str, overrides: list[str]) -> RunConfig | None:
    """Return the config in a file, or `None` if the file describes a workload."""
    from meseta.config import load_config
    from meseta.config.load import read_file_or_example
    from meseta.spec.workload import is_workload_document

    try:
        document = read_file_or_example(path)
    except MesetaError as error:
        raise MesetaError(f"config {path!r}: {error}") from None
    if not is_workload_document(document):
        return load_config(path, overrides)
    if overrides:
        raise MesetaError(f"plan: {overrides[0]!r} overrides a key of a config, but {path!r} is a workload file")
    return None


def _load_tables(path: str) -> Sequence[TableSpec]:
    """Return the tables of a config or a workload file."""
    from meseta.spec.workload import load_workload
    from meseta.train.setup.source import make_row_source
    from meseta.train.setup.specs import make_specs

    config = _read_config(path, [])
    if config is None:
        return load_workload(path).tables
    return make_specs(config, make_row_source(config.data).dataset().select(config.data.labels, config.data.without))[0]


def _infeasible_message(error: DoesNotFitError) -> str:
    """Format the proof that no plan fits, and one line per change that would make it fit."""
    lines = [f"{error.certificate}."]
    if error.fixes:
        lines.append("Each of these changes makes it fit:")
        lines += [f"  {1e3 * fix.step_s:>9.4g} ms per step: {fix.description}" for fix in error.fixes]
    else:
        lines.append("No single change makes it fit; use more or larger machines, or smaller tables.")
    return "\n".join(lines)


def _table(title: str, columns: list[str]) -> Any:
    """Create a table whose text columns wrap in a narrow terminal and whose numeric columns do not."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        is_text = not number or name in ("scheme", "runner-up", "ranks", "before", "after")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def _print_plan(console: Console, planned: PlanResult, choices: list[TableChoice], num_tables: int) -> None:
    """Print a summary of the plan, its ranks and its tables."""
    from meseta.planner.explain.tables import format_ranks

    prediction, problem, bound = planned.prediction, planned.problem, planned.bound
    topology, step_s = problem.topology, planned.prediction.step_s
    samples = problem.workload.batch_size / step_s
    origin = "measured here" if problem.cost_model.is_measured else f"documented for {problem.cost_model.device}"
    alone = ""
    if problem.cost_model.neural is not None:
        origin += ", corrected by networks"
        alone = f" by the constants alone, which predict {1e3 * planned.constants_step_s:.4g} ms for this plan"
    lines = [
        f"{len(planned.plan.tables):,} tables on {topology.num_hosts} x {topology.devices_per_host} {topology.device} "
        f"ranks{_exchange_text(planned)}; constants {origin}",
        f"step {1e3 * step_s:.4g} ms, {samples:,.0f} samples/s; rank {prediction.bottleneck} has the longest "
        f"lookup and update; found by: {planned.origin}",
        f"bound {1e3 * bound.step_s:.4g} ms: no plan of these sharding types is faster ({bound.reason}){alone}; gap "
        f"{100 * bound.relative_gap(planned.constants_step_s):.1f} %",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    _print_ranks(console, planned)
    _print_cache(console, planned)
    _print_overlap(console, planned)
    _print_codecs(console, planned)
    table = _table("tables", ["table", "scheme", "ranks", "ms of a rank", "MB", "runner-up", "ms per step with it"])
    for one in choices[:num_tables]:
        other = ("none", "") if one.runner_up is None else (one.runner_up, f"{1e3 * one.runner_up_s:.4g}")
        size = f"{one.num_bytes / 1e6:,.1f}"
        table.add_row(
            " + ".join(one.tables), one.scheme, format_ranks(one.ranks), f"{1e3 * one.rank_s:.3g}", size, *other
        )
    console.print(table)
    if len(choices) > num_tables:
        console.print(f"{len(choices) - num_tables:,} more tables with lower cost; --all prints them", soft_wrap=True)


def _exchange_text(planned: PlanResult) -> str:
    """Return the exchange algorithms between hosts, or an empty string if the plan has none."""
    names = [name for name in (planned.plan.exchange, planned.plan.dense_exchange) if name is not None]
    return f", exchange {' with sums by '.join(names)}" if names else ""


def _print_ranks(console: Console, planned: PlanResult) -> None:
    """Print milliseconds per component and the maximum memory per tier, of all ranks or of the fullest and busiest."""
    from meseta.planner.explain.memory import describe_fullest_ranks
    from meseta.spec.stages import STEP_COMPONENTS

    prediction = planned.prediction
    ranks = prediction.most_loaded_ranks(MAX_RANKS)
    title = "ranks: ms per step and peak MB" + (
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
    """Print the cache misses per step by table, and step times for other cache sizes. Prints nothing without misses."""
    from meseta.planner.explain.memory import MISS_HEADERS, STEP_HEADERS, miss_rows, step_rows_by_share

    missed = miss_rows(planned)
    if not missed:
        return
    for title, heads, rows in (
        ("rows fetched from backing stores per step", MISS_HEADERS, missed),
        ("step time by the share of these tables' bytes in the cache", STEP_HEADERS, step_rows_by_share(planned)),
    ):
        table = _table(title, list(heads))
        for cells in rows:
            table.add_row(*cells)
        console.print(table)


def _print_overlap(console: Console, planned: PlanResult) -> None:
    """Print the hidden part of each transfer. Prints nothing if no transfer is overlapped."""
    from meseta.planner.explain.communication import OVERLAP_HEADERS, overlap_rows, overlap_title

    rows = overlap_rows(planned.prediction)
    if not rows or not planned.problem.workload.overlap:
        return
    table = _table(overlap_title(planned), list(OVERLAP_HEADERS))
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


@app.command()
def check(run_dir: Annotated[Path, typer.Argument(help="Folder of a run that has ended.")]) -> None:
    """Compare predicted and measured times of a run by component, rank and transfer."""
    from meseta.report.prediction import compare_components
    from meseta.report.record import read_run

    record = read_run(run_dir)
    summary = record.summary
    comparisons = compare_components(summary)
    if not comparisons or summary is None or summary.predicted is None:
        raise MesetaError(
            f"plan check: run {str(run_dir)!r} has no predicted and measured times in its summary.json; they are "
            "written when a run of this version of Meseta ends"
        )
    console = plain_console()
    table = _table("ms per step", ["component", "rank", "predicted", "measured", "measured / predicted"])
    for one in comparisons:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        times = f"{1e3 * one.predicted_s:.3g}", f"{1e3 * one.measured_s:.3g}", ratio
        table.add_row(one.component, str(one.rank), *times)
    console.print(table)
    _print_transfers(console, summary)
    _print_misses(console, record)
    measured: dict[int, float] = {}
    for one in comparisons:
        measured[one.rank] = measured.get(one.rank, 0.0) + one.measured_s
    console.print(
        # The time of a step is that of its slowest rank.
        f"step predicted {1e3 * summary.predicted.step_s:.4g} ms, timed {1e3 * max(measured.values()):.4g} ms on the "
        f"slowest rank; constants {summary.predicted.constants}{_overlap_text(summary)}",
        soft_wrap=True,
    )


def _overlap_text(summary: RunSummary) -> str:
    """Return the hidden transfers of a run, and a note if its prediction ignores overlap."""
    hidden = [] if summary.overlap is None else summary.overlap.hidden
    predicted = summary.predicted.overlap if summary.predicted is not None else None
    text = f"; hidden: {', '.join(hidden)}" if hidden else ""
    if hidden and predicted is None:
        text += ", which the prediction of an older version does not include"
    return text


def _print_transfers(console: Console, summary: RunSummary) -> None:
    """Print seconds and bytes per step by transfer. Prints nothing if the ranks exchanged nothing."""
    from meseta.report.prediction import compare_transfers

    transfers = compare_transfers(summary)
    if not transfers:
        return
    whats = ("ms", "ms exposed", "kB inside", "kB across")
    heads = ["transfer", *(f"{what} {who}" for what in whats for who in ("pred.", "meas."))]
    table = _table("transfers per step, mean over ranks", heads)
    # Summaries of older versions have no predicted exposed times.
    knows_waits = summary.predicted is not None and summary.predicted.overlap is not None
    for one in transfers:
        both = (one.predicted, one.measured)
        cells = [f"{1e3 * means.seconds:.3g}" for means in both]
        waits = [f"{1e3 * means.wait_s:.3g}" for means in both]
        cells += waits if knows_waits else ["", waits[1]]
        cells += [f"{means.intra_host_bytes / 1e3:,.4g}" for means in both]
        cells += [f"{means.inter_host_bytes / 1e3:,.4g}" for means in both]
        table.add_row(one.name, *cells)
    console.print(table)


def _print_misses(console: Console, record: RunRecord) -> None:
    """Print predicted and measured cache misses per step by table. Prints nothing without misses."""
    from meseta.report.prediction import compare_cache_misses

    misses = compare_cache_misses(record)
    if not misses:
        return
    table = _table("misses per step, over all ranks", ["table", "predicted", "measured", "measured / predicted"])
    whole = [sum(values) for values in zip(*misses.values(), strict=True)]
    for name, (predicted, measured) in {**misses, "all": (whole[0], whole[1])}.items():
        ratio = f"{measured / predicted:.2f}" if predicted >= 0.5 else ""  # Meaningless for very few misses.
        table.add_row(name, f"{predicted:,.1f}", f"{measured:,.1f}", ratio)
    console.print(table)


def _print_codecs(console: Console, planned: PlanResult) -> None:
    """Print the predicted step time of this plan with each codec and each exchange algorithm."""
    from meseta.planner.explain.communication import codec_headers, codec_rows, predict_codecs

    predictions = predict_codecs(planned)
    if predictions:
        table = _table(
            "the same plan with other codecs (comm.precision); * is the chosen one", codec_headers(predictions)
        )
        for cells in codec_rows(predictions):
            table.add_row(*cells)
        console.print(table)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="Plan file.")],
    after: Annotated[Path, typer.Argument(help="Plan file to compare with the first one.")],
    config: Annotated[
        str | None,
        typer.Argument(
            help="Config or workload file with the data types and optimizers of the tables.",
            show_default="float32 rows with row-wise Adagrad",
        ),
    ] = None,
) -> None:
    """Count the rows and bytes that move between two plans, by table."""
    from meseta.planner.explain.tables import diff_plans
    from meseta.planner.search.kept_tables import read_plan_file

    (old_plan, old_tables), (new_plan, new_tables) = read_plan_file(str(before)), read_plan_file(str(after))
    specs = {table.name: table for table in (*old_tables, *new_tables)}
    if config is not None:
        specs = {table.name: table for table in _load_tables(config)}
    differences = diff_plans(old_plan, new_plan, specs)
    console = plain_console()
    table = _table("", ["table", "before", "after", "rows moved", "MB moved"])
    for one in differences:
        table.add_row(
            one.table, one.before or "-", one.after or "-", f"{one.num_rows:,}", f"{one.num_bytes / 1e6:,.1f}"
        )
    if differences:
        console.print(table)
    total = sum(one.num_bytes for one in differences)
    # Plan files do not contain the data types and optimizers of the tables.
    taken = "" if config is not None else ", for float32 rows with row-wise Adagrad; add the config to use its types"
    console.print(
        f"{len(differences):,} of {len(new_plan.tables):,} tables differ; "
        f"{sum(one.num_rows for one in differences):,} rows and {total / 1e6:,.1f} MB move{taken}",
        soft_wrap=True,
    )
