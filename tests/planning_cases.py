"""Workloads that planner tests share."""

import numpy as np

from meseta.spec import FeatureLoad, FeatureSpec, OptimizerSpec, TableSpec, Workload

OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")


def random_workload(num_tables: int, seed: int, *, batch_size: int = 16384, max_rows: float = 6.0) -> Workload:
    """Tables of 10^3 to 10^max_rows rows and 4 to 128 columns, each with a feature of 1 to 20 ids a sample."""
    random = np.random.default_rng(seed)
    tables = tuple(
        TableSpec(
            name=f"t{i}",
            num_embeddings=int(10 ** random.uniform(3, max_rows)),
            embedding_dim=int(2 ** random.integers(2, 8)),
            optimizer=OptimizerSpec(name=OPTIMIZERS[int(random.integers(3))]),
        )
        for i in range(num_tables)
    )
    loads = {
        f"f{i}": FeatureLoad(pooling_factor=float(np.exp(random.uniform(0, 3))), is_sorted=bool(random.integers(2)))
        for i in range(num_tables)
    }
    features = tuple(FeatureSpec(name=f"f{i}", table=f"t{i}") for i in range(num_tables))
    return Workload(tables=tables, features=features, batch_size=batch_size, loads=loads)
