"""Your own row optimizer: Lion (arXiv 2302.06675, algorithm 2), fused into the backward pass.

python examples/03_own_optimizer.py
"""

import torch

import meseta
from meseta.optim import RowOptimizer, element_state


def lion(spec):
    def init(weight):
        return {"momentum": element_state(weight)}

    def update(w, g, state, stats, h):
        direction = (state["momentum"] * spec.beta1 + g * (1 - spec.beta1)).sign()
        momentum = state["momentum"] * spec.options["beta2"] + g * (1 - spec.options["beta2"])
        return w - direction * h.lr, {"momentum": momentum}

    return RowOptimizer(name="lion", init=init, update=update)


if __name__ == "__main__":
    # A name is 'package.module:factory'. This file runs as __main__.
    optimizer = meseta.OptimizerSpec(name="__main__:lion", lr=0.02, options={"beta2": 0.99}, element_states=1)
    tables = [meseta.TableSpec(name="item", num_embeddings=100, embedding_dim=16, optimizer=optimizer)]
    embeddings = meseta.EmbeddingBagCollection(tables, [meseta.FeatureSpec(name="seen", table="item")])
    target = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    ids = [[k, k + 20] for k in range(64)]
    for step in range(1, 201):
        out = embeddings(meseta.KeyedJaggedTensor.from_lists({"seen": ids}))
        loss = (out.pooled.values - target).square().mean()
        loss.backward()
        if step in (1, 10, 100, 200):
            print(f"step {step:3}: loss {loss.item():.4f}")
