"""`meseta calibrate`: what operators and collectives cost on this machine, for `meseta plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meseta.errors import MesetaError

if TYPE_CHECKING:
    from meseta.measure.calibrate.calibration import Calibration
    from meseta.measure.calibrate.neural import FitComparison
    from meseta.spec.cost_model import CostModel, TierCost

DEFAULT_BUDGET_S, DEFAULT_NEURAL_BUDGET_S = 50.0, 120.0
"""Time to spend; networks learn from hundreds of combinations."""
MAX_BACKGROUND_LOAD = 0.5
"""Processors of others, above which figures are doubtful."""


def calibrate(
    out: Annotated[Path, typer.Option(help="YAML file of the cost model.")] = Path("cost.yaml"),
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank.")] = 1,
    ranks: Annotated[int, typer.Option(min=2, help="Processes that collectives are measured between.")] = 2,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Time to spend; more combinations, better figures. 50; with --neural 120."),
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="Measure rows on the disk of this folder too, for tables in tier disk.")
    ] = None,
    max_reads_per_s: Annotated[
        float | None, typer.Option(min=1.0, help="Reads of the disk a second at most, as storage.max_reads_per_s.")
    ] = None,
    neural: Annotated[
        bool, typer.Option("--neural", help="Train networks too, which correct what the constants predict.")
    ] = False,
) -> None:
    """Measure lookups, updates, matrix products and collectives of CPU ranks here, and fit the planner's cost model."""
    from meseta.machine.files import check_writable_path
    from meseta.measure.calibrate.calibration import calibrate as measure

    check_writable_path(out)
    if max_reads_per_s is not None and disk is None:
        raise MesetaError("calibrate: --max-reads-per-s is of a disk; name a folder on it with --disk")
    with _ProgressBar() as show:
        found = measure(threads, ranks, seconds or (DEFAULT_NEURAL_BUDGET_S if neural else DEFAULT_BUDGET_S), show)
        model, compared = found.cost_model, dict[str, "FitComparison"]()
        if neural:
            from meseta.measure.calibrate.neural import calibrate_networks

            model, compared = calibrate_networks(found, ranks, show)
        show("rows near and far", 1.0)
        model = replace(model, tiers=_measure_tiers(model, threads, disk, max_reads_per_s))
    model.save(out)
    _print_errors(found)
    if disk is not None:
        _print_disk(model.tiers)
    _print_networks(compared)
    typer.echo(f"wrote {out}")


def _measure_tiers(model: CostModel, threads: int, disk: Path | None, max_reads_per_s: float | None) -> TierCost:
    """Rows near and far as measured here; the disk too where there is one."""
    from meseta.measure.calibrate.disks import measure_disk
    from meseta.measure.calibrate.row_cache import measure_row_cache

    source = model.lookup.source
    if disk is not None:
        return measure_disk(disk, model.tiers, threads, source, max_reads_per_s)
    tiers = measure_row_cache(model.tiers, threads)
    return replace(tiers, source=f"rows near, and far in memory: {source}; disk: {tiers.source}")


def _print_errors(found: Calibration) -> None:
    typer.echo(f"measured in {found.elapsed_s:.0f} s; error on what the fit has not seen:")
    for name, error in found.errors.items():
        typer.echo(
            f"  {name:<12} median {error.median:.1%}, 95th percentile {error.p95:.1%}, of {error.count}; "
            f"repeats lie {error.repeat_spread:.1%} apart"
        )
    if found.background_load > MAX_BACKGROUND_LOAD:
        typer.echo(
            f"note: other programs kept {found.background_load:.1f} processors busy; calibrate again when the machine "
            f"is quiet",
            err=True,
        )


def _print_disk(tiers: TierCost) -> None:
    typer.echo(
        f"disk: {1 / tiers.disk_row_s:,.0f} random reads/s, {1e6 * tiers.disk_processor_s:.2f} us of a rank for each; "
        f"{tiers.disk_bytes_per_s / 1e6:,.0f} MB/s read and {tiers.disk_write_bytes_per_s / 1e6:,.0f} MB/s written in "
        "sequence"
    )


def _print_networks(compared: Mapping[str, FitComparison]) -> None:
    """Constants and networks side by side."""
    if not compared:
        return
    typer.echo("constants alone | with networks, on what neither has seen: median, 95th percentile, rank correlation")
    for name, both in compared.items():
        texts = [
            f"{own.error.median:>6.1%} {own.error.p95:>6.1%} {own.rank_correlation:.3f}"
            for own in (both.constants, both.networks)
        ]
        typer.echo(f"  {name:<24}{texts[0]} | {texts[1]}, of {both.networks.error.count}")


class _ProgressBar:
    """A bar on standard error; called with what happens and the share that is done."""

    def __enter__(self) -> _ProgressBar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self.progress.start()
        self.task = self.progress.add_task("starting", total=1.0)
        return self

    def __call__(self, text: str, share: float) -> None:
        self.progress.update(self.task, description=text, completed=min(share, 1.0))

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
