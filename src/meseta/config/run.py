"""The config of one training run; every key has a default, a unit and a docstring."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from meseta.config.embedding import EmbeddingConfig
from meseta.config.models import ModelConfig
from meseta.config.row_bits import BitsFile, BitsSetting, RowBits, min_bits_for_restores
from meseta.config.schedule import ScheduleConfig
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
from meseta.machine.remote import Location, check_encryption, is_url, to_location, validate_address
from meseta.machine.time_limits import TimeLimits
from meseta.spec import InitSpec, MesetaError
from meseta.spec.codecs import CodecName, Communication, CrossHostAlgorithm, ExchangeAlgorithm, Precision
from meseta.spec.stages import OVERLAPS, Overlap
from meseta.spec.tables import InitKind, TableDtype
from meseta.spec.tiers import MAX_LOOKAHEAD, EngineName, StorageOptions


class ServiceConfig(Section):
    url: str | None = None
    """Address of a dispatcher, such as grpc://127.0.0.1:7077; None: data.dir is read."""
    keys: LocalPath | None = None
    """Folder of keys, as `meseta readers keys` makes it, by which the address is grpc+tls://HOST:PORT."""
    dataset: str | None = Field(default=None, min_length=1, max_length=1024)
    """Name of the dataset there; None: the only one."""
    reader_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a run ends for which no reader decodes rows."""

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
    """Directory written by `meseta prepare`; this or data.service.url must be given, and not both."""
    labels: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Labels to learn, of those that the dataset has; None: all. Most models predict one."""
    shuffle: bool = True
    """Shuffle training rows, by row groups and inside windows; the order is a function of the seed alone."""
    shuffle_window_rows: PositiveInt = 262_144
    """Rows held in memory and permuted together."""
    prefetch_batches: NonNegativeInt = 4
    """Batches made ahead by a background thread; 0 reads in the training loop."""
    last_batch: Literal["keep", "drop", "pad"] = "keep"
    """The last training batch of an epoch where it is short: as it is, left out, or filled with samples of weight 0,
    which change nothing but the shape."""
    filter: str | None = None
    """Condition on the rows to train and to evaluate on, such as "age >= 18 and country != 'ES'", with at most 4,096
    constants; None: all rows."""
    negative_keep: float = Field(default=1.0, gt=0, le=1)
    """Share of the negatives to train on; predictions are corrected for it. Needs one label, 0 or 1."""
    service: ServiceConfig = ServiceConfig()
    """Readers that decode the rows, instead of this process, and send them."""

    @field_validator("dir", mode="before")
    @classmethod
    def _check_dir(cls, value: Any) -> Any:
        if isinstance(value, str) and "://" in value:
            raise ValueError(f"it must be a folder on this machine, got {value!r}; copy the dataset there first")
        return value

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        url = self.service.url
        if self.dir is None and url is None:
            raise ValueError(
                "neither data.dir nor data.service.url is set; set data.dir to what `meseta prepare` wrote, or "
                "data.service.url to the address of a dispatcher"
            )
        if self.dir is not None and url is not None:
            raise ValueError(
                f"data.dir is {str(self.dir)!r} and data.service.url is {url!r}, and rows come from one of them; set "
                "data.dir=null to take those of the readers, or data.service.url=null"
            )
        return self


DenseOptimizerName = Literal["sgd", "adagrad", "adam", "adamw", "lamb"]


