"""Predicted operations of a training sample, in which the cost of trials is counted."""

from __future__ import annotations

from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.train.setup.meta_model import make_meta_model, step_flops
from meseta.train.setup.specs import make_specs

# Sum of a bag, its gradient, and the update of a row with its state.
_OPERATIONS_PER_VALUE = 8


def sample_operations(config: RunConfig, dataset: Dataset) -> float:
    """Return the predicted operations of training on one sample: matrix products, and lookups and updates of rows.

    They depend on the sizes of the model and of the data, and never on the machine.
    """
    dataset = dataset.select(None, config.data.without)
    tables, features = make_specs(config, dataset)
    outline = make_meta_model(config, dataset, EmbeddingBagCollection(tables, features, seed=config.seed))
    batch_size = config.train.batch_size
    dims = {table.name: table.embedding_dim for table in tables}
    pooling = {column.name: column.statistics.mean_pooling_factor for column in dataset.sparse}
    values = sum(pooling[feature.name] * dims[feature.table] for feature in features)
    return step_flops(outline, batch_size, len(dataset.dense)) / batch_size + _OPERATIONS_PER_VALUE * values
