"""TorchRec's DLRM with a codec on every rank. Runs in the interpreter of the peer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from hosts.links import own_traffic
from peers.e2e_peers import LR, TorchRecTraining
from torch import nn

from links.variants import Window

PIPELINED = " pipelined"
_jobs: dict[str, Any] = {}
_calls: dict[str, int] = {}


class CodecTraining(TorchRecTraining):
    """Table-wise sharding, and DistributedDataParallel for the dense part."""

    def __init__(self, shape: dict[str, Any], codec: str, *, pipelined: bool) -> None:
        """Create the model. `pipelined` uses TorchRec's TrainPipelineSparseDist, which sends the ids of the next batch
        early."""
        self.codec = codec
        super().__init__(shape, "sgd")
        if pipelined:
            from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

            pipeline: Any = TrainPipelineSparseDist(self.model, self.optimizer, torch.device("cpu"))
            batches = map(self.to_batch, cycle(self.batches))
            self.actions["step"] = lambda call: pipeline.progress(batches)

    def init_process_group(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    def shard(self, model: nn.Module) -> None:
        """Shard whole tables with TorchRec's planner, and use the codec in both directions."""
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        registry = None
        if self.codec != "fp32":
            chosen = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
            registry = get_qcomm_codecs_registry(chosen)
        sharders: Any = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)]
        topology = Topology(world_size=self.num_ranks, compute_device="cpu", hbm_cap=0, ddr_cap=64 << 30)
        whole = {f"t{f}": ParameterConstraints(sharding_types=["table_wise"]) for f in range(len(self.keys))}
        planner = EmbeddingShardingPlanner(topology=topology, constraints=whole)
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=LR))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense_optimizer])


def build(shape: dict[str, Any], names: Sequence[str]) -> None:
    """Create one model per name on all ranks. A name is a codec, with PIPELINED as suffix."""
    torch.set_num_threads(1)
    for name in names:
        codec = name.removesuffix(PIPELINED)
        _jobs[name], _calls[name] = CodecTraining(shape, codec, pipelined=codec != name), 0


def window(name: str, num_steps: int) -> Window:
    job = _jobs[name]
    dist.barrier()
    before, busy_s = own_traffic(), time.process_time()
    dist.barrier()
    start_s = time.perf_counter()
    for call in range(_calls[name], _calls[name] + num_steps):
        job.actions["step"](call)
    dist.barrier()
    seconds, busy_s = time.perf_counter() - start_s, time.process_time() - busy_s
    sent = own_traffic().since(before)
    dist.barrier()
    _calls[name] += num_steps
    return Window(num_steps, seconds, busy_s, 0.0, sent.payload_bytes, {})