class DenseOptimizerConfig(Section):
    name: DenseOptimizerName = "adam"
    """Optimizer of the dense parameters: those of torch.optim, and LAMB (arXiv 1904.00962)."""
    lr: float = Field(default=0.001, ge=0)
    """Base learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """As in torch.optim; lamb adds weight_decay * parameter to its direction, as published."""
    momentum: Annotated[float, UsedBy("sgd")] = Field(default=0.0, ge=0, lt=1)
    """Decay of the velocity; 0 keeps none."""
    beta1: Annotated[float, UsedBy("adam", "adamw", "lamb")] = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: Annotated[float, UsedBy("adam", "adamw", "lamb")] = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: Annotated[float | None, UsedBy("adagrad", "adam", "adamw", "lamb")] = Field(default=None, ge=0)
    """Added to the root in the denominator; None: 1e-8 (adagrad 1e-10, lamb 1e-6)."""

    @model_validator(mode="after")
    def _check(self) -> DenseOptimizerConfig:
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
    """'uniform' in [-scale, scale), 'normal' with standard deviation `scale`, or 'constant' equal to `scale`."""
    scale: float
    """Width, or value."""

    @model_validator(mode="after")
    def _check(self) -> DenseInitConfig:
        InitSpec(kind=self.kind, scale=self.scale)
        return self


class DenseConfig(Section):
    sharding: Literal["replicated", "fsdp"] = "replicated"
    """'replicated' holds all of the dense part on every rank; 'fsdp' cuts its parameters, gradients and moments over
    the ranks of each host and replicates them across hosts, for dense parts larger than a device."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """'bfloat16' computes MLPs and cross layers in bfloat16, on float32 parameters and with float32 logits: faster
    where the processor multiplies bfloat16. 'float32' follows the embeddings; float64 rows make all of it float64.
    'auto' is bfloat16 where every rank's processor (AVX512_BF16, AMX, BF16 of ARM) or GPU (compute capability 8.0)
    multiplies it, and float32 else: chosen when the run begins, written to its config.yaml, and kept."""
    check_speed: bool = True
    """Refuse to begin a run in bfloat16 where a rank's processor or GPU has no instructions for it, which makes it
    many times slower than float32."""
    optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    """Optimizer of everything that is not a table."""
    init: dict[str, DenseInitConfig] = Field(default={})
    """How parameters start whose names a pattern meets, such as 'top_mlp.*.weight', where it is not as the model has
    it; the last pattern counts of those that meet one. See docs/models.md."""
    schedule: ScheduleConfig | None = None
    """Its learning-rate schedule, where it is not that of the section schedule; replaces all of its keys."""
    clip_value: float | None = Field(default=None, gt=0)
    """Every element of its gradients is limited to -clip_value..clip_value; None: no limit."""
    clip_norm: float | None = Field(default=None, gt=0)
    """All its gradients together are scaled to this norm where theirs is larger; None: no limit. Rows of tables have
    limits of their own, embedding.optimizer.clip_value and clip_norm."""


class MetricsConfig(Section):
    ndcg_k: PositiveInt | None = None
    """Ranks that NDCG looks at, where the data have groups; None: all."""
    segments: tuple[str, ...] = ()
    """Sparse features with one id per sample: evaluations measure the samples of each of their values apart."""
    max_segments: PositiveInt = 10
    """Values of each of `segments` that are listed, those with most samples; the others are measured together."""


class EarlyStoppingConfig(Section):
    metric: Literal["ne", "logloss", "auc", "pr_auc", "gauc", "ndcg"] = "ne"
    """Figure that says which evaluation is the best, of the split valid, or, where the data have none, of test; 'gauc'
    and 'ndcg' need data with groups."""
    task: str | None = None
    """Label whose figure it is, where the data have several; None: the first."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row that are no better; None: train to the end."""
    min_delta: float = Field(default=0.0, ge=0)
    """An evaluation is better if it gains more than this."""


