"""Choice of one width per table that minimizes the total size within a loss budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meseta.checkpoint.averages import average_values
from meseta.checkpoint.files.block import group_files_by_block, read_chain
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.files.quantization import decode_column, encode_column, estimate_row_bytes
from meseta.checkpoint.loading import fill_rows
from meseta.checkpoint.manifest import QUANTIZED, read_manifest
from meseta.checkpoint.row_map import RowMap
from meseta.config.row_bits import ROW_BIT_WIDTHS, BitsFile, RowBits, TableBits
from meseta.data.read.batch_reader import BatchReader
from meseta.spec import MesetaError
from meseta.storage import ROW, as_stored
from meseta.storage.table import from_stored
from meseta.system.remote import Location
from meseta.telemetry.metrics import validation_split
from meseta.train.evaluate import evaluate
from meseta.train.run_dir import RunDir
from meseta.train.setup.source import make_row_source
from meseta.train.trained_model import TrainedModel, open_trained

# Maximum number of candidate points per table. Above it, losses are rounded up to this many levels.
_MAX_POINTS = 20_000
# Factor by which the allowed loss is reduced, at least, after a choice exceeds the budget.
_BACKOFF_FACTOR = 0.8


@dataclass(frozen=True, kw_only=True)
class MeasuredWidth:
    """Size and loss of one table at one width."""

    bits: RowBits | None
    """Width of the rows. `None` means exact."""
    num_bytes: int
    """Size of the table in a full checkpoint."""
    ne_loss: float
    """Relative increase of the normalized entropy."""


def choose_widths(
    widths: Mapping[str, Sequence[MeasuredWidth]], budget: float, measure: Callable[[Mapping[str, RowBits]], float]
) -> tuple[dict[str, MeasuredWidth], float]:
    """Choose one width per table. Return (widths by table, measured loss of all chosen widths together), within
    `budget`.

    Args:
        widths: Measured widths of each table, including an exact one.
        budget: Maximum relative increase of the normalized entropy.
        measure: Measures the loss of a choice, given the tables that are not exact.
    """
    # A width may improve the metric by chance. Count a small loss, so that it can still be replaced if a choice exceeds
    # the budget.
    least = budget / (1000 * len(widths))
    losses = {name: [0.0 if w.bits is None else max(w.ne_loss, least) for w in of] for name, of in widths.items()}
    allowed = budget
    # Losses of single tables are added. If the measured loss of a choice exceeds the budget, repeat with a smaller sum.
    # This ends, because exact widths have no loss.
    while True:
        places = _minimize_bytes([[w.num_bytes for w in of] for of in widths.values()], [*losses.values()], allowed)
        chosen = {name: of[place] for (name, of), place in zip(widths.items(), places, strict=True)}
        narrow = {name: width.bits for name, width in chosen.items() if width.bits is not None}
        together = measure(narrow) if narrow else 0.0
        if together <= budget:
            return chosen, together
        added = sum(losses[name][place] for name, place in zip(widths, places, strict=True))
        allowed = added * min(_BACKOFF_FACTOR, budget / together)


def _minimize_bytes(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], allowed: float) -> list[int]:
    """Return the index of the entry of each table with the smallest total size whose total loss is at most
    `allowed`."""
    # Dynamic program over tables. Points that another one beats in both loss and size are dropped.
    loss, size = np.zeros(1), np.zeros(1)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for of_sizes, of_losses in zip(sizes, losses, strict=True):
        all_losses = (loss[:, None] + np.asarray(of_losses)).ravel()
        all_sizes = (size[:, None] + np.asarray(of_sizes, np.float64)).ravel()
        if len(all_losses) > _MAX_POINTS:
            step = allowed / _MAX_POINTS
            all_losses = np.ceil(all_losses / step) * step
        order = np.lexsort((all_losses, all_sizes))  # By (size, loss).
        order = order[all_losses[order] <= allowed]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], all_losses[order]]))[:-1]
        order = order[all_losses[order] < best_before]
        steps.append((order // len(of_sizes), order % len(of_sizes)))
        loss, size = all_losses[order], all_sizes[order]
    place, places = 0, list[int]()  # The first point has the smallest size.
    for before, taken in reversed(steps):
        places.append(int(taken[place]))
        place = int(before[place])
    return places[::-1]


OnWidth = Callable[[str, RowBits, float | None], None]
"""Called with (table, bits, loss) for each width. The loss is `None` if a larger width already exceeds the budget."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advised widths and their effect."""

    bits_file: BitsFile
    """Content of the file to write."""
    ne_loss: float
    """Relative increase of the normalized entropy with all tables at their widths."""
    num_bytes: int
    """Size of all tables at their widths."""
    exact_bytes: int
    """Size of all exact tables."""


def check_advice(budget: float, restores: int, out: Path) -> None:
    """Raise MesetaError if the arguments are invalid or the result could not be written, before a long measurement."""
    if not (math.isfinite(budget) and budget > 0):
        raise MesetaError(
            f"checkpoint advise: --budget must be a positive number, got {budget}; 0.0001 is 0.01 % of NE"
        )
    if restores < 1:
        raise MesetaError(
            f"checkpoint advise: --restores must be at least 1, got {restores}; without restores nothing is lost"
        )
    if out.is_dir() or not out.parent.is_dir():
        raise MesetaError(
            f"checkpoint advise: --out {str(out)!r} cannot be a file; choose a file in an existing folder"
        )


