"""Cost model: constants that predict the time of operators and collectives, measured or taken from documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from meseta.errors import MesetaError, check_choice, check_number
from meseta.spec.documents import load_document, parse_dataclass, rename_keys, strip_format, write_yaml
from meseta.spec.neural_cost import NeuralCost
from meseta.spec.tiers import DEFAULT_CACHE_SHARE
from meseta.spec.topology import DeviceKind, Link

_FORMAT = "meseta.cost_model/1"
STOCHASTIC_SUFFIX = ", drawn"
"""Suffix of a codec name that denotes stochastic rounding."""
_DEFAULT_LINK = Link(bytes_per_s=1e9, latency_s=1e-4)


@dataclass(frozen=True, kw_only=True)
class LookupCost:
    """Time of a lookup, which is one call for all shards of a rank. A constant `x_s` is the number of seconds per `x`.

    A hit is a row in the hardware cache, and a miss is a row in device memory. Bytes are rounded up to cache lines of
    64 bytes, and numbers of elements to vectors of 16.
    """

    call_s: float = 0.0
    shard_s: float = 0.0
    bag_s: float = 0.0
    id_s: float = 0.0
    hit_byte_s: float = 0.0
    miss_s: float = 0.0
    miss_byte_s: float = 0.0
    # Memory delivers pairs of cache lines together.
    long_miss_s: float = 0.0
    """Additional time per miss of a row longer than 128 bytes."""
    walk_s: float = 0.0
    """Time of page-table walks per id, for each doubling of the rank's rows and optimizer state above 64 MB."""
    out_byte_s: float = 0.0
    """Time per byte of pooled output."""
    unaligned_byte_s: float = 0.0
    """Additional time per byte of pooled output if `embedding_dim` of any table is not a multiple of 16."""
    half_number_s: float = 0.0
    """Additional time per element stored in 16 bits."""
    measured: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """Time of a table update, which is one call for all shards of a rank. See `LookupCost` for units.

    A call sorts the ids, sums the gradients of each distinct row, and applies the row optimizer. Hits and misses
    include optimizer states. Misses are read and written back.
    """

    call_s: float = 0.0
    shard_s: float = 0.0
    bag_s: float = 0.0
    id_s: float = 0.0
    """Time per id to sort it and to add its gradient."""
    gradient_byte_s: float = 0.0
    """Time per byte of the gradients of all ids, before they are summed."""
    row_s: float = 0.0
    """Time per distinct row."""
    hit_byte_s: float = 0.0
    miss_s: float = 0.0
    miss_byte_s: float = 0.0
    long_miss_s: float = 0.0
    """Additional time per miss of a row longer than 128 bytes."""
    walk_s: float = 0.0
    """Time of page-table walks per id, for each doubling of the rank's rows and optimizer state above 64 MB."""
    number_s: Mapping[str, float] = field(default_factory=dict)
    """Time per element of a distinct row, by row optimizer."""
    half_number_s: float = 0.0
    """Additional time per element of a distinct row that is stored in 16 bits."""
    # A row optimizer that sums over whole rows needs all columns. If a shard has only some of them, its gradients are
    # summed first, and its rows are updated in stages. The staged constants are the additional time.
    staged_shard_s: float = 0.0
    staged_id_s: float = 0.0
    staged_row_s: float = 0.0
    measured: bool = False
    source: str = ""

    def element_seconds(self, optimizer: str) -> float:
        """Return the seconds per element. Unknown optimizers cost as much as the slowest known one."""
        return self.number_s.get(optimizer, max(self.number_s.values(), default=0.0))


@dataclass(frozen=True, kw_only=True)
class HardwareCacheCost:
    """Hardware cache that keeps rows between steps."""

    cache_bytes: float = 0.0
    """Capacity that one rank can use."""
    measured: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class DenseCost:
    """Time of the dense part on one rank, and throughput of its matrix products."""

    float32_flops_per_s: float = 1e11
    bfloat16_flops_per_s: float = 1e11
    call_s: float = 0.0
    """Fixed time per step."""
    measured: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """Time of collectives inside and across hosts, and of packing their data. Links of a topology take precedence."""

    copy_byte_s: float = 0.0
    """Seconds per byte that is packed before sending, or unpacked after receiving."""
    bucket_id_s: float = 0.0
    """Seconds per id that is sorted by row range."""
    inside_all_to_all: Link = _DEFAULT_LINK
    # In an all-reduce of n bytes over R ranks, each rank sends 2 (R - 1) / R n bytes.
    inside_all_reduce: Link = _DEFAULT_LINK
    across_all_to_all: Link = _DEFAULT_LINK
    across_all_reduce: Link = _DEFAULT_LINK
    encode_number_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per encoded element, in addition to copying its bytes. Keys are codecs, or codecs with the suffix
    `STOCHASTIC_SUFFIX` for stochastic rounding."""
    decode_number_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per decoded element by codec, in addition to copying its bytes."""
    measured: bool = False
    source: str = ""

    def codec_seconds(self, codec: str, *, stochastic: bool = False) -> tuple[float, float]:
        """Return the seconds to (encode, decode) one element.

        `stochastic` selects stochastic rounding, which some codecs use for gradients.
        """
        write_s = self.encode_number_s.get(codec, 0.0)
        if stochastic:
            write_s = self.encode_number_s.get(codec + STOCHASTIC_SUFFIX, write_s)
        return write_s, self.decode_number_s.get(codec, 0.0)


