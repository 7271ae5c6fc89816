"""Config of a training run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from meseta.config.embedding import EmbeddingConfig, ScheduleConfig
from meseta.config.models import ModelConfig
from meseta.config.row_bits import BitsFile, BitsSetting, RowBits, min_bits_for_restores
from meseta.config.section import (
    BatchSize,
    LocalPath,
    MicroBatchCount,
    NonNegativeInt,
    PositiveInt,
    Section,
    Url,
    UsedBy,
    used_by,
)
from meseta.errors import format_value
from meseta.spec import InitSpec, MesetaError
from meseta.spec.average import AverageKind, AverageSpec
from meseta.spec.codecs import CodecName, Communication, CrossHostAlgorithm, ExchangeAlgorithm, Precision
from meseta.spec.stages import OVERLAPS, Overlap
from meseta.spec.tables import InitKind, TableDtype
from meseta.spec.tiers import MAX_LOOKAHEAD, EngineName, StorageOptions
from meseta.system.remote import Location, check_encryption, is_url, to_location, validate_address
from meseta.system.time_limits import TimeLimits


class ServiceConfig(Section):
    url: str | None = None
    """Address of a dispatcher, such as grpc://127.0.0.1:7077; None: read data.dir."""
    keys: LocalPath | None = None
    """Folder of keys created by `meseta readers keys`. With keys, the address must be grpc+tls://HOST:PORT."""
    dataset: str | None = Field(default=None, min_length=1, max_length=1024)
    """Name of a dataset of the readers; None: their only one."""
    reader_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a run stops if no reader decodes rows for it."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        try:
            return None if value is None else validate_address(value)
        except MesetaError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _check_encryption(self) -> ServiceConfig:
        if self.url is not None:
            try:
                check_encryption(self.url, has_keys=self.keys is not None)
            except MesetaError as error:
                raise ValueError(str(error)) from None
        return self


class DataConfig(Section):
    dir: LocalPath | None = None
    """Folder written by `meseta prepare`. Set either this or data.service.url."""
    labels: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Labels of the dataset to learn; None: all. Most models predict one label."""
    without: tuple[str, ...] = ()
    """Features that the model ignores. New rows may lack them."""
    shuffle: bool = True
    """Whether to shuffle training rows, by row group and inside windows. The order depends on the seed only."""
    shuffle_window_rows: PositiveInt = 262_144
    """Number of rows that are held in memory and permuted together."""
    prefetch_batches: NonNegativeInt = 4
    """Number of batches that a background thread prepares in advance; 0: read in the training loop."""
    last_batch: Literal["keep", "drop", "pad"] = "keep"
    """Handling of an incomplete last training batch of an epoch. 'pad' adds samples of weight 0."""
    filter: str | None = None
    """Condition on rows for training and evaluation, such as "age >= 18 and country != 'ES'", with at most 4,096
    constants; None: all rows."""
    negative_keep: float = Field(default=1.0, gt=0, le=1)
    """Share of the negative samples to train on. Predictions are corrected for it. Requires a single label of 0 or
    1."""
    service: ServiceConfig = ServiceConfig()
    """Readers that decode rows and send them, in place of this process."""

    @field_validator("dir", mode="before")
    @classmethod
    def _check_dir(cls, value: Any) -> Any:
        # Runs before validation, because Path would convert s3:// to s3:/.
        if isinstance(value, str) and "://" in value:
            raise ValueError(f"it must be a folder on this machine, got {value!r}; copy the dataset there first")
        return value

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        url = self.service.url
        if self.dir is None and url is None:
            raise ValueError(
                "neither data.dir nor data.service.url is set; set data.dir to a folder that `meseta prepare` wrote, "
                "or data.service.url to the address of a dispatcher"
            )
        if self.dir is not None and url is not None:
            raise ValueError(
                f"data.dir is {str(self.dir)!r} and data.service.url is {url!r}, but rows are read from only one of "
                "them; set data.dir=null to use the readers, or data.service.url=null to use the folder"
            )
        return self


DenseOptimizerName = Literal["sgd", "adagrad", "adam", "adamw", "lamb"]


class DenseOptimizerConfig(Section):
    name: DenseOptimizerName = "adam"
    """Optimizer of dense parameters, from torch.optim, or LAMB (arXiv 1904.00962)."""
    lr: float = Field(default=0.001, ge=0)
    """Base learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay as in torch.optim. For lamb, weight_decay * parameter is added to the update direction, as in the
    paper."""
    momentum: Annotated[float, UsedBy("sgd")] = Field(default=0.0, ge=0, lt=1)
    """Decay rate of the velocity; 0: no momentum."""
    beta1: Annotated[float, UsedBy("adam", "adamw", "lamb")] = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: Annotated[float, UsedBy("adam", "adamw", "lamb")] = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the second moment."""
    eps: Annotated[float | None, UsedBy("adagrad", "adam", "adamw", "lamb")] = Field(default=None, ge=0)
    """Constant added to the square root in the denominator; None: 1e-8 (adagrad 1e-10, lamb 1e-6)."""

    @model_validator(mode="after")
    def _check(self) -> DenseOptimizerConfig:
        # A key at its default is accepted, because the config.yaml of a run lists all keys.
        fields = {key: field for key, field in type(self).model_fields.items() if used_by(field)}
        used = [key for key, field in fields.items() if self.name in used_by(field)]
        for key, field in fields.items():
            if key not in used and getattr(self, key) != field.default:
                raise ValueError(
                    f"{self.name!r} does not use {key}, which is {getattr(self, key)!r}; leave it out, or choose an "
                    f"optimizer that does (this one uses lr, weight_decay, {', '.join(used)})"
                )
        return self


