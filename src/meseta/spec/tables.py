"""Specifications of embedding tables and of the sparse features that read them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, get_args

from meseta.errors import MAX_INT64, MesetaError, check_choice, check_number, duplicates, format_value, suggest
from meseta.spec.average import AverageSpec
from meseta.spec.optimizer import OptimizerSpec
from meseta.system.files import first_name_collision, has_control_characters

Pooling = Literal["sum", "mean", "none"]
IdPolicy = Literal["error", "drop", "clamp", "hash"]
TableDtype = Literal["float32", "float16", "bfloat16", "float64"]
DenseDtype = Literal["float32", "bfloat16"]
"""Type of dense activations. 'bfloat16' enables mixed precision. 'float32' uses the type of the embeddings."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
MAX_VALUE = {"float64": sys.float_info.max, "float32": 3.4028234e38, "float16": 65504.0, "bfloat16": 3.3895313e38}
"""Largest finite value, by `TableDtype`."""
InitKind = Literal["uniform", "normal", "constant"]
MAX_COLUMNS = 2**31 - 1
MAX_NORMAL_SAMPLE = math.sqrt(-2 * math.log(2.0**-32))
"""Largest standard normal sample of the Box-Muller transform with 32 random bits."""


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or name in ("", "*"):
        raise MesetaError(
            f"{kind} {name!r}: the name must be a non-empty string other than '*', which means all others in a plan"
        )
    fault = invalid_table_name_reason(name) if kind == "table" else None
    if fault:
        raise MesetaError(
            f"table {format_value(name)}: checkpoints use the name for files, so {fault}; rename the table"
        )


def invalid_table_name_reason(name: str) -> str | None:
    """Return why `name` is invalid for a table, or `None` if it is valid."""
    if name == "*":
        return "it must not be '*', which means all other tables in a plan"
    return "it must not be empty or contain control characters" if not name or has_control_characters(name) else None


@dataclass(frozen=True, kw_only=True)
class InitSpec:
    """Initialization of rows by a counter-based random generator with the key (seed, table, row, column)."""

    kind: InitKind = "uniform"
    """Distribution of the values: 'uniform' in [-scale, scale), 'normal' with standard deviation `scale`, or 'constant'
    with value `scale`."""
    scale: float | None = None
    """Scale of the distribution. `None` means 1 / sqrt(num_embeddings), as in DLRM (arXiv 1906.00091)."""

    def __post_init__(self) -> None:
        check_choice("init", "kind", self.kind, get_args(InitKind))
        if self.scale is not None and check_number("init", "scale", self.scale) < 0.0 and self.kind != "constant":
            raise MesetaError(f"init: scale must not be negative for kind {self.kind!r}, got {self.scale}")

    def scale_of(self, num_embeddings: int) -> float:
        """Return the scale for a table with this number of rows."""
        return 1 / math.sqrt(num_embeddings) if self.scale is None else self.scale

    def check_range(self, owner: str, dtype: TableDtype) -> None:
        """Raise MesetaError if initial values could overflow `dtype`. The message starts with `owner`."""
        largest = MAX_VALUE[dtype] / (MAX_NORMAL_SAMPLE if self.kind == "normal" else 1.0)
        if self.scale is not None and abs(self.scale) > largest:
            raise MesetaError(
                f"{owner}: scale must be at most {largest:.5g} for kind {self.kind!r} and dtype {dtype}, got "
                f"{self.scale}"
            )


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """Logical embedding table. Its sharding and placement are part of a `Plan`."""

    name: str
    """Unique name, for example 'user_id'."""
    num_embeddings: int
    """Number of rows, for example 1_000_000."""
    embedding_dim: int
    """Number of columns, for example 64."""
    dtype: TableDtype = "float32"
    """Type of stored rows. Arithmetic and optimizer state are float32, and 16-bit rows are rounded stochastically.
    'float64' also computes in float64, for verification."""
    init: InitSpec = field(default_factory=InitSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    average: AverageSpec | None = None
    """Average of the rows over steps, for rows of 32 or 64 bits."""

    @property
    def num_states(self) -> tuple[int, int]:
        """Number of state values (per element, per row) of the optimizer and the average."""
        per_element, per_row = self.optimizer.num_states
        if self.average is None or self.optimizer.name == "frozen":
            return per_element, per_row
        return per_element + 1, per_row + self.average.has_eras

    def __post_init__(self) -> None:
        _check_name("table", self.name)
        check_choice(f"table {self.name!r}", "dtype", self.dtype, get_args(TableDtype))
        for name, largest in (("num_embeddings", MAX_INT64), ("embedding_dim", MAX_COLUMNS)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= largest:
                raise MesetaError(
                    f"table {self.name!r}: {name} must be an integer in 1..{largest}, got {format_value(value)}"
                )
            object.__setattr__(self, name, int(value))  # NumPy integers are accepted, but not serializable.
        self.init.check_range(f"table {self.name!r}: init", self.dtype)
        if self.average is not None and self.dtype in ("float16", "bfloat16"):
            raise MesetaError(
                f"table {self.name!r}: average cannot be combined with dtype {self.dtype}, because rounded changes of "
                "rows would be missing in the average; set dtype to float32, or average to None"
            )


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Sparse feature and the table that it reads. Several features may share a table."""

    name: str
    """Unique name, which is the key in the `KeyedJaggedTensor`."""
    table: str
    pooling: Pooling = "sum"
    """Reduction of the rows of a bag, zeros for an empty bag. 'none' returns one row per id."""
    weighted: bool = False
    """Whether each id has a weight that multiplies its row before pooling. Mean pooling still divides by the number of
    ids."""
    id_policy: IdPolicy = "error"
    """Handling of ids outside 0..num_embeddings-1: raise an error, drop the id, clamp it to the nearest valid row, or
    hash it into the table. All policies except 'error' count such ids."""
    batch: str = ""
    """Name of the feature group, whose features have the same batch size, such as the number of distinct users. The
    group '' has one entry per sample of the loss."""

    def __post_init__(self) -> None:
        _check_name("feature", self.name)
        check_choice(f"feature {self.name!r}", "pooling", self.pooling, get_args(Pooling))
        check_choice(f"feature {self.name!r}", "id_policy", self.id_policy, get_args(IdPolicy))
        if self.weighted and self.pooling == "none":
            raise MesetaError(
                f"feature {self.name!r}: weighted requires pooling 'sum' or 'mean', got 'none'; "
                "set weighted=False and apply the weights to the returned rows"
            )


def check_features(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> None:
    """Raise MesetaError if names of tables or features are not unique, or if a feature reads an unknown table."""
    for kind, names in (("table", [t.name for t in tables]), ("feature", [f.name for f in features])):
        for name in duplicates(names):
            raise MesetaError(f"{kind} {name!r} is defined {names.count(name)} times; names must be unique")
    # Checkpoints have files with the names of tables. Some file systems ignore case or normalize accents.
    same_file = first_name_collision(table.name for table in tables)
    if same_file:
        raise MesetaError(
            f"tables {same_file[0]!r} and {same_file[1]!r} must not differ only in case or in the encoding of accents, "
            "because checkpoints use the names for files; rename one of them"
        )
    table_names = {table.name for table in tables}
    for feature in features:
        if feature.table not in table_names:
            raise MesetaError(
                f"feature {feature.name!r} reads the unknown table {feature.table!r}; "
                f"{suggest(feature.table, table_names)}"
            )
