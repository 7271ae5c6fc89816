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
    """One member that corrects by the factor e^bias, whatever it is told."""
    sizes = {"members": 1, "hidden": 3, "summed": 2, "inputs": inputs, "head_inputs": head_inputs}
    found = {name: np.zeros([own if isinstance(own, int) else sizes[own] for own in arrays[name]]) for name in arrays}
    for name in found:
        if name.endswith(("scale", "most")):
            found[name] += 1.0 if name.endswith("scale") else 1e6
    found["head_out_bias"] += bias
    found["limits"] += [-5.0, 5.0]
    return {name: Float32Array.from_array(own) for name, own in found.items()}


def constant_networks(lookup: float, update: float, collective: float) -> NeuralCost:
    """Networks that correct by e^these, collectives between two devices."""
    inputs, told = len(SHARD_INPUTS), 2 + len(RANK_INPUTS)
    return NeuralCost(
        lookup=network(dict(SHARD_ARRAYS), inputs, told, lookup),
        update=network(dict(SHARD_ARRAYS), inputs, told, update),
        collectives={2: network(dict(COLLECTIVE_ARRAYS), 4, 4, collective)},
        source="a test",
    )


def crowded_networks(strength: float) -> NeuralCost:
    """Networks by which ranks with many pieces are slower than the sum of their prices: a lookup takes
    e^(strength log2(1 + pieces)) times as long."""
    found = constant_networks(0.0, 0.0, 0.0)
    last = len(found.lookup["head_in"].to_array()[0]) - 1  # the number of pieces
    head_in, head_out = np.zeros((1, last + 1, 3)), np.zeros((1, 3))
    head_in[0, last, 0], head_out[0, 0] = 1.0, strength
    changed = {"head_in": Float32Array.from_array(head_in), "head_out": Float32Array.from_array(head_out)}
    return NeuralCost(lookup={**found.lookup, **changed}, update=found.update, source="a test")
