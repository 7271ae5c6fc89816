"""Sum of the loss over all ranks, and the checks that depend on it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meseta.comm import BatchTotals, World
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import ExhaustedInput, no_op
from meseta.ops.device_constants import AsyncHostCopy, copy_to_device
from meseta.ops.sums import total
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError
from meseta.system.ranks import print_note


class NonFiniteLoss(MesetaError):
    """Non-finite loss of a global batch. Raised on all ranks before any update."""


class LateNonFiniteLoss(NonFiniteLoss):
    """Non-finite loss that the host detects one step late. The device has skipped the update."""


@dataclass(eq=False)
class LossAgreement:
    """Asynchronous sum of losses and votes over all ranks."""

    global_totals: BatchTotals
    wait: Callable[[], Tensor]
    term_names: tuple[str, ...] = ()
    _copy: AsyncHostCopy | None = field(default=None, init=False)
    _sums: list[float] | None = field(default=None, init=False)

    @staticmethod
    def start(
        world: World, whole: BatchTotals, losses: Tensor, votes: Sequence[float], names: tuple[str, ...] = ()
    ) -> LossAgreement:
        """Start the all-reduce of float64 `losses`, the local sums of the loss and its terms, and local `votes`.

        `whole` has the totals of the global batch, and `names` the names of the terms.
        """
        local_sums = torch.cat([losses, copy_to_device(votes, torch.float64, world.device)])
        return LossAgreement(whole, world.start_all_reduce_small(local_sums, "agree"), names)

    def found_inf(self) -> Float[Tensor, ""]:
        """Return a float32 device scalar, 1 if `check` will raise NonFiniteLoss, else 0. The host does not wait."""
        sums = self.wait()
        # `check` reads this copy.
        self._copy = AsyncHostCopy(sums)
        return (~sums[0].isfinite() | (not math.isfinite(self.global_totals.weight))).float()

    def check(self) -> list[float]:
        """Wait for the sums of the loss, its terms and the votes. Raises NonFiniteLoss."""
        if self._sums is None:
            self._sums = (self.wait() if self._copy is None else self._copy.read()).tolist()
        loss_sum, weight = self._sums[0], self.global_totals.weight
        if not (math.isfinite(loss_sum) and math.isfinite(weight)):
            raise NonFiniteLoss(
                f"the loss is {loss_sum / (weight or 1.0)}, and nothing was updated; look for NaN or huge values "
                "in the dense inputs, or lower the learning rates"
            )
        return self._sums

    @property
    def loss(self) -> float:
        """Weighted mean over the global batch, or 0 if all weights are 0. Waits and raises as `check` does."""
        return self.check()[0] / (self.global_totals.weight or 1.0)

    @property
    def terms(self) -> dict[str, float]:
        """Weighted means of the loss terms over the global batch. Waits and raises as `check` does."""
        return {
            name: one / (self.global_totals.weight or 1.0)
            for name, one in zip(self.term_names, self.check()[1:], strict=False)
        }

    @property
    def votes(self) -> tuple[float, ...]:
        """Sums of the votes over all ranks. Waits and raises as `check` does."""
        return tuple(self.check()[1 + len(self.term_names) :])


@dataclass(eq=False)
class DeferredLossCheck:
    """Check of a loss that the host completes one step later. The update of its step has already started."""

    agreement: LossAgreement
    found_inf: Float[Tensor, ""]
    batch: Batch | None
    step: int
    """Step counter of the tables before the step."""
    undo: Callable[[], None] = no_op
    """Function that reverts the part of the update that ran on the host, if the device has skipped the rest."""

    def votes(self) -> tuple[float, ...]:
        """Return the votes of the step. Raises LateNonFiniteLoss if its loss is not finite."""
        try:
            return self.agreement.votes
        except NonFiniteLoss as error:
            self.undo()
            raise LateNonFiniteLoss(error.reason, remedy=error.remedy) from None


def make_batch_totals(batch: Batch) -> BatchTotals:
    """Return the totals of a rank's slice. A sample without any known label has the weight 0."""
    if batch.label_mask_2d is None:
        weight = float(batch.batch_size if batch.weight is None else total(batch.weight.double()))
    else:
        weight = _sum_weights(batch, batch.label_mask_2d.any(1))
    return BatchTotals(batch.batch_size, batch.num_padding, weight)


def known_label_weights(batch: Batch) -> list[float]:
    """Return the total weight of a rank's samples whose label is known, for each of T tasks."""
    assert batch.label_mask_2d is not None
    return [_sum_weights(batch, is_known) for is_known in batch.label_mask_2d.unbind(1)]


def _sum_weights(batch: Batch, is_counted: Tensor) -> float:
    # Sum in the same order as over all samples, so that the results are equal if all are selected.
    return float(total(is_counted.double() if batch.weight is None else batch.weight.double() * is_counted))


def start_task_factors(world: World, batch: Batch | None, num_tasks: int) -> Callable[[float], Float[Tensor, " T"]]:
    """Start summing the weights of known labels over all ranks. Return a function from W to the factors of the tasks.

    The factor of task t is W / W_t, or 0 for a task without known labels. W is the weight of all samples in the global
    batch, and W_t that of the samples whose label of task t is known. The first call of the function waits for the
    other ranks. All ranks call this for the same batches in the same order. `batch` is `None` if it could not be read.
    """
    known_weights = [0.0] * num_tasks if batch is None else known_label_weights(batch)
    wait = world.start_all_reduce_small(copy_to_device(known_weights, torch.float64, world.device), "label weights")
    sums: list[Tensor] = []

    def factors(weight: float) -> Tensor:
        if not sums:
            sums.append(wait())
        # A loss that is divided by W becomes the mean over known labels. If all are known, the factor is exactly 1.
        return torch.where(sums[0] > 0, weight / sums[0], 0.0)

    return factors


