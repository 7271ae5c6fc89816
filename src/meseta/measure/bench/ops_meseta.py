"""Benchmark target of Meseta's embedding operators: the module that users call, and its lookup operator alone."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import torch

from meseta.embedding import EmbeddingBagCollection
from meseta.measure.bench.workloads import make_optimizer
from meseta.measure.gather_limit import PrefetchHint, best_prefetches, gather
from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.synthetic_batches import IdBatch, LookupWorkload, make_id_batches
from meseta.ops.core import instruction_set
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, InitSpec, OptimizerSpec, TableSpec
from meseta.storage import Lease

LR = 0.01
INIT_VALUE = 0.01


def make_collection(
    traffic: LookupWorkload, optimizer: OptimizerSpec, dtype: str, init: InitSpec
) -> EmbeddingBagCollection:
    """Create a collection with one table and one feature per table of the workload."""
    tables = [
        TableSpec(
            name=f"t{f}",
            num_embeddings=rows,
            embedding_dim=dim,
            dtype=cast(Any, dtype),  # TableSpec rejects unknown types.
            init=init,
            optimizer=optimizer,
        )
        for f, (rows, dim) in enumerate(zip(traffic.rows, traffic.dims, strict=True))
    ]
    features = [
        FeatureSpec(name=f"f{f}", table=table.name, pooling=traffic.pooling, weighted=traffic.weighted)
        for f, table in enumerate(tables)
    ]
    return EmbeddingBagCollection(tables, features)


def make_ids(batch: IdBatch, num_features: int) -> KeyedJaggedTensor:
    """Convert a batch to the input of `EmbeddingBagCollection`."""
    return KeyedJaggedTensor(
        keys=tuple(f"f{f}" for f in range(num_features)),
        values=torch.from_numpy(batch.ids),
        lengths=torch.from_numpy(batch.lengths),
        weights=None if batch.weights is None else torch.from_numpy(batch.weights),
    )


class MesetaOperators(BenchmarkTarget):
    """Benchmark target for EmbeddingBagCollection: lookup, train step, lookup operator, and gather limit."""

    def __init__(self, workload: dict[str, Any], optimizer: str, dtype: str) -> None:
        super().__init__()
        self.workload = LookupWorkload.from_json(workload)
        self.num_threads = 1
        spec = make_optimizer(optimizer, lr=LR)
        self.embeddings = make_collection(self.workload, spec, dtype, InitSpec(kind="constant", scale=INIT_VALUE))
        self.lease = Lease(self.embeddings.shards)
        self.tables = [rows.weight for rows in self.lease.rows]
        num_tables, is_mean = len(self.tables), self.workload.pooling == "mean"
        self.group = LookupGroup(tuple(self.tables), (self.workload.weighted,) * num_tables, (is_mean,) * num_tables)
        batches = make_id_batches(self.workload, self.workload.num_batches)
        self.batches = [make_ids(batch, len(self.tables)) for batch in batches]
        self.ids = np.concatenate([batch.ids for batch in batches])
        counts = np.concatenate([batch.lengths.reshape(len(self.tables), -1).sum(axis=1) for batch in batches])
        self.bounds: list[int] = [0, *np.cumsum(counts).tolist()]
        torch.manual_seed(0)
        self.gradient = 0.01 * torch.randn(self.workload.batch_size, sum(self.workload.dims))
        self.prefetches: dict[int, list[PrefetchHint]] = {}
        self.actions = {
            "lookup": self._lookup,
            "operator": self._operator,
            "step": self._step,
            "limit": self._gather_limit,
        }

    def facts(self) -> dict[str, Any]:
        num_ids = self.ids.size / len(self.batches)
        return {
            "actions": list(self.actions),
            "ids_per_call": {"lookup": num_ids, "operator": num_ids, "step": num_ids, "limit": self.ids.size},
            "bytes_per_id": _mean_row_bytes(self.tables, np.diff(self.bounds)),
            "update_bytes": self._update_bytes(),
            "unique_share": self._unique_share(),
            "versions": {"torch": torch.__version__, "isa": instruction_set()},
        }

    def set_threads(self, num_threads: int) -> None:
        super().set_threads(num_threads)
        self.num_threads = num_threads

    def time(self, action: str, first: int, num_calls: int) -> float:
        """Return the total seconds of `num_calls` calls.

        For the gather limit, only the read loop counts, with the fastest prefetch parameters.
        """
        if action != "limit":
            return super().time(action, first, num_calls)
        return sum(self._gather_limit(call) for call in range(num_calls))

    def _lookup(self, call: int) -> None:
        with torch.no_grad():
            self.embeddings(self.batches[call % len(self.batches)])

    def _operator(self, call: int) -> None:
        ids = self.batches[call % len(self.batches)]
        lookup_group(self.group, ids.values, ids.offsets, ids.weights)

    def _step(self, call: int) -> None:
        self.embeddings(self.batches[call % len(self.batches)]).pooled.values.backward(self.gradient)

    def _gather_limit(self, call: int) -> float:
        threads = self.num_threads
        if threads not in self.prefetches:
            self.prefetches[threads] = best_prefetches(self.tables, self.ids, self.bounds, threads)
        # The limit is the fastest of the tuned variants.
        return min(gather(self.tables, self.ids, self.bounds, p, threads).seconds for p in self.prefetches[threads])

    def _update_bytes(self) -> float:
        """Return the bytes of row and optimizer state that an update reads and writes per unique row.

        The result is the mean over tables, with equal weights.
        """
        totals = [
            sum(2 * tensor.element_size() * (tensor.shape[1] if tensor.dim() > 1 else 1) for tensor in tensors)
            for tensors in (shard.values.values() for shard in self.embeddings.shards)
        ]
        return sum(totals) / len(totals)

    def _unique_share(self) -> float:
        """Return the number of unique rows per id in one batch."""
        start, num_features = time.perf_counter(), len(self.tables)
        unique, seen = 0, 0
        for s in range(num_features):
            part = self.ids[self.bounds[s] : self.bounds[s + 1]]
            unique, seen = unique + np.unique(part).size, seen + part.size
            if time.perf_counter() - start > 1.0:
                break  # An estimate from some features is enough for the report.
        return unique / max(seen, 1)


def _mean_row_bytes(tables: list[torch.Tensor], counts: np.ndarray) -> float:
    row_bytes = np.array([table.shape[1] * table.element_size() for table in tables])
    per_table = counts.reshape(-1, len(tables)).sum(axis=0)
    return float((row_bytes * per_table).sum() / max(per_table.sum(), 1))
