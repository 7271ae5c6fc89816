"""Tables, the features that read them, how rows start and how they learn."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, get_args

from meseta.errors import MAX_INT64, MesetaError, check_choice, check_number, duplicates, format_value, suggest
from meseta.machine.files import first_name_collision, has_control_characters
from meseta.spec.optimizer import OptimizerSpec

Pooling = Literal["sum", "mean", "none"]
IdPolicy = Literal["error", "drop", "clamp", "hash"]
TableDtype = Literal["float32", "float16", "bfloat16", "float64"]
DenseDtype = Literal["float32", "bfloat16"]
"""Type of the dense part's activations: 'float32' stands for that of the embeddings, 'bfloat16' for mixed precision."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Of one number of a row, by TableDtype."""
MAX_VALUE = {"float64": sys.float_info.max, "float32": 3.4028234e38, "float16": 65504.0, "bfloat16": 3.3895313e38}
"""Largest finite number, by TableDtype."""
InitKind = Literal["uniform", "normal", "constant"]
MAX_COLUMNS = 2**31 - 1
MAX_NORMAL_SAMPLE = math.sqrt(-2 * math.log(2.0**-32))
"""Largest standard normal number that the Box-Muller transform makes of 32 bits."""


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or name in ("", "*"):
        raise MesetaError(
            f"{kind} {name!r}: a name must be text, not empty, and not '*', which means all others in a plan"
        )
    fault = invalid_table_name_reason(name) if kind == "table" else None
    if fault:
        raise MesetaError(
            f"table {format_value(name)}: checkpoints have files of this name, so {fault}; name it otherwise"
        )


def invalid_table_name_reason(name: str) -> str | None:
    """Why a table cannot be called so; `None` if it can."""
    if name == "*":
        return "in a plan it means all other tables"
    return "it must have characters, and no control characters" if not name or has_control_characters(name) else None


@dataclass(frozen=True, kw_only=True)
class InitSpec:
    """Initial rows, drawn from a counter-based generator keyed by (seed, table, row, column)."""

    kind: InitKind = "uniform"
    """'uniform' in [-scale, scale), 'normal' with standard deviation `scale`, or 'constant' equal to `scale`."""
    scale: float | None = None
    """Width as above; None: 1 / sqrt(num_embeddings), the initial width of DLRM (arXiv 1906.00091)."""

    def __post_init__(self) -> None:
        check_choice("init", "kind", self.kind, get_args(InitKind))
        if self.scale is not None and check_number("init", "scale", self.scale) < 0.0 and self.kind != "constant":
            raise MesetaError(f"init: scale of {self.kind!r} is a width and must not be negative, got {self.scale}")

    def check_range(self, owner: str, dtype: TableDtype) -> None:
        """Raise MesetaError, beginning with `owner`, if values drawn by this may be infinite in `dtype`."""
        largest = MAX_VALUE[dtype] / (MAX_NORMAL_SAMPLE if self.kind == "normal" else 1.0)
        if self.scale is not None and abs(self.scale) > largest:
            raise MesetaError(
                f"{owner}: scale of {self.kind!r} must be at most {largest:.5g} for values of {dtype}, got {self.scale}"
            )


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One logical embedding table; how it is cut and placed is the plan's business."""

    name: str
    """Unique name, for example 'user_id'."""
    num_embeddings: int
    """Rows of the table, for example 1_000_000."""
    embedding_dim: int
    """Columns of the table, for example 64."""
    dtype: TableDtype = "float32"
    """Type of the rows. Arithmetic and optimizer state are float32 for the first three, and rows of 16 bits are rounded
    stochastically; 'float64' is for verification."""
    init: InitSpec = field(default_factory=InitSpec)
    """How rows start."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """How rows learn."""

    def __post_init__(self) -> None:
        _check_name("table", self.name)
        check_choice(f"table {self.name!r}", "dtype", self.dtype, get_args(TableDtype))
        for name, largest in (("num_embeddings", MAX_INT64), ("embedding_dim", MAX_COLUMNS)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= largest:
                raise MesetaError(
                    f"table {self.name!r}: {name} must be a whole number, at least 1 and at most {largest}, got "
                    f"{format_value(value)}"
                )
            object.__setattr__(self, name, int(value))  # numpy's integers are welcome, but are not JSON
        self.init.check_range(f"table {self.name!r}: init", self.dtype)


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """One sparse input and the table that it reads; several features may share a table."""

    name: str
    """Unique name, a key of the KeyedJaggedTensor."""
    table: str
    """Name of the TableSpec."""
    pooling: Pooling = "sum"
    """'sum' or 'mean' of a bag's rows (an empty bag gives zeros), or 'none': one row per id."""
    weighted: bool = False
    """Whether each id carries a weight, which multiplies its row before pooling (mean still divides by the ids)."""
    id_policy: IdPolicy = "error"
    """An id outside 0..num_embeddings-1 raises ('error'), is left out ('drop'), moves to the nearest valid row
    ('clamp') or is hashed into the table ('hash'); the last three are counted."""
    batch: str = ""
    """Features of one name have one batch size, such as that of a batch's distinct users; '' has that of the samples
    that the loss is the mean over."""

    def __post_init__(self) -> None:
        _check_name("feature", self.name)
        check_choice(f"feature {self.name!r}", "pooling", self.pooling, get_args(Pooling))
        check_choice(f"feature {self.name!r}", "id_policy", self.id_policy, get_args(IdPolicy))
        if self.weighted and self.pooling == "none":
            raise MesetaError(
                f"feature {self.name!r}: weights multiply rows while pooling, but pooling is 'none'; "
                "set weighted=False and apply the weights to the returned rows"
            )


def check_features(tables: Sequence[TableSpec], features: Sequence[FeatureSpec]) -> None:
    """Raise MesetaError unless names are unique and every feature reads a table that exists."""
    for kind, names in (("table", [t.name for t in tables]), ("feature", [f.name for f in features])):
        for name in duplicates(names):
            raise MesetaError(f"{kind} {name!r} is given {names.count(name)} times; names must be unique")
    alike = first_name_collision(table.name for table in tables)
    if alike:
        raise MesetaError(
            f"tables {alike[0]!r} and {alike[1]!r} are one name to file systems that ignore case or spell accents "
            "otherwise, and checkpoints have files of these names; rename one"
        )
    known = {table.name for table in tables}
    for feature in features:
        if feature.table not in known:
            raise MesetaError(
                f"feature {feature.name!r} reads table {feature.table!r}; {suggest(feature.table, known)}"
            )
