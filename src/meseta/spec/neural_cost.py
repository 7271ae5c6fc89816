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
        """Parse the group `neural` of a cost model.

        Raises MesetaError if a key is unknown or missing, or an array is truncated, non-finite or of the wrong shape.
        """
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