@dataclass(frozen=True, kw_only=True)
class TierCost:
    """Additional time of tables outside device memory, compared with tier `hbm`.

    The `near_*` constants assume that the rank never waits for reads.
    """

    host_bytes_per_s: float = 2e10
    """Bandwidth between a device and the DRAM of its host. On a CPU rank, bandwidth of copies between the cache and the
    backing store of tier `cached`."""
    host_row_s: float = 0.0
    """Seconds per row copied to or from host DRAM while many copies are in flight, including the search for a cache
    slot."""
    cache_call_s: float = 0.0
    """Fixed seconds per step on a rank with offloaded shards."""
    cache_shard_s: float = 0.0
    """Seconds per offloaded shard to find the rows of a batch in the cache and to release them."""
    cache_id_s: float = 0.0
    """Seconds per id that is looked up in the cache."""
    cache_row_s: float = 0.0
    """Seconds per distinct row of a batch to pin it in the cache, record its use and unpin it."""
    disk_bytes_per_s: float = 1e9
    """Sequential read bandwidth of all disks of a host."""
    disk_write_bytes_per_s: float = 1e9
    """Sequential write bandwidth of all disks of a host."""
    disk_row_s: float = 1e-5
    """Seconds per random row read while many reads are in flight, the inverse of the IOPS of a host."""
    disk_processor_s: float = 2e-6
    """Seconds of rank time, without disk time, to fetch a row from disk and evict it later."""
    cached_share: float = DEFAULT_CACHE_SHARE
    """Default share of the rows of an offloaded table that fit in its cache."""
    measured: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Constants that predict the time of operators and collectives on one kind of device.

    Each group of constants records its source, and whether it was measured on this machine or taken from documentation.
    """

    device: DeviceKind = "cpu"
    num_threads: int = 1
    """CPU threads per rank, if `device` is 'cpu'."""
    lookup: LookupCost = LookupCost()
    update: UpdateCost = UpdateCost()
    cache: HardwareCacheCost = HardwareCacheCost()
    dense: DenseCost = DenseCost()
    exchange: ExchangeCost = ExchangeCost()
    tiers: TierCost = TierCost()
    neural: NeuralCost | None = None
    """Networks that correct the predictions of the constants, or `None` to use the constants alone."""

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
        """Convert to plain data for YAML or JSON. `from_dict` is the inverse."""
        groups = {name: _group_to_dict(getattr(self, name)) for name in _GROUPS}
        neural = {} if self.neural is None else {"neural": self.neural.to_dict()}
        return {"format": _FORMAT, "device": self.device, "num_threads": self.num_threads, **groups, **neural}

    @staticmethod
    def from_dict(document: Mapping[Any, Any]) -> CostModel:
        """Parse a cost model. Raises MesetaError if a key is unknown or missing, or a value or the format is
        invalid."""
        document = strip_format("cost model", document, _FORMAT, required=True)
        for key in ("device", "num_threads", *_GROUPS):
            if key not in document:
                raise MesetaError(f"cost model: {key} is missing; run `meseta calibrate` again")
        if isinstance(document["tiers"], Mapping):
            document["tiers"] = rename_keys("cost model: tiers", document["tiers"], FORMER_TIER_KEYS)
        groups: dict[str, Any] = {
            name: parse_dataclass("cost model", form, document.pop(name), name) for name, form in _GROUPS.items()
        }
        neural = document.pop("neural", None)
        plain = parse_dataclass("cost model", CostModel, document)
        return replace(plain, neural=None if neural is None else NeuralCost.from_dict(neural), **groups)

    @staticmethod
    def load(path: str | Path) -> CostModel:
        """Load a cost model from a YAML or JSON file. Raises MesetaError if it cannot be read or is invalid."""
        return load_document("cost model", path, CostModel.from_dict)

    def save(self, path: str | Path) -> None:
        """Write the cost model to a YAML file."""
        write_yaml(path, self.to_dict())


FORMER_TIER_KEYS = {
    "near_call_s": "cache_call_s",
    "near_shard_s": "cache_shard_s",
    "near_id_s": "cache_id_s",
    "near_row_s": "cache_row_s",
}
"""Current name of each former key of `tiers`."""
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
                raise MesetaError(f"cost model: {where} must be above 0, got 0")


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