class DenseInitConfig(Section):
    kind: InitKind = "uniform"
    """Distribution: 'uniform' in [-scale, scale), 'normal' with standard deviation `scale`, or 'constant' with value
    `scale`."""
    scale: float
    """Scale of the distribution, see `kind`."""

    @model_validator(mode="after")
    def _check(self) -> DenseInitConfig:
        InitSpec(kind=self.kind, scale=self.scale)  # The constructor checks the values.
        return self


class DenseConfig(Section):
    sharding: Literal["replicated", "fsdp"] = "replicated"
    """'replicated' holds the dense part on every rank. 'fsdp' shards its parameters, gradients and moments across the
    ranks of each host, for dense parts that do not fit on a device."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Data type of MLPs and cross layers. 'bfloat16' keeps parameters and logits in float32. 'float32' becomes float64
    if rows are float64. 'auto' selects bfloat16 if every rank's processor (AVX512_BF16, AMX, BF16 of ARM) or GPU
    (compute capability 8.0) has instructions for it, and float32 otherwise. The choice is stored in the config.yaml of
    the run."""
    check_speed: bool = True
    """Whether to refuse a run in bfloat16 if a rank's processor or GPU has no instructions for it, which would be
    slow."""
    optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    """Optimizer of all parameters that are not in tables."""
    init: dict[str, DenseInitConfig] = Field(default={})
    """Initialization of parameters by patterns of their names, such as 'top_mlp.*.weight', in place of that of the
    model. If several patterns match a name, the last one applies. See docs/models.md."""
    schedule: ScheduleConfig | None = None
    """Learning-rate schedule of the dense part, in place of the section schedule; None: that section."""
    clip_value: float | None = Field(default=None, gt=0)
    """Limit to which each element of dense gradients is clipped, in -clip_value..clip_value; None: no limit."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Maximum norm of all dense gradients together; None: no limit. For rows of tables, see embedding.optimizer."""


