"""A storage without resident rows: they are stored in a file in reverse order, and operators receive copies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.random_rows import table_key
from meseta.ops.row_marks import RowMarks
from meseta.ops.row_program.optimizer import RowOptimizer
from meseta.ops.row_update import TableRows
from meseta.optim import make_row_optimizer
from meseta.spec import Shard, TableSpec
from meseta.storage import ROW, TableShard, TableStorage, as_stored


class FileStorage(TableStorage):
    """One file per name of a value; open while the storage is."""

    def __init__(
        self,
        folder: Path,
        spec: TableSpec,
        shard: Shard,
        optimizer: RowOptimizer,
        *,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.spec, self.shard, self.optimizer, self.seed = spec, shard, optimizer, seed
        self._device = torch.device(device)
        first = TableShard.create(spec, shard, optimizer, seed=seed, device="cpu")
        self._like = {name: torch.empty_like(value, device="meta") for name, value in first.values.items()}
        self._files: dict[str, NDArray[Any]] = {}
        for name, value in first.values.items():
            path, array = folder / f"{len(self._files)}.bin", as_stored(value).numpy()
            self._files[name] = np.memmap(path, array.dtype, "w+", shape=array.shape)
        self._put(0, {name: as_stored(value).numpy() for name, value in first.values.items()})
        self._lent: TableRows | None = None
        self.marks = RowMarks(shard.num_rows, device)
        self.num_lent = 0
        self.num_copies = 0

    @property
    def values(self) -> Mapping[str, Tensor]:
        return self._like

    @property
    def device(self) -> torch.device:
        return self._device

    def acquire(self) -> TableRows:
        self.num_lent += 1
        if self._lent is None:
            self.num_copies += 1
            values = self._get(0, self.shard.num_rows)
            self._lent = TableRows(
                weight=values.pop(ROW),
                state=values,
                key=table_key(self.seed, f"{self.spec.name}/rounding"),
                first_row=self.shard.rows[0],
                first_column=self.shard.columns[0],
                marks=self.marks.words,
            )
        return self._lent

    def release(self) -> None:
        assert self._lent is not None and self.num_lent > 0
        lent = {ROW: self._lent.weight, **self._lent.state}
        self._put(0, {name: as_stored(value.detach()).cpu().numpy() for name, value in lent.items()})
        self.num_lent -= 1
        if self.num_lent == 0:
            for value in lent.values():  # who still has it shall see that it is no longer the table's
                value.detach().fill_(-77)
            self._lent = None

    def read(self, first: int, stop: int) -> dict[str, Tensor]:
        assert self._lent is None
        return self._get(first, stop)

    def write(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        assert self._lent is None
        self.marks.add_range(first, first + len(next(iter(values.values()))))
        self._put(first, values)

    def scatter(self, rows: Tensor, values: Mapping[str, NDArray[Any]]) -> None:
        for place, row in enumerate(rows.tolist()):
            self.write(row, {name: value[place : place + 1] for name, value in values.items()})

    def snapshot(self, reuse: TableStorage | None = None) -> TableStorage:
        values = self.read(0, self.shard.num_rows)
        return TableShard(self.spec, self.shard, values.pop(ROW).cpu(), values, self.optimizer, self.seed)

    def gather(self, rows: torch.Tensor) -> dict[str, Tensor]:
        return {name: value[rows].cpu() for name, value in self.read(0, self.shard.num_rows).items()}

    def _get(self, first: int, stop: int) -> dict[str, Tensor]:
        files = {}
        for name, file in self._files.items():
            stored = torch.from_numpy(file[::-1][first:stop].copy())
            files[name] = stored.view(self._like[name].dtype).to(self._device)
        return files

    def _put(self, first: int, values: Mapping[str, NDArray[Any]]) -> None:
        for name, source in values.items():
            assert source.dtype == self._files[name].dtype
            self._files[name][::-1][first : first + len(source)] = source


@contextmanager
def files_for_rows() -> Iterator[list[FileStorage]]:
    """Context manager that stores every table created inside in files, and yields its shards."""
    made: list[FileStorage] = []

    def make(pieces: Any, *, seed: int, device: Any, options: Any) -> tuple[FileStorage, ...]:
        first = len(made)
        for spec, shard in pieces:
            folder = Path(root) / str(len(made))
            folder.mkdir()
            optimizer = make_row_optimizer(spec.optimizer)
            made.append(FileStorage(folder, spec, shard, optimizer, seed=seed, device=device))
        return tuple(made[first:])

    with tempfile.TemporaryDirectory(prefix="meseta-rows-") as root, pytest.MonkeyPatch.context() as patch:
        for module in ("collection", "sharded"):
            patch.setattr(f"meseta.embedding.{module}.make_storages", make)
        yield made
