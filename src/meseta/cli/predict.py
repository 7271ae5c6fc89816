"""`meseta predict RUN --out FILE.parquet`: predictions in the order of the rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meseta.cli.launch import is_launched, run_ranks


def predict(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a training run.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write: row, keys, prediction, label.")],
    split: Annotated[str, typer.Option(help="train, test, or valid where the dataset has one.")] = "test",
    data: Annotated[Path | None, typer.Option(help="Another prepared dataset with the same features.")] = None,
    nproc: Annotated[int, typer.Option(help="Ranks on this machine.")] = 1,
    keys: Annotated[
        str, typer.Option(help="Columns of the prepared data to hand through, as user,item; group and time always are.")
    ] = "",
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="The checkpoint of the best evaluation; else the newest, or what train.finish says."
        ),
    ] = False,
) -> None:
    """Predict with a checkpoint of a run: one probability per row and label, in the order of the split, with the row's
    number and keys."""
    if nproc != 1 and not is_launched():
        sys.exit(run_ranks(sys.argv[1:], nproc))

    from meseta.train.predictions import write_predictions
    from meseta.train.trained import open_trained

    names = [name.strip() for name in keys.split(",") if name.strip()]
    with open_trained(run_dir, split, data, best=best, every_row=True) as trained:
        num_rows = write_predictions(trained.model, trained.reader, trained.world, out, names, trained.shift)
    if trained.world.rank == 0:
        print(f"{num_rows:,} predictions of {split} in {out}")