class MetricsConfig(Section):
    ndcg_k: PositiveInt | None = None
    """Cutoff k of NDCG, for data with groups; None: no cutoff."""
    segments: tuple[str, ...] = ()
    """Single-valued sparse features. Evaluations compute separate metrics for the samples of each value."""
    max_segments: PositiveInt = 10
    """Number of listed values per feature of `segments`, most frequent first. All other values form one segment."""


class EarlyStoppingConfig(Section):
    metric: Literal["ne", "logloss", "auc", "pr_auc", "gauc", "ndcg"] = "ne"
    """Metric that selects the best evaluation, on the split valid, or on test if there is no valid. 'gauc' and 'ndcg'
    require data with groups."""
    task: str | None = None
    """Label for which the metric is computed; None: the first."""
    patience: PositiveInt | None = None
    """Number of successive evaluations without improvement after which training stops; None: train to the end."""
    min_delta: float = Field(default=0.0, ge=0)
    """Minimum change of the metric that counts as an improvement."""


class TrainConfig(Section):
    batch_size: BatchSize = 2048
    """Samples of a global batch, over all ranks."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Maximum norm of the gradients of layers and tables together, as in torch's clip_grad_norm_; None: no limit. The
    gradient of a row is its sum over the batch. Excludes dense.clip_norm. Limits of row optimizers apply
    afterwards."""
    accumulate_steps: MicroBatchCount = 1
    """Number of micro-batches into which each rank divides its slice of a global batch. Optimizers step once, after the
    last one, with the result of the whole batch. Activations need the memory of one micro-batch."""
    epochs: PositiveInt = 1
    """Number of passes over the training split."""
    task_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """Weight of the loss of each label; labels without an entry have weight 1."""
    search_budget: float = Field(default=4.0, ge=0)
    """Cost of trials of `meseta train --data`, in units of the first."""
    max_steps: PositiveInt | None = None
    """Number of steps after which training stops; None: after `epochs`."""
    log_every_steps: PositiveInt = 50
    """Number of steps between lines of metrics.jsonl."""
    loggers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    """Programs that also receive the values of metrics.jsonl. Each requires the extra of its name. 'tensorboard' writes
    to run_dir/tensorboard. The environment variables of MLflow and of Weights & Biases choose server and project."""
    eval_every_steps: PositiveInt | None = None
    """Number of steps between evaluations on the split valid, or on test if there is no valid; None: see
    eval_every_epochs."""
    eval_every_epochs: float | None = Field(default=None, gt=0)
    """Number of epochs between evaluations, such as 0.5. Cannot be combined with eval_every_steps; None for both:
    evaluate only at the end."""
    eval_batch_size: BatchSize = 8192
    """Samples of a global batch in evaluation and prediction."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    """Choice of the best evaluation, and condition for stopping. Requires eval_every_steps or eval_every_epochs."""
    test_first: bool = True
    """Whether start_from is evaluated on all training rows first."""
    finish: Literal["last", "best"] = "last"
    """Final weights of the run, for the test split, the report, `eval`, `predict` and exports: the last ones, or those
    of the best evaluation by early_stopping, whose checkpoint is kept."""

    average_weights: AverageKind | None = None
    """Average of weights over steps for evaluations, predictions and exports: 'ema', 'swa' (mean), or None."""
    average_decay: float = Field(default=0.999, gt=0, lt=1)
    """Factor of the previous average in each step of 'ema'."""
    average_start_step: NonNegativeInt = 0
    """Number of steps whose weights are left out."""
    average_norm_batches: PositiveInt = 100
    """Number of training batches for the statistics of batch norm with averaged weights."""

    @property
    def average_spec(self) -> AverageSpec | None:
        """Average of the weights."""
        if self.average_weights is None:
            return None
        decay = {"decay": self.average_decay} if self.average_weights == "ema" else {}
        return AverageSpec(kind=self.average_weights, start_step=self.average_start_step, **decay)

    @property
    def evaluates_during_training(self) -> bool:
        """Whether evaluations take place before the end of training."""
        return self.eval_every_steps is not None or self.eval_every_epochs is not None

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.eval_every_steps is not None and self.eval_every_epochs is not None:
            raise ValueError("eval_every_steps and eval_every_epochs cannot be combined; leave one out")
        if self.early_stopping.patience is not None:
            self.require_evaluations("early_stopping.patience")
        if self.finish == "best":
            self.require_evaluations("finish 'best'")
        return self

    def require_evaluations(self, what: str) -> None:
        """Raise ValueError if no evaluations take place during training. `what` is the setting that requires them."""
        if not self.evaluates_during_training:
            raise ValueError(
                f"{what} needs evaluations during training; set train.eval_every_steps or train.eval_every_epochs"
            )


class TableCheckpointConfig(Section):
    """Checkpoint options of one table."""

    bits: BitsSetting
    """Number of bits per value for this table, in place of `checkpoint.bits`."""


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = None
    """Number of steps between checkpoints; None: no limit. A checkpoint is always saved at the end and after SIGTERM or
    Ctrl-C."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Minutes between checkpoints, by the clock of rank 0; None: no limit."""
    background: Literal["auto", "always", "never"] = "auto"
    """Whether training continues during a save, which needs a copy of the tables and states of each rank in memory.
    'auto': if every rank has twice this memory free."""
    deltas: Literal["none", "one_shot", "consecutive", "intermittent", "rolling"] = "none"
    """Delta policy. A delta checkpoint holds only changed rows and needs files of older checkpoints. 'none': all
    checkpoints are full; 'one_shot': rows changed since the last full one; 'consecutive': rows changed since the
    previous one; 'intermittent': as 'one_shot', with a full one as soon as it is expected to cost less; 'rolling': as
    'consecutive', but each also rewrites a part of all rows, so that none is large."""
    max_chain: int = Field(default=8, ge=2, le=1024)
    """Maximum number of files that hold the rows of one block."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Reaction to a failed save: 'stop' ends the run, and 'continue' prints a warning and
    trains until the next save. A failed save at the end or after a signal always ends the run."""
    max_bytes_per_s: float | None = Field(default=None, gt=0)
    """Maximum bytes of checkpoints that all ranks together write per second, at least a million per rank; None: no
    limit. It does not apply to a save after a signal, whose sender waits."""
    bits: BitsSetting = "exact"
    """Number of bits per row value in checkpoints, except the last one, which is exact; see docs/checkpoints.md. 'auto'
    selects the smallest number that allows `expected_restores`."""
    tables: dict[str, TableCheckpointConfig] = Field(default={})
    """Per-table settings, by the name of the feature, or a file of `meseta checkpoint advise` with these settings."""
    expected_restores: NonNegativeInt = 20
    """Number of times that bits 'auto' expects this run to be resumed. After more, later checkpoints use more bits."""
    on_signal: Literal["exact", "delta"] = "exact"
    """Checkpoint after a signal, if rows are stored with fewer bits: a full exact one, or, in less time, one like the
    previous ones."""
    keep_last: PositiveInt = 2
    """Number of checkpoints to keep; older ones are removed."""
    keep_best: bool = False
    """Whether to save a checkpoint after each evaluation that is the best so far by train.early_stopping.metric, and to
    keep the latest of these in addition to `keep_last` others."""
    dir: Url | None = None
    """URL of fsspec, such as s3://bucket/run, for checkpoints; None: run_dir/checkpoints. Every rank writes its blocks
    there, and a run_dir without checkpoints resumes from there."""
    mirror: Url | None = None
    """URL of fsspec, such as s3://bucket/run, to which each checkpoint of run_dir is copied. A run_dir without
    checkpoints resumes from there. A mirror belongs to one run."""
    resume: Literal["auto", "older", "never"] = "auto"
    """'auto' resumes from the newest checkpoint of run_dir, and fails if it is damaged. 'older' then resumes from the
    newest undamaged one, and retries failed reads for 10 s. 'never' refuses a run_dir with checkpoints."""

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if self.dir is not None and not is_url(self.dir):
            raise ValueError(f"dir must be a URL such as s3://bucket/run or file:///folder, got {self.dir!r}")
        if self.dir is not None and self.mirror is not None:
            raise ValueError("dir and mirror cannot be combined: checkpoints at a URL are not copied; leave one out")
        if self.dir is not None and self.max_bytes_per_s is not None:
            raise ValueError("dir and max_bytes_per_s cannot be combined: uploads are not limited; leave one out")
        return self

    @field_validator("tables", mode="before")
    @classmethod
    def _load_tables_file(cls, tables: object) -> object:
        # The content becomes part of the config, so that a resumed run does not read the file again.
        if not isinstance(tables, str | Path):
            return tables
        try:
            return asdict(BitsFile.load(tables))["tables"]
        except MesetaError as error:
            raise ValueError(str(error)) from None

    def table_bits(self, table: str, restores: int) -> RowBits | None:
        """Return the number of bits for a table of a run with this number of restores. `None` means exact rows."""
        bits = self.tables[table].bits if table in self.tables else self.bits
        if bits == "auto":  # A run that is resumed more often than expected needs more bits.
            return min_bits_for_restores(max(self.expected_restores, restores))
        return None if bits == "exact" else bits


