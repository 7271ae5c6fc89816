"""What trainers, the dispatcher and readers say to each other: JSON against these schemas, and nothing else.

    trainer    --describe, count, lease--->  dispatcher  <---beat---  reader
    trainer    --------- ticket ---------->  reader      ---- Arrow record batches --->  trainer

Nothing here is a state: each message holds all that its receiver needs to answer it, so that any may begin anew.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from meseta.data.read.options import LastBatch, ReaderOptions
from meseta.errors import MesetaError, format_value
from meseta.machine.files import MAX_DOCUMENT_VALUES, parse_json
from meseta.machine.waits.checked_memory import encode_text

MAX_MESSAGE_BYTES = 1 << 20
"""The most that one may have; descriptions and counts of a split, which the dispatcher sends, may have more."""
MAX_MESSAGE_VALUES = 1 << 14
"""The most values that one may have: each may be an error, which costs many times its bytes."""
MAX_REPLY_BYTES = 1 << 28
MAX_TABLE_BYTES = 1 << 32
"""The most that a file may have that a TableRequest asks for."""
MAX_REASON_BYTES, MAX_REMEDY_BYTES = 3072, 1024
"""Limits on the parts of an error, which gRPC sends in headers. Headers of 8 KiB or more may break the connection."""

Name = Annotated[str, Field(min_length=1, max_length=1024)]
Number = Annotated[int, Field(ge=0, lt=1 << 53)]
Positive = Annotated[int, Field(ge=1, lt=1 << 53)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
RedecodeReason = Literal["room", "idle"]
"""It made room for one that is wanted before it; or for another, after nobody had taken rows of it for a while."""
MoveReason = Literal["silent", "lost", "slow"]
"""Its reader told nothing any more; a rank met trouble there, or was sent nothing."""


MessageType = TypeVar("MessageType", bound="Message")


class Message(BaseModel):
    """Frozen; an unknown key, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    max_bytes: ClassVar[int] = MAX_MESSAGE_BYTES
    max_values: ClassVar[int] = MAX_MESSAGE_VALUES

    def to_bytes(self) -> bytes:
        """JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls: type[MessageType], content: bytes, sender: str) -> MessageType:
        """Undo `to_bytes`. Raises MesetaError, which names the sender, for anything else."""
        if len(content) > cls.max_bytes:
            raise MesetaError(f"{sender} sent a message of {len(content):,} bytes; at most {cls.max_bytes:,} are read")
        try:
            parse_json(content, max_values=cls.max_values)  # refuses keys that are there twice, and depth
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "message"
            problem = f"{format_value(key)}: {first['msg']}"
        except ValueError as error:
            problem = format_value(str(error))
        raise MesetaError(f"{sender} sent what is no {cls.__name__}: {problem}; run the same version everywhere")


class ErrorStatus(Message):
    """Error that asking another reader does not avoid, as additional information of an Arrow Flight error."""

    reason: str = Field(max_length=MAX_REASON_BYTES)
    remedy: str | None = Field(default=None, max_length=MAX_REMEDY_BYTES)

    @staticmethod
    def of(error: MesetaError) -> ErrorStatus:
        """The status of an error, whose parts are truncated."""
        remedy = None if error.remedy is None else encode_text(error.remedy, MAX_REMEDY_BYTES).decode()
        return ErrorStatus(reason=encode_text(error.reason, MAX_REASON_BYTES).decode(), remedy=remedy)


class RowOrder(Message):
    """Rows of one split in one order: what a window's content is a function of."""

    dataset: Name
    """As the dispatcher calls it."""
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """Of its description, see `DatasetDescription`."""
    split: Name
    labels: tuple[Name, ...]
    """Of the dataset's, in this order."""
    shuffle: bool
    seed: int
    window_rows: Positive
    filter: str | None
    negative_keep: float = Field(gt=0, le=1)

    @staticmethod
    def from_options(
        description: DatasetDescription, split: str, labels: tuple[str, ...], options: ReaderOptions
    ) -> RowOrder:
        """Those that a reader with these options gives."""
        return RowOrder(
            dataset=description.name,
            digest=description.digest,
            split=split,
            labels=labels,
            shuffle=options.shuffle,
            seed=options.seed,
            window_rows=options.window_rows,
            filter=options.filter,
            negative_keep=options.negative_keep,
        )

    @property
    def options(self) -> ReaderOptions:
        """Of a reader of these rows, but for its batches."""
        return ReaderOptions(
            batch_size=1,
            shuffle=self.shuffle,
            seed=self.seed,
            window_rows=self.window_rows,
            filter=self.filter,
            negative_keep=self.negative_keep,
        )


class Session(Message):
    """One rank of one attempt at a run, and what it reads."""

    rows: RowOrder
    run: Name
    """The same for every attempt to finish a run."""
    attempt: Number
    """Larger for a later one; ranks of an earlier one are turned away."""
    rank: Number
    num_ranks: Annotated[int, Field(ge=1, le=1 << 20)]


class DescribeRequest(Message):
    """Which dataset, by name; None: the only one."""

    dataset: Name | None = None