class TrainConfig(Section):
    batch_size: BatchSize = 2048
    """Samples of a global batch, over all ranks."""
    clip_norm: float | None = Field(default=None, gt=0)
    """The gradients of layers and tables together, each row's summed over the batch, are scaled to this norm where
    theirs is larger, as torch's clip_grad_norm_ does; in one process, and not beside dense.clip_norm. Limits of the row
    optimizers come after it. None: no limit."""
    accumulate_steps: MicroBatchCount = 1
    """Parts in which each rank takes its slice of a global batch, one after the other, with one step of all optimizers
    after the last: the memory of activations becomes that of a part, the result is that of the whole batch."""
    epochs: PositiveInt = 1
    """Passes over the training split."""
    task_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """What the loss of a label is multiplied by, by the name of the label; those that are not named keep 1."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps; None: after `epochs`."""
    log_every_steps: PositiveInt = 50
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Also write the figures of metrics.jsonl to run_dir/tensorboard; needs the extra 'tensorboard'."""
    eval_every_steps: PositiveInt | None = None
    """Steps between evaluations, of the split valid where the data have one, else of test; None: see
    eval_every_epochs."""
    eval_every_epochs: float | None = Field(default=None, gt=0)
    """The same in epochs, whole or a part such as 0.5; not beside eval_every_steps. Neither: only at the end."""
    eval_batch_size: BatchSize = 8192
    """Samples of a global batch in evaluation and prediction."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    """What the best evaluation is, and when to stop; needs eval_every_steps or eval_every_epochs."""
    finish: Literal["last", "best"] = "last"
    """Weights that the run ends with, which the test split, the report, `eval`, `predict` and exports take: the last,
    or those of the best evaluation by early_stopping, whose checkpoint is then kept as by checkpoint.keep_best."""

    @property
    def evaluates_during_training(self) -> bool:
        """Whether there are evaluations before the end."""
        return self.eval_every_steps is not None or self.eval_every_epochs is not None

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.eval_every_steps is not None and self.eval_every_epochs is not None:
            raise ValueError("eval_every_steps and eval_every_epochs say the same in two ways; leave one out")
        if self.early_stopping.patience is not None:
            self.require_evaluations("early_stopping.patience")
        if self.finish == "best":
            self.require_evaluations("finish 'best'")
        return self

    def require_evaluations(self, what: str) -> None:
        """Raise ValueError where there are none on the way, which `what` needs."""
        if not self.evaluates_during_training:
            raise ValueError(
                f"{what} needs evaluations on the way; set train.eval_every_steps or train.eval_every_epochs"
            )


class TableCheckpointConfig(Section):
    """What one table has of its own in checkpoints."""

    bits: BitsSetting
    """As `checkpoint.bits`."""


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = None
    """Steps between checkpoints; None: not by steps. The end, and SIGTERM or Ctrl-C, always make one."""
    every_minutes: float | None = Field(default=None, gt=0)
    """Minutes between checkpoints, by the clock of rank 0; None: not by time."""
    background: Literal["auto", "always", "never"] = "auto"
    """Write while training goes on, from a copy that takes as much memory as the tables and states of a rank. 'auto'
    does so where every rank has twice that free; else training waits until all is written."""
    deltas: Literal["none", "one_shot", "consecutive", "intermittent", "rolling"] = "none"
    """Which checkpoints hold but the rows that have changed, and need files of older ones. 'none': each is whole.
    'one_shot': what has changed since the last whole one; 'consecutive': since the one before; 'intermittent': as
    'one_shot', and a whole one as soon as that is expected to be cheaper; 'rolling': as 'consecutive', and each writes
    a part of all rows anew, so that none is large."""
    max_chain: int = Field(default=8, ge=2, le=1024)
    """The most files that any row needs."""
    on_failure: Literal["stop", "continue"] = "stop"
    """What a save that fails does to the run, as on a full disk: 'stop' ends it, 'continue' says so and trains on until
    the next save. The last one, and that of a signal, end it in any case."""
    max_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bytes that all ranks together write of checkpoints in any second, at least a million for each rank; None: no
    limit. It holds for every save but that of a signal, whose sender waits."""
    bits: BitsSetting = "exact"
    """Bits that a checkpoint keeps of each value of a row, see docs/checkpoints.md; those that end a run are exact.
    'auto' takes the fewest that stand `expected_restores`."""
    tables: dict[str, TableCheckpointConfig] = Field(default={})
    """Per-table settings, by the name of the feature; or a file with them, as `meseta checkpoint advise` writes it."""
    expected_restores: NonNegativeInt = 20
    """Times that bits 'auto' expects this run to be taken up from a checkpoint; where they become more, later
    checkpoints are wider."""
    on_signal: Literal["exact", "delta"] = "exact"
    """What a signal saves where rows have fewer bits: a whole exact checkpoint, or, in less time, one as those
    before."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; older ones are removed."""
    keep_best: bool = False
    """Save a checkpoint after every evaluation that is the best so far, by train.early_stopping.metric, and keep the
    last of these beside `keep_last` others."""
    dir: Url | None = None
    """URL of fsspec, such as s3://bucket/run, to which checkpoints are written instead of run_dir, by every rank its
    blocks, and from which a run_dir without any goes on; None: run_dir/checkpoints."""
    mirror: Url | None = None
    """URL of fsspec, such as s3://bucket/run, that holds the same checkpoints as run_dir: each is copied there, and a
    run_dir that has none begins with the newest there. One run per mirror."""
    resume: Literal["auto", "older", "never"] = "auto"
    """'auto' goes on from the newest checkpoint of run_dir, and ends where that is damaged; 'older' goes back to the
    newest that is whole then, and repeats a read that fails for 10 s; 'never' refuses a run_dir that has one."""

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if self.dir is not None and not is_url(self.dir):
            raise ValueError(f"dir must be a URL such as s3://bucket/run or file:///folder, got {self.dir!r}")
        if self.dir is not None and self.mirror is not None:
            raise ValueError("dir and mirror: what is written to a URL is not copied to another; leave one out")
        if self.dir is not None and self.max_bytes_per_s is not None:
            raise ValueError("dir and max_bytes_per_s: parts of an upload are not held apart; leave one out")
        return self

    @field_validator("tables", mode="before")
    @classmethod
    def _load_tables_file(cls, tables: object) -> object:
        if not isinstance(tables, str | Path):
            return tables
        try:
            return asdict(BitsFile.load(tables))["tables"]
        except MesetaError as error:
            raise ValueError(str(error)) from None

    def table_bits(self, table: str, restores: int) -> RowBits | None:
        """Of a run that was taken up so many times; None: its rows stay exact."""
        bits = self.tables[table].bits if table in self.tables else self.bits
        if bits == "auto":
            return min_bits_for_restores(max(self.expected_restores, restores))
        return None if bits == "exact" else bits