class PlannerConfig(Section):
    """Inputs of the search for plan 'auto'."""

    topology: LocalPath | None = None
    """File of the topology, see `meseta topology detect`; None: the machines of this run."""
    cost_model: LocalPath | None = None
    """File written by `meseta calibrate`; None: documented constants for the type of device."""
    constraints: LocalPath | None = None
    """File with constraints for the plan; None: no constraints."""


class CommConfig(Section):
    """Codecs and exchange algorithms, and timeouts. See meseta.Communication for the first ones."""

    keys_described_by = Communication
    precision: Precision = "fp32"
    forward: CodecName | None = None
    backward: CodecName | None = None
    dense: CodecName | None = None
    exchange: Literal["auto", ExchangeAlgorithm] = "auto"
    dense_exchange: Literal["auto", CrossHostAlgorithm] = "auto"
    heartbeat_timeout_s: float = TimeLimits.heartbeat_timeout_s
    """Seconds without a heartbeat of a rank after which the run is stopped and the rank reported. Heartbeats are sent
    every second, unless the rank is stopped, swapping or blocked by a disk."""
    stall_timeout_s: float = TimeLimits.stall_timeout_s
    """Seconds in one transfer, or in one stage of a step, after which the run is stopped. The rank that the others wait
    for is reported. A warning is printed after 30 s."""

    @model_validator(mode="after")
    def _check(self) -> CommConfig:
        _ = self.communication, self.time_limits  # Their constructors check the values.
        return self

    @property
    def communication(self) -> Communication:
        """Codecs and exchange algorithms."""
        return Communication(**self.model_dump(exclude=set(TimeLimits.__dataclass_fields__)))

    @property
    def time_limits(self) -> TimeLimits:
        """Timeouts for ranks."""
        return TimeLimits(heartbeat_timeout_s=self.heartbeat_timeout_s, stall_timeout_s=self.stall_timeout_s)


