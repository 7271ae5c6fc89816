"""Networks of a neural cost model, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from meseta.measure.calibrate.fit import Floats
from meseta.spec.neural_cost import Float32Array, Network

HIDDEN_WIDTH, SHARD_WIDTH = 24, 12
NUM_MEMBERS = 4
"""Networks of an ensemble, which differ in their first weights and in what stops their training."""
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-2
MAX_EPOCHS = 400
PATIENCE = 40
"""Epochs without gain on the part that stops training."""
HUBER_BETA = 0.1
"""Errors of the logarithm below this are squared, so that others, disturbed measurements among them, weigh less."""
CORRECTION_MARGIN = 0.1
"""Corrections may pass the largest that was measured by so much."""
_MIN_SCALE = 1e-3


@dataclass(frozen=True)
class TrainingExamples:
    """What networks learn from: ranks or collectives."""

    features: Floats
    """Of each [N, G]."""
    target: Floats
    """Logarithm of what each took, over what the constants predict [N]."""
    shard_features: Floats | None = None
    """Of their pieces [N, P, F], padded; None: there are none."""
    shard_shares: Floats | None = None
    """Part of the predicted seconds that each piece has [N, P]; 0 where padded."""

    def select(self, which: Sequence[int] | np.ndarray) -> TrainingExamples:
        """Some of them."""
        return replace(
            self,
            features=self.features[which],
            target=self.target[which],
            shard_features=None if self.shard_features is None else self.shard_features[which],
            shard_shares=None if self.shard_shares is None else self.shard_shares[which],
        )

    @staticmethod
    def from_ranks(ranks: Sequence[tuple[Floats, Floats, Floats]], target: Floats) -> TrainingExamples:
        """From (inputs of pieces [P, F], their shares [P], what is told of the rank [G]) of each rank."""
        longest = max(len(shares) for _, shares, _ in ranks)
        inputs = np.zeros((len(ranks), longest, ranks[0][0].shape[1]))
        shares = np.zeros((len(ranks), longest))
        for number, (own, part, _) in enumerate(ranks):
            inputs[number, : len(own)], shares[number, : len(own)] = own, part
        return TrainingExamples(np.stack([told for _, _, told in ranks]), target, inputs, shares)


class CostNetwork(nn.Module):
    """One member: a network of each piece, summed over pieces by their shares, beside what is told of the rank, into a
    head. Without pieces, the head alone. Starts as no correction at all."""

    def __init__(self, examples: TrainingExamples) -> None:
        """Takes the range and the spread of inputs from `examples`."""
        super().__init__()
        self.feature_scaler = _InputScaler(examples.features)
        width = examples.features.shape[1]
        self.shard_scaler, self.shard_layers = None, None
        if examples.shard_features is not None and examples.shard_shares is not None:
            self.shard_scaler = _InputScaler(examples.shard_features[examples.shard_shares > 0.0])
            self.shard_layers = nn.Sequential(
                nn.Linear(examples.shard_features.shape[2], HIDDEN_WIDTH),
                nn.ReLU(),
                nn.Linear(HIDDEN_WIDTH, SHARD_WIDTH),
            )
            width += SHARD_WIDTH
        last = nn.Linear(HIDDEN_WIDTH, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(width, HIDDEN_WIDTH), nn.ReLU(), last)

    def forward(self, told: Tensor, inputs: Tensor | None = None, shares: Tensor | None = None) -> Tensor:
        """[N], from told [N, G], and where there are pieces inputs [N, P, F] and shares [N, P]."""
        known = self.feature_scaler(told)
        if (
            self.shard_scaler is not None
            and self.shard_layers is not None
            and inputs is not None
            and shares is not None
        ):
            summed = (self.shard_layers(self.shard_scaler(inputs)) * shares.unsqueeze(2)).sum(1)
            known = torch.cat([summed, known], 1)
        return self.head(known).squeeze(1)


class _InputScaler(nn.Module):
    """Inputs in units of their spread; beyond what was measured, as at its edge."""

    def __init__(self, seen: Floats) -> None:
        super().__init__()
        scale = seen.std(axis=0)
        values = {
            "center": seen.mean(axis=0),
            "scale": np.where(scale > _MIN_SCALE, scale, 1.0),
            "least": seen.min(axis=0),
            "most": seen.max(axis=0),
        }
        for name, own in values.items():
            self.register_buffer(name, torch.tensor(own, dtype=torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        center, scale, least, most = (self.get_buffer(name) for name in ("center", "scale", "least", "most"))
        return (torch.minimum(torch.maximum(inputs, least), most) - center) / scale


def train_ensemble(examples: TrainingExamples, log: Callable[[int], None], seed: int = 0) -> list[CostNetwork]:
    """MEMBERS networks of one kind; `log` is told the number of each as its training begins.

    Each leaves out another part of the examples and ends where the error on that is least, which may be before the
    first step. The same examples and seed give the same networks on one kind of machine.
    """
    found, numbers = [], np.arange(len(examples.target))
    with torch.random.fork_rng(devices=[]):
        for member in range(NUM_MEMBERS):
            log(member)
            torch.manual_seed(1000 * seed + member)
            stops = numbers % NUM_MEMBERS == member
            network = CostNetwork(examples)
            _train_member(network, examples.select(numbers[~stops]), examples.select(numbers[stops]))
            found.append(network)
    return found


def _train_member(network: CostNetwork, learned: TrainingExamples, stops: TrainingExamples) -> None:
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
        if in_vain > PATIENCE:
            break
        for rows in torch.randperm(len(target)).split(BATCH_SIZE):
            optimizer.zero_grad()
            found = network(*(own[rows] for own in inputs))
            nn.functional.smooth_l1_loss(found, target[rows], beta=HUBER_BETA).backward()
            optimizer.step()
    network.load_state_dict(kept)


def _tensors(examples: TrainingExamples) -> tuple[list[Tensor], Tensor]:
    parts = [own for own in (examples.features, examples.shard_features, examples.shard_shares) if own is not None]
    inputs = [torch.tensor(own, dtype=torch.float32) for own in parts]
    return inputs, torch.tensor(examples.target, dtype=torch.float32)


def to_arrays(members: Sequence[CostNetwork], target: Floats) -> Network:
    """The members as arrays of a cost model; corrections stay within the range of `target` and a little more."""
    first = members[0]
    found: dict[str, Floats] = {}
    has_pieces = first.shard_scaler is not None
    spreads = (
        {"": first.feature_scaler}
        if first.shard_scaler is None
        else {"": first.shard_scaler, "rank_": first.feature_scaler}
    )
    for prefix, spread in spreads.items():
        found |= {f"{prefix}{name}": _numpy(own) for name, own in spread.named_buffers()}
    layers = {"head_in": ("head", 0), "head_out": ("head", 2)}
    if has_pieces:
        layers = {"table_in": ("shard_layers", 0), "table_out": ("shard_layers", 2), **layers}
    for name, (part, index) in layers.items():
        own = [getattr(member, part)[index] for member in members]
        found[name] = np.stack([_numpy(layer.weight).T for layer in own])
        found[f"{name}_bias"] = np.stack([_numpy(layer.bias) for layer in own])
    found["head_out"], found["head_out_bias"] = found["head_out"][:, :, 0], found["head_out_bias"][:, 0]
    found["limits"] = np.array([min(target.min(), 0.0) - CORRECTION_MARGIN, max(target.max(), 0.0) + CORRECTION_MARGIN])
    return {name: Float32Array.from_array(own) for name, own in found.items()}


def _numpy(tensor: Tensor) -> Floats:
    return tensor.detach().numpy().astype(np.float64)
