"""`meseta calibrate`: measures the cost of operators and collectives on this machine for `meseta plan`."""

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
"""Seconds to spend by default. Networks need more, because they learn from hundreds of shapes."""
MAX_BACKGROUND_LOAD = 0.5
"""Mean number of processors that other programs keep busy, above which a warning is printed."""


def calibrate(
    out: Annotated[Path, typer.Option(help="YAML file to which the cost model is written.")] = Path("cost.yaml"),
    threads: Annotated[int, typer.Option(min=1, help="Number of threads per rank.")] = 1,
    ranks: Annotated[int, typer.Option(min=2, help="Number of processes between which collectives are measured.")] = 2,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Seconds to spend. More time lowers the error. Default: 50, with --neural 120."),
    ] = None,
    disk: Annotated[
        Path | None, typer.Option(help="Also measure the disk of this folder, for tables in tier disk. Default: none.")
    ] = None,
    max_reads_per_s: Annotated[
        float | None,
        typer.Option(min=1.0, help="Limit on disk reads per second, as storage.max_reads_per_s. Default: no limit."),
    ] = None,
    neural: Annotated[
        bool, typer.Option("--neural", help="Also train neural networks that correct the predictions of the constants.")
    ] = False,
) -> None:
    """Measure lookups, updates, matrix products and collectives of CPU ranks, and fit the planner's cost model."""
    from meseta.measure.calibrate.calibration import calibrate as measure
    from meseta.system.files import check_writable_path

    # Report an unwritable file before the measurement, which takes about a minute.
    check_writable_path(out)
    if max_reads_per_s is not None and disk is None:
        raise MesetaError("calibrate: --max-reads-per-s needs a disk; name a folder on it with --disk")
    with _ProgressBar() as show:
        calibration = measure(
            threads, ranks, seconds or (DEFAULT_NEURAL_BUDGET_S if neural else DEFAULT_BUDGET_S), show
        )
        model, compared = calibration.cost_model, dict[str, "FitComparison"]()
        if neural:
            from meseta.measure.calibrate.neural import calibrate_networks

            model, compared = calibrate_networks(calibration, ranks, show)
        show("row cache and backing store", 1.0)
        model = replace(model, tiers=_measure_tiers(model, threads, disk, max_reads_per_s))
    model.save(out)
    _print_errors(calibration)
    if disk is not None:
        _print_disk(model.tiers)
    _print_networks(compared)
    typer.echo(f"wrote {out}")


def _measure_tiers(model: CostModel, threads: int, disk: Path | None, max_reads_per_s: float | None) -> TierCost:
    """Return the cost of cached and host rows on this machine, and that of disk rows if `disk` is given."""
    from meseta.measure.calibrate.disks import measure_disk
    from meseta.measure.calibrate.row_cache import measure_row_cache

    source = model.lookup.source
    if disk is not None:
        return measure_disk(disk, model.tiers, threads, source, max_reads_per_s)
    tiers = measure_row_cache(model.tiers, threads)
    return replace(tiers, source=f"cache and host memory: {source}; disk: {tiers.source}")


def _print_errors(calibration: Calibration) -> None:
    typer.echo(f"measured in {calibration.elapsed_s:.0f} s; error on held-out measurements:")
    for name, error in calibration.errors.items():
        typer.echo(
            f"  {name:<12} median {error.median:.1%}, 95th percentile {error.p95:.1%}, of {error.count}; "
            f"repeats differ by {error.repeat_spread:.1%}"
        )
    if calibration.background_load > MAX_BACKGROUND_LOAD:
        typer.echo(
            f"note: other programs kept {calibration.background_load:.1f} processors busy; calibrate again when the "
            f"machine is idle",
            err=True,
        )


def _print_disk(tiers: TierCost) -> None:
    typer.echo(
        f"disk: {1 / tiers.disk_row_s:,.0f} random reads/s, {1e6 * tiers.disk_processor_s:.2f} us of processor time "
        f"per read; sequential: {tiers.disk_bytes_per_s / 1e6:,.0f} MB/s read, "
        f"{tiers.disk_write_bytes_per_s / 1e6:,.0f} MB/s write"
    )


def _print_networks(compared: Mapping[str, FitComparison]) -> None:
    """Print the errors of the constants next to those with networks. `compared` is empty without networks."""
    if not compared:
        return
    typer.echo("constants | with networks, on held-out measurements: median, 95th percentile, rank correlation")
    for name, both in compared.items():
        texts = [
            f"{fit.error.median:>6.1%} {fit.error.p95:>6.1%} {fit.rank_correlation:.3f}"
            for fit in (both.constants, both.networks)
        ]
        typer.echo(f"  {name:<24}{texts[0]} | {texts[1]}, of {both.networks.error.count}")


class _ProgressBar:
    """Context manager that shows a progress bar on stderr. Call it with a description and the completed share."""

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
