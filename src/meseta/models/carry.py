"""Parameters and moments of a model whose input columns change, carried over by the names of the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.comm.dense import full_tensor
from meseta.models.columns import BOTTOM, ColumnAxes, InputColumns, InputLabel, LabeledAxis, Source, describe_changes
from meseta.spec import FeatureSpec, MesetaError, TableSpec

RESET_HINT = "keep the columns, or start the dense part again with --reset dense"
VALUE_PREFIXES, MOMENT_PREFIX = ("model.", "average."), "optimizer."
"""Beginnings of names of saved tensors: values of parameters and buffers, and moments."""


@dataclass(frozen=True)
class CarriedTensors:
    """Start of a model that continues another one."""

    tensors: dict[str, Tensor]
    """Dense tensors by name, with the shapes of the new model."""
    zero_table_columns: dict[str, slice]
    """Columns of the rows of new tables that must start at zero, by table."""


def carry_over(
    saved: Mapping[str, Tensor], before: InputColumns, model: nn.Module, now: InputColumns
) -> CarriedTensors:
    """Map the dense tensors of a model with the columns `before` to a model with the columns `now`, by column name.

    New entries start at zero or as in `model`, so that new columns change no prediction and have gradients. If no
    column is common, all start as in `model`. Moments of new entries are zero, and completely new parameters have none.
    Collective if dense parameters are sharded.

    Args:
        saved: Tensors `model.PARAMETER`, `average.PARAMETER` and `optimizer.PARAMETER.MOMENT`. Others are kept.
        before: Columns of the saved model.
        model: New model with initial parameters. It is not changed.
        now: Columns of `model`.

    Raises MesetaError if the model's class has no `column_axes`, `now` does not match the model, a feature has another
    width, a saved tensor has the wrong shape, or the model reads common columns differently.
    """
    if before == now:
        return CarriedTensors(dict(saved), {})
    # A subclass may read the columns differently, so it must declare its own axes.
    declare = vars(type(model)).get("column_axes")
    if declare is None:
        raise MesetaError(
            f"{type(model).__name__} cannot change its columns ({describe_changes(before, now)}); {RESET_HINT}"
        )
    _check_columns(model, before, now)
    axes_before: ColumnAxes = declare(model, before)
    axes_now: ColumnAxes = declare(model, now)
    shared = set(before.sources & now.sources)
    # If all dense columns were exchanged, the bottom MLP computes another vector.
    if not set(before.dense) & set(now.dense):
        shared.discard(BOTTOM)
    carrier = _Carrier(type(model).__name__, axes_before, axes_now, frozenset(shared), _zero_sources(model) - shared)
    changes = describe_changes(before, now)
    for name in axes_now.parameters:
        carrier.check_labels(name, changes)
    new = [name for name, _ in now.sparse if ("sparse", name) not in shared] if shared else []
    widths, tables = dict(now.sparse), {feature.name: feature.table for feature in _features(model)}
    columns = {tables[name]: slice(*axes_now.zero_row_columns.indices(widths[name])[:2]) for name in new}
    return CarriedTensors(
        _carry_tensors(saved, model, carrier),
        {table: zeros for table, zeros in columns.items() if zeros.start < zeros.stop},
    )


def _carry_tensors(saved: Mapping[str, Tensor], model: nn.Module, carrier: _Carrier) -> dict[str, Tensor]:
    starts: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():  # In the same order on all ranks, because gathering is collective.
        if carrier.is_rebuilt(name):
            starts[name] = full_tensor(value.detach()).cpu().clone()
        elif name in carrier.now.parameters:
            starts[name] = carrier.start(name, full_tensor(value.detach()).cpu())
    tensors: dict[str, Tensor] = {}
    for key, value in saved.items():
        name, is_moment = _parameter_of(key)
        if carrier.is_rebuilt(name):
            continue
        if name not in carrier.now.parameters:
            tensors[key] = value
        elif not is_moment:
            tensors[key] = carrier.carry(key, name, value, starts[name])
        elif carrier.carries_entries(name):
            is_scalar = value.dim() == 0  # A number of steps.
            tensors[key] = value if is_scalar else carrier.carry(key, name, value, torch.zeros_like(starts[name]))
    rebuilt = {name: value for name, value in starts.items() if carrier.is_rebuilt(name)}
    tensors |= {f"model.{name}": value for name, value in rebuilt.items()}
    if any(key.startswith("average.") for key in saved):  # Buffers have none.
        averaged = rebuilt.keys() & dict(model.named_parameters()).keys()
        tensors |= {f"average.{name}": rebuilt[name].clone() for name in sorted(averaged)}
    return tensors


def _parameter_of(key: str) -> tuple[str, bool]:
    """Return (parameter or buffer, '' for another tensor, is a moment)."""
    if key.startswith(MOMENT_PREFIX):
        return key.removeprefix(MOMENT_PREFIX).rpartition(".")[0], True
    prefix = next((prefix for prefix in VALUE_PREFIXES if key.startswith(prefix)), None)
    return ("" if prefix is None else key.removeprefix(prefix)), False


@dataclass(frozen=True)
class _Carrier:
    model: str
    before: ColumnAxes
    now: ColumnAxes
    shared: frozenset[Source]
    zero_sources: frozenset[Source]
    """New inputs whose rows start at zero by their `InitSpec`."""

    def check_labels(self, name: str, changes: str) -> None:
        """Raise MesetaError if a label of shared inputs exists in only one of the models."""
        for before, now in zip(self.before.parameters[name], self.now.parameters[name], strict=True):
            labels = [{label for label in axis.labels if self._is_shared(label)} for axis in (before, now) if axis]
            if labels and labels[0] != labels[1]:
                # A single vector has no pairs, so DLRM reads its elements.
                columns = sorted({column for label in labels[0] ^ labels[1] for _, column in label.sources if column})
                raise MesetaError(
                    f"{self.model}: {name} reads {', '.join(map(repr, columns))} in products with other vectors, or "
                    f"directly if there is no other, so its weights do not fit these changes: {changes}; {RESET_HINT}"
                )

    def is_rebuilt(self, name: str) -> bool:
        """Whether the submodule of the parameter is dropped or built again."""
        modules = (module for module, source in self.now.modules.items() if source not in self.shared)
        return any(name.startswith(f"{module}.") for module in modules)

    def carries_entries(self, name: str) -> bool:
        """Whether an entry of the parameter is carried over."""
        return all(axis is None or any(map(self._is_shared, axis.labels)) for axis in self.now.parameters[name])

    def start(self, name: str, value: Tensor) -> Tensor:
        """Return the values at which new entries start, given those in a new model."""
        axes = self.now.parameters[name]
        shape = [size if axis is None else len(axis.labels) for size, axis in zip(value.shape, axes, strict=True)]
        assert [*value.shape] == shape, f"{self.model}: {name} is {list(value.shape)}, but has the labels of {shape}"
        if not self.shared:
            return value
        start = value.clone()
        for dim, axis in enumerate(axes):
            if axis is not None and axis.starts_at_zero:
                start.index_fill_(dim, self._new_places(axis), 0.0)
        for dim, axis in enumerate(axes):
            if axis is not None and not axis.starts_at_zero:
                places = self._new_places(axis)
                start.index_copy_(dim, places, value.index_select(dim, places))
        return start

    def _new_places(self, axis: LabeledAxis) -> Tensor:
        """Return positions of new entries, without weights that read rows of zeros and must not be zero."""
        zeros = self.zero_sources if axis.starts_at_zero else frozenset[Source]()
        new = [not self._is_shared(label) and not label.sources & zeros for label in axis.labels]
        return torch.tensor(new, dtype=torch.bool).nonzero()[:, 0]

    def carry(self, key: str, name: str, value: Tensor, start: Tensor) -> Tensor:
        """Return `start` with the shared entries and the dtype of `value`, which `key` names in errors."""
        axes = self.before.parameters[name], self.now.parameters[name]
        pairs = list(zip(*axes, strict=True))
        expected = [
            size if axis is None else len(axis.labels) for size, (axis, _) in zip(start.shape, pairs, strict=True)
        ]
        if [*value.shape] != expected:
            raise MesetaError(
                f"dense tensor {key!r} is saved as {[*value.shape]}, but a model of this config with the saved columns "
                f"has {expected}; use the config that it was trained with, or --reset dense"
            )
        result = start.to(value.dtype, copy=True)
        places = [self._places(size, *pair) for size, pair in zip(start.shape, pairs, strict=True)]
        shapes = [[-1 if axis == dim else 1 for axis in range(value.dim())] for dim in range(value.dim())]
        old, new = (tuple(place[i].view(shape) for place, shape in zip(places, shapes, strict=True)) for i in (0, 1))
        result[new] = value[old].cpu()
        return result

    def _places(self, size: int, before: LabeledAxis | None, now: LabeledAxis | None) -> tuple[Tensor, Tensor]:
        """Return positions of the shared entries in the (saved, new) parameter."""
        if before is None or now is None:
            return torch.arange(size), torch.arange(size)
        positions = {label: position for position, label in enumerate(before.labels) if self._is_shared(label)}
        pairs = [(positions[label], place) for place, label in enumerate(now.labels) if label in positions]
        old, new = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
        return old, new

    def _is_shared(self, label: InputLabel) -> bool:
        return label.sources <= self.shared


def _features(model: nn.Module) -> Sequence[FeatureSpec]:
    return cast(Sequence[FeatureSpec], cast(Any, model).embeddings.features)


def _zero_sources(model: nn.Module) -> frozenset[Source]:
    tables = cast(Sequence[TableSpec], cast(Any, model).embeddings.tables)
    zero_tables = {table.name for table in tables if table.init.scale == 0.0}
    return frozenset(("sparse", feature.name) for feature in _features(model) if feature.table in zero_tables)


def _check_columns(model: nn.Module, before: InputColumns, now: InputColumns) -> None:
    columns = InputColumns.from_embeddings(now.dense, cast(Any, model).embeddings)
    if columns != now or len(now.dense) != cast(Any, model).num_dense:
        raise MesetaError(
            f"{type(model).__name__}: the columns {now} are not those of the model, which has {columns.sparse} and "
            f"{cast(Any, model).num_dense} dense columns; pass the columns that it was built with"
        )
    widths = dict(before.sparse)
    for feature, width in now.sparse:
        if widths.get(feature, width) != width:
            raise MesetaError(
                f"feature {feature!r} has width {width}, but {widths[feature]} in the saved model; set its "
                f"embedding_dim back, or start both parts again with --reset dense --reset {feature}"
            )