class PlannerConfig(Section):
    """What plan 'auto' is made for."""

    topology: LocalPath | None = None
    """File with the machines, see `meseta topology detect`; None: those at hand."""
    cost_model: LocalPath | None = None
    """File that `meseta calibrate` has written; None: documented constants of the kind of device."""
    constraints: LocalPath | None = None
    """File with what the plan has to keep to; None: nothing."""


class CommConfig(Section):
    """See meseta.Communication for the meaning of the keys."""

    keys_described_by = Communication
    precision: Precision = "fp32"
    forward: CodecName | None = None
    backward: CodecName | None = None
    dense: CodecName | None = None
    exchange: Literal["auto", ExchangeAlgorithm] = "auto"
    dense_exchange: Literal["auto", CrossHostAlgorithm] = "auto"
    heartbeat_timeout_s: float = TimeLimits.heartbeat_timeout_s
    """Seconds without a sign of life of a rank, which comes each second, after which the run is ended and the rank
    named: it is stopped, swapping, or held up by a disk."""
    stall_timeout_s: float = TimeLimits.stall_timeout_s
    """Seconds for which a rank may wait for one and the same transfer, or be in one stage of a step; then the run is
    ended, and the rank named that keeps the others waiting. A warning comes after 30."""

    @model_validator(mode="after")
    def _check(self) -> CommConfig:
        _ = self.communication, self.time_limits
        return self

    @property
    def communication(self) -> Communication:
        """How ranks write and route."""
        return Communication(**self.model_dump(exclude=set(TimeLimits.__dataclass_fields__)))

    @property
    def time_limits(self) -> TimeLimits:
        """How long they wait."""
        return TimeLimits(heartbeat_timeout_s=self.heartbeat_timeout_s, stall_timeout_s=self.stall_timeout_s)


class PipelineConfig(Section):
    overlap: Literal["auto", "off"] | list[Overlap] = "auto"
    """What travels between ranks while they compute, of ids, embeddings, gradients, dense and agree, see
    docs/pipeline.md; no number depends on it. 'auto': all that can."""

    staleness: Literal[0, 1] = 0
    """Updates that a lookup does not see. With 1 every batch is looked up before the update of the one before, so that
    rows and bags travel while that one is computed: other numbers than with 0, alike on any number of ranks; see
    docs/pipeline.md for what they cost."""

    @field_validator("overlap", mode="before")
    @classmethod
    def _check(cls, overlap: object) -> object:
        if overlap is False:  # what YAML makes of off
            return "off"
        if not isinstance(overlap, list | tuple) and overlap not in ("auto", "off"):
            raise ValueError(f"{overlap!r} is not 'auto', 'off' or a list of {', '.join(OVERLAPS)}")
        for name in overlap if isinstance(overlap, list | tuple) else ():
            if name not in OVERLAPS:
                raise ValueError(f"{name!r} is none of {', '.join(OVERLAPS)}")
            if list(overlap).count(name) > 1:
                raise ValueError(f"{name!r} stands there twice; name each once")
        return overlap


