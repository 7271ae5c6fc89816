"""Sizes of DLRM-DCNv2, and the bytes and operations that a training step needs.

The bytes are those of a step in which each operator reads its inputs and writes its results once. Rows that are looked
up several times are read each time, and updated once. Ids are uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from published_models import MLPERF_IDS, MLPERF_ROWS

from meseta.spec import FeatureSpec, InitSpec, OptimizerSpec, TableSpec
from meseta.spec.tables import DenseDtype

RowOptimizerName = Literal["rowwise_adagrad", "adagrad", "sgd"]
RowDtype = Literal["float32", "bfloat16", "float16"]
NUM_DENSE = 13
LR = 0.005
MARK_BITS_PER_ROW = 2
BLOCK_SAMPLES, MIN_LONG_RUN = 256, 16
"""Samples whose contributions to a row are added first, and the number of contributions that are added ahead."""
SORT_DIGIT_BITS = 8
"""Number of bits of a key that a pass of the radix sort orders."""


class Work(NamedTuple):
    """Bytes and operations of an operator in one step."""

    num_bytes: float
    num_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Dcnv2Shape:
    """Sizes of a model and its batches. All features have a fixed number of ids per sample."""

    rows: tuple[int, ...]
    """Number of rows of each table. Each table has one feature."""
    ids: tuple[int, ...]
    """Number of ids per sample of each feature."""
    dim: int
    """Number of columns of all tables, and outputs of the bottom MLP."""
    bottom_mlp: tuple[int, ...]
    """Hidden widths of the bottom MLP."""
    top_mlp: tuple[int, ...]
    """Hidden widths of the top MLP."""
    cross: tuple[int, int]
    """(number of cross layers, rank of their matrices)."""
    batch_size: int
    rows_dtype: RowDtype = "float32"
    dense_dtype: DenseDtype = "bfloat16"
    optimizer: RowOptimizerName = "rowwise_adagrad"
    """Optimizer of the rows."""

    def with_max_rows(self, max_rows: int) -> Dcnv2Shape:
        """Return a shape whose tables have at most `max_rows` rows."""
        return replace(self, rows=tuple(min(rows, max_rows) for rows in self.rows))

    def with_batch_size(self, batch_size: int) -> Dcnv2Shape:
        """Return a shape with another batch size, and as many rows per sample, so that ids repeat as often.

        Tables have more rows if their ids would otherwise repeat often within a block of samples, but do not in this
        shape.
        """
        rows = []
        for num_rows, count in zip(self.rows, self.ids, strict=True):
            scaled = max(1, round(num_rows * batch_size / self.batch_size))
            has_long_runs = BLOCK_SAMPLES * count >= MIN_LONG_RUN * num_rows
            rows.append(scaled if has_long_runs else max(scaled, 2 * batch_size * count // MIN_LONG_RUN))
        return replace(self, rows=tuple(rows), batch_size=batch_size)

    @property
    def long_run_bytes(self) -> float:
        """Bytes of the sums of long runs: keys, positions, and the gradients and sums of tables with few rows."""
        num_bytes = self.num_ids * 8.0
        for num_rows, count in zip(self.rows, self.ids, strict=True):
            if BLOCK_SAMPLES * count >= MIN_LONG_RUN * num_rows:
                num_sums = num_rows * math.ceil(self.batch_size / BLOCK_SAMPLES)
                num_bytes += 4 * self.dim * (self.batch_size * count + num_sums)
        return num_bytes

    @property
    def specs(self) -> tuple[list[TableSpec], list[FeatureSpec]]:
        """Table and feature specs. Rows are created with a constant, which takes one kernel per table."""
        optimizer = OptimizerSpec(name=self.optimizer, lr=LR)
        tables = [
            TableSpec(
                name=f"t{f}",
                num_embeddings=rows,
                embedding_dim=self.dim,
                dtype=self.rows_dtype,
                init=InitSpec(kind="constant", scale=0.0),
                optimizer=optimizer,
            )
            for f, rows in enumerate(self.rows)
        ]
        return tables, [FeatureSpec(name=f"f{f}", table=table.name) for f, table in enumerate(tables)]

    @property
    def num_ids(self) -> int:
        """Number of ids of a batch."""
        return self.batch_size * sum(self.ids)

    @property
    def num_inputs(self) -> int:
        """Number of inputs of the cross network."""
        return self.dim * (len(self.rows) + 1)

    @property
    def mlp_layers(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of all layers of the MLPs."""
        widths = (NUM_DENSE, *self.bottom_mlp, self.dim), (self.num_inputs, *self.top_mlp, 1)
        return [layer for mlp in widths for layer in pairwise(mlp)]

    @property
    def num_dense_weights(self) -> int:
        """Number of weights of the matrices."""
        num_layers, rank = self.cross
        return sum(a * b for a, b in self.mlp_layers) + 2 * num_layers * rank * self.num_inputs

    @property
    def num_touched_rows(self) -> float:
        """Expected number of different rows that a batch looks up."""
        return sum(
            -rows * math.expm1(self.batch_size * count * math.log1p(-1 / rows)) if rows > 1 else 1
            for rows, count in zip(self.rows, self.ids, strict=True)
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its state."""
        return self.dim * getattr(torch, self.rows_dtype).itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a row. States are float32."""
        return {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 4 * self.dim}[self.optimizer]

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows, their states and the marks of changed rows."""
        return sum(self.rows) * (self.row_bytes + self.state_bytes) + sum(self.rows) * MARK_BITS_PER_ROW // 8

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation of the dense part."""
        return getattr(torch, self.dense_dtype).itemsize  # type: ignore[no-any-return]

    def work(self) -> dict[str, Work]:
        """Return the work of a step by operator."""
        num_ids, samples = self.num_ids, self.batch_size
        pooled_bytes = 4 * self.dim * len(self.rows) * samples
        key_bytes = 4 if sum(self.rows) < 2**31 - 1 else 8
        passes = -(-sum(self.rows).bit_length() // SORT_DIGIT_BITS)
        # A sort reads keys for its histograms, and each pass moves keys and positions.
        sort_bytes = key_bytes + passes * 2 * (key_bytes + 8)
        ids_bytes = num_ids * (4 + 8)  # Copied ids have 4 bytes, checked ones 8.
        batch_bytes = 2 * samples * (4 * NUM_DENSE + 4) + 2 * num_ids * 4
        touched_bytes = self.num_touched_rows * (self.row_bytes + self.state_bytes)
        return {
            "copy and check of the batch": Work(batch_bytes + ids_bytes),
            "lookup": Work(num_ids * (8 + self.row_bytes) + pooled_bytes, num_ids * self.dim),
            "sort of ids": Work(num_ids * (8 + key_bytes + sort_bytes)),
            "row update": Work(
                num_ids * (key_bytes + 8) + pooled_bytes + 2 * touched_bytes, num_ids * self.dim
            ),
            "MLPs": self._mlp_work(),
            "concatenation": self._concatenation_work(),
            "cross layers": self._cross_work(),
            "dense optimizer": Work(4 * 7 * self.num_dense_weights, 12 * self.num_dense_weights),
        }  # fmt: skip

    @property
    def total_work(self) -> Work:
        """Sum over all operators."""
        works = self.work().values()
        return Work(sum(work.num_bytes for work in works), sum(work.num_flops for work in works))

    @property
    def product_flops(self) -> float:
        """Operations of all matrix products of a step: one forward and two backward, except for dense inputs."""
        return self._mlp_work().num_flops + self._cross_work().num_flops

    def _mlp_work(self) -> Work:
        """Forward reads x and writes y. Backward reads dy, y, x and dy again, and writes dx."""
        size, samples, total = self.activation_bytes, self.batch_size, Work(0.0)
        for index, (inputs, outputs) in enumerate(self.mlp_layers):
            has_input_gradient = index > 0
            values = 2 * inputs + 4 * outputs + inputs * has_input_gradient
            products = 2 + has_input_gradient
            weight_bytes = inputs * outputs * (size * (1 + has_input_gradient) + 4)
            total = Work(
                total.num_bytes + values * size * samples + weight_bytes,
                total.num_flops + 2 * products * inputs * outputs * samples,
            )
        return total

    def _concatenation_work(self) -> Work:
        """Forward casts and concatenates. Backward writes the gradient of the pooled rows in float32."""
        num_cells = self.batch_size * self.num_inputs
        return Work(2 * num_cells * (4 + self.activation_bytes))

    def _cross_work(self) -> Work:
        """Let p = U V x + b.

        Forward reads x, writes and reads V x, reads x0 and x, and writes p and the result. Backward, one kernel reads
        the gradients of the result and of x0, x0 and p, and writes the gradients of p and x0. The products of U read
        the former twice, and those of V read x and the residual, and write the gradient of x.
        """
        num_layers, rank = self.cross
        cells = (5 + 6 + 2 + 3) * self.num_inputs + (2 + 1 + 1 + 2) * rank
        weights = 2 * rank * self.num_inputs
        per_layer = cells * self.activation_bytes * self.batch_size + weights * (2 * self.activation_bytes + 4)
        return Work(num_layers * per_layer, num_layers * 6 * weights * self.batch_size)


MLPERF = Dcnv2Shape(
    rows=MLPERF_ROWS,
    ids=MLPERF_IDS,
    dim=128,
    bottom_mlp=(512, 256),
    top_mlp=(1024, 1024, 512, 256),
    cross=(3, 512),
    batch_size=55_296,
)
"""MLPerf Training's benchmark, and the batch size of its results on eight GPUs."""
TINY = Dcnv2Shape(
    rows=(50, 3, 20),
    ids=(2, 1, 5),
    dim=16,
    bottom_mlp=(8,),
    top_mlp=(8, 8),
    cross=(2, 4),
    batch_size=32,
)
"""Small sizes that train on any machine."""
