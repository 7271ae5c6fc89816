"""Training samples/s of DLRM, beside the same model in plain PyTorch (nn.EmbeddingBag with sparse gradients).

    python benchmarks/bench_train.py [num_steps]

Criteo-shaped: 13 dense inputs, 26 tables with the rows of Criteo Kaggle capped at 1 million, one Zipf id each; bottom
MLP 512-256-64-D, top 512-256-1, dot interaction, SGD on both sides, one process with all cores. Both models start from
the same weights and must give the same losses, else nothing is reported. Rounds are interleaved; medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from record import record
from torch import Tensor, nn

from meseta.comm import World
from meseta.config import ModelConfig
from meseta.data.batch import Batch
from meseta.data.synth import CARDINALITIES
from meseta.embedding import EmbeddingBagCollection
from meseta.jagged import KeyedJaggedTensor
from meseta.models import make_model
from meseta.pipeline import TrainStep
from meseta.spec import FeatureSpec, OptimizerSpec, TableSpec

NUM_ROUNDS = 7
LR = 0.01


class PlainDLRM(nn.Module):
    """DLRM as one writes it at home; takes its dense weights from `twin`."""

    def __init__(self, twin: nn.Module, num_dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(s.weight.clone(), freeze=False, mode="sum", sparse=True)
            for s in twin.embeddings.shards
        )
        self.bottom, self.top = nn.Sequential(), nn.Sequential()
        for mine, theirs in ((self.bottom, twin.bottom_mlp), (self.top, twin.top_mlp)):
            for layer in theirs:
                copy = nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else nn.ReLU()
                copy.load_state_dict(layer.state_dict())
                mine.append(copy)
        rows, columns = torch.tril_indices(len(self.tables) + 1, len(self.tables) + 1, offset=-1)
        self.pairs = (rows, columns)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        offsets = torch.arange(dense.shape[0])
        vectors = torch.stack([x, *(table(ids[f], offsets) for f, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def make_batches(sizes: list[int], batch_size: int, num_batches: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(dense [B, 13], ids [26, B], label [B]), ids by a bounded Zipf law, scattered over the table."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(num_batches):
        ranks = [np.minimum(random.zipf(1.05, batch_size) - 1, n - 1) * 7919 % n for n in sizes]
        dense = torch.from_numpy(random.standard_normal((batch_size, 13), dtype=np.float32))
        label = torch.from_numpy((random.random(batch_size) < 0.25).astype(np.float32))
        batches.append((dense, torch.from_numpy(np.stack(ranks)), label))
    return batches


def make_steps(sizes: list[int], dim: int) -> tuple[Callable[..., float], Callable[..., float]]:
    """(our step, the plain step), each (dense, ids, label) -> loss."""
    tables = [
        TableSpec(name=f"t{f}", num_embeddings=n, embedding_dim=dim, optimizer=OptimizerSpec(name="sgd", lr=LR))
        for f, n in enumerate(sizes)
    ]
    features = [FeatureSpec(name=table.name, table=table.name) for table in tables]
    config = ModelConfig(name="dlrm", embedding_dim=dim)
    model = make_model(config, EmbeddingBagCollection(tables, features), 13, seed=0)
    plain = PlainDLRM(model, 13)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=LR, fused=True), World.single())
    keys = tuple(feature.name for feature in features)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    criterion = nn.BCEWithLogitsLoss()

    def ours(dense: Tensor, ids: Tensor, label: Tensor) -> float:
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        sparse = KeyedJaggedTensor(keys=keys, values=ids.view(-1), lengths=lengths)
        return step(Batch(dense=dense, sparse=sparse, label=label)).loss

    def theirs(dense: Tensor, ids: Tensor, label: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(plain(dense, ids), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    return ours, theirs


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for dim, batch_size in ((16, 2048), (16, 8192), (64, 2048)):
        sizes = [min(n, 1_000_000) for n in CARDINALITIES]
        ours, theirs = make_steps(sizes, dim)
        batches = make_batches(sizes, batch_size, num_steps)
        for batch in batches[:3]:
            mine, other = ours(*batch), theirs(*batch)
            if abs(mine - other) > 1e-5:
                sys.exit(f"bench_train: losses differ: {mine!r} and {other!r}; nothing is reported")
        speeds: tuple[list[float], list[float]] = ([], [])
        for _ in range(NUM_ROUNDS):
            for run, speed in zip((ours, theirs), speeds, strict=True):
                start_s = time.perf_counter()
                for batch in batches:
                    run(*batch)
                speed.append(num_steps * batch_size / (time.perf_counter() - start_s))
        median, peer = (statistics.median(speed) for speed in speeds)
        case = f"DLRM D {dim}, B {batch_size}"
        record("train", case, "training", median, "samples/s", peer="plain PyTorch", peer_value=peer)


if __name__ == "__main__":
    main()
