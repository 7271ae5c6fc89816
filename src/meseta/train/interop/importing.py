"""Start a run from a model that was trained elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meseta import checkpoint
from meseta.checkpoint.exporting import EXPORT_PATH, ExportReader
from meseta.checkpoint.files.layout import TableLayout
from meseta.checkpoint.loading import check_tables
from meseta.comm import World
from meseta.config import DenseOptimizerConfig, RunConfig
from meseta.errors import join_names
from meseta.models import DLRM
from meseta.optim.dense import make_dense_optimizer
from meseta.spec import MesetaError, suggest
from meseta.spec.shards import BLOCK_BYTES
from meseta.storage import ROW, as_stored
from meseta.system.remote import Location
from meseta.train.interop.state_dicts import (
    LAYOUTS,
    Layout,
    read_state_dict,
    reorder_interactions,
    table_target,
    translate_names,
)
from meseta.train.state import check_dense_optimizer, set_dense_parameters, set_dense_tensors
from meseta.train.trainer import Trainer

MESETA_LAYOUT = "meseta"
"""Layout of folders written by `meseta.checkpoint.export`."""
# Maximum number of names in an error message.
_MAX_LISTED = 6


_REMEDY = (
    "use the config of the model that was trained, rename tensors with --rename SOURCE=TARGET, or skip them with "
    "--ignore PATTERN"
)


@dataclass(frozen=True, kw_only=True)
class ImportedTensor:
    """Imported tensor with its name in the file and in the model."""

    source: str
    """Name of the tensor in the file."""
    target: str
    """Name of the tensor in the model. Tables are named embeddings.TABLE.weight."""
    shape: tuple[int, ...]


def import_model(
    path: Path,
    layout: Layout,
    config: RunConfig,
    *,
    renames: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
) -> tuple[Location, list[ImportedTensor]]:
    """Start the run of `config` with tensors of `path` and new optimizer states, in one process.

    Returns (checkpoint of step 0, imported tensors). `meseta train` resumes from the checkpoint.
    Raises MesetaError, without writing anything, if run_dir has a checkpoint, a file cannot be read, names or shapes do
    not match the model, or a value is not finite.

    Args:
        path: File or folder with tensors.
        layout: Naming scheme of the tensors.
        config: Config of the run.
        renames: Target names that replace those of the layout.
        ignore: Patterns of tensors to skip.
    """
    _check_no_checkpoint(config)
    if (path / EXPORT_PATH).exists():
        raise MesetaError(
            f"import: {str(path)!r} is an export of `meseta checkpoint export`; use --from {MESETA_LAYOUT}"
        )
    tensors = {n: t for n, t in read_state_dict(path).items() if not any(fnmatchcase(n, p) for p in ignore)}
    imported: list[ImportedTensor] = []
    trainer = Trainer(config, World.single())
    trainer.save_initial_checkpoint(partial(_fill_model, tensors, layout, dict(renames or {}), imported))
    return trainer.run_dir.checkpoint_path(trainer.step), imported


def import_export(path: Path, config: RunConfig, *, states: bool = False) -> tuple[Location, list[ImportedTensor]]:
    """Start the run of `config` with an export of `meseta.checkpoint.export` in folder `path`, in one process.

    `states` also imports the states of the dense and row optimizers and their step count. The first step of the run is
    then identical to the next step of the exported run on the same batch. Returns (checkpoint of step 0, imported
    tensors). Raises MesetaError, without writing anything, if run_dir has a checkpoint, the export is damaged or has no
    states, or it does not match the model and its optimizers.
    """
    # Tables are read block by block.
    _check_no_checkpoint(config)
    exported = ExportReader.open(path)
    if states and (not exported.has_states or exported.embedding_step is None or exported.dense_optimizer is None):
        raise MesetaError(
            f"import: export {str(path)!r} has no optimizer states; export the checkpoint again with --states, or "
            "import without --states"
        )
    trainer = Trainer(config, World.single())
    imported: list[ImportedTensor] = []
    trainer.save_initial_checkpoint(partial(_fill_model_from_export, exported, trainer if states else None, imported))
    return trainer.run_dir.checkpoint_path(trainer.step), imported


def _check_no_checkpoint(config: RunConfig) -> None:
    existing = checkpoint.latest_complete(config.checkpoint_location)
    if existing is not None:
        raise MesetaError(
            f"import: run_dir {str(config.run_dir)!r} already has a checkpoint ({existing}); choose another run_dir"
        )


def _fill_model_from_export(
    exported: ExportReader, trainer: Trainer | None, imported: list[ImportedTensor], model: Any
) -> None:
    """Fill the model from an export. With a `trainer`, fill its optimizer and the row states too."""
    shards, states = model.embeddings.shards, trainer is not None
    held = [shard.spec.name for shard in shards]
    check_tables("export", exported.root, exported.tables, held, shards, states=states)
    tensors, where = exported.read_dense(), f"export {str(exported.root)!r}"
    if trainer is None:
        set_dense_parameters(model, tensors, where)
    else:
        optimizer = trainer.optimizer
        steps = int(exported.embedding_step or 0)
        check_dense_optimizer(where, optimizer, str(exported.dense_optimizer), tensors, steps)
        _check_moments(where, trainer.config.dense.optimizer, model, tensors)
        set_dense_tensors(model, optimizer, tensors)
        model.embeddings.set_resume_state(steps, None)
        trainer.average.set_tensors(tensors, where)
    names = [name for name in tensors if name.startswith("model." if trainer is None else ("model.", "optimizer."))]
    for name in names:
        target = name.removeprefix("model.")
        imported.append(ImportedTensor(source=name, target=target, shape=tuple(tensors[name].shape)))
    for shard in shards:
        layout, name = TableLayout.from_values(shard.spec, shard.values), shard.spec.name
        if not states:
            layout = replace(layout, schema=replace(layout.schema, columns=layout.schema.columns[:1]))
        with exported.open_table(layout) as read:
            for first, stop in layout.block_ranges():
                shard.write(first, read(first, stop))
        for column in layout.schema.columns:
            target = table_target(name) if column.name == ROW else f"embeddings.{name}.{column.name}"
            shape = layout.schema.shape(column, shard.spec.num_embeddings)
            imported.append(ImportedTensor(source=f"tables/{name}: {column.name}", target=target, shape=shape))


def _check_moments(where: str, config: DenseOptimizerConfig, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise MesetaError unless each dense parameter has either all moments of its optimizer, in its shape, or none."""
    probe = nn.Parameter(torch.zeros(2))
    optimizer = make_dense_optimizer(config, [probe])
    probe.grad = torch.zeros(2)
    optimizer.step()
    scalars = {name: torch.as_tensor(value).dim() == 0 for name, value in optimizer.state[probe].items()}
    left = {name for name in tensors if name.startswith("optimizer.")}
    for name, parameter in model.named_parameters():
        expected = {f"optimizer.{name}.{key}": () if scalar else parameter.shape for key, scalar in scalars.items()}
        for key in expected if left & expected.keys() else ():
            if key not in tensors or tensors[key].shape != expected[key] or not tensors[key].is_floating_point():
                actual = f"{tensors[key].dtype} {list(tensors[key].shape)}" if key in tensors else "missing"
                raise MesetaError(
                    f"{where}: dense tensor {key!r} must be floating-point {list(expected[key])}, but is {actual}; "
                    "export again, or import without --states"
                )
        left -= expected.keys()
    if left:
        raise MesetaError(
            f"{where}: dense tensor {min(left)!r} belongs to no parameter of the model and its optimizer; use the "
            "config that it was trained with, or import without --states"
        )