class PipelineConfig(Section):
    overlap: Literal["auto", "off"] | list[Overlap] = "auto"
    """Exchanges that overlap with computation: ids, embeddings, gradients, dense and agree, see docs/pipeline.md. The
    results do not depend on it. 'auto': all that can overlap."""

    graph: Literal["auto", "off"] = "auto"
    """CUDA graphs of whole steps on one GPU, see docs/pipeline.md. The results do not depend on them. 'auto':
    all steps that can be captured."""

    staleness: Literal[0, 1] = 0
    """Number of updates that a lookup does not see. With 1, each batch is looked up before the update of the previous
    batch, so that embeddings are exchanged during its computation. Results differ from those with 0, but not between
    numbers of ranks. See docs/pipeline.md for the effect on quality."""

    @field_validator("graph", mode="before")
    @classmethod
    def _check_graph(cls, graph: object) -> object:
        return "off" if graph is False else graph  # YAML 1.1 reads `off` as false.

    @field_validator("overlap", mode="before")
    @classmethod
    def _check(cls, overlap: object) -> object:
        if overlap is False:  # YAML 1.1 reads `off` as false.
            return "off"
        if not isinstance(overlap, list | tuple) and overlap not in ("auto", "off"):
            raise ValueError(f"{overlap!r} is not 'auto', 'off' or a list of {', '.join(OVERLAPS)}")
        for name in overlap if isinstance(overlap, list | tuple) else ():
            if name not in OVERLAPS:
                raise ValueError(f"{name!r} is not one of {', '.join(OVERLAPS)}")
            if list(overlap).count(name) > 1:
                raise ValueError(f"{name!r} is listed twice; list each name once")
        return overlap


