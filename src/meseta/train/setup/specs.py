"""Specifications of tables and features from a config and a dataset. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from meseta.config import RunConfig
from meseta.config.embedding import RegularizationConfig
from meseta.config.models import VectorModelConfig
from meseta.data.dataset.dataset import Dataset
from meseta.spec import FeatureSpec, InitSpec, MesetaError, OptimizerSpec, TableSpec, suggest
from meseta.spec.optimizer import COUPLED_DECAY_OPTIMIZERS


def make_specs(config: RunConfig, dataset: Dataset) -> tuple[list[TableSpec], list[FeatureSpec]]:
    """Return one table and one feature per sparse column, with the settings of `embedding` and `embedding.tables`.

    Raises MesetaError if a setting names an unknown column or does not fit its column.
    """
    feature_names = [column.name for column in dataset.sparse]
    for section, settings in (("embedding", config.embedding.tables), ("checkpoint", config.checkpoint.tables)):
        for name in settings:
            if name not in feature_names:
                way_out = suggest(name, feature_names)
                raise MesetaError(f"config: {section}.tables has {name!r}, which is no sparse feature; {way_out}")
    tables, features = [], []
    for column in dataset.sparse:
        pooling = config.embedding.table_pooling(column.name)
        if pooling == "none" and column.weighted:
            raise MesetaError(
                f"config: embedding.tables.{column.name}.pooling must not be 'none', because the ids of the feature "
                "have weights; set it to sum or mean"
            )
        optimizer = OptimizerSpec(**config.embedding.table_optimizer(column.name))
        tables.append(
            TableSpec(
                name=column.name,
                num_embeddings=column.num_embeddings,
                embedding_dim=_table_width(config, column.name),
                dtype=config.embedding.dtype,
                init=InitSpec(**config.embedding.table_init(column.name)),
                optimizer=_with_penalties(column.name, optimizer, config.embedding.regularization),
            )
        )
        features.append(
            FeatureSpec(
                name=column.name,
                table=column.name,
                pooling=pooling,
                weighted=column.weighted,
                id_policy=config.embedding.id_policy,
            )
        )
    return tables, features


def _table_width(config: RunConfig, table: str) -> int:
    """Return the number of columns of a table. Raises MesetaError if a dimension is set but the model has no
    embeddings."""
    dim, model = config.embedding.table_embedding_dim(table), config.model
    if dim is not None and not isinstance(model, VectorModelConfig):
        raise MesetaError(
            f"config: embedding.tables.{table}.embedding_dim is {dim}, but model {model.name!r} has one weight per id "
            "and no embeddings; remove it, or choose another model.name"
        )
    return model.table_width(dim)


def _with_penalties(table: str, spec: OptimizerSpec, penalty: RegularizationConfig) -> OptimizerSpec:
    """Return the optimizer of a table with the penalties of `embedding.regularization`.

    Raises MesetaError if the optimizer does not support them or sets them itself.
    """
    if spec.name == "frozen" or not (penalty.l2 or penalty.l1):
        return spec
    where = f"config: embedding.regularization on table {table!r}, whose row optimizer is {spec.name!r}"
    if spec.is_custom or spec.name not in COUPLED_DECAY_OPTIMIZERS:
        raise MesetaError(
            f"{where}: the optimizer does not support penalties that are added to the gradient; set its "
            f"weight_decay (ftrl: l1, l2), or use one of {', '.join(COUPLED_DECAY_OPTIMIZERS)}"
        )
    if spec.weight_decay or spec.l1 or spec.stepped_rows != "touched":
        raise MesetaError(
            f"{where}: the optimizer also sets weight_decay, l1 or stepped_rows, which mean the same; remove one"
        )
    return replace(spec, weight_decay=penalty.l2, l1=penalty.l1, stepped_rows=penalty.rows)
