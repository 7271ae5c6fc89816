"""`meseta predict RUN --out FILE`: predictions for a prepared dataset or raw files, in the order of the rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meseta.cli.evaluate import (
    DEFAULT_SPLIT,
    AverageOption,
    DataOption,
    EncodingOption,
    RunsArgument,
    UnseenOption,
    average_options,
    format_metrics,
    is_dataset,
    raw_row_options,
)
from meseta.cli.launch import run_ranks
from meseta.cli.prepare import comma_list, print_unseen
from meseta.cli.watch import load_time_limits
from meseta.errors import MesetaError
from meseta.system.ranks import is_distributed

if TYPE_CHECKING:
    from meseta.train.interop.output_tables import OutputColumns

ColumnsOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|NEW=OLD,...",
        help="Columns of FILE in order, such as user,score=prediction. OLD is row, a key, prediction or label (with "
        "several labels prediction.NAME and label.NAME). Keys listed here need no --keys. Default: all.",
    ),
]


def predict(
    run_dirs: RunsArgument,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="CSV or Parquet file to write: row, keys, prediction, label.")
    ],
    split: Annotated[str, typer.Option(help="Split to predict: train, test or valid (if present).")] = DEFAULT_SPLIT,
    data: DataOption = None,
    nproc: Annotated[int, typer.Option(help="Number of ranks on this machine.")] = 1,
    keys: Annotated[
        str, typer.Option(help="Input columns to copy, such as user,item. Prepared data always adds group and time.")
    ] = "",
    columns: ColumnsOption = "",
    encoding: EncodingOption = None,
    allow_unseen: UnseenOption = False,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best checkpoint. Default: the final weights, see train.finish.")
    ] = False,
    storage_dir: Annotated[
        Path | None,
        typer.Option(help="Folder on a local disk in which all tables are stored. Default: the tiers of the run."),
    ] = None,
    average: AverageOption = "probability",
) -> None:
    """Predict with a checkpoint of a run, or with the average of several runs. Writes one probability per row and
    label, in the order of the rows."""
    from meseta.train.interop.output_tables import OutputColumns, check_suffix

    # Check the options before ranks start.
    check_suffix(out)
    chosen, names = OutputColumns.parse(comma_list(columns)), comma_list(keys)
    chosen.check_keys(names)
    options = {"best": best, "storage_dir": storage_dir, **average_options(run_dirs, average)}
    options |= raw_row_options("predict", data, split, encoding=encoding, allow_unseen=allow_unseen)
    # Ranks that torchrun or the launcher has started run the command themselves.
    if nproc != 1 and not is_distributed():
        sys.exit(run_ranks(sys.argv[1:], nproc, load_time_limits(run_dirs[0])))

    try:
        _predict(run_dirs[0], out, split, data, names, chosen, **options)
    except MesetaError as error:
        raise chosen.explain_missing(error) from None


def _predict(
    run_dir: Path,
    out: Path,
    split: str,
    data: Sequence[str] | None,
    keys: Sequence[str],
    columns: OutputColumns,
    **options: Any,
) -> None:
    names = columns.keys if columns.pairs else keys
    if data and not is_dataset(data):
        _predict_rows(run_dir, out, data, names, columns, **options)
        return
    from meseta.train.predictions import write_predictions
    from meseta.train.trained_model import open_trained

    folder = Path(data[0]) if data else None
    # data.filter is ignored, so that predictions match all rows of the files.
    with open_trained(run_dir, split, folder, ignore_filter=True, **options) as trained:
        num_rows = write_predictions(
            trained.model, trained.reader, trained.world, out, names, trained.correction, columns=columns
        )
    if trained.world.rank == 0:
        print(f"wrote {num_rows:,} predictions of {split} to {out}")


def _predict_rows(
    run_dir: Path, out: Path, patterns: Sequence[str], keys: Sequence[str], columns: OutputColumns, **options: Any
) -> None:
    """Predict raw rows, and print metrics if the rows have labels."""
    from meseta.train.predictions import write_raw_predictions
    from meseta.train.trained_model import open_for_raw_rows

    with open_for_raw_rows(run_dir, patterns, keys=keys, **options) as trained:
        predicted = write_raw_predictions(
            trained.model, trained.reader, trained.world, out, trained.correction, columns
        )
    if trained.world.rank == 0:
        print(f"wrote {predicted.num_rows:,} predictions to {out}")
        print_unseen(predicted.unseen)
        for other in trained.others:
            if other.unseen is not None and other.unseen != predicted.unseen:
                print(f"  as encoded by {other.path}:")
                print_unseen(other.unseen)
        for label, line in predicted.metrics.items():
            print(f"{label}: {format_metrics(line)}")
        if predicted.note:
            print(f"note: {predicted.note}", file=sys.stderr)