def _fill_model(
    tensors: Mapping[str, Tensor], layout: Layout, renames: dict[str, str], imported: list[ImportedTensor], model: Any
) -> None:
    for name in renames:
        if name not in tensors:
            raise MesetaError(f"import: tensor {name!r} of --rename is not in the file; {suggest(name, tensors)}")
    # Targets of tables have the shape of the table only.
    targets = {table_target(shard.spec.name): shard.values[ROW] for shard in model.embeddings.shards}
    targets |= model.state_dict()
    tables = [shard.spec.name for shard in model.embeddings.shards]
    names = translate_names(layout, list(tensors), tables) | renames
    matching_layouts = [
        other
        for other in LAYOUTS
        if other != layout and set(translate_names(other, list(tensors), tables).values()) == set(targets)
    ]
    _check_names(tensors, targets, names, f"use --from {matching_layouts[0]}" if matching_layouts else _REMEDY)
    values = {names[name]: tensor for name, tensor in tensors.items()}
    first = "top_mlp.0.weight"
    is_dot = isinstance(model, DLRM) and model.interaction == "dot" and model.bottom_mlp is not None
    if layout == "torchrec" and is_dot and first in values:
        width = next(iter(model.dims.values()))
        values[first] = reorder_interactions(values[first], width, len(model.dims) + 1)
    for name, value in values.items():
        if not all(part.isfinite().all() for part in _row_chunks(value)):
            raise MesetaError(f"import: tensor {name!r} must have finite values only; import an undamaged model")
    tables_by_target = {table_target(shard.spec.name): shard for shard in model.embeddings.shards}
    with torch.no_grad():
        for name, value in values.items():
            if name in tables_by_target:
                shard, begin = tables_by_target[name], 0
                for part in _row_chunks(value):
                    shard.write(begin, {ROW: as_stored(part.to(shard.dtype).contiguous()).cpu().numpy()})
                    begin += len(part)
            else:
                targets[name].copy_(value)
    imported += [ImportedTensor(source=n, target=names[n], shape=tuple(t.shape)) for n, t in tensors.items()]


def _row_chunks(value: Tensor) -> Sequence[Tensor]:
    if value.dim() == 0 or not len(value):
        return [value]
    # Chunks of about one checkpoint block, so that a table is not read into memory as a whole.
    return value.split(max(BLOCK_BYTES // max(value[0].nbytes, 1), 1))


def _check_names(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], names: Mapping[str, str], way_out: str
) -> None:
    problems = []
    strange = [n for n in tensors if names[n] not in targets]
    if strange:
        free = set(targets) - {names[n] for n in tensors}
        problems.append(
            "match nothing in the model: " + _format_names(strange, lambda n: f"({suggest(names[n], free)})")
        )
    empty = [n for n in targets if n not in {names[source] for source in tensors}]
    if empty:
        problems.append("are missing in the file: " + _format_names(empty, lambda n: str(list(targets[n].shape))))
    by_target: dict[str, str] = {}
    twice = [n for n in tensors if by_target.setdefault(names[n], n) != n]
    if twice:
        problems.append("have the same target as another tensor: " + _format_names(twice, lambda n: f"to {names[n]!r}"))
    wrong = [n for n in tensors if names[n] in targets and targets[names[n]].shape != tensors[n].shape]
    if wrong:
        shapes = {n: f"{list(tensors[n].shape)}, and {list(targets[names[n]].shape)} in the model" for n in wrong}
        problems.append("have a different shape: " + _format_names(wrong, shapes.__getitem__))
    if problems:
        raise MesetaError(f"import: tensors that {'; that '.join(problems)}; {way_out}")


def _format_names(names: Sequence[str], more: Callable[[str], str]) -> str:
    return join_names([f"{name!r} {more(name)}" for name in names], _MAX_LISTED)
