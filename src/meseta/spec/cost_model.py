"""What operators and collectives cost on one kind of device: measured here, or as documented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from meseta.errors import MesetaError, check_choice, check_number
from meseta.spec.documents import load_document, parse_dataclass, strip_format, write_yaml
from meseta.spec.neural_cost import NeuralCost
from meseta.spec.tiers import DEFAULT_CACHE_SHARE
from meseta.spec.topology import DeviceKind, Link

_FORMAT = "meseta.cost_model/1"
STOCHASTIC_SUFFIX = ", drawn"
"""Behind the name of a codec: it rounds to one of both neighbours, by a draw."""
_DEFAULT_LINK = Link(bytes_per_s=1e9, latency_s=1e-4)


@dataclass(frozen=True, kw_only=True)
class LookupCost:
    """Of one rank, seconds: a call looks up all of its shards."""

    call_s: float = 0.0
    """Of a call."""
    shard_s: float = 0.0
    """Of a shard in it."""
    bag_s: float = 0.0
    """Of a bag."""
    id_s: float = 0.0
    """Of an id."""
    hit_byte_s: float = 0.0
    """Of a byte of a row that lies in a cache."""
    miss_s: float = 0.0
    """Of a row that comes from the device's memory."""
    miss_byte_s: float = 0.0
    """Of a byte of such a row, in lines of 64."""
    long_miss_s: float = 0.0
    """Of such a row, if it is longer than 128 bytes, on top."""
    walk_s: float = 0.0
    """Of an id, for each doubling of its rank's rows and state above 64 MB: the walk to the address of its page."""
    out_byte_s: float = 0.0
    """Of a byte of a pooled bag, written, in lines of 64."""
    unaligned_byte_s: float = 0.0
    """Of such a byte, where a table of the model has no multiple of 16 columns, on top."""
    half_number_s: float = 0.0
    """Of a number that is stored in 16 bits, in vectors of 16, on top."""
    measured: bool = False
    """Whether measured on this machine; else as documented."""
    source: str = ""
    """Where the constants are from."""


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """Of one rank, seconds: a call sorts the ids of all of its shards, adds the gradients of every row, steps it."""

    call_s: float = 0.0
    """Of a call."""
    shard_s: float = 0.0
    """Of a shard in it."""
    bag_s: float = 0.0
    """Of a bag."""
    id_s: float = 0.0
    """Of an id that is sorted and whose gradient is added."""
    gradient_byte_s: float = 0.0
    """Of a byte of the gradient of an id, in lines of 64."""
    row_s: float = 0.0
    """Of a distinct row."""
    hit_byte_s: float = 0.0
    """Of a byte of a distinct row and its state that lie in a cache."""
    miss_s: float = 0.0
    """Of a distinct row that comes from the device's memory."""
    miss_byte_s: float = 0.0
    """Of a byte of such a row and its state, read and written back, in lines of 64."""
    long_miss_s: float = 0.0
    """Of such a row, if it is longer than 128 bytes, on top."""
    walk_s: float = 0.0
    """Of an id, for each doubling of its rank's rows and state above 64 MB: the walk to the address of its page."""
    number_s: Mapping[str, float] = field(default_factory=dict)
    """Of a number of a distinct row, in vectors of 16, by row optimizer; see `element_seconds`."""
    half_number_s: float = 0.0
    """Of a number that is rounded to 16 bits, in vectors of 16, on top."""
    staged_shard_s: float = 0.0
    """Of a shard that holds some columns of rows whose optimizer sums over whole rows, on top: gradients are added up
    first, and rows stepped in stages."""
    staged_id_s: float = 0.0
    """Of an id of such a shard, on top."""
    staged_row_s: float = 0.0
    """Of a distinct row of such a shard, on top."""
    measured: bool = False
    """Whether measured on this machine; else as documented."""
    source: str = ""
    """Where the constants are from."""

    def element_seconds(self, optimizer: str) -> float:
        """Of a number of a distinct row; an optimizer that `number_s` lacks costs as the costliest one in it."""
        return self.number_s.get(optimizer, max(self.number_s.values(), default=0.0))


