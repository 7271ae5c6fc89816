"""Messages between trainers, the dispatcher and readers. They are JSON that is validated against these schemas.

    trainer    --describe, count, lease--->  dispatcher  <-heartbeat-  reader
    trainer    --------- ticket ---------->  reader      ---- Arrow record batches --->  trainer

Messages are stateless: each contains everything that its receiver needs, so any process may restart.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from meseta.data.read.options import LastBatch, ReaderOptions
from meseta.errors import MesetaError, format_value
from meseta.system.files import MAX_DOCUMENT_VALUES, parse_json
from meseta.system.waits import encode_text

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of a message in bytes. Descriptions and row counts from the dispatcher may be larger."""
# Each value may cause a validation error, which takes much more memory than the value.
MAX_MESSAGE_VALUES = 1 << 14
"""Maximum number of JSON values in a message."""
MAX_REPLY_BYTES = 1 << 28
MAX_TABLE_BYTES = 1 << 32
"""Maximum size of a file that a TableRequest returns, in bytes."""
# gRPC sends errors in headers. Headers of 8 KiB or more may break the connection.
MAX_REASON_BYTES, MAX_REMEDY_BYTES = 3072, 1024
"""Limits on the parts of an error, in bytes."""

Name = Annotated[str, Field(min_length=1, max_length=1024)]
Number = Annotated[int, Field(ge=0, lt=1 << 53)]
Positive = Annotated[int, Field(ge=1, lt=1 << 53)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
RedecodeReason = Literal["room", "idle"]
"""Reason for decoding a window again: it was evicted for a window that is needed earlier ('room'), or because no rank
had taken its rows for a while ('idle')."""
MoveReason = Literal["silent", "lost", "slow"]
"""Reason for moving a window to another reader: no heartbeat ('silent'), a failure that a rank reported ('lost'), or no
rows ('slow')."""


MessageType = TypeVar("MessageType", bound="Message")


class Message(BaseModel):
    """Immutable message. Unknown keys and values of another type are errors."""

    # Fields with alias choices also accept the key that earlier versions send.

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    max_bytes: ClassVar[int] = MAX_MESSAGE_BYTES
    max_values: ClassVar[int] = MAX_MESSAGE_VALUES

    def to_bytes(self) -> bytes:
        """Serialize to JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls: type[MessageType], content: bytes, sender: str) -> MessageType:
        """Restore the result of `to_bytes`. Raises MesetaError that names `sender` if the content is invalid."""
        if len(content) > cls.max_bytes:
            raise MesetaError(f"{sender} sent a message of {len(content):,} bytes; at most {cls.max_bytes:,} are read")
        try:
            parse_json(content, max_values=cls.max_values)  # Refuses duplicate keys and deep nesting.
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "message"
            problem = f"{format_value(key)}: {first['msg']}"
        except ValueError as error:
            problem = format_value(str(error))
        raise MesetaError(f"{sender} sent an invalid {cls.__name__}: {problem}; run the same version everywhere")


class ErrorStatus(Message):
    """Error that another reader would report too. It is the additional information of an Arrow Flight error."""

    reason: str = Field(max_length=MAX_REASON_BYTES)
    remedy: str | None = Field(default=None, max_length=MAX_REMEDY_BYTES)

    @staticmethod
    def of(error: MesetaError) -> ErrorStatus:
        """Return the status of an error, with truncated parts."""
        remedy = None if error.remedy is None else encode_text(error.remedy, MAX_REMEDY_BYTES).decode()
        return ErrorStatus(reason=encode_text(error.reason, MAX_REASON_BYTES).decode(), remedy=remedy)


class RowOrder(Message):
    """Rows of one split in one order. It determines the content of each window."""

    dataset: Name
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of the dataset's description, see `DatasetDescription`."""
    split: Name
    labels: tuple[Name, ...]
    """Labels of the dataset to read, in this order."""
    without: tuple[Name, ...] = ()
    """Features of the dataset that are not read."""
    shuffle: bool
    seed: int
    window_rows: Positive
    filter: str | None
    negative_keep: float = Field(gt=0, le=1)

    @staticmethod
    def from_options(
        description: DatasetDescription,
        split: str,
        labels: tuple[str, ...],
        options: ReaderOptions,
        without: tuple[str, ...] = (),
    ) -> RowOrder:
        """Return the rows and order that a reader with these options has."""
        return RowOrder(
            dataset=description.name,
            digest=description.digest,
            split=split,
            labels=labels,
            without=without,
            shuffle=options.shuffle,
            seed=options.seed,
            window_rows=options.window_rows,
            filter=options.filter,
            negative_keep=options.negative_keep,
        )

    @property
    def options(self) -> ReaderOptions:
        """Options of a reader of these rows. The options of batches have default values."""
        return ReaderOptions(
            batch_size=1,
            shuffle=self.shuffle,
            seed=self.seed,
            window_rows=self.window_rows,
            filter=self.filter,
            negative_keep=self.negative_keep,
        )


class Session(Message):
    """Rank in one attempt of a run, with the rows that it reads."""

    rows: RowOrder
    run: Name
    """Name of the run, common to all of its attempts."""
    attempt: Number
    """Number of the attempt. Ranks of earlier attempts are rejected."""
    rank: Number
    num_ranks: Annotated[int, Field(ge=1, le=1 << 20)]


class DescribeRequest(Message):
    """Request for the description of a dataset by name. `None` selects the only dataset."""

    dataset: Name | None = None


class DatasetDescription(Message):
    """Description of a dataset without its rows."""

    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    name: Name
    document: dict[str, Any]
    """Content of dataset.json, with the digests of all vocabularies."""
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class CountRequest(Message):
    """Request for the number of rows in each row group."""

    rows: RowOrder


class RowCounts(Message):
    """Number of selected rows in each row group, in the order of the split. Groups without selected rows are left
    out."""

    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    groups: tuple[Number, ...]
    """Numbers of the row groups in the split, in ascending order."""
    group_rows: tuple[Positive, ...]
    num_filtered: Number = Field(validation_alias=AliasChoices("num_filtered", "by_filter"))
    num_dropped_negatives: Number = Field(validation_alias=AliasChoices("num_dropped_negatives", "negatives"))
    """Number of negatives that were not drawn."""
    int64_features: tuple[Name, ...] = Field(validation_alias=AliasChoices("int64_features", "wide_features"))
    """Sparse features whose ids are int64 in some file. The ids of other features are int32."""


class TableRequest(Message):
    """Request for a file with which new rows are encoded. The reply is its content in chunks."""

    dataset: Name
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of the dataset's description."""
    feature: Name | None
    """Feature whose vocabulary is requested. `None` requests the bits of trained rows."""
    candidates: bool = False
    """Whether the candidates of the vocabulary are requested."""

    def to_bytes(self) -> bytes:
        # Dispatchers of older versions, which have no candidates, refuse the key.
        return self.model_dump_json(exclude=None if self.candidates else {"candidates"}).encode()


class ReaderFailure(Message):
    """Failure of a rank to get a window from its reader."""

    window: Number
    reader: Name
    kind: Literal["slow", "failed"]
    """'slow' if the reader is reachable but sends nothing, 'failed' for any error."""
    reason: str = Field(default="", max_length=4096, validation_alias=AliasChoices("reason", "what"))
    """Error message of a reader that failed."""

    @model_validator(mode="before")
    @classmethod
    def _add_kind(cls, document: Any) -> Any:
        # Trainers of older versions send no kind. They send "slow" in place of an error message, under its former key.
        if isinstance(document, dict) and "kind" not in document:
            return {**document, "kind": "slow" if document.get("what") == "slow" else "failed"}
        return document


class LeaseRequest(Message):
    """Request for the readers of windows."""

    session: Session
    epoch: Number
    windows: tuple[Number, ...] = Field(max_length=1024)
    """Numbers of the windows whose readers are requested."""
    failures: tuple[ReaderFailure, ...] = Field(
        default=(), max_length=1024, validation_alias=AliasChoices("failures", "troubles")
    )
    """Failed readers that should be replaced."""
    wait_s: Seconds = Field(default=0.0, validation_alias=AliasChoices("wait_s", "waited_s"))
    """Seconds for which the rank waited for rows since its first batch."""
    elapsed_s: Seconds = Field(default=0.0, validation_alias=AliasChoices("elapsed_s", "passed_s"))
    """Seconds since the rank's first batch."""


class WindowLease(Message):
    """Assignment of a window to a reader."""

    window: Number
    reader: Name


class Leases(Message):
    """Reply to a LeaseRequest."""

    leases: tuple[WindowLease, ...]
    """Lease of each requested window. Empty if there is no reader."""
    num_readers: Number
    """Number of active readers. It is useful to request this many windows ahead."""


class WindowTicket(Message):
    """Request for this rank's rows of one window, in order."""

    session: Session
    epoch: Number
    window: Number
    first_row: Number = Field(validation_alias=AliasChoices("first_row", "begin"))
    """Row of the epoch at which the first batch starts."""
    batch_size: Positive
    last_batch: LastBatch
    num_received: Number = Field(default=0, validation_alias=AliasChoices("num_received", "num_had"))
    """Number of rows of the window that this rank has already received. They are not sent again."""


class WindowTimings(Message):
    """Time that making a window took, by kind as in WindowTimer. It is sent with the first record batch."""

    storage_s: Seconds
    decode_s: Seconds
    transform_s: Seconds
    """Seconds of encoding raw rows, as in WindowTimer."""
    buffered_s: Seconds = Field(validation_alias=AliasChoices("buffered_s", "ready_s"))
    """Seconds since the window was decoded, possibly for another rank."""


class Heartbeat(Message):
    """Message by which a reader shows that it is alive."""

    reader: Name
    buffered_bytes: Number = Field(validation_alias=AliasChoices("buffered_bytes", "held_bytes"))
    """Bytes of decoded windows in the buffer."""
    max_buffer_bytes: Number = Field(validation_alias=AliasChoices("max_buffer_bytes", "buffer_bytes"))
    num_rows: Number
    """Number of rows decoded since the reader started."""
    num_windows: Number
    num_redecoded: dict[RedecodeReason, Number] = Field(validation_alias=AliasChoices("num_redecoded", "num_again"))
    """Number of windows that were decoded again before all ranks had them, by reason."""
    busy_s: Seconds
    """Seconds spent decoding since the reader started. Otherwise all requested windows were in its buffer."""
    is_draining: bool = Field(default=False, validation_alias=AliasChoices("is_draining", "is_leaving"))
    """Whether the reader finishes its current windows and accepts no new ones."""


class HeartbeatReply(Message):
    """Reply to a Heartbeat."""

    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    datasets: dict[Name, Name]
    """Folder of each dataset by name."""


class ReaderStatus(Heartbeat):
    """Status of a reader at the dispatcher."""

    num_leases: Number
    rows_per_s: float = Field(ge=0)
    busy_share: float = Field(ge=0)
    """Share of the last seconds in which the reader was decoding."""


class SessionStatus(Message):
    """Active epoch of a run over a split."""

    run: Name
    dataset: Name
    split: Name
    num_ranks: Number
    waiting_shares: dict[str, float]
    """Share of the last seconds for which each rank waited for batches."""

    @property
    def waiting_share(self) -> float:
        """Largest waiting share of all ranks."""
        return max(self.waiting_shares.values(), default=0.0)


class ScaleTarget(Message):
    """Number of readers that the autoscaler requests, with its limits."""

    target: Number = Field(validation_alias=AliasChoices("target", "wanted"))
    min_readers: Number = Field(validation_alias=AliasChoices("min_readers", "least"))
    max_readers: Number = Field(validation_alias=AliasChoices("max_readers", "most"))


class ReaderServiceStatus(Message):
    """Status of the reader service."""

    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    datasets: dict[Name, Name]
    readers: tuple[ReaderStatus, ...]
    sessions: tuple[SessionStatus, ...]
    num_moved: dict[MoveReason, Number]
    """Number of windows moved to another reader, by reason."""
    scale: ScaleTarget | None = None
    """`None` if no autoscaler has asked for the status."""
