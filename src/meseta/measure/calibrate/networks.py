"""Networks of a neural cost model, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from meseta.measure.calibrate.fit import Floats
from meseta.spec.neural_cost import Network, NumberArray

HIDDEN, SUMMED = 24, 12
MEMBERS = 4
"""Networks of an ensemble, which differ in their first weights and in what stops their training."""
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-2
MAX_EPOCHS = 400
MAX_IN_VAIN = 40
"""Epochs without gain on the part that stops training."""
SMALL_ERROR = 0.1
"""Errors of the logarithm below this are squared, so that others, disturbed measurements among them, weigh less."""
MARGIN = 0.1
"""Corrections may pass the largest that was measured by so much."""
_LEAST_SCALE = 1e-3


@dataclass(frozen=True)
class Examples:
    """What networks learn from: ranks or collectives."""

    told: Floats
    """Of each [N, G]."""
    target: Floats
    """Logarithm of what each took, over what the constants predict [N]."""
    inputs: Floats | None = None
    """Of their pieces [N, P, F], padded; None: there are none."""
    shares: Floats | None = None
    """Part of the predicted seconds that each piece has [N, P]; 0 where padded."""

    def take(self, which: Sequence[int] | np.ndarray) -> Examples:
        """Some of them."""
        return replace(
            self,
            told=self.told[which],
            target=self.target[which],
            inputs=None if self.inputs is None else self.inputs[which],
            shares=None if self.shares is None else self.shares[which],
        )

    @staticmethod
    def of_ranks(ranks: Sequence[tuple[Floats, Floats, Floats]], target: Floats) -> Examples:
        """From (inputs of pieces [P, F], their shares [P], what is told of the rank [G]) of each rank."""
        longest = max(len(shares) for _, shares, _ in ranks)
        inputs = np.zeros((len(ranks), longest, ranks[0][0].shape[1]))
        shares = np.zeros((len(ranks), longest))
        for number, (own, part, _) in enumerate(ranks):
            inputs[number, : len(own)], shares[number, : len(own)] = own, part
        return Examples(np.stack([told for _, _, told in ranks]), target, inputs, shares)


class CostNetwork(nn.Module):
    """One member: a network of each piece, summed over pieces by their shares, beside what is told of the rank, into a
    head. Without pieces, the head alone. Starts as no correction at all."""

    def __init__(self, examples: Examples) -> None:
        """Takes the range and the spread of inputs from `examples`."""
        super().__init__()
        self.told = _Spread(examples.told)
        width = examples.told.shape[1]
        self.pieces, self.table = None, None
        if examples.inputs is not None and examples.shares is not None:
            self.pieces = _Spread(examples.inputs[examples.shares > 0.0])
            self.table = nn.Sequential(
                nn.Linear(examples.inputs.shape[2], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, SUMMED)
            )
            width += SUMMED
        last = nn.Linear(HIDDEN, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), last)

    def forward(self, told: Tensor, inputs: Tensor | None = None, shares: Tensor | None = None) -> Tensor:
        """[N], from told [N, G], and where there are pieces inputs [N, P, F] and shares [N, P]."""
        known = self.told(told)
        if self.pieces is not None and self.table is not None and inputs is not None and shares is not None:
            summed = (self.table(self.pieces(inputs)) * shares.unsqueeze(2)).sum(1)
            known = torch.cat([summed, known], 1)
        return self.head(known).squeeze(1)


class _Spread(nn.Module):
    """Inputs in units of their spread; beyond what was measured, as at its edge."""

    def __init__(self, seen: Floats) -> None:
        super().__init__()
        scale = seen.std(axis=0)
        values = {
            "center": seen.mean(axis=0),
            "scale": np.where(scale > _LEAST_SCALE, scale, 1.0),
            "least": seen.min(axis=0),
            "most": seen.max(axis=0),
        }
        for name, own in values.items():
            self.register_buffer(name, torch.tensor(own, dtype=torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        center, scale, least, most = (self.get_buffer(name) for name in ("center", "scale", "least", "most"))
        return (torch.minimum(torch.maximum(inputs, least), most) - center) / scale


def train_members(examples: Examples, log: Callable[[int], None], seed: int = 0) -> list[CostNetwork]:
    """MEMBERS networks of one kind; `log` is told the number of each as its training begins.

    Each leaves out another part of the examples and ends where the error on that is least, which may be before the
    first step. The same examples and seed give the same networks on one kind of machine.
    """
    found, numbers = [], np.arange(len(examples.target))
    with torch.random.fork_rng(devices=[]):
        for member in range(MEMBERS):
            log(member)
            torch.manual_seed(1000 * seed + member)
            stops = numbers % MEMBERS == member
            network = CostNetwork(examples)
            _train(network, examples.take(numbers[~stops]), examples.take(numbers[stops]))
            found.append(network)
    return found


def _train(network: CostNetwork, learned: Examples, stops: Examples) -> None:
    """Adam with weight decay (I. Loshchilov and F. Hutter, arXiv 1711.05101) on Huber's loss of the logarithms (P. J.
    Huber, The Annals of Mathematical Statistics 35, 1964)."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    (inputs, target), (held, held_target) = _tensors(learned), _tensors(stops)
    best, kept, in_vain = float("inf"), network.state_dict(), 0
    for epoch in range(MAX_EPOCHS + 1):
        with torch.no_grad():
            error = float((network(*held) - held_target).abs().mean()) if len(held_target) else float(-epoch)
        in_vain += 1
        if error < best:
            best, in_vain = error, 0
            kept = {name: own.clone() for name, own in network.state_dict().items()}
        if in_vain > MAX_IN_VAIN:
            break
        for rows in torch.randperm(len(target)).split(BATCH_SIZE):
            optimizer.zero_grad()
            found = network(*(own[rows] for own in inputs))
            nn.functional.smooth_l1_loss(found, target[rows], beta=SMALL_ERROR).backward()
            optimizer.step()
    network.load_state_dict(kept)


def _tensors(examples: Examples) -> tuple[list[Tensor], Tensor]:
    parts = [own for own in (examples.told, examples.inputs, examples.shares) if own is not None]
    inputs = [torch.tensor(own, dtype=torch.float32) for own in parts]
    return inputs, torch.tensor(examples.target, dtype=torch.float32)


def to_arrays(members: Sequence[CostNetwork], target: Floats) -> Network:
    """The members as arrays of a cost model; corrections stay within the range of `target` and a little more."""
    first = members[0]
    found: dict[str, Floats] = {}
    has_pieces = first.pieces is not None
    spreads = {"": first.told} if first.pieces is None else {"": first.pieces, "rank_": first.told}
    for prefix, spread in spreads.items():
        found |= {f"{prefix}{name}": _numpy(own) for name, own in spread.named_buffers()}
    layers = {"head_in": ("head", 0), "head_out": ("head", 2)}
    if has_pieces:
        layers = {"table_in": ("table", 0), "table_out": ("table", 2), **layers}
    for name, (part, index) in layers.items():
        own = [getattr(member, part)[index] for member in members]
        found[name] = np.stack([_numpy(layer.weight).T for layer in own])
        found[f"{name}_bias"] = np.stack([_numpy(layer.bias) for layer in own])
    found["head_out"], found["head_out_bias"] = found["head_out"][:, :, 0], found["head_out_bias"][:, 0]
    found["limits"] = np.array([min(target.min(), 0.0) - MARGIN, max(target.max(), 0.0) + MARGIN])
    return {name: NumberArray.of(own) for name, own in found.items()}


def _numpy(tensor: Tensor) -> Floats:
    return tensor.detach().numpy().astype(np.float64)
