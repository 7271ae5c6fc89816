"""Plain PyTorch with memory-mapped tables in a control group: tiers.mapped_process OPTIONS, JSON of MappedOptions.

Prints seconds of a step and the peak memory of the process in bytes as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.e2e_peers import PlainDLRM
from torch import Tensor, nn

from meseta.measure.synthetic_batches import DlrmWorkload, make_id_batches
from tiers.system_memory import memory_bytes, open_map, write_map

EPS = 1e-8
WARM_BATCHES, MADE_AT_ONCE = 50, 1 << 18


@dataclass(frozen=True)
class MappedOptions:
    training: DlrmWorkload
    folder: str
    group: str | None
    """Memory control group to enter."""
    num_steps: int
    lr: float
    warm_s: float
    """Seconds of lookups before the measurement."""

    @staticmethod
    def from_json(text: str) -> MappedOptions:
        document: dict[str, Any] = json.loads(text)
        return MappedOptions(**{**document, "training": DlrmWorkload.from_json(document["training"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class MappedTables:
    """Rows and sums of squares in mapped files, updated by row-wise Adagrad."""

    def __init__(self, options: MappedOptions) -> None:
        self._lr = options.lr
        traffic, folder = options.training.lookups, Path(options.folder)
        self.weights: list[Tensor] = []
        self.sums: list[Tensor] = []
        for f, (rows, dim) in enumerate(zip(traffic.rows, traffic.dims, strict=True)):
            self.weights.append(_mapped(folder / f"rows{f}", (rows, dim)).requires_grad_())
            self.sums.append(_mapped(folder / f"sums{f}", (rows,)))

    @torch.no_grad()
    def step(self) -> None:
        for weight, sums in zip(self.weights, self.sums, strict=True):
            assert weight.grad is not None
            grad = weight.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            total = sums[rows] + values.square().mean(1)
            sums[rows] = total
            weight.index_add_(0, rows, values / (total.sqrt() + EPS).unsqueeze(1), alpha=-self._lr)
            weight.grad = None


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    random = np.random.default_rng(0)
    parts = (
        random.random((min(MADE_AT_ONCE, shape[0] - first), *shape[1:]), np.float32) * np.float32(0.01)
        for first in range(0, shape[0], MADE_AT_ONCE)
    )
    write_map(path, parts)
    return torch.from_numpy(open_map(path, np.float32, shape))


class Bags(nn.Module):
    """Pooling of rows that are stored elsewhere, like nn.EmbeddingBag."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.rows = [weight]  # no parameter of the module, which would be stepped with the layers

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding_bag(ids, self.rows[0], mode="sum", sparse=True)


def main() -> None:
    options = MappedOptions.from_json(sys.argv[1])
    if options.group is not None:
        Path(options.group, "cgroup.procs").write_text(str(os.getpid()))
    training = options.training
    traffic = training.lookups
    tables = MappedTables(options)
    model = PlainDLRM(replace(training, lookups=replace(traffic, rows=(1,) * len(traffic.rows))))
    for f, weight in enumerate(tables.weights):
        model.tables[f] = Bags(weight)
    layers = [*model.bottom.parameters(), *model.top.parameters()]
    optimizer, criterion = torch.optim.SGD(layers, lr=options.lr), nn.BCEWithLogitsLoss()
    shape, start_s = (len(traffic.rows), traffic.batch_size, traffic.bag_size), time.perf_counter()
    number = 0
    while time.perf_counter() - start_s < options.warm_s:
        for ids in make_id_batches(traffic, WARM_BATCHES, 1_000_000 + number):
            for weight, of_table in zip(tables.weights, torch.from_numpy(ids.ids).view(shape), strict=True):
                nn.functional.embedding_bag(of_table, weight.detach())
        number += 1
    random, seconds = np.random.default_rng(10), []
    for ids in make_id_batches(traffic, options.num_steps, 11):
        dense = torch.from_numpy(random.standard_normal((traffic.batch_size, training.num_dense), dtype=np.float32))
        label = torch.from_numpy((random.random(traffic.batch_size) < 0.25).astype(np.float32))
        start_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        criterion(model(dense, torch.from_numpy(ids.ids).view(shape)), label).backward()
        optimizer.step()
        tables.step()
        seconds.append(time.perf_counter() - start_s)
    print(json.dumps({"step_s": sum(seconds) / len(seconds), "peak_bytes": memory_bytes("VmHWM")}))


if __name__ == "__main__":
    main()