COUNT_TIMEOUT_S = 5.0
"""Seconds for which remaining batches are read to count them."""
_MAX_LISTED_RANKS = 4


def find_uneven_error(ran_out: Mapping[int, ExhaustedInput], uneven: str, num_ranks: int) -> MesetaError | None:
    """Return the error, equal on all ranks, if policy `uneven` does not allow the exhausted ranks, or `None`."""
    first = min(ran_out)
    other = next((r for r, reported in sorted(ran_out.items()) if reported.policy != uneven), None)
    if other is not None:
        return MesetaError(
            f"meseta.ahead: uneven must be equal on all ranks, got {ran_out[other].policy!r} on rank {other} and "
            f"{uneven!r} on another rank"
        )
    if len(ran_out) == num_ranks or uneven == "drop":
        return None
    if uneven == "error":
        return MesetaError(
            f"meseta.ahead: rank {first} is exhausted after {_format_batches(ran_out[first].num_batches)}, but others "
            "have more; give all ranks the same number of batches, or set uneven='join' to train the others too, or "
            "uneven='drop' to skip them"
        )
    idle = next((rank for rank, reported in sorted(ran_out.items()) if not reported.num_batches), None)
    if idle is None:
        return None
    return MesetaError(
        f"meseta.ahead: rank {idle} has no batches, but uneven='join' needs one as a template for empty batches; give "
        "the rank at least one batch, which may be empty, or set uneven='drop'"
    )


def warn_remaining_batches(
    ran_out: Mapping[int, ExhaustedInput], num_begun: int, batches: Iterator[Any], world: World
) -> None:
    """Print on rank 0 how many batches are skipped because the loop ends with the first exhausted rank. Collective.

    `num_begun` is the number of remaining batches that this rank has started. Others are read to count them, for
    `COUNT_TIMEOUT_S` at most.
    """
    count, is_all = _count_remaining(batches)
    left = [*enumerate(world.all_gather_object((count + num_begun, is_all)))]
    some = [(rank, count, is_all) for rank, (count, is_all) in left if count]
    first, total = min(ran_out), sum(count for _, count, _ in some)
    by_rank = [f"rank {rank}: {_format_bound(is_all)}{count:,}" for rank, count, is_all in some[:_MAX_LISTED_RANKS]]
    more = [f"and {len(some) - _MAX_LISTED_RANKS:,} ranks more"] if len(some) > _MAX_LISTED_RANKS else []
    if world.rank == 0:
        print_note(
            f"meseta.ahead: rank {first} is exhausted after {_format_batches(ran_out[first].num_batches)}, so the loop "
            f"ends; {_format_bound(all(is_all for *_, is_all in some))}{_format_batches(total)} of other ranks are not "
            f"trained ({', '.join(by_rank + more)})"
        )


def make_empty_batch(batch: Any, sizes: Collection[int]) -> Any:
    """Copy a batch without its samples. `sizes` are the batch sizes of its features.

    Tensors whose first dimension is in `sizes` become empty, also in dicts, lists and tuples. The copy shares all else.
    """
    empty = copy.copy(batch)
    names = [name for kind in type(batch).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*getattr(batch, "__dict__", ()), *names]:
        if hasattr(batch, name):
            object.__setattr__(empty, name, _empty_like(getattr(batch, name), sizes))
    if isinstance(batch, Batch):
        object.__setattr__(empty, "num_padding", 0)
    return empty


def _empty_like(value: Any, sizes: Collection[int]) -> Any:
    if isinstance(value, Tensor):
        return value.new_empty((0, *value.shape[1:])) if value.dim() and value.shape[0] in sizes else value
    if isinstance(value, KeyedJaggedTensor):
        weights = None if value.weights is None else value.weights[:0].clone()
        return KeyedJaggedTensor(value.keys, value.values[:0].clone(), value.lengths[:0].clone(), weights)
    if isinstance(value, JaggedTensor):
        return JaggedTensor(value.values[:0].clone(), value.lengths[:0].clone())
    if isinstance(value, dict):
        return {key: _empty_like(item, sizes) for key, item in value.items()}
    if isinstance(value, list):
        return [_empty_like(item, sizes) for item in value]
    if isinstance(value, tuple):
        each = [_empty_like(item, sizes) for item in value]
        return type(value)(*each) if hasattr(value, "_fields") else tuple(each)
    return value


def _count_remaining(batches: Iterator[Any]) -> tuple[int, bool]:
    """Return (number of batches read, whether these are all)."""
    count, deadline = 0, time.monotonic() + COUNT_TIMEOUT_S
    try:
        for _ in batches:
            count += 1
            if time.monotonic() > deadline:
                return count, False
    except Exception:  # Batches that are not trained may be unreadable.
        return count, False
    return count, True


def _format_batches(count: int) -> str:
    return f"{count:,} batch{'es' * (count != 1)}"


def _format_bound(is_all: bool) -> str:
    return "" if is_all else "at least "