@dataclass(frozen=True, kw_only=True)
class HardwareCacheCost:
    """The cache that rows stay in between steps."""

    cache_bytes: float = 0.0
    """What a rank has of it."""
    measured: bool = False
    """Whether fitted to measurements on this machine; else as documented."""
    source: str = ""
    """Where it is from."""


@dataclass(frozen=True, kw_only=True)
class DenseCost:
    """The part of a model that is not tables."""

    float32_flops_per_s: float = 1e11
    """Of a rank's matrix products."""
    bfloat16_flops_per_s: float = 1e11
    """The same in bfloat16."""
    call_s: float = 0.0
    """Of a step, whatever its size."""
    measured: bool = False
    """Whether measured on this machine; else as documented."""
    source: str = ""
    """Where the constants are from."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """Collectives, and packing before and after them. Links that a topology gives come before these."""

    copy_byte_s: float = 0.0
    """Of a byte that is packed before it is sent, or put in place after it came, in seconds."""
    bucket_id_s: float = 0.0
    """Of an id that is sorted by the row range that it falls into, in seconds."""
    inside_all_to_all: Link = _DEFAULT_LINK
    """Between the devices of a host."""
    inside_all_reduce: Link = _DEFAULT_LINK
    """The same of sums; one of n bytes sends 2 (R - 1) / R n bytes from each of R ranks."""
    across_all_to_all: Link = _DEFAULT_LINK
    """Between hosts."""
    across_all_reduce: Link = _DEFAULT_LINK
    """The same of sums."""
    encode_number_s: Mapping[str, float] = field(default_factory=dict)
    """Of a number that a codec writes, by its name, in seconds, beside those of copying its bytes; of one whose
    rounding is drawn by its name and DRAWN."""
    decode_number_s: Mapping[str, float] = field(default_factory=dict)
    """Of a number that it reads."""
    measured: bool = False
    """Whether measured on this machine; else as documented."""
    source: str = ""
    """Where the constants are from."""

    def codec_seconds(self, codec: str, *, stochastic: bool = False) -> tuple[float, float]:
        """(writing a number, reading it). Roundings of gradients are drawn, where a codec draws any."""
        write_s = self.encode_number_s.get(codec, 0.0)
        if stochastic:
            write_s = self.encode_number_s.get(codec + STOCHASTIC_SUFFIX, write_s)
        return write_s, self.decode_number_s.get(codec, 0.0)


@dataclass(frozen=True, kw_only=True)
class TierCost:
    """Rows that do not lie in the device's memory. What a rank spends on rows near and far is what a step takes longer
    than with the same tables in its memory, where its reads do not keep it waiting."""

    host_bytes_per_s: float = 2e10
    """Of one device, from and to the DRAM of its host; of a CPU rank, copies between far rows of 'cached' and near
    ones."""
    host_row_s: float = 0.0
    """Of a row on that way, in seconds, many being under way; with what it costs a rank to find a slot for it."""
    near_call_s: float = 0.0
    """Of a step of a rank that has rows near and far, in seconds."""
    near_shard_s: float = 0.0
    """Of a shard whose rows lie near and far, in seconds: to look for rows of a batch, and to give them back."""
    near_id_s: float = 0.0
    """Of an id that is looked for there, in seconds."""
    near_row_s: float = 0.0
    """Of a distinct row of a batch, in seconds: it is kept near, noted as looked up, and let go."""
    disk_bytes_per_s: float = 1e9
    """Of a host's disks, read in sequence."""
    disk_write_bytes_per_s: float = 1e9
    """Of a host's disks, written in sequence."""
    disk_row_s: float = 1e-5
    """Of a row read at random, in seconds, many being under way: one over the reads a second of a host."""
    disk_processor_s: float = 2e-6
    """Of a row that is read from a disk, put near, and pushed out again, what its rank loses beside the disk, in
    seconds."""
    cached_share: float = DEFAULT_CACHE_SHARE
    """Share of its rows that a table in 'cached' or on 'disk' has near, where nothing else is said."""
    measured: bool = False
    """Whether measured on this machine; else as documented."""
    source: str = ""
    """Where the constants are from."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What a rank's operators and collectives cost. Groups of constants say each where they are from."""

    device: DeviceKind = "cpu"
    """Kind of device."""
    num_threads: int = 1
    """Threads of a rank, where it computes on a CPU."""
    lookup: LookupCost = LookupCost()
    """Reading and pooling rows."""
    update: UpdateCost = UpdateCost()
    """Sorting, adding gradients, stepping rows."""
    cache: HardwareCacheCost = HardwareCacheCost()
    """Rows that need not come from memory."""
    dense: DenseCost = DenseCost()
    """Matrix products."""
    exchange: ExchangeCost = ExchangeCost()
    """Collectives."""
    tiers: TierCost = TierCost()
    """Rows outside the device's memory."""
    neural: NeuralCost | None = None
    """Networks that correct what the constants predict; None: there are none."""

    def __post_init__(self) -> None:
        check_choice("cost model", "device", self.device, get_args(DeviceKind))
        if isinstance(self.num_threads, bool) or not isinstance(self.num_threads, int) or self.num_threads < 1:
            raise MesetaError(f"cost model: num_threads must be at least 1, got {self.num_threads!r}")
        for name in _GROUPS:
            _check_group(name, getattr(self, name))

    @property
    def is_measured(self) -> bool:
        """Whether lookups, updates, matrix products and collectives were measured on this machine."""
        return all(getattr(self, name).measured for name in ("lookup", "update", "dense", "exchange"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML or JSON; `from_dict` reads it back."""
        groups = {name: _group_to_dict(getattr(self, name)) for name in _GROUPS}
        neural = {} if self.neural is None else {"neural": self.neural.to_dict()}
        return {"format": _FORMAT, "device": self.device, "num_threads": self.num_threads, **groups, **neural}

    @staticmethod
    def from_dict(document: Mapping[Any, Any]) -> CostModel:
        """Read a cost model. Raises MesetaError for an unknown or missing key, a value that breaks its rule, or another
        format."""
        document = strip_format("cost model", document, _FORMAT, required=True)
        for key in ("device", "num_threads", *_GROUPS):
            if key not in document:
                raise MesetaError(f"cost model: {key} is missing; run `meseta calibrate` again")
        groups: dict[str, Any] = {
            name: parse_dataclass("cost model", form, document.pop(name), name) for name, form in _GROUPS.items()
        }
        neural = document.pop("neural", None)
        plain = parse_dataclass("cost model", CostModel, document)
        return replace(plain, neural=None if neural is None else NeuralCost.from_dict(neural), **groups)

    @staticmethod
    def load(path: str | Path) -> CostModel:
        """Read a YAML or JSON file; raises MesetaError as `from_dict` does, naming the file."""
        return load_document("cost model", path, CostModel.from_dict)

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        write_yaml(path, self.to_dict())


_GROUPS: dict[str, type] = {
    "lookup": LookupCost,
    "update": UpdateCost,
    "cache": HardwareCacheCost,
    "dense": DenseCost,
    "exchange": ExchangeCost,
    "tiers": TierCost,
}


def _check_group(name: str, group: Any) -> None:
    for entry in fields(group):
        where, value = f"{name}.{entry.name}", getattr(group, entry.name)
        if isinstance(value, Mapping):
            for key, number in value.items():
                _check_cost(f"{where}.{key}", number)
        elif entry.name not in ("measured", "source") and not isinstance(value, Link):
            _check_cost(where, value)
            if (entry.name.endswith("_per_s") or entry.name == "cached_share") and value == 0:
                raise MesetaError(f"cost model: {where} must be above 0")


def _check_cost(where: str, value: object) -> None:
    if check_number("cost model", where, value) < 0:
        raise MesetaError(f"cost model: {where} must not be negative, got {value}")


def _group_to_dict(group: Any) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for entry in fields(group):
        value: Any = getattr(group, entry.name)
        if isinstance(value, Link):
            document[entry.name] = value.to_dict()
        else:
            document[entry.name] = dict(value) if isinstance(value, Mapping) else value
    return document
