"""Networks that tests of cost models share."""

import numpy as np

from meseta.spec.cost_model import (
    COLLECTIVE_ARRAYS,
    RANK_INPUTS,
    SHARD_ARRAYS,
    SHARD_INPUTS,
    Float32Array,
    Network,
    NeuralCost,
)


def network(arrays: dict[str, tuple[str | int, ...]], inputs: int, head_inputs: int, bias: float) -> Network:
    """Return a network with one member that corrects by the factor e^bias for every input."""
    sizes = {"members": 1, "hidden": 3, "summed": 2, "inputs": inputs, "head_inputs": head_inputs}
    values = {
        name: np.zeros([size if isinstance(size, int) else sizes[size] for size in arrays[name]]) for name in arrays
    }
    for name in values:
        if name.endswith(("scale", "most")):
            values[name] += 1.0 if name.endswith("scale") else 1e6
    values["head_out_bias"] += bias
    values["limits"] += [-5.0, 5.0]
    return {name: Float32Array.from_array(value) for name, value in values.items()}


def constant_networks(lookup: float, update: float, collective: float) -> NeuralCost:
    """Return networks that correct by the exponentials of these values. Collectives have two devices."""
    inputs, head_inputs = len(SHARD_INPUTS), 2 + len(RANK_INPUTS)
    return NeuralCost(
        lookup=network(dict(SHARD_ARRAYS), inputs, head_inputs, lookup),
        update=network(dict(SHARD_ARRAYS), inputs, head_inputs, update),
        collectives={2: network(dict(COLLECTIVE_ARRAYS), 4, 4, collective)},
        source="a test",
    )


def crowded_networks(strength: float) -> NeuralCost:
    """Return networks for which a lookup on a rank with several shards takes e^(strength log2(1 + shards)) times as
    long."""
    networks = constant_networks(0.0, 0.0, 0.0)
    last = len(networks.lookup["head_in"].to_array()[0]) - 1  # the number of shards
    head_in, head_out = np.zeros((1, last + 1, 3)), np.zeros((1, 3))
    head_in[0, last, 0], head_out[0, 0] = 1.0, strength
    changed = {"head_in": Float32Array.from_array(head_in), "head_out": Float32Array.from_array(head_out)}
    return NeuralCost(lookup={**networks.lookup, **changed}, update=networks.update, source="a test")