class StorageConfig(Section):
    dir: LocalPath | None = None
    """Folder on a local disk for rows of tier 'disk', in scratch files that a run removes; None: the tier is not
    used."""
    cache_bytes: Literal["auto"] | PositiveInt = "auto"
    """Memory of each rank for caches of tiers 'cached' and 'disk'. It is divided among the shards for which the plan
    has no cache_rows, by the benefit of the next row. 'auto': the smallest memory for which a step is predicted to take
    at most 3 % longer than with all available memory."""
    lookahead: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_LOOKAHEAD)] = "auto"
    """Number of batches whose rows are prefetched from the backing store; 0: rows are fetched when they are looked up.
    'auto': 2 if rows are on a disk, otherwise 1."""
    engine: EngineName = "auto"
    """I/O engine for row files. 'auto' selects io_uring if the system allows it, otherwise threads."""
    max_reads_per_s: float | None = Field(default=None, gt=0)
    """Maximum number of disk reads per second of each rank; None: no limit."""

    @property
    def options(self) -> StorageOptions:
        """Storage options for `meseta.shard`."""
        return StorageOptions(
            dir=self.dir,
            cache_bytes=None if self.cache_bytes == "auto" else self.cache_bytes,
            lookahead=None if self.lookahead == "auto" else self.lookahead,
            engine=self.engine,
            max_reads_per_s=self.max_reads_per_s,
        )


StartPart = Literal["tables", "states", "dense"]
"""Part of a checkpoint."""


class StartConfig(Section):
    load: tuple[StartPart, ...] = get_args(StartPart)
    """Loaded parts; 'states' of optimizers."""
    reset: tuple[str, ...] = ()
    """Tables, by feature, with initial rows; 'dense': the dense part."""
    allow_unseen: bool = False
    """Whether almost all values of a feature may be new."""
    again: bool = False
    """Whether to accept files that the chain has read."""
    like: LocalPath | None = None
    """Dataset or run with the encoding of a lone checkpoint."""

    @model_validator(mode="after")
    def _check(self) -> StartConfig:
        if "states" in self.load and "tables" not in self.load and "dense" not in self.load:
            raise ValueError("load: 'states' belong to 'tables' or 'dense'; add one of them, or leave out 'states'")
        return self


class ReportConfig(Section):
    importance: bool = True
    """Whether to measure the importance of features at the end, see docs/report.md."""
    baseline: Literal["lightgbm"] | None = None
    """Learner to compare with, see docs/report.md."""


