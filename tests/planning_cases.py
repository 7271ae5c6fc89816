"""Workloads of planner tests."""

from dataclasses import replace

import numpy as np

from meseta.spec import FeatureLoad, FeatureSpec, OptimizerSpec, Reuse, TableSpec, Workload

OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")


def random_workload(num_tables: int, seed: int, *, batch_size: int = 16384, max_rows: float = 6.0) -> Workload:
    """Return tables of 10^3 to 10^max_rows rows and 4 to 128 columns, each with a feature of 1 to 20 ids per sample."""
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


def skewed_workload(num_tables: int, seed: int) -> Workload:
    """Return large batches and tables of 10 to 10^7 rows with few rows that have most lookups, for which replicas pay
    off."""
    random = np.random.default_rng(seed + 1000)
    workload = random_workload(num_tables, seed, batch_size=65536, max_rows=7.0)
    tables, loads = [], {}
    for table, feature in zip(workload.tables, workload.features, strict=True):
        is_small = bool(random.integers(2))
        tables.append(replace(table, num_embeddings=int(10 ** random.uniform(1, 3.5))) if is_small else table)
        hot = float(random.uniform(0.01, 0.2))
        reuse = Reuse(window_samples=4096, edges=(0, 1, 16), rows=(1.0 - hot, 0.0, hot), lookups=(0.2, 0.0, 0.8))
        loads[feature.name] = replace(workload.loads[feature.name], reuse=reuse, is_sorted=True)
    return replace(workload, tables=tuple(tables), loads=loads)
