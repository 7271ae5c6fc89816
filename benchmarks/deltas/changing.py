"""Table whose rows change between saves, with Zipf ids."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from meseta import Plan, TableSpec
from meseta.config.row_bits import RowBits
from meseta.measure.synthetic_batches import zipf_ids
from meseta.optim import make_row_optimizer
from meseta.storage import TableShard

DRAWN_AT_ONCE = 1 << 17


def row_bits(table: str, bits: str) -> dict[str, RowBits]:
    return {} if bits == "exact" else {table: cast(RowBits, int(bits))}


class ChangingTable:
    """Table with row-wise Adagrad and change marks."""

    def __init__(self, num_rows: int, width: int, seed: int = 0) -> None:
        self.spec = TableSpec(name="table", num_embeddings=num_rows, embedding_dim=width)
        self.plan = Plan.from_dict({"tables": {"table": "table_wise"}}, [self.spec], 1)
        optimizer = make_row_optimizer(self.spec.optimizer)
        weight = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * 0.05
        [shard] = self.plan["table"].shards
        self.shard = TableShard(self.spec, shard, weight, optimizer.init(weight), optimizer)
        self._random = np.random.default_rng(seed)

    @property
    def num_bytes(self) -> int:
        return self.shard.num_bytes()

    def touch(self, share: float) -> int:
        """Change rows with Zipf ids until `share` of all has changed. Returns their number."""
        num_rows = self.spec.num_embeddings
        touched: NDArray[np.bool_] = np.zeros(num_rows, bool)
        while (count := int(touched.sum())) < share * num_rows:
            touched[zipf_ids(self._random, DRAWN_AT_ONCE, num_rows)] = True
        rows = torch.from_numpy(touched.nonzero()[0])
        change = torch.from_numpy(self._random.standard_normal(self.spec.embedding_dim, np.float32)) * 1e-3
        self.shard.weight[rows] += change
        for state in self.shard.state.values():
            state[rows] += 1e-6
        self.shard.marks.add(rows)
        return count