class RunConfig(Section):
    run_dir: LocalPath
    """Folder for all files of the run."""
    start_from: Url | None = None
    """Run folder or checkpoint, also at a URL, with the first weights; None: initial ones."""
    start: StartConfig = StartConfig()
    """Parts of start_from to load."""
    seed: NonNegativeInt = 0
    """Random seed for the order of data, initial rows and weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for training. 'auto' selects GPUs if there is one for each rank of the host."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """Number of CPU threads of each rank; None: as `meseta doctor` reports, divided by ranks, or fewer while other
    programs compete for the processors."""
    check_memory: bool = True
    """Whether to refuse a run that is predicted to need more memory than is free."""
    data: DataConfig
    """Dataset and order of its rows."""
    model: SerializeAsAny[ModelConfig] = ModelConfig()
    """Model and its sizes."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """Initialization and optimizers of embedding tables."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule of tables and the dense part, unless embedding.schedule or dense.schedule is set."""
    dense: DenseConfig = DenseConfig()
    """Data type, sharding and optimizer of the dense part."""
    train: TrainConfig = TrainConfig()
    """Batch size, duration and evaluations of training."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics of evaluations."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    plan: Literal["auto"] | LocalPath | dict[str, Any] = "auto"
    """Plan file, or an inline plan in the short form of meseta.Plan.from_dict. 'auto' searches for the plan with the
    shortest predicted step."""
    planner: PlannerConfig = PlannerConfig()
    """Inputs of the search for plan 'auto'."""
    storage: StorageConfig = StorageConfig()
    """Memory and disk of tiers 'cached' and 'disk'."""
    comm: CommConfig = CommConfig()
    """Communication between ranks, and its timeouts."""
    pipeline: PipelineConfig = PipelineConfig()
    """Overlap of communication with computation."""
    report: ReportConfig = ReportConfig()
    """Measurements for the report."""

    @property
    def checkpoint_location(self) -> Location:
        """Folder or URL of the checkpoints."""
        return self.run_dir / "checkpoints" if self.checkpoint.dir is None else to_location(self.checkpoint.dir)

    @property
    def embedding_schedule(self) -> ScheduleConfig:
        """Learning-rate schedule of tables."""
        return self.schedule if self.embedding.schedule is None else self.embedding.schedule

    @property
    def dense_schedule(self) -> ScheduleConfig:
        """Learning-rate schedule of the dense part."""
        return self.schedule if self.dense.schedule is None else self.dense.schedule

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best evaluation is kept."""
        return self.checkpoint.keep_best or self.train.finish == "best"

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if "plateau" in (self.embedding_schedule.kind, self.dense_schedule.kind):
            self.train.require_evaluations("schedule.kind 'plateau'")
        if self.train.clip_norm is not None and self.dense.clip_norm is not None:
            raise ValueError("train.clip_norm and dense.clip_norm cannot be combined: both clip dense gradients; "
                             "leave one out")  # fmt: skip
        if self.train.average_weights is not None and self.embedding.dtype in ("float16", "bfloat16"):
            raise ValueError(f"train.average_weights and embedding.dtype {self.embedding.dtype!r} cannot be combined: "
                             "rounded changes of rows would be missing in the average; set embedding.dtype to "
                             "'float32', or train.average_weights to null")  # fmt: skip
        if self.data.last_batch == "pad" and getattr(self.model, "batch_norm", False):
            raise ValueError("data.last_batch 'pad' and model.batch_norm cannot be combined: padding would change the "
                             "batch statistics; set data.last_batch to 'keep' or 'drop'")  # fmt: skip
        if self.embedding.dtype == "float64" and any(
            bits != "exact" for bits in (self.checkpoint.bits, *(t.bits for t in self.checkpoint.tables.values()))
        ):
            raise ValueError("checkpoint.bits and embedding.dtype 'float64' cannot be combined: float64 rows cannot be "
                             "quantized; set checkpoint.bits to 'exact', or embedding.dtype to 'float32'")  # fmt: skip
        for pattern, init in self.dense.init.items():
            dtype: TableDtype = "float64" if self.embedding.dtype == "float64" else "float32"
            InitSpec(kind=init.kind, scale=init.scale).check_range(f"dense.init {format_value(pattern)}", dtype)
        return self
