"""Published model sizes planned on published clusters, with documented constants.

`python benchmarks/published_models.py` prints the table of docs/published_models.md. Nothing is measured. Parameters,
tables and clusters are published ones if a comment says so, and approximate otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from common.command import make_parser

from meseta.measure.calibrate.tasks import ID_DISTRIBUTIONS
from meseta.planner import DoesNotFitError, PlanResult, find_plan
from meseta.planner.explain.communication import predict_codecs
from meseta.spec import (
    DenseLoad,
    DeviceKind,
    FeatureLoad,
    FeatureSpec,
    Link,
    OptimizerSpec,
    TableSpec,
    Topology,
    Workload,
)
from meseta.spec.codecs import Precision

# MLPerf DLRM-DCNv2: rows and ids per sample of its 26 tables, layers and ranks of its crosses
# (mlcommons/training_results_v4.0, Apache-2.0).
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
BATCH_SIZE = 65_536
# Sixteen hosts of eight A100 with 40 GB, 1.5 TB of DRAM, NVLink with 600 GB/s both ways and 200 Gb/s per GPU, as in
# arXiv 2104.05158, section 5; the size of its disks is not published.
PAPER_HOST = {"devices_per_host": 8, "device": "a100", "hbm_bytes": 40_000_000_000, "host_bytes": 1_500_000_000_000}
DISK_BYTES = 8_000_000_000_000


def mlperf() -> Workload:
    inputs = 128 * (len(MLPERF_ROWS) + 1)
    layers = [(13, 512), (512, 256), (256, 128), *[(inputs, 512), (512, inputs)] * 3]
    layers += [(inputs, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    weights = sum(a * b for a, b in layers)
    return workload(
        [(rows, 128, ids) for rows, ids in zip(MLPERF_ROWS, MLPERF_IDS, strict=True)],
        dtype="float32",
        dense=DenseLoad(
            flops_per_sample=3 * 2.0 * weights,
            parameter_bytes=4 * weights,
            activation_bytes_per_sample=8 * sum(b for _, b in layers),
            dtype="float32",
        ),
    )


def paper_model(parameters: float, num_tables: int, dims: tuple[int, ...], ids: float, mflops: float) -> Workload:
    """Return a model of the paper. Rows are log-normal over tables and have 16 bits. `mflops` is of a forward pass."""
    random = np.random.default_rng(num_tables)
    widths = random.choice(dims, num_tables)
    sizes = random.lognormal(sigma=1.5 if num_tables > 10 else 0.5, size=num_tables)
    rows = np.maximum(sizes * parameters / (sizes * widths).sum(), 10).round()
    bags = np.maximum(random.lognormal(sigma=0.7, size=num_tables), 0.1)
    bags *= ids / bags.mean()
    tables = [(int(r), int(d), float(n)) for r, d, n in zip(rows, widths, bags, strict=True)]
    per_sample = mflops * 1e6
    dense = DenseLoad(
        flops_per_sample=3 * per_sample,
        parameter_bytes=int(2 * per_sample),  # a multiplication and an addition per parameter of four bytes
        activation_bytes_per_sample=8 * int(sum(d for _, d, _ in tables)),
        dtype="bfloat16",
    )
    return workload(tables, dtype="float16", dense=dense)


def workload(tables: list[tuple[int, int, float]], dtype: str, dense: DenseLoad) -> Workload:
    """Return tables of (rows, columns, ids per sample), with reuse as in published production traces."""
    specs = tuple(
        TableSpec(
            name=f"t{n}",
            num_embeddings=rows,
            embedding_dim=dim,
            dtype=dtype,  # type: ignore[arg-type]
            optimizer=OptimizerSpec(name="rowwise_adagrad"),
        )
        for n, (rows, dim, _) in enumerate(tables)
    )
    return Workload(
        tables=specs,
        features=tuple(FeatureSpec(name=table.name, table=table.name) for table in specs),
        batch_size=BATCH_SIZE,
        loads={
            table.name: FeatureLoad(pooling_factor=ids, reuse=ID_DISTRIBUTIONS[0])
            for table, (_, _, ids) in zip(specs, tables, strict=True)
        },
        dense=dense,
    )


def gpus(device: DeviceKind, num_gpus: int, hbm_bytes: float) -> Topology:
    per_host = min(num_gpus, 8)
    return Topology(
        num_hosts=num_gpus // per_host,
        devices_per_host=per_host,
        device=device,
        hbm_bytes=int(hbm_bytes),
        host_bytes=2_000_000_000_000 * per_host // 8,
    )


def paper_cluster(disk_bytes: int = 0) -> Topology:
    """Return 128 A100. A direction of NVLink has half of the 600 GB/s."""
    return Topology(
        num_hosts=16,
        **PAPER_HOST,  # type: ignore[arg-type]
        disk_bytes=disk_bytes,
        inside=Link(bytes_per_s=300e9, latency_s=2e-5),
        across=Link(bytes_per_s=25e9, latency_s=4e-5),
    )


@dataclass(frozen=True)
class Case:
    name: str
    workload: Workload
    topology: Topology


def cases() -> list[Case]:
    model = mlperf()
    inference_cases = [
        Case(f"MLPerf DLRM-DCNv2, {count} {device.upper()}", model, gpus(device, count, room))
        for device, room in (("h100", 80e9), ("h200", 141e9))
        for count in (1, 8, 64)
    ]
    # About 1,000 tables of 4 to 384 columns, 93 on average.
    wide = (4, 16, 32, 64, 92, 128, 192, 4, 16, 32, 64, 92, 176, 384)
    narrow = (92,)
    return [
        *inference_cases,
        Case("A: 793 billion, 128 A100", paper_model(793e9, 1000, wide, 15, 638), paper_cluster(DISK_BYTES)),
        Case("F: 12 trillion, 128 A100", paper_model(12e12, 10, (256,), 20, 5), paper_cluster(DISK_BYTES)),
        Case("I: 332 billion, 128 A100", paper_model(332e9, 100, narrow, 70, 60), paper_cluster(DISK_BYTES)),
    ]


HEAD = ("model and cluster", "parameters", "held, TB", "plan", "tiers", "step, ms", "samples/s", "bound by", "gap", "s")


def describe(case: Case, planned: PlanResult, seconds: float) -> list[str]:
    prediction, step_s = planned.prediction, planned.prediction.step_s
    schemes: dict[str, int] = {}
    tiers: dict[str, float] = {}
    for entry in planned.plan.tables:
        schemes[str(entry.sharding)] = schemes.get(str(entry.sharding), 0) + 1
        for shard in entry.shards:
            cells = float(shard.num_rows) * shard.num_columns * len(shard.ranks)
            tiers[shard.tier] = tiers.get(shard.tier, 0.0) + cells
    parts = {name: float(prediction.seconds[name].max()) for name in prediction.seconds}
    longest = max(parts, key=lambda name: parts[name])
    held = sum(prediction.peak_bytes(tier).sum() for tier in ("hbm", "host", "disk"))
    cells = sum(float(t.num_embeddings) * t.embedding_dim for t in case.workload.tables)
    whole = sum(tiers.values())
    return [
        case.name,
        f"{cells:.3g}",
        f"{held / 1e12:.3g}",
        ", ".join(f"{count} {name}" for name, count in sorted(schemes.items(), key=lambda item: -item[1])),
        ", ".join(f"{tier} {100 * size / whole:.0f} %" for tier, size in sorted(tiers.items())),
        f"{1e3 * step_s:.3g}",
        f"{case.workload.batch_size / step_s:,.0f}",
        f"{longest} ({100 * parts[longest] / sum(parts.values()):.0f} %)",
        f"{100 * planned.bound.relative_gap(step_s):.1f} %",
        f"{seconds:.1f}",
    ]


COMPARED: tuple[Precision, ...] = ("fp32", "paper", "int8")


def compare(case: Case, planned: PlanResult) -> tuple[list[str], list[str]]:
    """Return the header and cells of predicted steps by precision and algorithm, relative to flat fp32."""
    steps = {
        f"{one.precision} {one.exchange}": one.step_s for one in predict_codecs(planned) if one.precision in COMPARED
    }
    base = steps["fp32 flat"]
    head = ["model and cluster", "flat fp32, ms", *steps]
    return head, [case.name, f"{1e3 * base:.3g}", *(f"{step_s / base:.3f}" for step_s in steps.values())]


def line(cells: Iterable[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    make_parser(__doc__).parse_args()
    line(HEAD)
    print("| --- " * len(HEAD) + "|")
    compared = []
    for case in cases():
        start = time.perf_counter()
        try:
            planned = find_plan(case.workload, case.topology)
        except DoesNotFitError as error:
            print(f"| {case.name} | does not fit: {error} |")
            continue
        line(describe(case, planned, time.perf_counter() - start))
        if case.topology.num_hosts > 1:
            compared.append(compare(case, planned))
    print()
    line(compared[0][0])
    print("| --- " * len(compared[0][0]) + "|")
    for _, cells in compared:
        line(cells)


if __name__ == "__main__":
    main()
