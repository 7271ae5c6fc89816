"""Compare lookup and fused update on a GPU with its copy bandwidth and with nn.EmbeddingBag + torch.optim.

    PYTHONPATH=src python benchmarks/bench_gpu.py

Bytes of a lookup are the necessary ones: rows, ids and outputs once. Those of an update are different rows and their
states, read and written, and ids and gradients once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common.command import make_parser
from common.device_rates import copy_rate, device_seconds
from common.processes import check_tests
from record import record
from torch import Tensor, nn

from meseta.ops.pooled_lookup import pooled_lookup
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec

NUM_BATCHES = 8


@dataclass(frozen=True)
class Shape:
    """Shape of equal tables with uniform ids."""

    name: str
    num_tables: int
    rows: int
    dim: int
    batch_size: int
    bag_size: int


SHAPES = [
    Shape("8 x 4M x 64, 20 ids", 8, 4_000_000, 64, 8192, 20),
    Shape("8 x 2M x 128, 20 ids", 8, 2_000_000, 128, 8192, 20),
    Shape("26 x 1M x 16, 1 id", 26, 1_000_000, 16, 65536, 1),
]


class Job:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.tables = [torch.randn(shape.rows, shape.dim, device="cuda").mul_(0.01) for _ in range(shape.num_tables)]
        num_ids = shape.num_tables * shape.batch_size * shape.bag_size
        self.batches = [torch.randint(shape.rows, (num_ids,), device="cuda") for _ in range(NUM_BATCHES)]
        self.offsets = torch.arange(shape.num_tables * shape.batch_size + 1, device="cuda") * shape.bag_size
        self.gradient = torch.randn(shape.batch_size, shape.num_tables * shape.dim, device="cuda").mul_(0.01)

    def ids(self, number: int) -> Tensor:
        """Return the ids of a batch. Batches repeat."""
        return self.batches[number % NUM_BATCHES]

    def lookup_bytes(self) -> int:
        row_bytes = 4 * self.shape.dim
        return self.batches[0].numel() * (row_bytes + 8) + self.offsets.numel() * 8 + self.gradient.numel() * 4

    def update_bytes(self, name: str) -> int:
        """Return the bytes of different rows and their states, read and written, and of ids and gradients."""
        shape = self.shape
        by_table = self.batches[0].view(shape.num_tables, -1)
        num_touched = sum(table_ids.unique().numel() for table_ids in by_table)
        num_values = {"sgd": shape.dim, "rowwise_adagrad": shape.dim + 1, "adam": 3 * shape.dim}[name]
        return 2 * 4 * num_touched * num_values + 8 * by_table.numel() + 4 * self.gradient.numel()

    def update(self, name: str) -> Callable[[int], None]:
        optimizer = make_row_optimizer(OptimizerSpec(name=name, lr=0.01))  # type: ignore[arg-type]
        rows = tuple(TableRows(weight=table, state=optimizer.init(table)) for table in self.tables)
        features = tuple(FeatureGradient(f, f, 0, f * self.shape.dim) for f in range(len(rows)))
        group = UpdateGroup(optimizer, rows, (self.shape.dim,) * len(rows), features)

        def run(number: int) -> None:
            bags = Bags(self.ids(number), self.offsets, self.shape.batch_size)
            row_update(group, 0.01, 1, bags, [self.gradient])

        return run


class Peer:
    """Equal tables as nn.EmbeddingBag(sparse=True)."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.bags = [nn.EmbeddingBag.from_pretrained(t, freeze=False, mode="sum", sparse=True) for t in job.tables]
        self.outputs: list[Tensor] = []

    def lookup(self, number: int) -> None:
        shape = self.job.shape
        ids = self.job.ids(number).view(shape.num_tables, shape.batch_size, shape.bag_size)
        self.outputs = [bag(part) for bag, part in zip(self.bags, ids, strict=True)]

    def step(self, name: str) -> Callable[[int], None]:
        """Return a function that runs forward, backward and optimizer for a batch."""
        kinds = {"sgd": torch.optim.SGD, "rowwise_adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        optimizer = kinds[name]([bag.weight for bag in self.bags], lr=0.01)
        parts = list(self.job.gradient.split(self.job.shape.dim, dim=1))

        def run(number: int) -> None:
            self.lookup(number)
            torch.autograd.backward(self.outputs, parts)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run


def measure(shape: Shape, copy: float) -> None:
    job = Job(shape)
    case = f"{shape.name} B {shape.batch_size} float32, {torch.cuda.get_device_name()}"
    peer = Peer(job)

    def lookup(number: int) -> Tensor:
        return pooled_lookup(job.tables, job.ids(number), job.offsets)

    ours_s, peer_s = device_seconds(lookup), device_seconds(peer.lookup)
    record("gpu", case, "lookup", job.lookup_bytes() / ours_s / 1e9, "GB/s", peer="device-to-device copy",
           peer_value=copy / 1e9)  # fmt: skip
    record("gpu", case, "lookup", ours_s * 1000, "ms", peer="nn.EmbeddingBag", peer_value=peer_s * 1000)
    for name, peer_name in (("sgd", "SGD"), ("rowwise_adagrad", "Adagrad"), ("adam", "SparseAdam")):
        update = job.update(name)
        update_s = device_seconds(update)
        record("gpu", case, f"update {name}", job.update_bytes(name) / update_s / 1e9, "GB/s",
               peer="device-to-device copy", peer_value=copy / 1e9)  # fmt: skip
        step = device_seconds(lambda number, update=update: (lookup(number), update(number)))
        label = f"nn.EmbeddingBag(sparse) + {peer_name}"
        record(
            "gpu",
            case,
            f"step {name}",
            step * 1000,
            "ms",
            peer=label,
            peer_value=device_seconds(peer.step(name)) * 1000,
        )


def main() -> None:
    make_parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: torch sees no GPU here, so nothing was measured")
        return
    check_tests("tests/gpu/test_kernels.py")
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy / 1e9:,.0f} GB/s, read and written")
    for shape in SHAPES:
        measure(shape, copy)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
