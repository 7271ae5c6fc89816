"""`meseta train CONFIG.yaml [key=value ...] [--nproc N]`: a run, or the rest of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meseta.cli.launch import is_launched, run_ranks


def train(
    config: Annotated[Path, typer.Argument(help="YAML config of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as train.batch_size=4096.")
    ] = None,
    nproc: Annotated[int, typer.Option(help="Ranks on this machine. torchrun works too.")] = 1,
) -> None:
    """Train a model, evaluate it, and write a report; started again, go on from the newest checkpoint."""
    from meseta.config import load_config

    settings = load_config(config, overrides or [])
    if nproc != 1 and not is_launched():
        sys.exit(run_ranks(sys.argv[1:], nproc))

    from meseta.train.interruption import Stopped
    from meseta.train.session import session
    from meseta.train.trainer import Trainer

    try:
        with session(settings) as world:
            summary = Trainer(settings, world).run()
    except Stopped as stopped:
        raise typer.Exit(stopped.exit_code) from None
    if world.rank == 0:
        _print_result(summary, settings.run_dir)


def _print_result(summary: dict[str, Any], run_dir: Path) -> None:
    test, teacher = summary["test"], summary["teacher"]
    print(f"test AUC {_number(test['auc'])}  NE {_number(test['ne'])}  logloss {_number(test['logloss'])}  "
          f"calibration {_number(test['calibration'])}  ({test['num_samples']:,} samples)")  # fmt: skip
    if teacher:
        print(f"best reachable: AUC {teacher['auc']:.4f}  NE {teacher['ne']:.4f}  (the teacher's, on the same rows)")
    speed = f"{summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else "no step was left to do"
    print(f"{summary['num_samples']:,} samples in {summary['train_s']:.1f} s of training, {speed}, "
          f"{summary['num_ranks']} rank{'s' * (summary['num_ranks'] > 1)}")  # fmt: skip
    for what, outside in (("training", summary["ids_outside"]), ("the test split", test.get("ids_outside"))):
        if outside:
            counts = ", ".join(f"{feature} {count:,}" for feature, count in outside.items())
            print(f"ids outside their table in {what}, handled as embedding.id_policy says: {counts}")
    print(f"report: {run_dir / 'report.html'}")


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
