"""Prefetched embeddings in checkpoints: those of the next batch, looked up before the last update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError
from meseta.system.remote import Location

_POOLED_KEY, _IDS_KEY = "pooled", "ids"
# Odd 64-bit multipliers of the id hash: 2^64 / golden ratio, and one of xxHash64.
_HASH_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)


@dataclass(frozen=True, eq=False)
class PrefetchedEmbeddings:
    """Embeddings of a batch in the order of the global batch. Any number of ranks under any plan can take slices."""

    pooled: Float[Tensor, "B_global sum_of_D"]
    id_digests: Int[Tensor, " B_global"]
    """int64 hash of each sample's ids."""
    first_sample: int = 0
    """Index of the first sample in the global batch. Ranks other than 0 may hold only their slice."""

    @staticmethod
    def gather(world: World, batch: Batch, pooled: Float[Tensor, "B_local sum_of_D"]) -> PrefetchedEmbeddings:
        """Gather the embeddings of all ranks on rank 0. Other ranks keep only their slice. Collective."""
        local_part = PrefetchedEmbeddings(pooled.detach().clone(), sample_digests(batch.sparse).to(pooled.device))
        if world.size == 1:
            return local_part
        sizes = world.all_gather_object(batch.batch_size)

        def whole(tensor: Tensor) -> Tensor:
            width = tensor.shape[1] if tensor.dim() == 2 else 1
            send = [tensor.numel(), *[0] * (world.size - 1)]
            receive = [size * width if world.rank == 0 else 0 for size in sizes]
            received = world.all_to_all(tensor.reshape(-1), send, receive, "prefetched embeddings").wait()
            return received.view(-1, *tensor.shape[1:])

        pooled_of_all, ids_of_all = whole(local_part.pooled), whole(local_part.id_digests)
        if world.rank == 0:
            return PrefetchedEmbeddings(pooled_of_all, ids_of_all)
        return replace(local_part, first_sample=sum(sizes[: world.rank]))

    def local_slice(self, world: World, batch: Batch) -> Float[Tensor, "B_local sum_of_D"]:
        """Return the embeddings of this rank's samples. Collective.

        Raises MesetaError on all ranks if the ids of the batch differ.
        """
        sizes = world.all_gather_object(batch.batch_size)
        first = sum(sizes[: world.rank]) - self.first_sample
        local_range = slice(first, first + batch.batch_size)
        # The digests recognize the batch. The last rank also checks that the global batch ends with its samples.
        is_last = world.rank == world.size - 1
        is_same = first >= 0 and torch.equal(self.id_digests[local_range].cpu(), sample_digests(batch.sparse).cpu())
        problem = None
        if not is_same or (is_last and local_range.stop != len(self.id_digests)):
            problem = MesetaError(
                "the next batch differs from that of the prefetched embeddings in the checkpoint; use the data and the "
                "train.batch_size of the saved run, or set pipeline.staleness=0 to ignore prefetched embeddings"
            )
        world.raise_on_all_ranks(problem)
        return self.pooled[local_range].to(world.device)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name."""
        return {_POOLED_KEY: self.pooled, _IDS_KEY: self.id_digests}

    @staticmethod
    def from_tensors(
        path: Location, tensors: Mapping[str, Tensor], embeddings: BaseEmbeddingCollection[Any]
    ) -> PrefetchedEmbeddings:
        """Create it from tensors of the checkpoint at `path`. Raises MesetaError if they do not match `embeddings`."""
        width, dtype = sum(embeddings.groups[0].pooled_dims), embeddings.dtype
        pooled, ids = tensors.get(_POOLED_KEY), tensors.get(_IDS_KEY)
        if tensors.keys() != {_POOLED_KEY, _IDS_KEY} or pooled is None or ids is None:
            raise MesetaError(
                f"checkpoint {str(path)!r}: tensors of prefetched embeddings must be {_IDS_KEY!r} and {_POOLED_KEY!r}, "
                f"got {sorted(tensors)}; use an older checkpoint"
            )
        shapes = (list(pooled.shape), pooled.dtype, list(ids.shape), ids.dtype)
        if shapes != ([len(ids), width], dtype, [len(ids)], torch.int64):
            raise MesetaError(
                f"checkpoint {str(path)!r}: prefetched embeddings must be [B, {width}] ({dtype}) and their digests [B] "
                f"(torch.int64), got {shapes[0]} ({shapes[1]}) and {shapes[2]} ({shapes[3]}); use an older checkpoint"
            )
        return PrefetchedEmbeddings(pooled, ids)


def sample_digests(ids: KeyedJaggedTensor) -> Int[Tensor, " B"]:
    """Return a 64-bit hash of each sample's ids, including their features and positions."""
    batch_size = ids.batch_size
    bags = torch.arange(len(ids.keys) * batch_size, device=ids.values.device)
    bag = bags.repeat_interleave(ids.lengths)
    place = torch.arange(len(bag), device=bag.device) - ids.offsets[:-1].long()[bag]
    mixed = (ids.values.long() + 1) * _HASH_MULTIPLIERS[0] + (bag // max(batch_size, 1)) * _HASH_MULTIPLIERS[1] + place
    mixed = (mixed ^ (mixed >> 29)) * _HASH_MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 32)) * _HASH_MULTIPLIERS[1]
    return mixed.new_zeros(batch_size).index_add_(0, bag % max(batch_size, 1), mixed)
