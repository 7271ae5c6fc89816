"""Fit of cost constants to measured seconds by non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meseta.spec.cost_model import Float32Array, Network

Floats = NDArray[np.float64]
_NUM_ROUNDS = 20
_MIN_ERROR = 0.01
# Errors below this value have equal weights.
_MIN_RATIO = 0.2


def fit_relative(terms: Floats, seconds: Floats) -> Floats:
    """Fit non-negative constants [k] such that terms [n, k] @ constants approximates seconds [n]."""
    # Approximately minimizes the sum of the absolute logarithms of predicted over measured seconds, by iteratively
    # reweighted least squares (E. J. Schlossmacher, Journal of the American Statistical Association 68, 1973).
    # Absolute errors make the fit robust to measurements that other programs disturbed. Logarithms treat predictions
    # that are too low and too high equally. The relative error of a low prediction never exceeds 1, so noise would bias
    # the constants downward.
    relative = terms / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0, initial=0.0), 1e-300)
    weights = np.ones(len(seconds))
    for _ in range(_NUM_ROUNDS):
        constants = nnls(relative / scale * weights[:, None], weights)
        ratio = np.maximum(relative / scale @ constants, _MIN_RATIO)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(np.log(ratio)), _MIN_ERROR) * ratio)
    return constants / scale


def nnls(matrix: Floats, target: Floats) -> Floats:
    """Return x >= 0 [k] that minimizes the norm of matrix [n, k] @ x - target [n]."""
    # Uses the active-set method of C. L. Lawson and R. J. Hanson, "Solving least squares problems", 1974, chapter 23.
    num = matrix.shape[1]
    solution, active = np.zeros(num), np.zeros(num, bool)
    tolerance = 1e-10 * max(np.abs(matrix).sum(axis=0).max(initial=0.0), 1e-300)
    for _ in range(3 * num):
        slope = matrix.T @ (target - matrix @ solution)
        slope[active] = -np.inf
        if active.all() or slope.max() <= tolerance:
            break
        active[slope.argmax()] = True
        while True:
            trial = np.zeros(num)
            trial[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            negative = active & (trial <= 0.0)
            if not negative.any():
                break
            step = (solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300)).min()
            solution = solution + step * (trial - solution)
            active &= solution > 1e-14 * max(solution.max(), 1e-300)
        solution = trial
    return solution


def relative_errors(predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> Floats:
    """Return the absolute values of the relative errors [n]."""
    return np.abs(np.asarray(predicted, np.float64) / np.asarray(measured, np.float64) - 1.0)


HIDDEN_WIDTH, SHARD_WIDTH = 24, 12
NUM_MEMBERS = 4
"""Number of networks per ensemble."""
# They differ in initial weights and in the examples for early stopping.
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-2
MAX_EPOCHS = 400
PATIENCE = 40
# Larger errors count linearly, so that disturbed measurements have less weight.
HUBER_BETA = 0.1
"""Error of the logarithm up to which the loss is quadratic."""
CORRECTION_MARGIN = 0.1
_MIN_SCALE = 1e-3


@dataclass(frozen=True)
class TrainingExamples:
    """Training examples of a network. An example is a rank or a collective."""

    features: Floats
    """Features of each example [N, G]."""
    target: Floats
    """Logarithm of measured over predicted seconds [N]. The prediction uses the constants only."""
    shard_features: Floats | None = None
    """Features of the shards of each rank [N, P, F], padded. `None` for collectives."""
    shard_shares: Floats | None = None
    """Share of each shard in the predicted seconds of its rank [N, P], 0 for padding. `None` for collectives."""

    def select(self, which: Sequence[int] | np.ndarray) -> TrainingExamples:
        """Return the examples with the indices `which`."""
        return replace(
            self,
            features=self.features[which],
            target=self.target[which],
            shard_features=None if self.shard_features is None else self.shard_features[which],
            shard_shares=None if self.shard_shares is None else self.shard_shares[which],
        )

    @staticmethod
    def from_ranks(ranks: Sequence[tuple[Floats, Floats, Floats]], target: Floats) -> TrainingExamples:
        """Create examples from (shard features [P, F], shard shares [P], rank features [G]) of each rank."""
        longest = max(len(shares) for _, shares, _ in ranks)
        inputs = np.zeros((len(ranks), longest, ranks[0][0].shape[1]))
        shares = np.zeros((len(ranks), longest))
        for number, (shard_features, part, _) in enumerate(ranks):
            inputs[number, : len(shard_features)], shares[number, : len(shard_features)] = shard_features, part
        return TrainingExamples(np.stack([rank_features for _, _, rank_features in ranks]), target, inputs, shares)


class CostNetwork(nn.Module):
    """Member of an ensemble. Predicts the logarithm of the correction for ranks or collectives."""

    # A small network is applied to each shard, and its outputs are summed, weighted by the shares of the shards. A head
    # takes this sum and the features of the rank. For collectives, there is only the head.

    def __init__(self, examples: TrainingExamples) -> None:
        """Create a network whose inputs are scaled by mean, standard deviation and range of `examples`."""
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
        # With zero weights in the last layer, the network starts without any correction.
        last = nn.Linear(HIDDEN_WIDTH, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(width, HIDDEN_WIDTH), nn.ReLU(), last)

    def forward(self, features: Tensor, inputs: Tensor | None = None, shares: Tensor | None = None) -> Tensor:
        """Return logarithms of corrections [N].

        Args:
            features: Features of ranks or collectives [N, G].
            inputs: Features of shards [N, P, F]. `None` for collectives.
            shares: Shares of shards [N, P]. `None` for collectives.
        """
        known = self.feature_scaler(features)
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
    """Standardizes inputs after clamping them to the range of the training examples."""

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
    """Train NUM_MEMBERS networks, each with another part of the examples as its validation set.

    `log` is called with the index of each. The weights with the lowest validation error are kept. The result is
    reproducible for equal examples and seed on one kind of machine.
    """
    networks, numbers = [], np.arange(len(examples.target))
    with torch.random.fork_rng(devices=[]):
        for member in range(NUM_MEMBERS):
            log(member)
            torch.manual_seed(1000 * seed + member)
            stops = numbers % NUM_MEMBERS == member
            network = CostNetwork(examples)
            _train_member(network, examples.select(numbers[~stops]), examples.select(numbers[stops]))
            networks.append(network)
    return networks


def _train_member(network: CostNetwork, learned: TrainingExamples, stops: TrainingExamples) -> None:
    """Train one network on `learned`, with early stopping on `stops`."""
    # Minimizes the Huber loss of the logarithms (P. J. Huber, The Annals of Mathematical Statistics 35, 1964) by AdamW
    # (I. Loshchilov and F. Hutter, arXiv 1711.05101).
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    (inputs, target), (held, held_target) = _tensors(learned), _tensors(stops)
    best, kept, num_stale_epochs = float("inf"), network.state_dict(), 0
    for epoch in range(MAX_EPOCHS + 1):
        with torch.no_grad():
            error = float((network(*held) - held_target).abs().mean()) if len(held_target) else float(-epoch)
        num_stale_epochs += 1
        if error < best:
            best, num_stale_epochs = error, 0
            kept = {name: values.clone() for name, values in network.state_dict().items()}
        if num_stale_epochs > PATIENCE:
            break
        for rows in torch.randperm(len(target)).split(BATCH_SIZE):
            optimizer.zero_grad()
            predicted = network(*(values[rows] for values in inputs))
            nn.functional.smooth_l1_loss(predicted, target[rows], beta=HUBER_BETA).backward()
            optimizer.step()
    network.load_state_dict(kept)


def _tensors(examples: TrainingExamples) -> tuple[list[Tensor], Tensor]:
    parts = [
        values for values in (examples.features, examples.shard_features, examples.shard_shares) if values is not None
    ]
    inputs = [torch.tensor(values, dtype=torch.float32) for values in parts]
    return inputs, torch.tensor(examples.target, dtype=torch.float32)


def to_arrays(members: Sequence[CostNetwork], target: Floats) -> Network:
    """Convert an ensemble to arrays for a cost model."""
    # Corrections are limited to the range of `target`, extended to include 0 and by CORRECTION_MARGIN.
    first = members[0]
    arrays: dict[str, Floats] = {}
    has_pieces = first.shard_scaler is not None
    spreads = (
        {"": first.feature_scaler}
        if first.shard_scaler is None
        else {"": first.shard_scaler, "rank_": first.feature_scaler}
    )
    for prefix, spread in spreads.items():
        arrays |= {f"{prefix}{name}": _numpy(values) for name, values in spread.named_buffers()}
    layers = {"head_in": ("head", 0), "head_out": ("head", 2)}
    if has_pieces:
        layers = {"table_in": ("shard_layers", 0), "table_out": ("shard_layers", 2), **layers}
    for name, (part, index) in layers.items():
        values = [getattr(member, part)[index] for member in members]
        arrays[name] = np.stack([_numpy(layer.weight).T for layer in values])
        arrays[f"{name}_bias"] = np.stack([_numpy(layer.bias) for layer in values])
    arrays["head_out"], arrays["head_out_bias"] = arrays["head_out"][:, :, 0], arrays["head_out_bias"][:, 0]
    arrays["limits"] = np.array(
        [min(target.min(), 0.0) - CORRECTION_MARGIN, max(target.max(), 0.0) + CORRECTION_MARGIN]
    )
    return {name: Float32Array.from_array(values) for name, values in arrays.items()}


def _numpy(tensor: Tensor) -> Floats:
    return tensor.detach().numpy().astype(np.float64)
