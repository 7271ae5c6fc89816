"""Cost models from data sheets and published measurements, for devices that were not measured."""

from __future__ import annotations

from typing import NamedTuple

from meseta.spec import CostModel, DeviceKind, Link
from meseta.spec.cost_model import (
    STOCHASTIC_SUFFIX,
    DenseCost,
    ExchangeCost,
    HardwareCacheCost,
    LookupCost,
    TierCost,
    UpdateCost,
)

_BANDWIDTH_SHARE = 0.8
"""Assumed share of the documented bandwidth of memory and links that programs reach."""
# Layers are a few hundred to a few thousand wide, which does not fill a GPU.
_MFU = 0.4
"""Assumed share of the documented tensor throughput that matrix products of a recommendation model reach."""

# A tenth of the latency that was measured between two ranks.
_PEER_S = 3e-5
"""Assumed seconds per additional rank of a collective over gloo."""
# Encoding and decoding were measured with 2,048 rows of 64 columns on a Zen 4 core, 2026-11-24, without the copy of the
# encoded bytes.
_ENCODE_S = {
    "fp16": 0.0,
    "bf16": 0.0,
    "fp8": 3.7e-10,
    "int8": 1.6e-10,
    f"fp8{STOCHASTIC_SUFFIX}": 1.0e-9,
    f"int8{STOCHASTIC_SUFFIX}": 7.5e-10,
}
"""Seconds to encode one element, by codec, with `STOCHASTIC_SUFFIX` for stochastic rounding."""
_DECODE_S = {"fp16": 0.0, "bf16": 0.0, "fp8": 3.4e-10, "int8": 7e-11}
"""Seconds to decode one element, by codec."""


def documented_cost_model(device: DeviceKind) -> CostModel:
    """Return the cost model of a device that `meseta calibrate` has not measured."""
    return _cpu() if device == "cpu" else _gpu(device)


def _cpu() -> CostModel:
    # One thread of an AMD Zen 4 core. Lookup, update and hardware cache were fitted to 600 combinations as `meseta
    # calibrate` does, with the median of three rounds each, 2026-11-22. The other constants were measured on the same
    # machine. A collective of gloo on loopback takes 0.15 to 0.4 ms. All-to-all reaches 3.4 GB/s and all-reduce 2.3
    # GB/s. Matrix products run at 103 GFLOP/s in float32 and 225 in bfloat16. A disk reads 95,000 random blocks of 4 KB
    # per second, and 1.2 GB/s sequentially.
    source = "measured on one thread of an AMD EPYC (Zen 4)"
    fitted = "600 combinations on one thread of an AMD EPYC (Zen 4), fitted as meseta calibrate does, 2026-11-22"
    between = Link(
        bytes_per_s=25e9 / 8 * _BANDWIDTH_SHARE, latency_s=4e-4 - _PEER_S, peer_s=_PEER_S
    )  # 25 Gb/s Ethernet
    return CostModel(
        device="cpu",
        lookup=LookupCost(
            call_s=6.4e-6,
            shard_s=2.5e-7,
            bag_s=3.6e-9,
            id_s=1.1e-9,
            hit_byte_s=2.2e-11,
            miss_byte_s=5.9e-11,
            long_miss_s=8.6e-9,
            walk_s=6.5e-10,
            out_byte_s=2.9e-11,
            unaligned_byte_s=6.7e-11,
            half_number_s=6.8e-12,
            source=fitted,
        ),
        update=UpdateCost(
            call_s=1.5e-5,
            shard_s=2.2e-6,
            bag_s=9.2e-9,
            id_s=1.2e-8,
            gradient_byte_s=3.7e-11,
            row_s=2.6e-9,
            miss_byte_s=5.6e-11,
            walk_s=6.8e-10,
            number_s={"rowwise_adagrad": 2.8e-10, "sgd": 0.0, "adagrad": 2.9e-10, "adam": 8.5e-10},
            half_number_s=3.5e-10,
            staged_shard_s=3.3e-4,
            staged_id_s=1.5e-8,
            staged_row_s=3.5e-8,
            source=fitted,
        ),
        cache=HardwareCacheCost(cache_bytes=4e6, source=fitted),
        dense=DenseCost(float32_flops_per_s=103e9, bfloat16_flops_per_s=225e9, call_s=5e-4, source=source),
        exchange=ExchangeCost(
            copy_byte_s=2.5e-10,
            bucket_id_s=8e-9,
            inside_all_to_all=Link(bytes_per_s=3.4e9, latency_s=3e-4 - _PEER_S, peer_s=_PEER_S),
            inside_all_reduce=Link(bytes_per_s=2.3e9, latency_s=3e-4 - _PEER_S, peer_s=_PEER_S),
            across_all_to_all=between,
            across_all_reduce=between,
            encode_number_s=_ENCODE_S,
            decode_number_s=_DECODE_S,
            source=f"{source}; 25 Gb/s between hosts",
        ),
        tiers=_cpu_tiers(source),
    )


def _cpu_tiers(source: str) -> TierCost:
    # Similar to measurements of `meseta calibrate --disk` with one thread of an Intel Xeon (AVX-512, AMX), which had
    # other work at the same time, 2026-11-25.
    return TierCost(
        host_bytes_per_s=2.2e9,
        host_row_s=1.2e-7,
        cache_call_s=8e-5,
        cache_shard_s=4e-6,
        cache_id_s=4.5e-8,
        cache_row_s=2.5e-8,
        disk_bytes_per_s=1.2e9,
        disk_write_bytes_per_s=1.0e9,
        disk_row_s=1 / 95e3,
        disk_processor_s=2.5e-6,
        source=source,
    )


