"""Formats the metrics of an evaluation as one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meseta.cli.launch import run_ranks
from meseta.cli.watch import load_time_limits
from meseta.system.ranks import is_distributed


def format_metrics(line: Mapping[str, Any]) -> str:
    """Format an entry of metrics.jsonl."""
    clamped = line.get("logloss_clamped")  # Missing in lines of older versions.
    return (
        f"AUC {_format_metric(line['auc'])}  NE {_format_metric(line['ne'])}  logloss "
        f"{_format_metric(line['logloss'])}{'' if clamped is None else f' (clamped {clamped:.4f})'}  "
        f"calibration {_format_metric(line['calibration'])}  ({line['num_samples']:,} samples)"
    )


def _format_metric(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    split: Annotated[
        str, typer.Option(help="Split to evaluate: train, test, or valid if the dataset has it.")
    ] = "test",
    data: Annotated[
        Path | None, typer.Option(help="Another prepared dataset with the same features. Default: that of the run.")
    ] = None,
    nproc: Annotated[int, typer.Option(help="Number of ranks on this machine.")] = 1,
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="Use the checkpoint of the best evaluation. Default: the final weights of the run, see train.finish.",
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Sparse feature by which metrics are segmented. May be repeated. Default: metrics.segments of the run."
        ),
    ] = None,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Folder on a local disk in which all tables are stored. Default: the tiers of the run."),
    ] = None,
) -> None:
    """Evaluate a checkpoint of a run on all rows of a split, and print the metrics as JSON."""
    # Ranks that torchrun or the launcher has started run the command themselves.
    if nproc != 1 and not is_distributed():
        sys.exit(run_ranks(sys.argv[1:], nproc, load_time_limits(run_dir)))

    from meseta.train.trained_model import open_trained

    with open_trained(run_dir, split, data, best=best, storage_dir=storage_dir) as trained:
        evaluation = trained.evaluate(by or ())
    if trained.world.rank == 0:
        line = {
            "run": str(run_dir),
            "step": trained.step,
            "split": split,
            **evaluation.to_dict(include_reliability=False),
        }
        print(json.dumps(line, indent=1))
