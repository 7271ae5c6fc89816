"""Axes of dense parameters that are indexed by input columns or by pairs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from meseta.models.layers import pooled_dims

Source = tuple[str, str]
"""Kind and name of an input of a model: a dense column, a sparse feature, or `BOTTOM`."""
BOTTOM: Source = ("bottom", "")
"""Vector that a bottom MLP computes from all dense columns."""


class InputLabel(NamedTuple):
    """Name of an entry of an axis, which is equal in models with other columns."""

    sources: frozenset[Source]
    """Inputs that the entry depends on: one, two for a product of their vectors, or none for a hidden unit."""
    element: int = 0
    """Index of the element in the vector of the input."""


@dataclass(frozen=True)
class InputColumns:
    """Input columns of a model."""

    dense: tuple[str, ...]
    """Names of the dense columns, in the order of the model's dense inputs."""
    sparse: tuple[tuple[str, int], ...]
    """Name and table width of each sparse feature, in the order of the pooled embeddings."""

    @classmethod
    def from_embeddings(cls, dense: Iterable[str], embeddings: nn.Module) -> InputColumns:
        """Return the columns of a model with `embeddings`, a module with `tables` and `features`.

        Raises MesetaError if a feature is not pooled.
        """
        return cls(tuple(dense), tuple(pooled_dims("columns", embeddings).items()))

    @property
    def sources(self) -> frozenset[Source]:
        """Inputs of a model with these columns."""
        dense = [BOTTOM, *(("dense", name) for name in self.dense)] if self.dense else []
        return frozenset([*dense, *(("sparse", name) for name, _ in self.sparse)])

    def dense_labels(self, width: int = 1) -> list[InputLabel]:
        """Return labels of vectors of the dense columns, one after the other. By default they are the inputs."""
        return [label for name in self.dense for label in vector_labels(("dense", name), width)]

    def bottom_labels(self, width: int) -> list[InputLabel]:
        """Return labels of the output of a bottom MLP, which exists only with dense columns."""
        return vector_labels(BOTTOM, width) if self.dense else []

    def sparse_labels(self, num_weights: int = 0) -> list[InputLabel]:
        """Return labels of the pooled embeddings, without the last `num_weights` columns of each table."""
        return [label for name, dim in self.sparse for label in vector_labels(("sparse", name), dim - num_weights)]

    def pair_labels(self) -> list[InputLabel]:
        """Return labels of `dot_interaction`: all pairs of the bottom MLP's vector, if it exists, and the features."""
        vectors: list[Source] = [BOTTOM] if self.dense else []
        vectors += [("sparse", name) for name, _ in self.sparse]
        return [
            InputLabel(frozenset({vector, earlier}))
            for index, vector in enumerate(vectors)
            for earlier in vectors[:index]
        ]


def vector_labels(source: Source, width: int) -> list[InputLabel]:
    """Return the labels of the elements of an input's vector."""
    sources = frozenset({source})
    return [InputLabel(sources, element) for element in range(width)]


def describe_changes(before: InputColumns, now: InputColumns) -> str:
    """Return the dense and sparse columns that were added, dropped, reordered or resized. Empty if there are none."""
    changes = []
    each = (
        ("dense", dict.fromkeys(before.dense, 1), dict.fromkeys(now.dense, 1)),
        (
            "sparse",
            dict(before.sparse),
            dict(now.sparse),
        ),
    )
    for kind, old, new in each:
        kept = [name for name in old if name in new]
        sets = {
            "added": [name for name in new if name not in old],
            "dropped": [name for name in old if name not in new],
            "reordered": kept if kept != [name for name in new if name in old] else [],
            "resized": [name for name in kept if old[name] != new[name]],
        }
        changes += [f"{kind} {', '.join(map(repr, names))} {change}" for change, names in sets.items() if names]
    return "; ".join(changes)


@dataclass(frozen=True)
class Axis:
    """Axis of a dense parameter that is indexed by inputs."""

    labels: tuple[InputLabel, ...]
    starts_at_zero: bool
    """Whether new entries start at zero. Otherwise they start as in a new model, also if another axis is zero there."""


def reading(labels: Sequence[InputLabel]) -> Axis:
    """Return an axis of weights that read inputs. Those of a new input start at zero."""
    return Axis(tuple(labels), starts_at_zero=True)


def initial(labels: Sequence[InputLabel]) -> Axis:
    """Return an axis whose new entries start as in a new model, because another factor of their paths is zero."""
    return Axis(tuple(labels), starts_at_zero=False)


ParameterAxes = tuple[Axis | None, ...]
"""Axes of a parameter, `None` for one that is not indexed by inputs."""


@dataclass(frozen=True)
class ColumnAxes:
    """Axes of a model that are indexed by inputs.

    A model class that can change its columns has a method `column_axes(columns)`, which returns these axes for any
    columns. Each path from a new input to the logit must have a zero factor, so that adding the input changes no
    prediction. Each new weight and row must be on a path without another zero factor, so that it has a gradient.
    """

    parameters: Mapping[str, ParameterAxes]
    """Axes of parameters by name. Other parameters do not depend on the columns."""
    modules: Mapping[str, Source] = field(default_factory=dict)
    """Input that a submodule computes, by name. The submodule exists if the input does."""
    zero_row_columns: slice = field(default_factory=lambda: slice(0))
    """Columns of table rows that reach the logit without a weight. Those of a new table start at zero."""