class _DataSheet(NamedTuple):
    """Specifications of a GPU. Bandwidths are in bytes per second, and throughputs in dense FLOP/s."""

    memory_bytes: int
    memory_bytes_per_s: float
    cache_bytes: float
    tf32_flops_per_s: float
    bf16_flops_per_s: float
    nvlink_bytes_per_s: float
    """NVLink bandwidth per direction."""
    network_bytes_per_s: float
    pcie_bytes_per_s: float
    """PCIe bandwidth per direction."""


_DATA_SHEETS: dict[str, _DataSheet] = {
    # NVIDIA A100 40GB data sheet: 40 GB, 1,555 GB/s; 40 MB of L2; 156 and 312 TFLOPS; NVLink 600 GB/s both ways; DGX
    # A100: 200 Gb/s per GPU; PCIe 4.0 x16.
    "a100": _DataSheet(40 * 10**9, 1.555e12, 40e6, 156e12, 312e12, 300e9, 25e9, 32e9),
    # NVIDIA H100 SXM data sheet: 80 GB, 3.35 TB/s; 50 MB; 494 and 989 TFLOPS without sparsity; NVLink 900 GB/s; DGX
    # H100: 400 Gb/s per GPU; PCIe 5.0 x16.
    "h100": _DataSheet(80 * 10**9, 3.35e12, 50e6, 494e12, 989e12, 450e9, 50e9, 64e9),
    # NVIDIA H200 SXM data sheet: 141 GB, 4.8 TB/s; otherwise equal to the H100.
    "h200": _DataSheet(141 * 10**9, 4.8e12, 50e6, 494e12, 989e12, 450e9, 50e9, 64e9),
    # NVIDIA DGX B200 data sheet: 1,440 GB and 64 TB/s over 8 GPUs; 1.1 and 2.25 PFLOPS without sparsity; NVLink 1.8
    # TB/s; 400 Gb/s per GPU; L2 of 126 MB as the driver reports.
    "b200": _DataSheet(180 * 10**9, 8.0e12, 126e6, 1.1e15, 2.25e15, 900e9, 50e9, 64e9),
}


def documented_memory_bytes(device: DeviceKind) -> int | None:
    """Return the memory of a GPU according to its data sheet, or `None` for a CPU."""
    return _DATA_SHEETS[device].memory_bytes if device in _DATA_SHEETS else None


def _gpu(device: DeviceKind) -> CostModel:
    """Return the cost model of a GPU. Operators are memory-bound, so a row costs its bytes divided by the bandwidth."""
    _, memory, cache, tf32, bf16, nvlink, network, pcie = _DATA_SHEETS[device]
    byte_s, cached_byte_s = 1 / (memory * _BANDWIDTH_SHARE), 1 / (memory * _BANDWIDTH_SHARE * 3)
    source = (
        f"data sheet of {device.upper()}, {_BANDWIDTH_SHARE:.0%} of its bandwidths, {_MFU:.0%} of its tensor throughput"
    )
    # Small collectives are assumed to take 20 us inside a host, and 40 us between hosts.
    inside = Link(bytes_per_s=nvlink * _BANDWIDTH_SHARE, latency_s=2e-5)
    across = Link(bytes_per_s=network * _BANDWIDTH_SHARE, latency_s=4e-5)
    # Radix sort reaches 29.4 billion 32-bit keys/s on an A100 ("Onesweep", arXiv 2206.01784). A quarter of it is
    # assumed here, because an id has a position and the borders of rows are searched. It is scaled by memory bandwidth.
    sort_id_s = 4 / 29.4e9 * 1.555e12 / memory
    return CostModel(
        device=device,
        lookup=LookupCost(
            # A call of a few kernel launches is assumed to take 20 to 100 us.
            call_s=2e-5,
            id_s=8 * byte_s,
            bag_s=8 * byte_s,
            hit_byte_s=cached_byte_s,
            miss_byte_s=byte_s,
            out_byte_s=byte_s,
            source=source,
        ),
        update=UpdateCost(
            call_s=1e-4,
            id_s=sort_id_s + 16 * byte_s,
            bag_s=8 * byte_s,
            gradient_byte_s=byte_s,
            row_s=16 * byte_s,
            hit_byte_s=2 * cached_byte_s,
            miss_byte_s=2 * byte_s,
            number_s=dict.fromkeys(("sgd", "adam"), 0.0),
            source=source,
        ),
        cache=HardwareCacheCost(cache_bytes=cache, source=source),
        dense=DenseCost(float32_flops_per_s=tf32 * _MFU, bfloat16_flops_per_s=bf16 * _MFU, call_s=1e-3, source=source),
        exchange=ExchangeCost(
            copy_byte_s=2 * byte_s,
            bucket_id_s=sort_id_s,
            inside_all_to_all=inside,
            inside_all_reduce=inside,
            across_all_to_all=across,
            across_all_reduce=across,
            source=source,
        ),
        tiers=TierCost(
            host_bytes_per_s=pcie * _BANDWIDTH_SHARE,
            # Four NVMe drives per host are assumed to read 25 GB/s, write half of that, and read 4 million blocks of 4
            # KB per second. Processor time is not included.
            disk_bytes_per_s=25e9,
            disk_write_bytes_per_s=12e9,
            disk_row_s=1 / 4e6,
            disk_processor_s=0.0,
            source=f"{source}; four NVMe drives a host",
        ),
    )
