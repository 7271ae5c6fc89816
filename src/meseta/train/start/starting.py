"""First state of a run that starts from a parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from meseta import checkpoint
from meseta.checkpoint.averages import AVERAGE_PREFIX, MODEL_PREFIX, saved_average
from meseta.checkpoint.failures import run_on_all_ranks
from meseta.checkpoint.loading import LoadedCheckpoint, TableSource, read_first_rows
from meseta.checkpoint.manifest import QUANTIZED
from meseta.checkpoint.row_map import RowMap
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.models.carry import carry_over
from meseta.models.columns import InputColumns
from meseta.models.registry import check_columns
from meseta.spec import MesetaError
from meseta.storage import ROW, TableStorage, as_stored
from meseta.storage.tiered import TRANSFER_CHUNK_ROWS
from meseta.train.setup.config_changes import find_model_change
from meseta.train.start.measurements import NewRowMeasurements, record_parent
from meseta.train.start.parent import Parent, damaged_parent_error, find_parent
from meseta.train.start.row_sources import DENSE_PART, map_rows, new_row_masks
from meseta.train.start.start_record import StartRecord
from meseta.train.state import (
    check_dense_optimizer,
    check_trainer_state,
    set_dense_parameters,
    set_dense_tensors,
    set_random_state,
)

if TYPE_CHECKING:
    from meseta.train.trainer import Trainer


def start_from_parent(trainer: Trainer) -> None:
    """Load the weights of the parent that the config names into a trainer without a checkpoint. Collective.

    Rows of tables are matched by value. `start.load` and `start.reset` select parts. Optimizer steps, the
    embedding step and the random state continue with the states, while steps, metrics and schedules begin at 0.
    Raises MesetaError, on all ranks, if the parent is missing, damaged or has changed since the run was started, or
    does not fit the config or the dataset.
    """
    config, world, dataset = trainer.config, trainer.world, trainer.dataset
    parent, before, maps = world.broadcast_from_rank_0(lambda: _load_parent(config, dataset))
    with_states = "states" in config.start.load
    sources = {name: TableSource(rows=rows, states=with_states) for name, rows in maps.items()}
    embeddings = trainer.model.embeddings
    sources = sources if "tables" in config.start.load else {}
    try:
        loaded = checkpoint.load(parent.checkpoint, world=world, shards=embeddings.shards, sources=sources)
    except checkpoint.DamagedCheckpoint as problem:
        damage = problem
        raise world.broadcast_from_rank_0(lambda: damaged_parent_error(damage, parent.checkpoint)) from None
    world.run_on_rank_0(lambda: _check_state(config, parent, loaded))
    if config.embedding.new_rows == "unknown" and "tables" in config.start.load:
        # Other hosts may lack the files of the parent's dataset.
        masks = world.broadcast_from_rank_0(lambda: new_row_masks(before, dataset, maps))
        run_on_all_ranks(
            world, lambda: _copy_unknown_rows(embeddings.shards, masks, read_first_rows(parent.checkpoint))
        )
    if "dense" in config.start.load and DENSE_PART not in config.start.reset:
        _load_dense(trainer, parent, before, loaded)
    if with_states:
        embeddings.set_resume_state(loaded.state["embedding_step"], None)
        set_random_state(loaded.state["random"])
    else:
        trainer.average.reset()
    trainer.checkpoint_manager.count_restores(loaded.state.get("restores", 0) + (QUANTIZED in loaded.manifest))
    trainer.started_from = str(parent.checkpoint)
    world.run_on_rank_0(lambda: record_parent(trainer, parent, new_row_masks(before, dataset, maps)))
    trainer.continued = NewRowMeasurements(trainer, before)


def _load_parent(config: RunConfig, dataset: Dataset) -> tuple[Parent, Dataset, dict[str, RowMap]]:
    """Return the parent, the dataset with its encoding, and the maps from its rows to those of the run."""
    assert config.start_from is not None
    parent = find_parent(config)
    if StartRecord.load(config.run_dir) is None:  # The config was not completed by `add_inherited`.
        parent.record(config.start_from, {}).save(config.run_dir)
    parent.check_other_place(config.run_dir, (config.checkpoint_location, config.checkpoint.mirror))
    before = parent.load_dataset(config.start.like)
    return parent, before, map_rows(before, dataset, config.start.reset)


def _check_state(config: RunConfig, parent: Parent, loaded: LoadedCheckpoint) -> None:
    check_trainer_state(parent.checkpoint, loaded.state)
    before, now = saved_average(loaded.state), config.train.average_spec
    if "states" in config.start.load and before != now:
        raise MesetaError(
            f"start_from {str(parent.checkpoint)!r} has another average: train.average_weights was "
            f"{before and before.kind!r}, and is {now and now.kind!r} now; set the keys train.average_* as in the "
            "parent, or set --load tables,dense"
        )


def _load_dense(trainer: Trainer, parent: Parent, before: Dataset, loaded: LoadedCheckpoint) -> None:
    config, world, where = trainer.config, trainer.world, f"start_from {str(parent.checkpoint)!r}"
    world.run_on_rank_0(lambda: _check_same_model(where, parent, config))
    widths = {name: entry["embedding_dim"] for name, entry in loaded.manifest["tables"].items()}
    saved = InputColumns(
        tuple(column.name for column in before.dense),
        tuple((feature.name, widths[feature.name]) for feature in before.sparse),
    )
    embeddings = trainer.model.embeddings
    columns = InputColumns.from_embeddings((column.name for column in trainer.dataset.dense), embeddings)
    check_columns(config.model, saved, columns)
    carried = carry_over(loaded.dense, saved, trainer.model, columns)
    run_on_all_ranks(world, lambda: _set_columns_to_zero(embeddings.shards, carried.zero_table_columns))
    if "states" not in config.start.load:
        parameters = {name: value for name, value in carried.tensors.items() if name.startswith(MODEL_PREFIX)}
        set_dense_parameters(trainer.model, parameters, where)
        return
    check_dense_optimizer(where, trainer.optimizer, loaded.state["dense_optimizer"], loaded.dense, loaded.step)
    set_dense_tensors(trainer.model, trainer.optimizer, carried.tensors, where)
    if any(name.startswith(AVERAGE_PREFIX) for name in carried.tensors):
        trainer.average.set_tensors(carried.tensors, where)


def _set_columns_to_zero(shards: Sequence[TableStorage], zeros: Mapping[str, slice]) -> None:
    """Set columns of the rows of new tables to zero, by table."""
    for shard in (shard for shard in shards if shard.spec.name in zeros):
        columns, (low, high) = zeros[shard.spec.name], shard.shard.columns
        first, last = (min(max(end, low), high) - low for end in (columns.start, columns.stop))
        for start in range(0, shard.shard.num_rows if first < last else 0, TRANSFER_CHUNK_ROWS):
            rows = shard.read(start, min(start + TRANSFER_CHUNK_ROWS, shard.shard.num_rows))[ROW].clone()
            rows[:, first:last] = 0
            shard.write(start, {ROW: as_stored(rows).cpu().numpy()})


def _check_same_model(where: str, parent: Parent, config: RunConfig) -> None:
    """Raise MesetaError if the config defines another model than that of the parent."""
    former = parent.load_config()
    change = None if former is None else find_model_change(former, config)
    if change is not None:
        key, was, is_now = change
        raise MesetaError(
            f"{where} has another model: {key} was {was!r} and is {is_now!r} now; set it back, or reinitialize the "
            "dense part with --reset dense"
        )


def _copy_unknown_rows(
    shards: Sequence[TableStorage], masks: Mapping[str, NDArray[np.bool_]], first_rows: Mapping[str, NDArray[Any]]
) -> None:
    """Set new rows of vocabularies to row 0 of the parent."""
    for shard in shards:
        mask, row = masks.get(shard.spec.name), first_rows.get(shard.spec.name)
        if mask is None or row is None:
            continue
        rows = np.flatnonzero(mask[slice(*shard.shard.rows)])
        rows = rows[rows + shard.shard.rows[0] > 0]
        values = row[:, slice(*shard.shard.columns)].repeat(len(rows), axis=0)
        if len(rows):
            shard.scatter(torch.from_numpy(rows), {ROW: values})
