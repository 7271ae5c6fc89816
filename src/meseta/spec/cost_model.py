"""Small neural networks that correct a cost model's predictions, in the form in which they are stored in its file."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meseta.errors import MesetaError, check_keys, is_int

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from meseta.errors import check_choice, check_number
from meseta.spec.documents import load_document, parse_dataclass, rename_keys, strip_format, write_yaml
from meseta.spec.tiers import DEFAULT_CACHE_SHARE
from meseta.spec.topology import DeviceKind, Link

SHARD_INPUTS = (
    "ids", "bags", "distinct", "lookup_misses", "update_misses", "update_bytes", "walks",
    "id_bytes", "miss_bytes", "out_bytes", "columns", "row_bytes", "num_rows", "stored_bytes",
    "is_unaligned", "is_half", "sgd", "rowwise_adagrad", "adagrad", "adam",
)  # fmt: skip
"""Input features of a network per shard. Numeric features are logarithms."""
RANK_INPUTS = ("seconds", "pieces")
"""Input features of a network per rank, as logarithms: predicted seconds and number of shards."""
_HEAD_ARRAYS = {
    "head_in": ("members", "head_inputs", "hidden"),
    "head_in_bias": ("members", "hidden"),
    "head_out": ("members", "hidden"),
    "head_out_bias": ("members",),
    "limits": (2,),
}
_NORMALIZATION_ARRAYS = {"center": ("inputs",), "scale": ("inputs",), "least": ("inputs",), "most": ("inputs",)}
SHARD_ARRAYS: Mapping[str, tuple[str | int, ...]] = {
    **_NORMALIZATION_ARRAYS,
    **{f"rank_{name}": (len(RANK_INPUTS),) for name in _NORMALIZATION_ARRAYS},
    "table_in": ("members", "inputs", "hidden"),
    "table_in_bias": ("members", "hidden"),
    "table_out": ("members", "hidden", "summed"),
    "table_out_bias": ("members", "summed"),
    **_HEAD_ARRAYS,
}
"""Arrays of a lookup or update network, with the names or values of their dimensions."""
COLLECTIVE_ARRAYS: Mapping[str, tuple[str | int, ...]] = {**_NORMALIZATION_ARRAYS, **_HEAD_ARRAYS}
"""Arrays of a collective network, with the names or values of their dimensions."""


@dataclass(frozen=True, kw_only=True)
class Float32Array:
    """Array of finite float32 numbers in a serializable form."""

    shape: tuple[int, ...]
    """Size of each dimension, at least 1."""
    float32: str
    """Numbers in C order, little-endian, encoded in base64 (RFC 4648)."""

    def __post_init__(self) -> None:
        try:
            data = base64.b64decode(self.float32, validate=True)
        except (binascii.Error, ValueError) as error:
            raise MesetaError(f"float32 is not valid base64 ({error})") from None
        if len(data) != 4 * math.prod(self.shape):
            raise MesetaError(f"float32 has {len(data):,} bytes, but shape {list(self.shape)} requires 4 per number")
        import numpy as np  # Only files with networks need numpy.

        if not np.isfinite(np.frombuffer(data, "<f4")).all():
            raise MesetaError("float32 contains a non-finite number")

    @staticmethod
    def from_array(numbers: NDArray[Any]) -> Float32Array:
        """Create an instance from an array of any shape. Raises MesetaError if a number is not finite in float32."""
        import numpy as np

        data = np.ascontiguousarray(numbers, "<f4").tobytes()
        return Float32Array(shape=numbers.shape, float32=base64.b64encode(data).decode())

    def to_array(self) -> NDArray[np.float64]:
        """Return the numbers as a float64 array of `shape`."""
        import numpy as np

        data = base64.b64decode(self.float32)
        return np.frombuffer(data, "<f4").astype(np.float64).reshape(self.shape)


Network = Mapping[str, Float32Array]


@dataclass(frozen=True, kw_only=True)
class NeuralCost:
    """Networks that correct the predictions of a cost model, as in NeuroShard (arXiv 2305.01868, section 3.2).

    Each network is an ensemble. It predicts the logarithm of the ratio between the time of a lookup, update or
    collective and the time that the constants predict.
    """

    lookup: Network
    update: Network
    collectives: Mapping[int, Network] = field(default_factory=dict)
    """Networks for collectives inside one host, by number of devices."""
    source: str = ""
    """Command, date and extent of the measurements that the networks were trained on."""

    def __post_init__(self) -> None:
        for name in ("lookup", "update"):
            sizes = {"inputs": len(SHARD_INPUTS)}
            dims = _check_arrays(f"neural.{name}", getattr(self, name), SHARD_ARRAYS, sizes)
            _check_size(f"neural.{name}", "head_in", dims["head_inputs"], dims["summed"] + len(RANK_INPUTS))
        for num_ranks, network in self.collectives.items():
            where = f"neural.collectives.{num_ranks}"
            if not is_int(num_ranks) or num_ranks < 2:
                raise MesetaError(f"cost model: {where}: the key must be a number of devices, at least 2")
            dims = _check_arrays(where, network, COLLECTIVE_ARRAYS, {"inputs": num_ranks + 2})
            _check_size(where, "head_in", dims["head_inputs"], dims["inputs"])

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data. `from_dict` is the inverse."""
        return {
            "lookup": _to_dict(self.lookup),
            "update": _to_dict(self.update),
            "collectives": {num_ranks: _to_dict(network) for num_ranks, network in self.collectives.items()},
            "source": self.source,
        }

    @staticmethod
    def from_dict(document: object) -> NeuralCost:
        """Parse the group `neural`. Raises MesetaError for unknown or missing keys, and truncated, non-finite or
        misshaped arrays."""
        document = _check_mapping("neural", document)
        keys = ("lookup", "update", "collectives", "source")
        check_keys("cost model: neural", document, keys)
        for key in keys:
            if key not in document:
                raise MesetaError(f"cost model: neural.{key} is missing; run `meseta calibrate --neural` again")
        if not isinstance(document["source"], str):
            raise MesetaError(f"cost model: neural.source must be a string, got {document['source']!r}")
        collectives = _check_mapping("neural.collectives", document["collectives"])
        return NeuralCost(
            lookup=_read_network("neural.lookup", document["lookup"]),
            update=_read_network("neural.update", document["update"]),
            collectives={key: _read_network(f"neural.collectives.{key}", value) for key, value in collectives.items()},
            source=document["source"],
        )


