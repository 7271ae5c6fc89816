"""From a config and a dataset to tables and features. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from meseta.config import RunConfig
from meseta.config.embedding import RegularizationConfig
from meseta.config.models import VectorModelConfig
from meseta.data.dataset.dataset import Dataset
from meseta.spec import FeatureSpec, InitSpec, MesetaError, OptimizerSpec, TableSpec, suggest
from meseta.spec.optimizer import COUPLED_DECAY_OPTIMIZERS


def make_specs(config: RunConfig, dataset: Dataset) -> tuple[list[TableSpec], list[FeatureSpec]]:
    """One table and one feature per sparse column, with the settings of `embedding` and `embedding.tables`."""
    known = [column.name for column in dataset.sparse]
    for section, settings in (("embedding", config.embedding.tables), ("checkpoint", config.checkpoint.tables)):
        for name in settings:
            if name not in known:
                way_out = suggest(name, known)
                raise MesetaError(f"config: {section}.tables names {name!r}, which the data lack; {way_out}")
    tables, features = [], []
    for column in dataset.sparse:
        pooling = config.embedding.table_pooling(column.name)
        if pooling == "none" and column.weighted:
            raise MesetaError(
                f"config: embedding.tables.{column.name}.pooling is 'none', but its ids have weights, which multiply "
                "rows while they are pooled; set it to sum or mean"
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
    """Columns of a table; raises MesetaError for a width of its own where the model has no vectors."""
    dim, model = config.embedding.table_embedding_dim(table), config.model
    if dim is not None and not isinstance(model, VectorModelConfig):
        raise MesetaError(
            f"config: embedding.tables.{table}.embedding_dim is {dim}, but model {model.name!r} has one weight of an "
            "id and no vectors; leave it out, or choose another model.name"
        )
    return model.table_width(dim)


def _with_penalties(table: str, spec: OptimizerSpec, penalty: RegularizationConfig) -> OptimizerSpec:
    """The optimizer of a table with the penalties of `embedding.regularization`; raises MesetaError where it cannot
    have them."""
    if spec.name == "frozen" or not (penalty.l2 or penalty.l1):
        return spec
    where = f"config: embedding.regularization on table {table!r}, whose row optimizer is {spec.name!r}"
    if spec.is_custom or spec.name not in COUPLED_DECAY_OPTIMIZERS:
        raise MesetaError(
            f"{where}: the penalties are added to the gradient, and this optimizer has decay of its own; set its own "
            f"constants (weight_decay; ftrl: l1, l2), or take one of {', '.join(COUPLED_DECAY_OPTIMIZERS)}"
        )
    if spec.weight_decay or spec.l1 or spec.stepped_rows != "touched":
        raise MesetaError(
            f"{where}: the optimizer sets weight_decay, l1 or stepped_rows itself, which mean the same; set one"
        )
    return replace(spec, weight_decay=penalty.l2, l1=penalty.l1, stepped_rows=penalty.rows)
