"""The section `embedding` of a run's config: how tables begin and learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from meseta.config.schedule import ScheduleConfig
from meseta.config.section import Section, Width
from meseta.spec import InitSpec, MesetaError, OptimizerSpec
from meseta.spec.optimizer import SteppedRows, WeightDecayMode
from meseta.spec.tables import InitKind, Pooling, TableDtype


class RowOptimizerConfig(Section):
    """See meseta.OptimizerSpec for the meaning of the constants."""

    keys_described_by = OptimizerSpec
    name: str = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    alpha: float = 0.99
    momentum: float = 0.0
    initial_accumulator: float = 0.0
    trust_coefficient: float = 0.001
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "coupled"
    clip_value: float | None = None
    clip_norm: float | None = None
    stepped_rows: SteppedRows = "touched"
    options: dict[str, Any] = Field(default={})
    element_states: int = 0
    row_states: int = 0

    @model_validator(mode="after")
    def _check(self) -> RowOptimizerConfig:
        OptimizerSpec(**self.model_dump())
        return self


class InitConfig(Section):
    """See meseta.InitSpec."""

    keys_described_by = InitSpec
    kind: InitKind = "uniform"
    scale: float | None = None


class PartialSection(Section):
    """Holds what is given; the rest comes from elsewhere, so that it is not written down either."""

    @model_serializer(mode="wrap")
    def _dump_set_fields(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}


class TableOptimizerConfig(PartialSection, RowOptimizerConfig):
    """Constants that are not given are those of `embedding.optimizer`, or, where `name` says another one, its
    defaults. See meseta.OptimizerSpec for their meaning."""

    @model_validator(mode="after")
    def _check(self) -> TableOptimizerConfig:
        return self  # what is given here is checked with the rest


class TableInitConfig(PartialSection, InitConfig):
    """What is not given is that of `embedding.init`, or, where `kind` says another one, its default. See
    meseta.InitSpec."""


class TableConfig(Section):
    """What one table has of its own; the rest comes from `embedding`."""

    optimizer: TableOptimizerConfig | None = None
    """Row optimizer: what differs from `embedding.optimizer`; another `name` begins from its own defaults."""
    init: TableInitConfig | None = None
    """Initial rows: what differs from `embedding.init`; another `kind` begins from its own default."""
    embedding_dim: Width | None = None
    """Numbers of the vectors of this table; None: model.embedding_dim. Models that need one width for all refuse
    another."""
    pooling: Pooling | None = None
    """How bags of this feature are reduced, with 'none' not at all, for a model of your own that reads rows; None:
    embedding.pooling."""


class RegularizationConfig(Section):
    """Penalties that are added to the loss of every step, by their gradients."""

    l2: float = Field(default=0.0, ge=0)
    """l2 / 2 * (sum of squares of the rows)."""
    l1: float = Field(default=0.0, ge=0)
    """l1 * (sum of absolute values of the rows)."""
    rows: SteppedRows = "touched"
    """Rows that are penalised: those that a batch reads, each once ('touched') or once for each of its lookups in the
    global batch ('looked_up'), or 'all' of the table, which steps every row in every step."""


class EmbeddingConfig(Section):
    dtype: TableDtype = "float32"
    """Type of the rows: 'float16' and 'bfloat16' take half the memory, and are updated in float32 and rounded
    stochastically; 'float64' makes the whole run float64, for verification."""
    optimizer: RowOptimizerConfig = RowOptimizerConfig()
    """Row optimizer of all tables."""
    schedule: ScheduleConfig | None = None
    """Learning-rate schedule of all tables, where it is not that of the section schedule; replaces all of its keys."""
    regularization: RegularizationConfig = RegularizationConfig()
    """Penalties on the rows of all tables that learn."""
    init: InitConfig = InitConfig()
    """Initial rows of all tables."""
    pooling: Literal["sum", "mean"] = "sum"
    """How bags with several ids are reduced."""
    id_policy: Literal["error", "drop", "clamp", "hash"] = "error"
    """What happens to an id outside its table."""
    tables: dict[str, TableConfig] = Field(default={})
    """Per-table settings, by the name of the feature."""

    @model_validator(mode="after")
    def _check(self) -> EmbeddingConfig:
        self._check_init("", self.init.model_dump())
        for table in self.tables:
            self._check_init(f"tables.{table}.", self.table_init(table))
            try:
                OptimizerSpec(**self.table_optimizer(table))
            except MesetaError as error:
                raise ValueError(f"tables.{table}.optimizer: {error}") from None
        return self

    def _check_init(self, where: str, init: dict[str, Any]) -> None:
        try:
            InitSpec(**init).check_range("init", self.dtype)
        except MesetaError as error:
            raise ValueError(f"{where}{error}") from None

    def table_optimizer(self, table: str) -> dict[str, Any]:
        """The constants of a table's row optimizer, without `regularization`."""
        own = self.tables.get(table)
        return _merge_overrides(self.optimizer, own.optimizer if own else None, "name")

    def table_pooling(self, table: str) -> Pooling:
        """How bags of a feature are reduced."""
        own = self.tables.get(table)
        return self.pooling if own is None or own.pooling is None else own.pooling

    def table_embedding_dim(self, table: str) -> int | None:
        """Numbers of a table's vectors; None: as many as the model says."""
        own = self.tables.get(table)
        return None if own is None else own.embedding_dim

    def table_init(self, table: str) -> dict[str, Any]:
        """How a table's rows start."""
        own = self.tables.get(table)
        return _merge_overrides(self.init, own.init if own else None, "kind")


def _merge_overrides(common: Section, own: PartialSection | None, kind: str) -> dict[str, Any]:
    """The keys of `common` under those that `own` gives; where `own` says another `kind`, those it gives alone."""
    given = {} if own is None else own.model_dump()
    is_other = given.get(kind, getattr(common, kind)) != getattr(common, kind)
    return given if is_other else {**common.model_dump(), **given}
