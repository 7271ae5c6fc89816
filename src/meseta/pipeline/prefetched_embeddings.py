"""Answers that a checkpoint carries: of the batch to come, which was looked up before the last update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meseta.comm import World
from meseta.data.batch import Batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Float, Int
from meseta.machine.remote import Location
from meseta.spec import MesetaError

_POOLED_KEY, _IDS_KEY = "pooled", "ids"
"""Names of the tensors in a checkpoint."""
_HASH_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)
"""Odd numbers of 64 bits (2^64 / golden ratio, and one of xxHash64), by which ids are told from one another."""


@dataclass(frozen=True, eq=False)
class PrefetchedEmbeddings:
    """By sample, in the order of the global batch: any number of ranks, under any plan, takes its slice."""

    pooled: Float[Tensor, "B_global sum_of_D"]
    """What the lookup gave."""
    id_digests: Int[Tensor, " B_global"]
    """A digest of each sample's ids, int64, by which the batch is known again."""
    first_sample: int = 0
    """Place of the first of them in the global batch: ranks other than 0 hold their slice alone."""

    @staticmethod
    def gather(world: World, batch: Batch, pooled: Float[Tensor, "B_local sum_of_D"]) -> PrefetchedEmbeddings:
        """On rank 0, of all ranks; on others, theirs alone. Collective."""
        mine = PrefetchedEmbeddings(pooled.detach().clone(), sample_digests(batch.sparse).to(pooled.device))
        if world.size == 1:
            return mine
        sizes = world.all_gather_object(batch.batch_size)

        def whole(tensor: Tensor) -> Tensor:
            width = tensor.shape[1] if tensor.dim() == 2 else 1
            send = [tensor.numel(), *[0] * (world.size - 1)]
            receive = [size * width if world.rank == 0 else 0 for size in sizes]
            came = world.all_to_all(tensor.reshape(-1), send, receive, "prefetched embeddings").wait()
            return came.view(-1, *tensor.shape[1:])

        pooled_of_all, ids_of_all = whole(mine.pooled), whole(mine.id_digests)
        if world.rank == 0:
            return PrefetchedEmbeddings(pooled_of_all, ids_of_all)
        return replace(mine, first_sample=sum(sizes[: world.rank]))

    def local_slice(self, world: World, batch: Batch) -> Float[Tensor, "B_local sum_of_D"]:
        """Those of this rank's samples. Collective; raises MesetaError, on all ranks, where they are of other ids."""
        sizes = world.all_gather_object(batch.batch_size)
        first = sum(sizes[: world.rank]) - self.first_sample
        mine = slice(first, first + batch.batch_size)
        is_last = world.rank == world.size - 1
        is_same = first >= 0 and torch.equal(self.id_digests[mine].cpu(), sample_digests(batch.sparse).cpu())
        problem = None
        if not is_same or (is_last and mine.stop != len(self.id_digests)):
            problem = MesetaError(
                "the batch that comes is another one than that whose answers were carried, which was looked up before "
                "the last update; give the data and train.batch_size that the run had, or look it up anew with "
                "pipeline.staleness=0"
            )
        world.raise_on_all_ranks(problem)
        return self.pooled[mine].to(world.device)

    def to_tensors(self) -> dict[str, Tensor]:
        """By name, for a checkpoint."""
        return {_POOLED_KEY: self.pooled, _IDS_KEY: self.id_digests}

    @staticmethod
    def from_tensors(
        path: Location, tensors: Mapping[str, Tensor], embeddings: BaseEmbeddingCollection[Any]
    ) -> PrefetchedEmbeddings:
        """Undo `tensors`, of the checkpoint `path`; raises MesetaError for others than of such `embeddings`."""
        width, dtype = sum(embeddings.groups[0].pooled_dims), embeddings.dtype
        pooled, ids = tensors.get(_POOLED_KEY), tensors.get(_IDS_KEY)
        if tensors.keys() != {_POOLED_KEY, _IDS_KEY} or pooled is None or ids is None:
            raise MesetaError(
                f"checkpoint {str(path)!r}: it carries tensors {sorted(tensors)}, which must be {_IDS_KEY!r} and "
                f"{_POOLED_KEY!r}; use an older one"
            )
        shapes = (list(pooled.shape), pooled.dtype, list(ids.shape), ids.dtype)
        if shapes != ([len(ids), width], dtype, [len(ids)], torch.int64):
            raise MesetaError(
                f"checkpoint {str(path)!r}: it carries pooled embeddings {shapes[0]} ({shapes[1]}) and digests "
                f"{shapes[2]} ({shapes[3]}), which must be [B, {width}] ({dtype}) and [B] (torch.int64); use an older "
                "one"
            )
        return PrefetchedEmbeddings(pooled, ids)


def sample_digests(ids: KeyedJaggedTensor) -> Int[Tensor, " B"]:
    """A number of 64 bits for each sample, of its ids, their features and places."""
    batch_size = ids.batch_size
    bags = torch.arange(len(ids.keys) * batch_size, device=ids.values.device)
    bag = bags.repeat_interleave(ids.lengths)
    place = torch.arange(len(bag), device=bag.device) - ids.offsets[:-1].long()[bag]
    mixed = (ids.values.long() + 1) * _HASH_MULTIPLIERS[0] + (bag // max(batch_size, 1)) * _HASH_MULTIPLIERS[1] + place
    mixed = (mixed ^ (mixed >> 29)) * _HASH_MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> 32)) * _HASH_MULTIPLIERS[1]
    return mixed.new_zeros(batch_size).index_add_(0, bag % max(batch_size, 1), mixed)
