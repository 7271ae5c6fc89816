"""Random combinations of tables on one rank, to which the cost model is fitted."""

from __future__ import annotations

import numpy as np

from meseta.measure.calibrate.tasks import DIMS, ID_DISTRIBUTIONS, MIN_ROWS, ShardingTask, TaskTable, random_table
from meseta.planner.cost.sizes import shard_storage_bytes
from meseta.spec import OptimizerSpec, TableSpec

OPTIMIZERS = ("rowwise_adagrad", "sgd", "adagrad", "adam")
DTYPES = ("float32", "float16", "bfloat16")
BATCH_SIZES = (512, 1024, 2048, 4096)
MAX_TABLES = 24
# With this number of ids, one measurement takes about 0.1 s.
MAX_BATCH_IDS = 300_000
"""Maximum number of ids in a batch with several tables."""


def random_combination(seed: int, memory_bytes: float) -> ShardingTask:
    """Return the random combination of a seed: 1 to 24 tables (log-uniform) that fit in `memory_bytes` with states."""
    random = np.random.default_rng([7, seed])
    # Most models use float32 with row-wise Adagrad, so two thirds of the combinations do.
    plain = random.random() < 0.67
    dtype = "float32" if plain else str(random.choice(DTYPES))
    optimizer = OPTIMIZERS[0] if plain else str(random.choice(OPTIMIZERS))
    # In half of the combinations all tables have one dimension, so that a fit can separate costs per row and per byte.
    dims = [int(random.choice(DIMS))] if random.random() < 0.5 else list(DIMS)
    batch_size, distribution = int(random.choice(BATCH_SIZES)), int(random.integers(len(ID_DISTRIBUTIONS)))
    number = round(float(np.exp(random.uniform(0.0, np.log(MAX_TABLES)))))
    tables: list[TaskTable] = []
    left, ids = memory_bytes, 0.0
    for _ in range(number):
        table = random_table(random, dims, distribution)
        spec = TableSpec(
            name="t", num_embeddings=table.num_rows, embedding_dim=table.dim, optimizer=OptimizerSpec(name=optimizer)
        )
        size = shard_storage_bytes(spec, spec.num_embeddings, spec.embedding_dim)
        if size > left or (tables and ids + table.pooling_factor * batch_size > MAX_BATCH_IDS):
            continue
        left, ids = left - size, ids + table.pooling_factor * batch_size
        tables.append(table)
    if not tables:
        tables = [TaskTable(num_rows=int(MIN_ROWS), dim=dims[0], pooling_factor=1.0, distribution_index=distribution)]
    return ShardingTask(seed=seed, tables=tuple(tables), batch_size=batch_size, dtype=dtype, optimizer=optimizer)
