"""Division of a rank's slice into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from meseta.data.read.batch import Batch
from meseta.pipeline.uneven import LateNonFiniteLoss
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Split a batch into `num_parts` micro-batches of consecutive samples, as equal in size as possible.

    Ids are copied. All other tensors are views.
    """
    if num_parts == 1:
        return [batch]
    # The first parts are smaller, or empty. Therefore no part that is empty on all ranks follows a non-empty one.
    share, more = divmod(batch.batch_size, num_parts)
    sizes = [share + (part >= num_parts - more) for part in range(num_parts)]
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    ids = batch.sparse
    first_bags = torch.arange(len(ids.keys))[:, None] * batch.batch_size + bounds
    places = ids.offsets[first_bags.to(ids.offsets.device)].tolist()
    lengths = ids.lengths.view(len(ids.keys), batch.batch_size).split(sizes, dim=1)

    def cut(tensor: Tensor | None) -> list[Tensor | None]:
        return [None] * num_parts if tensor is None else list(tensor.split(sizes))

    def cut_ids(tensor: Tensor, part: int) -> Tensor:
        return torch.cat([tensor[of_key[part] : of_key[part + 1]] for of_key in places])

    return [
        Batch(
            dense=batch.dense[start:stop],
            sparse=KeyedJaggedTensor(
                keys=ids.keys,
                values=cut_ids(ids.values, part),
                lengths=lengths[part].reshape(-1),
                weights=None if ids.weights is None else cut_ids(ids.weights, part),
                batch_sizes=(stop - start,) * len(ids.keys),
            ),
            label=batch.label[start:stop],
            weight=weight,
            group=group,
            label_mask=None if batch.label_mask is None else batch.label_mask[start:stop],
        )
        for part, ((start, stop), weight, group) in enumerate(
            zip(pairwise(bounds.tolist()), cut(batch.weight), cut(batch.group), strict=True)
        )
    ]


@contextmanager
def micro_batch_error_context(index: int, num_parts: int) -> Iterator[None]:
    """Context manager that prefixes errors with the index of the micro-batch that raised them.

    Errors deferred from the previous step pass through unchanged.
    """
    try:
        yield
    except LateNonFiniteLoss:
        raise
    except MesetaError as error:
        if num_parts == 1:
            raise
        raise error.with_prefix(f"micro-batch {index + 1} of {num_parts}: ") from None