class StorageConfig(Section):
    dir: LocalPath | None = None
    """Folder on a local disk for rows of tier 'disk', in scratch files that a run removes; None: none lies there."""
    cache_bytes: Literal["auto"] | PositiveInt = "auto"
    """Memory of each rank for rows of tiers 'cached' and 'disk' that lie near, shared out to the pieces of tables for
    which the plan has no cache_rows, by what the next row saves. 'auto': the least with which a step is predicted to
    take no more than 3 % longer than with all that there is."""
    lookahead: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_LOOKAHEAD)] = "auto"
    """Batches whose rows are brought from far before their turn; 0: rows come when they are looked up. 'auto': 2 where
    rows lie on a disk, else 1."""
    engine: EngineName = "auto"
    """What reads and writes the disk; 'auto' takes io_uring where the system allows it, else threads."""
    max_reads_per_s: float | None = Field(default=None, gt=0)
    """Reads of the disk a second that each rank makes at most; None: no limit."""

    @property
    def options(self) -> StorageOptions:
        """The same for `meseta.shard`."""
        return StorageOptions(
            dir=self.dir,
            cache_bytes=None if self.cache_bytes == "auto" else self.cache_bytes,
            lookahead=None if self.lookahead == "auto" else self.lookahead,
            engine=self.engine,
            max_reads_per_s=self.max_reads_per_s,
        )


class RunConfig(Section):
    run_dir: LocalPath
    """Where everything of this run goes."""
    seed: NonNegativeInt = 0
    """Order of data, initial rows and weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """'auto' takes GPUs where each rank of the host can have one."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each rank, fewer while other programs use the processors and that is faster; None: cores divided
    by ranks on this host."""
    check_memory: bool = True
    """Refuse to start a run that is predicted to need more memory than is free."""
    data: DataConfig
    """What is read."""
    model: SerializeAsAny[ModelConfig] = ModelConfig()
    """What is trained."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """How tables learn."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule of tables and dense part, where embedding.schedule and dense.schedule are not given."""
    dense: DenseConfig = DenseConfig()
    """How the rest learns."""
    train: TrainConfig = TrainConfig()
    """How long and how often."""
    metrics: MetricsConfig = MetricsConfig()
    """What evaluations measure."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What survives."""
    plan: Literal["auto"] | LocalPath | dict[str, Any] = "auto"
    """'auto' searches the plan with the shortest predicted step; else a plan file, or a plan written here (the short
    form of meseta.Plan.from_dict)."""
    planner: PlannerConfig = PlannerConfig()
    """What plan 'auto' is made for."""
    storage: StorageConfig = StorageConfig()
    """Room for rows that the plan puts into tiers 'cached' and 'disk'."""
    comm: CommConfig = CommConfig()
    """How ranks write and route what they send each other."""
    pipeline: PipelineConfig = PipelineConfig()
    """What of that is hidden behind computation."""

    @property
    def checkpoint_location(self) -> Location:
        """Where checkpoints lie."""
        return self.run_dir / "checkpoints" if self.checkpoint.dir is None else to_location(self.checkpoint.dir)

    @property
    def embedding_schedule(self) -> ScheduleConfig:
        """The one that tables learn by."""
        return self.schedule if self.embedding.schedule is None else self.embedding.schedule

    @property
    def dense_schedule(self) -> ScheduleConfig:
        """The one that the dense part learns by."""
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
            raise ValueError("train.clip_norm and dense.clip_norm: the norm of one holds the gradients of the other; "
                             "leave one out")  # fmt: skip
        if self.data.last_batch == "pad" and getattr(self.model, "batch_norm", False):
            raise ValueError("data.last_batch 'pad' and model.batch_norm: padding would count in the statistics of a "
                             "batch; set data.last_batch to 'keep' or 'drop'")  # fmt: skip
        if self.embedding.dtype == "float64" and any(
            bits != "exact" for bits in (self.checkpoint.bits, *(t.bits for t in self.checkpoint.tables.values()))
        ):
            raise ValueError("checkpoint.bits and embedding.dtype 'float64': rows of float64 have no codes; set "
                             "checkpoint.bits to 'exact', or embedding.dtype to 'float32'")  # fmt: skip
        for pattern, init in self.dense.init.items():
            dtype: TableDtype = "float64" if self.embedding.dtype == "float64" else "float32"
            InitSpec(kind=init.kind, scale=init.scale).check_range(f"dense.init {format_value(pattern)}", dtype)
        return self
