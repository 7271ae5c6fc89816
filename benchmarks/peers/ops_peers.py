"""Embedding operators of other systems: torch.nn.EmbeddingBag, FBGEMM's TBE, TorchRec's fused module."""

# This module runs in the interpreter of the peer, which has only `harness.target` and `synthetic_batches` of Meseta.

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn

from meseta.measure.harness.target import BenchmarkTarget
from meseta.measure.synthetic_batches import LookupWorkload, make_id_batches

LR = 0.01
INIT_VALUE = 0.01


class PeerOperators(BenchmarkTarget):
    """Base class of targets that time lookups and train steps on prepared batches."""

    packages: tuple[str, ...] = ("torch",)

    def __init__(self, workload: dict[str, Any], optimizer: str, dtype: str) -> None:
        super().__init__()
        self.workload = LookupWorkload.from_json(workload)
        torch.manual_seed(0)
        self.gradient = 0.01 * torch.randn(self.workload.batch_size, sum(self.workload.dims))
        self.batches: list[Any] = []
        self.num_ids = 0.0
        self.build(optimizer, dtype)
        batches = make_id_batches(self.workload, self.workload.num_batches)
        self.num_ids = sum(len(batch.ids) for batch in batches) / len(batches)
        for batch in batches:
            weights = None if batch.weights is None else torch.from_numpy(batch.weights)
            self.batches.append(self.prepare(torch.from_numpy(batch.ids), torch.from_numpy(batch.offsets), weights))
        self.actions = {"lookup": self._lookup, "step": self._step}

    def build(self, optimizer: str, dtype: str) -> None:
        """Create the tables with `optimizer` and with rows of `dtype`."""
        raise NotImplementedError

    def prepare(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Any:
        """Convert a batch to the input format that is fastest for this system. Its result is passed to `lookup`."""
        raise NotImplementedError

    def lookup(self, batch: Any) -> Tensor:
        """Return pooled embeddings [B, sum of D] that support backward."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        return {
            "actions": list(self.actions),
            "ids_per_call": {"lookup": self.num_ids, "step": self.num_ids},
            "versions": {name: importlib.metadata.version(name) for name in self.packages},
        }

    def _lookup(self, call: int) -> None:
        with torch.no_grad():
            self.lookup(self.batches[call % len(self.batches)])

    def _step(self, call: int) -> None:
        self.lookup(self.batches[call % len(self.batches)]).backward(self.gradient)


class PyTorchOperators(PeerOperators):
    """Target of plain PyTorch: an nn.EmbeddingBag with sparse gradients per table, and an optimizer of torch.optim."""

    def build(self, optimizer: str, dtype: str) -> None:
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(
                rows,
                dim,
                mode=self.workload.pooling,
                sparse=True,
                include_last_offset=True,
                _weight=torch.full((rows, dim), INIT_VALUE),
            )
            for rows, dim in zip(self.workload.rows, self.workload.dims, strict=True)
        )
        make: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        self.optimizer: torch.optim.Optimizer = make[optimizer](list(self.tables.parameters()), lr=LR)

    def prepare(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> list[tuple[Tensor, Tensor, Any]]:
        num_bags, parts = self.workload.batch_size, []
        for f in range(len(self.tables)):
            bounds = offsets[f * num_bags : (f + 1) * num_bags + 1]
            start, stop = int(bounds[0]), int(bounds[-1])
            bag_weights = None if weights is None else weights[start:stop].clone()
            parts.append((ids[start:stop].clone(), bounds - start, bag_weights))
        return parts

    def lookup(self, batch: Any) -> Tensor:
        bags = [
            table(ids, offsets, per_sample_weights=weights)
            for table, (ids, offsets, weights) in zip(self.tables, batch, strict=True)
        ]
        return torch.cat(bags, dim=1)

    def _step(self, call: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        super()._step(call)
        self.optimizer.step()


class FbgemmOperators(PeerOperators):
    """Target of FBGEMM: SplitTableBatchedEmbeddingBagsCodegen on the CPU. The backward pass applies the optimizer."""

    packages = ("torch", "fbgemm_gpu-cpu")

    def build(self, optimizer: str, dtype: str) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

        names = {"sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
        host, cpu = fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU
        self.tables = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, host, cpu) for rows, dim in zip(self.workload.rows, self.workload.dims, strict=True)],
            optimizer=getattr(EmbOptimType, names.get(optimizer, optimizer.upper())),
            weights_precision=SparseType.FP16 if dtype == "float16" else SparseType.FP32,
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.MEAN if self.workload.pooling == "mean" else PoolingMode.SUM,
            learning_rate=LR,
            eps=1e-8,
            device=torch.device("cpu"),
        )
        for table in self.tables.split_embedding_weights():
            table.fill_(INIT_VALUE)

    def prepare(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        return ids, offsets, weights

    def lookup(self, batch: Any) -> Tensor:
        return self.tables(*batch)


class TorchRecOperators(PeerOperators):
    """Target of TorchRec: FusedEmbeddingBagCollection."""

    packages = ("torch", "torchrec", "fbgemm_gpu-cpu")

    def build(self, optimizer: str, dtype: str) -> None:
        from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        make: dict[str, Any] = {
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "adam": torch.optim.Adam,
            "rowwise_adagrad": RowWiseAdagrad,
        }
        pooling = PoolingType.MEAN if self.workload.pooling == "mean" else PoolingType.SUM
        configs = [
            EmbeddingBagConfig(
                name=f"t{f}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{f}"], pooling=pooling
            )
            for f, (rows, dim) in enumerate(zip(self.workload.rows, self.workload.dims, strict=True))
        ]
        self.tables = FusedEmbeddingBagCollection(
            configs,
            optimizer_type=make[optimizer],
            optimizer_kwargs={"lr": LR},
            is_weighted=self.workload.weighted,
            device=torch.device("cpu"),
        )
        with torch.no_grad():
            for parameter in self.tables.parameters():
                parameter.fill_(INIT_VALUE)
        self.keys = [f"f{f}" for f in range(len(configs))]
        self.kjt_class = KeyedJaggedTensor

    def prepare(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        return ids, offsets.diff(), weights

    def lookup(self, batch: Any) -> Tensor:
        ids, lengths, weights = batch
        # A KeyedJaggedTensor caches values such as its offsets, so each step creates a new one.
        values: Tensor = self.tables(self.kjt_class(self.keys, ids, weights=weights, lengths=lengths)).values()
        return values
