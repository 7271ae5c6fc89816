"""Config of a learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from meseta.config.section import NonNegativeInt, PositiveInt, Section, UsedBy, Width
from meseta.spec import InitSpec, MesetaError, OptimizerSpec
from meseta.spec.optimizer import SteppedRows, WeightDecayMode
from meseta.spec.tables import InitKind, Pooling, TableDtype


class ScheduleConfig(Section):
    """Factor on the base learning rate, with a linear warm-up, a constant phase and a decay to end_factor."""

    kind: Literal["constant", "polynomial", "cosine", "step", "plateau"] = "constant"
    """Schedule after the warm-up. 'polynomial' and 'cosine' decay between two steps. 'step' multiplies the factor by
    `step_factor` every `step_every` steps, and 'plateau' whenever evaluations stop improving."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the factor rises linearly to 1."""
    decay_start_step: NonNegativeInt = 0
    """Step, counted from 0, at which the decay starts, at the earliest after the warm-up. Kind 'plateau' ignores
    earlier evaluations."""
    decay_steps: NonNegativeInt = 0
    """Length of the decay in steps; 0: until the end of training."""
    power: Annotated[float, UsedBy("polynomial")] = Field(default=2.0, gt=0)
    """Exponent of the decay."""
    end_factor: float = Field(default=0.0, ge=0)
    """Factor after the decay. For 'step' and 'plateau' it is the smallest factor."""
    step_factor: Annotated[float, UsedBy("step", "plateau")] = Field(default=0.1, gt=0, lt=1)
    """Multiplier of the factor at each reduction."""
    step_every: Annotated[PositiveInt | None, UsedBy("step")] = None
    """Number of steps between reductions, from the start of the decay."""
    plateau_patience: Annotated[PositiveInt, UsedBy("plateau")] = 2
    """Number of successive evaluations without improvement after which the factor is reduced and the count restarts.
    The metric and min_delta of train.early_stopping define an improvement."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.kind == "step" and self.step_every is None:
            raise ValueError("kind 'step' needs step_every, the number of steps between reductions; set it")
        return self


class RowOptimizerConfig(Section):
    """See meseta.OptimizerSpec for the meaning of the keys."""

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
        OptimizerSpec(**self.model_dump())  # The constructor checks the values.
        return self


class InitConfig(Section):
    """See meseta.InitSpec for the meaning of the keys."""

    keys_described_by = InitSpec
    kind: InitKind = "uniform"
    scale: float | None = None


class PartialSection(Section):
    """Section of which only the keys set by the user are stored. The other values come from another section."""

    @model_serializer(mode="wrap")
    def _dump_set_fields(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # A saved default would override the value of the other section when the config is loaded again.
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}


class TableOptimizerConfig(PartialSection, RowOptimizerConfig):
    """Row optimizer of one table. The keys are described at meseta.OptimizerSpec.

    Missing keys are those of `embedding.optimizer`. If `name` differs from its name, they have their defaults.
    """

    @model_validator(mode="after")
    def _check(self) -> TableOptimizerConfig:
        return self  # `EmbeddingConfig` checks the merged keys.


class TableInitConfig(PartialSection, InitConfig):
    """Initial values of the rows of one table. The keys are described at meseta.InitSpec.

    Missing keys are those of `embedding.init`. If `kind` differs from its kind, they have their defaults.
    """


class TableConfig(Section):
    """Options of one table, which override those of `embedding`."""

    optimizer: TableOptimizerConfig | None = None
    """Keys of the row optimizer that differ from `embedding.optimizer`. If `name` differs, missing keys have their
    defaults."""
    init: TableInitConfig | None = None
    """Keys of the initial values that differ from `embedding.init`. If `kind` differs, missing keys have their
    defaults."""
    embedding_dim: Width | None = None
    """Embedding dimension of this table; None: model.embedding_dim. Models that need equal dimensions reject others."""
    pooling: Pooling | None = None
    """Pooling of bags of this feature; None: embedding.pooling. With 'none', a custom model reads the rows."""


class RegularizationConfig(Section):
    """Penalties on rows. In every step their gradients are added to those of the loss."""

    l2: float = Field(default=0.0, ge=0)
    """Factor of the penalty l2 / 2 * (sum of squares of the rows)."""
    l1: float = Field(default=0.0, ge=0)
    """Factor of the penalty l1 * (sum of absolute values of the rows)."""
    rows: SteppedRows = "touched"
    """Penalized rows. 'touched' penalizes each row of a global batch once, and 'looked_up' once for each lookup. 'all'
    penalizes all rows of the table, and updates them in every step."""


class EmbeddingConfig(Section):
    dtype: TableDtype = "float32"
    """Data type of rows. 'float16' and 'bfloat16' halve the memory. Their updates are computed in float32 and rounded
    stochastically. With 'float64' the whole run uses float64, for verification."""
    optimizer: RowOptimizerConfig = RowOptimizerConfig()
    """Row optimizer of all tables."""
    schedule: ScheduleConfig | None = None
    """Learning-rate schedule of all tables, in place of the section schedule; None: that section."""
    regularization: RegularizationConfig = RegularizationConfig()
    """Penalties on the rows of all tables that learn."""
    init: InitConfig = InitConfig()
    """Initial values of the rows of all tables."""
    new_rows: Literal["initial", "unknown"] = "initial"
    """Rows of values new since start_from: 'initial', or 'unknown' (copies of row 0)."""
    pooling: Literal["sum", "mean"] = "sum"
    """Pooling of bags."""
    id_policy: Literal["error", "drop", "clamp", "hash"] = "error"
    """Handling of ids that are out of range for their table."""
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
        """Return the arguments of a table's OptimizerSpec, without `regularization`."""
        overrides = self.tables.get(table)
        return _merge_overrides(self.optimizer, overrides.optimizer if overrides else None, "name")

    def table_pooling(self, table: str) -> Pooling:
        """Return the pooling of a feature."""
        overrides = self.tables.get(table)
        return self.pooling if overrides is None or overrides.pooling is None else overrides.pooling

    def table_embedding_dim(self, table: str) -> int | None:
        """Return the embedding dimension of a table. `None` means that of the model."""
        overrides = self.tables.get(table)
        return None if overrides is None else overrides.embedding_dim

    def table_init(self, table: str) -> dict[str, Any]:
        """Return the arguments of a table's InitSpec."""
        overrides = self.tables.get(table)
        return _merge_overrides(self.init, overrides.init if overrides else None, "kind")


def _merge_overrides(common: Section, overrides: PartialSection | None, kind: str) -> dict[str, Any]:
    set_keys = {} if overrides is None else overrides.model_dump()
    # Constants of one optimizer or initialization have no meaning for another.
    is_other = set_keys.get(kind, getattr(common, kind)) != getattr(common, kind)
    return set_keys if is_other else {**common.model_dump(), **set_keys}