class DatasetDescription(Message):
    """A dataset without its rows."""

    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    name: Name
    document: dict[str, Any]
    """As dataset.json, with the digests of all vocabularies."""
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the document."""


class CountRequest(Message):
    """How many rows there are."""

    rows: RowOrder


class RowCounts(Message):
    """Rows of each row group that has any to read, in the order of the split."""

    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    groups: tuple[Number, ...]
    """Numbers of the row groups in the split, ascending."""
    group_rows: tuple[Positive, ...]
    by_filter: Number
    """Rows that the filter leaves out."""
    negatives: Number
    """Negatives that were not drawn."""
    wide_features: tuple[Name, ...]
    """Single- and multi-valued features whose ids are int64 in some file; those of others are int32."""


class TableRequest(Message):
    """Which file of those that encoding further rows takes; what comes are its bytes, in pieces."""

    dataset: Name
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    """Of its description."""
    feature: Name | None
    """Whose vocabulary; None: the bits of the rows that training looks up."""


class ReaderFailure(Message):
    """What a rank met at the reader of a window."""

    window: Number
    reader: Name
    """Its URL."""
    kind: Literal["slow", "failed"]
    """`slow` if the reader is there, and sends nothing."""
    what: str = Field(default="", max_length=4096)
    """Text of the error at a reader that failed."""

    @model_validator(mode="before")
    @classmethod
    def _add_kind(cls, document: Any) -> Any:
        # Trainers of older versions send no kind, and "slow" in place of an error.
        if isinstance(document, dict) and "kind" not in document:
            return {**document, "kind": "slow" if document.get("what") == "slow" else "failed"}
        return document


class LeaseRequest(Message):
    """Who reads windows."""

    session: Session
    epoch: Number
    windows: tuple[Number, ...] = Field(max_length=1024)
    """Whose readers are asked for."""
    troubles: tuple[ReaderFailure, ...] = Field(default=(), max_length=1024)
    """Readers to be relieved of windows."""
    waited_s: Seconds = 0.0
    """For how long the rank has stood still for batches since the first of this pass."""
    passed_s: Seconds = 0.0
    """Since then."""


class WindowLease(Message):
    """Who decodes a window."""

    window: Number
    reader: Name
    """URL."""


class Leases(Message):
    leases: tuple[WindowLease, ...]
    """For each window that was asked for; none where there is no reader."""
    num_readers: Number
    """That are at work: so many windows are worth asking for ahead."""


class WindowTicket(Message):
    """This rank's rows of one window, in order."""

    session: Session
    epoch: Number
    window: Number
    begin: Number
    """Row of the epoch where the first batch begins."""
    batch_size: Positive
    last_batch: LastBatch
    num_had: Number = 0
    """Rows that this rank has had of it, which are left out."""


class WindowTimings(Message):
    """How a window that was asked for came about; comes beside the first record batch of its rows."""

    storage_s: Seconds
    decode_s: Seconds
    transform_s: Seconds
    """As in WindowTimer."""
    ready_s: Seconds
    """Since when it was decoded, as this is sent; it may have been for another rank."""


class Heartbeat(Message):
    """A reader is there."""

    reader: Name
    """Its URL, as trainers reach it."""
    held_bytes: Number
    """Of decoded windows."""
    buffer_bytes: Number
    """It may hold."""
    num_rows: Number
    """Decoded since it began."""
    num_windows: Number
    num_again: dict[RedecodeReason, Number]
    """Windows decoded once more before all ranks had them, by why they were not held any more."""
    busy_s: Seconds
    """Since it began in which it decoded; in the others all that it was asked for lay ready in its buffer."""
    is_leaving: bool = False
    """Whether it gives what it was asked for, and wants no other windows."""


class HeartbeatReply(Message):
    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    datasets: dict[Name, Name]
    """Folder of each, by name."""


class ReaderStatus(Heartbeat):
    """What the dispatcher knows of a reader."""

    num_leases: Number
    """Windows that are its own."""
    rows_per_s: float = Field(ge=0)
    """Decoded lately."""
    busy_share: float = Field(ge=0)
    """Of the last seconds, in which it decoded."""


class SessionStatus(Message):
    """A pass over a split that is under way."""

    run: Name
    dataset: Name
    split: Name
    num_ranks: Number
    waiting_shares: dict[str, float]
    """Of the last seconds of each rank, by its number, in which it stood still for batches."""

    @property
    def waiting_share(self) -> float:
        """Of the rank that waits most, for which the others wait."""
        return max(self.waiting_shares.values(), default=0.0)


class ScaleTarget(Message):
    """How many readers there should be."""

    wanted: Number
    least: Number
    most: Number


class ReaderServiceStatus(Message):
    """What the dispatcher knows."""

    max_bytes, max_values = MAX_REPLY_BYTES, MAX_DOCUMENT_VALUES
    datasets: dict[Name, Name]
    readers: tuple[ReaderStatus, ...]
    sessions: tuple[SessionStatus, ...]
    num_moved: dict[MoveReason, Number]
    """Windows that went to another reader, by why."""
    scale: ScaleTarget | None = None
    """None where nobody has asked for it."""
