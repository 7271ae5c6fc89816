"""Small networks that correct what the constants of a cost model predict, as text that goes into its file."""

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
"""What a network is told of a piece, numbers as logarithms."""
RANK_INPUTS = ("seconds", "pieces")
"""What it is told of a rank beside that: what the constants predict, and how many pieces, as logarithms."""
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
"""Arrays of a network of lookups or updates, with the names of their sizes."""
COLLECTIVE_ARRAYS: Mapping[str, tuple[str | int, ...]] = {**_NORMALIZATION_ARRAYS, **_HEAD_ARRAYS}
"""Arrays of a network of collectives."""


@dataclass(frozen=True, kw_only=True)
class Float32Array:
    """Finite float32 numbers."""

    shape: tuple[int, ...]
    """Sizes, each at least 1."""
    float32: str
    """The numbers in C order, little-endian, in base64 (RFC 4648)."""

    def __post_init__(self) -> None:
        try:
            data = base64.b64decode(self.float32, validate=True)
        except (binascii.Error, ValueError) as error:
            raise MesetaError(f"float32 is no base64 ({error})") from None
        if len(data) != 4 * math.prod(self.shape):
            raise MesetaError(f"float32 holds {len(data):,} bytes, but shape {list(self.shape)} takes 4 each")
        import numpy as np  # Only files with networks need it.

        if not np.isfinite(np.frombuffer(data, "<f4")).all():
            raise MesetaError("float32 holds a number that is not finite")

    @staticmethod
    def from_array(numbers: NDArray[Any]) -> Float32Array:
        """From numbers of any shape; raises MesetaError where one is not finite as float32."""
        import numpy as np

        data = np.ascontiguousarray(numbers, "<f4").tobytes()
        return Float32Array(shape=numbers.shape, float32=base64.b64encode(data).decode())

    def to_array(self) -> NDArray[np.float64]:
        """As an array of `shape`."""
        import numpy as np

        data = base64.b64decode(self.float32)
        return np.frombuffer(data, "<f4").astype(np.float64).reshape(self.shape)


Network = Mapping[str, Float32Array]
"""Arrays by name."""


@dataclass(frozen=True, kw_only=True)
class NeuralCost:
    """Networks in the way of NeuroShard (D. Zha et al., arXiv 2305.01868, section 3.2), each an ensemble.

    They give the logarithm of what a lookup, an update or a collective takes, over what the constants of the same cost
    model predict for it."""

    lookup: Network
    """Of a rank's pieces: SHARD_ARRAYS."""
    update: Network
    """The same."""
    collectives: Mapping[int, Network] = field(default_factory=dict)
    """By number of devices of one host: COLLECTIVE_ARRAYS."""
    source: str = ""
    """Where the networks are from."""

    def __post_init__(self) -> None:
        for name in ("lookup", "update"):
            sizes = {"inputs": len(SHARD_INPUTS)}
            found = _check_arrays(f"neural.{name}", getattr(self, name), SHARD_ARRAYS, sizes)
            _check_size(f"neural.{name}", "head_in", found["head_inputs"], found["summed"] + len(RANK_INPUTS))
        for num_ranks, network in self.collectives.items():
            where = f"neural.collectives.{num_ranks}"
            if not is_int(num_ranks) or num_ranks < 2:
                raise MesetaError(f"cost model: {where}: its key must be a number of devices, 2 and up")
            found = _check_arrays(where, network, COLLECTIVE_ARRAYS, {"inputs": num_ranks + 2})
            _check_size(where, "head_in", found["head_inputs"], found["inputs"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        return {
            "lookup": _to_dict(self.lookup),
            "update": _to_dict(self.update),
            "collectives": {num_ranks: _to_dict(network) for num_ranks, network in self.collectives.items()},
            "source": self.source,
        }

    @staticmethod
    def from_dict(document: object) -> NeuralCost:
        """Read the group `neural` of a cost model. Raises MesetaError for an unknown or missing key, and for arrays
        that have another shape than their network needs, are cut short or hold what is no finite number."""
        document = _check_mapping("neural", document)
        known = ("lookup", "update", "collectives", "source")
        check_keys("cost model: neural", document, known)
        for key in known:
            if key not in document:
                raise MesetaError(f"cost model: neural.{key} is missing; run `meseta calibrate --neural` again")
        if not isinstance(document["source"], str):
            raise MesetaError(f"cost model: neural.source must be text, got {document['source']!r}")
        collectives = _check_mapping("neural.collectives", document["collectives"])
        return NeuralCost(
            lookup=_read_network("neural.lookup", document["lookup"]),
            update=_read_network("neural.update", document["update"]),
            collectives={key: _read_network(f"neural.collectives.{key}", own) for key, own in collectives.items()},
            source=document["source"],
        )


def _check_arrays(
    where: str, network: Network, known: Mapping[str, tuple[str | int, ...]], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The sizes by name; raises MesetaError where an array is missing, unknown, or of another shape."""
    found = dict(sizes)
    check_keys(f"cost model: {where}", network, known)
    for name, named in known.items():
        if name not in network:
            raise MesetaError(f"cost model: {where}.{name} is missing; run `meseta calibrate --neural` again")
        shape = network[name].shape
        if len(shape) != len(named):
            raise MesetaError(f"cost model: {where}.{name} must have {len(named)} sizes, got {list(shape)}")
        for size, own in zip(named, shape, strict=True):
            expected = size if isinstance(size, int) else found.setdefault(size, own)
            _check_size(where, name, own, expected)
    return found


def _check_size(where: str, name: str, size: int, expected: int) -> None:
    if size != expected:
        raise MesetaError(
            f"cost model: {where}.{name} has a size of {size} where {expected} is due; it may be of another version: "
            "run `meseta calibrate --neural` again"
        )


def _to_dict(network: Network) -> dict[str, Any]:
    return {name: {"shape": list(own.shape), "float32": own.float32} for name, own in network.items()}


def _read_network(where: str, document: object) -> Network:
    return {str(name): _read_array(f"{where}.{name}", own) for name, own in _check_mapping(where, document).items()}


def _read_array(where: str, document: object) -> Float32Array:
    own = _check_mapping(where, document)
    if set(own) != {"shape", "float32"} or not isinstance(own["float32"], str):
        raise MesetaError(f"cost model: {where} must hold shape and float32, got {sorted(map(str, own))}")
    shape = own["shape"]
    if not isinstance(shape, Sequence) or not all(is_int(size) and size >= 1 for size in shape):
        raise MesetaError(f"cost model: {where}.shape must be a list of whole numbers above 0, got {shape!r}")
    try:
        return Float32Array(shape=tuple(shape), float32=own["float32"])
    except MesetaError as error:
        raise MesetaError(f"cost model: {where}: {error}") from None


def _check_mapping(where: str, document: object) -> Mapping[Any, Any]:
    if not isinstance(document, Mapping):
        raise MesetaError(f"cost model: {where} must be a mapping, got {document!r}")
    return document