def _check_arrays(
    where: str, network: Network, arrays: Mapping[str, tuple[str | int, ...]], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Check that a network has all `arrays` in consistent shapes, and return the dimensions by name."""
    dims = dict(sizes)
    check_keys(f"cost model: {where}", network, arrays)
    for name, dim_names in arrays.items():
        if name not in network:
            raise MesetaError(f"cost model: {where}.{name} is missing; run `meseta calibrate --neural` again")
        shape = network[name].shape
        if len(shape) != len(dim_names):
            raise MesetaError(f"cost model: {where}.{name} must have {len(dim_names)} dimensions, got {list(shape)}")
        for dim_name, size in zip(dim_names, shape, strict=True):
            expected = dim_name if isinstance(dim_name, int) else dims.setdefault(dim_name, size)
            _check_size(where, name, size, expected)
    return dims


def _check_size(where: str, name: str, size: int, expected: int) -> None:
    if size != expected:
        raise MesetaError(
            f"cost model: {where}.{name} has a dimension of size {size}, expected {expected}; it may be from another "
            "version: run `meseta calibrate --neural` again"
        )


def _to_dict(network: Network) -> dict[str, Any]:
    return {name: {"shape": list(array.shape), "float32": array.float32} for name, array in network.items()}


def _read_network(where: str, document: object) -> Network:
    return {str(name): _read_array(f"{where}.{name}", value) for name, value in _check_mapping(where, document).items()}


def _read_array(where: str, document: object) -> Float32Array:
    array = _check_mapping(where, document)
    if set(array) != {"shape", "float32"} or not isinstance(array["float32"], str):
        raise MesetaError(f"cost model: {where} must have the keys shape and float32, got {sorted(map(str, array))}")
    shape = array["shape"]
    if not isinstance(shape, Sequence) or not all(is_int(size) and size >= 1 for size in shape):
        raise MesetaError(f"cost model: {where}.shape must be a list of positive integers, got {shape!r}")
    try:
        return Float32Array(shape=tuple(shape), float32=array["float32"])
    except MesetaError as error:
        raise MesetaError(f"cost model: {where}: {error}") from None


def _check_mapping(where: str, document: object) -> Mapping[Any, Any]:
    if not isinstance(document, Mapping):
        raise MesetaError(f"cost model: {where} must be a mapping, got {document!r}")
    return document


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
        """Return the seconds to (encode, decode) one element. `stochastic` selects stochastic rounding of gradients."""
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
