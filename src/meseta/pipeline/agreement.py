"""The loss of a global batch: each rank's sum, and what all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meseta.comm import Totals, World
from meseta.data.batch import Batch
from meseta.embedding.flight import at_once
from meseta.jagged.shapes import Float
from meseta.ops.device_words import HostCopy, on_device
from meseta.ops.sums import total
from meseta.spec import MesetaError


class NonFiniteLoss(MesetaError):
    """The loss of a global batch is no number; raised on all ranks before any update."""


class LateNonFiniteLoss(NonFiniteLoss):
    """That of the step before the one under way, or of the last one between steps: the device has known it in time, and
    updated nothing."""


@dataclass(eq=False)
class Agreement:
    """The sum of the losses of all ranks, on its way."""

    whole: Totals
    """Of the global batch."""
    wait: Callable[[], Tensor]
    names: tuple[str, ...] = ()
    """Of the terms of the loss, whose sums stand behind it."""
    _copy: HostCopy | None = field(default=None, init=False)
    _sums: list[float] | None = field(default=None, init=False)

    @staticmethod
    def begin(
        world: World, whole: Totals, losses: Tensor, votes: Sequence[float], names: tuple[str, ...] = ()
    ) -> Agreement:
        """Begin to add this rank's `losses`, float64 sums of the loss and of its terms, which have `names`, and `votes`
        to those of the others."""
        mine = torch.cat([losses, on_device(votes, torch.float64, world.device)])
        return Agreement(whole, world.start_sum_of_few(mine, "agree"), names)

    def found_inf(self) -> Float[Tensor, ""]:
        """float32 on the device: 1 where `check` will raise NonFiniteLoss, else 0. Waits on the device alone; a copy of
        the sums is then on its way to the host, for `check`."""
        sums = self.wait()
        self._copy = HostCopy(sums)
        return (~sums[0].isfinite() | (not math.isfinite(self.whole.weight))).float()

    def check(self) -> list[float]:
        """Wait for the sums of the loss, of its terms and of the votes; raises NonFiniteLoss where the loss is no
        number."""
        if self._sums is None:
            self._sums = (self.wait() if self._copy is None else self._copy.read()).tolist()
        loss_sum, weight = self._sums[0], self.whole.weight
        if not (math.isfinite(loss_sum) and math.isfinite(weight)):
            raise NonFiniteLoss(
                f"the loss is {loss_sum / (weight or 1.0)}, and nothing was updated; look for NaN or huge values "
                "in the dense inputs, or lower the learning rates"
            )
        return self._sums

    @property
    def loss(self) -> float:
        """Weighted mean over the global batch; 0 where all weights are 0. Waits and raises as `check` does."""
        return self.check()[0] / (self.whole.weight or 1.0)

    @property
    def terms(self) -> dict[str, float]:
        """Weighted means over the global batch of the terms of the loss, by name. Waits and raises as `check` does."""
        return {name: one / (self.whole.weight or 1.0) for name, one in zip(self.names, self.check()[1:], strict=False)}

    @property
    def votes(self) -> tuple[float, ...]:
        """Sums of the votes. Waits and raises as `check` does."""
        return tuple(self.check()[1 + len(self.names) :])


@dataclass(eq=False)
class UnheardStep:
    """A step of which the host does not know yet whether its loss is a number; its update has begun."""

    agreement: Agreement
    found_inf: Float[Tensor, ""]
    """The same on the device, see `Agreement.found_inf`."""
    batch: Batch | None
    """What it was of."""
    step: int
    """Steps of the tables before it."""
    undo: Callable[[], None] = at_once
    """Puts back what of its update the host has done, where the device has done nothing."""

    def votes(self) -> tuple[float, ...]:
        """Those of the step. Raises LateNonFiniteLoss where its loss is no number."""
        try:
            return self.agreement.votes
        except NonFiniteLoss as error:
            self.undo()
            raise LateNonFiniteLoss(str(error)) from None


def totals_of(batch: Batch) -> Totals:
    """Of the samples of one rank, before they are cut into micro-batches."""
    weight = float(batch.batch_size if batch.weight is None else total(batch.weight.double()))
    return Totals(batch.batch_size, batch.num_padding, weight)