@contextmanager
def open_advisor(
    run_dir: Path, restores: int, data: Path | None = None, storage_dir: Path | None = None
) -> Iterator[BitsAdvisor]:
    """Context manager that loads the final checkpoint of a run and yields its advisor.

    It measures the validation split, or the test split if there is none. Raises MesetaError under the conditions of
    `load_trained`, or if the checkpoint is quantized.
    """
    run = RunDir(run_dir)
    split = validation_split(make_row_source(run.load_config().data, data).dataset().splits)
    with open_trained(run_dir, split, data, storage_dir=storage_dir) as trained:
        path = run.final_checkpoint()
        assert path is not None  # open_trained has loaded it.
        yield BitsAdvisor(trained, path, restores)


# The loss of several restores is measured with one quantization error, multiplied by the root of their number. Errors
# of rows that are trained in between are independent, so their squares add. This is an upper bound: untrained rows are
# quantized to the same values again, and training corrects errors.
class BitsAdvisor:
    """Measures one exact checkpoint on one split, in this process."""

    def __init__(self, trained: TrainedModel[BatchReader], path: Location, restores: int) -> None:
        self.split = trained.reader.split
        self._trained_model = trained
        self._root = path
        self._num_restores = restores
        manifest = read_manifest(path)
        if QUANTIZED in manifest:
            raise MesetaError(
                f"checkpoint advise: {str(path)!r} has quantized rows itself; choose a run that has ended, or whose "
                "last checkpoint is exact"
            )
        self._tables: Mapping[str, Any] = manifest["tables"]
        self._state: Mapping[str, Any] = manifest["state"]
        self._exact_ne = self._mean_ne()

    @property
    def tables(self) -> list[str]:
        """Names of the measured tables."""
        return list(self._tables)

    @property
    def num_widths(self) -> int:
        """Maximum number of measurements."""
        return len(self._tables) * len(ROW_BIT_WIDTHS)

    def advise(self, budget: float, on_width: OnWidth) -> Advice:
        """Measure each table separately, choose widths, and measure the chosen widths together."""
        widths = {
            name: [
                MeasuredWidth(bits=None, num_bytes=self._num_bytes(name, None), ne_loss=0.0),
                *self._measure_table(name, budget, on_width),
            ]
            for name in self._tables
        }
        chosen, ne_loss = choose_widths(widths, budget, self.ne_loss)
        tables = {name: TableBits(bits=width.bits or "exact") for name, width in chosen.items()}
        run = str(self._trained_model.config.run_dir)
        return Advice(
            bits_file=BitsFile(tables=tables, run=run, split=self.split, restores=self._num_restores, ne_loss=ne_loss),
            ne_loss=ne_loss,
            num_bytes=sum(width.num_bytes for width in chosen.values()),
            exact_bytes=sum(of_table[0].num_bytes for of_table in widths.values()),
        )

    def ne_loss(self, bits: Mapping[str, RowBits]) -> float:
        """Return the relative increase of the normalized entropy with these widths. Other tables are exact."""
        for name, width in bits.items():
            self._fill_table(name, width)
        loss = self._mean_ne() / self._exact_ne - 1
        for name in bits:
            self._fill_table(name, None)
        return loss

    def _measure_table(self, name: str, budget: float, on_width: OnWidth) -> Iterator[MeasuredWidth]:
        """Measure widths from the largest down, until one exceeds the budget."""
        loss = 0.0
        for bits in ROW_BIT_WIDTHS:
            if loss <= budget:
                loss = self.ne_loss({name: bits})
                on_width(name, bits, loss)
                yield MeasuredWidth(bits=bits, num_bytes=self._num_bytes(name, bits), ne_loss=loss)
            else:
                on_width(name, bits, None)

    def _mean_ne(self) -> float:
        trained = self._trained_model
        tasks = evaluate(trained.model, trained.reader, trained.world, logit_shift=trained.logit_shift).tasks
        ne = fmean(metrics.ne for metrics in tasks.values())
        if not (math.isfinite(ne) and ne > 0):
            raise MesetaError(
                f"checkpoint advise: split {self.split!r} has no normalized entropy, because its labels have one class "
                "only or its logits are not finite; prepare the data with more rows in this split"
            )
        return ne

    def _fill_table(self, name: str, bits: RowBits | None) -> None:
        """Load the rows of a table from the checkpoint. `bits` adds the error of this width."""
        schema = BlockSchema.from_dict(self._tables[name])
        for files in group_files_by_block(self._tables[name]):
            exact = read_chain(self._root, schema, files)
            rows = exact[ROW] if bits is None else self._with_quantization_error(schema, exact[ROW], bits)
            values = {ROW: average_values(self._state, {**exact, ROW: rows})}
            first, stop = files[0]["first_row"], files[0]["first_row"] + files[0]["num_rows"]
            for piece in self._trained_model.model.embeddings.shards:
                if piece.spec.name == name:
                    row_map = RowMap.identity(piece.spec.num_embeddings).to_targets(*piece.shard.rows)
                    fill_rows(piece, schema, row_map.from_rows(first, stop), values)

    def _with_quantization_error(self, schema: BlockSchema, rows: np.ndarray, bits: RowBits) -> np.ndarray:
        column = schema.columns[0]
        stored = encode_column(schema, column, rows, bits)
        if stored.row_format is None:
            return rows
        restored = decode_column(schema, column, stored.values, stored.row_format)
        if self._num_restores == 1:
            return restored
        dtype: torch.dtype = getattr(torch, column.dtype)
        exact, once = (from_stored(array, dtype).float() for array in (rows.copy(), restored))
        return as_stored(torch.lerp(exact, once, math.sqrt(self._num_restores)).to(dtype)).numpy()

    def _num_bytes(self, name: str, bits: RowBits | None) -> int:
        entry = self._tables[name]
        return int(entry["num_embeddings"]) * estimate_row_bytes(BlockSchema.from_dict(entry), bits)
