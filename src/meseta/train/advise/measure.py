"""What a trained model's figures lose where the rows of its tables come back from fewer bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from meseta.checkpoint.files.chain import group_files_by_block, read_chain
from meseta.checkpoint.files.layout import BlockSchema
from meseta.checkpoint.files.quantization import decode_column, encode_column, estimate_row_bytes
from meseta.checkpoint.loading import fill_shard
from meseta.checkpoint.manifest import QUANTIZED, read_manifest
from meseta.config.row_bits import ROW_BIT_WIDTHS, BitsFile, RowBits, TableBits
from meseta.data.read.batch_reader import BatchReader
from meseta.machine.remote import Location
from meseta.spec import MesetaError
from meseta.storage import ROW, as_stored
from meseta.storage.table import from_stored
from meseta.telemetry.splits import validation_split
from meseta.train.advise.choice import MeasuredWidth, choose_widths
from meseta.train.evaluate import evaluate
from meseta.train.run_dir import RunDir
from meseta.train.setup.source import make_row_source
from meseta.train.trained_model import TrainedModel, open_trained

OnWidth = Callable[[str, RowBits, float | None], None]
"""Called with each width of each table, and what it loses; None: a wider one has lost more than the budget."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Widths that are thought to stay within a budget."""

    bits_file: BitsFile
    """To write."""
    ne_loss: float
    """By what part the normalised entropy rises, all tables together."""
    num_bytes: int
    """Of all tables in these widths."""
    exact_bytes: int
    """Of all tables as they are."""


def check_advice(budget: float, restores: int, out: Path) -> None:
    """Raise MesetaError where no advice can be given, or written, before hours are spent on it."""
    if not (math.isfinite(budget) and budget > 0):
        raise MesetaError(
            f"checkpoint advise: --budget must be a positive number, got {budget}; 0.0001 is 0.01 % of NE"
        )
    if restores < 1:
        raise MesetaError(
            f"checkpoint advise: --restores must be at least 1, got {restores}; with none nothing is lost"
        )
    if out.is_dir() or not out.parent.is_dir():
        raise MesetaError(f"checkpoint advise: --out {str(out)!r} cannot be a file; name one in a folder that is there")


@contextmanager
def open_advisor(
    run_dir: Path, restores: int, data: Path | None = None, storage_dir: Path | None = None
) -> Iterator[BitsAdvisor]:
    """An advisor of the checkpoint that stands for a run, on the split valid, or test where there is none. Raises
    MesetaError as `load_trained` does, and for a checkpoint whose rows are in codes already."""
    run = RunDir(run_dir)
    split = validation_split(make_row_source(run.load_config().data, data).dataset().splits)
    with open_trained(run_dir, split, data, storage_dir=storage_dir) as trained:
        path = run.final_checkpoint()
        assert path is not None  # it was loaded
        yield BitsAdvisor(trained, path, restores)


class BitsAdvisor:
    """Measures one exact checkpoint of a run on one split of its data, in this process.

    What quantising, restoring and training on lose `restores` times is measured with one error of the codes, times the
    root of `restores`: errors of rows that have moved in between are independent, so that their squares add. Rows that
    nobody moves keep their bits, and training corrects: there will be no more than this.
    """

    def __init__(self, trained: TrainedModel[BatchReader], path: Location, restores: int) -> None:
        self.split = trained.reader.split
        """That is measured on."""
        self._trained_model = trained
        self._root = path
        self._num_restores = restores
        manifest = read_manifest(path)
        if QUANTIZED in manifest:
            raise MesetaError(
                f"checkpoint advise: {str(path)!r} has rows in codes itself; give a run that has ended, or whose last "
                "checkpoint is exact"
            )
        self._tables: Mapping[str, Any] = manifest["tables"]
        self._exact_ne = self._mean_ne()

    @property
    def tables(self) -> list[str]:
        """Names of those that are measured."""
        return list(self._tables)

    @property
    def num_widths(self) -> int:
        """The most that there is to measure."""
        return len(self._tables) * len(ROW_BIT_WIDTHS)

    def advise(self, budget: float, on_width: OnWidth) -> Advice:
        """Measure all tables, one at a time, then what the chosen widths lose together."""
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
        """By what part the normalised entropy rises where these tables have so many bits, and the others are exact."""
        for name, width in bits.items():
            self._fill_table(name, width)
        loss = self._mean_ne() / self._exact_ne - 1
        for name in bits:
            self._fill_table(name, None)
        return loss

    def _measure_table(self, name: str, budget: float, on_width: OnWidth) -> Iterator[MeasuredWidth]:
        """From the widest down, until one loses more than the budget."""
        loss = 0.0
        for bits in ROW_BIT_WIDTHS:
            if loss <= budget:
                loss = self.ne_loss({name: bits})
                on_width(name, bits, loss)
                yield MeasuredWidth(bits=bits, num_bytes=self._num_bytes(name, bits), ne_loss=loss)
            else:
                on_width(name, bits, None)

    def _mean_ne(self) -> float:
        """The mean over labels."""
        trained = self._trained_model
        tasks = evaluate(trained.model, trained.reader, trained.world, logit_shift=trained.logit_shift).tasks
        ne = fmean(figures.ne for figures in tasks.values())
        if not (math.isfinite(ne) and ne > 0):
            raise MesetaError(
                f"checkpoint advise: the split {self.split!r} has no normalised entropy, since its labels are of one "
                "class alone, or its logits are not finite; prepare the data with more rows in it"
            )
        return ne

    def _fill_table(self, name: str, bits: RowBits | None) -> None:
        """Give the model the rows of a table as they were saved, or as they come back from so many bits."""
        schema = BlockSchema.from_dict(self._tables[name])
        for files in group_files_by_block(self._tables[name]):
            rows = read_chain(self._root, schema, files)[ROW]
            values = {ROW: rows if bits is None else self._with_quantization_error(schema, rows, bits)}
            for piece in self._trained_model.model.embeddings.shards:
                if piece.spec.name == name:
                    fill_shard(piece, schema, files[0]["first_row"], values)

    def _with_quantization_error(self, schema: BlockSchema, rows: np.ndarray, bits: RowBits) -> np.ndarray:
        """The rows with the errors of their codes, of all restores together."""
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
