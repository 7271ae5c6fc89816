"""DLRM training in other systems: plain PyTorch (with DistributedDataParallel on several ranks) and TorchRec.

Both are used in the way that their own examples show.
"""

# This module runs in the interpreter of the peer, which has only `harness.target` and `synthetic_batches` of Meseta.

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.synthetic_batches import DlrmWorkload, TrainingBatch, make_training_batches

# Labels are random, so training does not converge. With a small rate, losses remain finite over thousands of steps.
LR = 0.001
INIT_VALUE = 0.01


class TrainingPeer(BenchmarkTarget):
    """Base class of targets that train on prepared batches. Subclasses define `build` and `step`."""

    packages: tuple[str, ...] = ("torch",)

    def __init__(self, workload: dict[str, Any], optimizer: str, dense_dtype: str = "float32") -> None:
        super().__init__()
        self.workload = DlrmWorkload.from_json(workload)
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        self.build(optimizer, dense_dtype)
        self.batches = make_training_batches(self.workload, self.rank, self.num_ranks)
        self.actions = {"step": lambda call: self.step(self.batches[call % len(self.batches)])}

    def build(self, optimizer: str, dense_dtype: str) -> None:
        raise NotImplementedError

    def init_process_group(self) -> None:
        """Initialize torch.distributed with gloo for the processes that `WorkerGroup` has started."""
        meeting = f"file://{os.environ['MESETA_RENDEZVOUS']}"
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=self.num_ranks)

    def step(self, samples: TrainingBatch) -> Any:
        """Train on one batch and return the loss."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        return {
            "actions": list(self.actions),
            "samples_per_call": self.workload.lookups.batch_size,
            "versions": {name: importlib.metadata.version(name) for name in self.packages},
        }

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()


class PairProducts(nn.Module):
    """Dot products of all pairs of vectors. Its buffers move with the model, so that a step copies no indices."""

    rows: Tensor
    columns: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return products [B, F(F-1)/2] of vectors [B, F, D]."""
        return torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]


class PlainDLRM(nn.Module):
    """DLRM of standard PyTorch modules. Each table is an nn.EmbeddingBag with sparse gradients."""

    def __init__(self, training: DlrmWorkload) -> None:
        super().__init__()
        traffic, dim = training.lookups, training.dim
        num_vectors = len(traffic.rows) + 1
        self.bag_size = traffic.bag_size
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=torch.full((rows, dim), INIT_VALUE))
            for rows in traffic.rows
        )
        self.bottom = mlp([training.num_dense, *training.bottom_mlp, dim], relu_last=True)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = mlp([dim + num_pairs, *training.top_mlp, 1])
        self.products = PairProducts(num_vectors)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Return logits [B] for dense features [B, num_dense] and ids [F, B, bag_size]."""
        x = self.bottom(dense)
        # nn.EmbeddingBag needs no offsets for two-dimensional ids, which are bags of equal length.
        vectors = torch.stack([x, *(table(ids[f]) for f, table in enumerate(self.tables))], dim=1)
        logits: Tensor = self.top(torch.cat([x, self.products(vectors)], dim=1)).squeeze(1)
        return logits


def mlp(widths: Sequence[int], *, relu_last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(widths):
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*(layers if relu_last else layers[:-1]))


class PyTorchTraining(TrainingPeer):
    """Training target of plain PyTorch. Computes in bfloat16 by autocast if requested."""

    def build(self, optimizer: str, dense_dtype: str) -> None:
        self.model: nn.Module = PlainDLRM(self.workload)
        if self.num_ranks > 1:
            self.init_process_group()
            self.model = nn.parallel.DistributedDataParallel(self.model)
        make: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
        self.optimizer: torch.optim.Optimizer = make[optimizer](self.model.parameters(), lr=LR)
        self.criterion = nn.BCEWithLogitsLoss()
        self.autocast = dense_dtype != "float32"

    def step(self, samples: TrainingBatch) -> Tensor:
        dense, ids, label = (torch.from_numpy(part) for part in (samples.dense, samples.ids, samples.label))
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            logits = self.model(dense, ids)
        loss: Tensor = self.criterion(logits.float(), label)
        loss.backward()
        self.optimizer.step()
        return loss


class TorchRecTraining(TrainingPeer):
    """Training target of TorchRec: its DLRM with DistributedModelParallel and its planner.

    The tables are updated during the backward pass.
    """

    packages = ("torch", "torchrec", "fbgemm_gpu-cpu")

    def build(self, optimizer: str, dense_dtype: str) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.models.dlrm import DLRM, DLRMTrain
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        if dense_dtype != "float32":
            raise ValueError(f"TorchRec is measured in float32 only, but dense_dtype is {dense_dtype}")
        self.init_process_group()
        traffic, dim = self.workload.lookups, self.workload.dim
        self.keys = [f"f{f}" for f in range(len(traffic.rows))]
        tables = [
            EmbeddingBagConfig(name=f"t{f}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{f}"])
            for f, rows in enumerate(traffic.rows)
        ]
        embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        model = DLRMTrain(
            DLRM(
                embeddings,
                dense_in_features=self.workload.num_dense,
                dense_arch_layer_sizes=[*self.workload.bottom_mlp, dim],
                over_arch_layer_sizes=[*self.workload.top_mlp, 1],
                dense_device=torch.device("cpu"),
            )
        )
        row_optimizer = {"sgd": torch.optim.SGD, "rowwise_adagrad": RowWiseAdagrad}[optimizer]
        apply_optimizer_in_backward(row_optimizer, embeddings.parameters(), {"lr": LR})
        self.shard(model)
        self.lengths = torch.full((len(self.keys) * traffic.batch_size // self.num_ranks,), traffic.bag_size)
        self.kjt_class = KeyedJaggedTensor

    def shard(self, model: nn.Module) -> None:
        """Shard the model over the ranks, and combine the optimizers of the tables and of the dense part."""
        from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        sharders = get_default_sharders()
        topology = Topology(world_size=self.num_ranks, compute_device="cpu", hbm_cap=0, ddr_cap=64 << 30)
        plan = EmbeddingShardingPlanner(topology=topology).collective_plan(model, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=LR))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense_optimizer])

    def to_batch(self, samples: TrainingBatch) -> Any:
        """Convert a batch to the input of TorchRec's models."""
        from torchrec.datasets.utils import Batch

        ids = torch.from_numpy(samples.ids.reshape(-1))
        sparse = self.kjt_class(self.keys, ids, lengths=self.lengths, stride=samples.label.shape[0])
        label = torch.from_numpy(samples.label).int()
        return Batch(dense_features=torch.from_numpy(samples.dense), sparse_features=sparse, labels=label)

    def step(self, samples: TrainingBatch) -> Tensor:
        batch = self.to_batch(samples)
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()
        result: Tensor = loss
        return result
