"""Embedding tables in your own training loop, on one process or, under torchrun, on several.

    python examples/01_ten_lines.py
    torchrun --nproc-per-node 2 examples/01_ten_lines.py

Both print the same losses, up to rounding.
"""

import os

import torch
from torch import nn

import meseta

rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Model(nn.Module):
    """Your model: any module that contains a collection of tables."""

    def __init__(self) -> None:
        super().__init__()
        adagrad = meseta.OptimizerSpec(name="rowwise_adagrad", lr=0.1)
        tables = [
            meseta.TableSpec(name="user", num_embeddings=100, embedding_dim=16, optimizer=adagrad),
            meseta.TableSpec(name="item", num_embeddings=200, embedding_dim=32, optimizer=adagrad),
        ]
        features = [
            meseta.FeatureSpec(name="who", table="user"),
            meseta.FeatureSpec(name="clicked", table="item", pooling="mean"),
            meseta.FeatureSpec(name="shown", table="item"),
        ]
        self.embeddings = meseta.EmbeddingBagCollection(tables, features)
        self.layers = nn.Sequential(nn.Linear(16 + 32 + 32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, sparse: meseta.KeyedJaggedTensor) -> torch.Tensor:
        return self.layers(self.embeddings(sparse).pooled.values).squeeze(1)


def local_batch(step: int, batch_size: int = 256) -> tuple[meseta.KeyedJaggedTensor, torch.Tensor]:
    """Return this rank's slice of global batch `step`. Users click on items with the same parity."""
    random = torch.Generator().manual_seed(step)
    who = torch.randint(100, (batch_size, 1), generator=random)
    clicked = torch.randint(200, (batch_size, 3), generator=random)
    shown = torch.randint(200, (batch_size, 1), generator=random)
    label = (who % 2 == shown % 2).float().squeeze(1)
    part = torch.arange(batch_size).chunk(num_ranks)[rank]
    bags = {"who": who[part], "clicked": clicked[part], "shown": shown[part]}
    return meseta.KeyedJaggedTensor.from_lists({name: ids.tolist() for name, ids in bags.items()}), label[part]


torch.manual_seed(0)
plan = {"tables": {"user": "data_parallel", "item": "row_wise"}}  # without a plan, the planner searches for one
model = meseta.shard(Model(), plan)  # the only line for several processes
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(50):
    sparse, label = local_batch(step)
    loss = nn.functional.binary_cross_entropy_with_logits(model(sparse), label)
    optimizer.zero_grad()
    loss.backward()  # also updates the rows of the tables
    optimizer.step()  # updates the dense parameters
    if step % 10 == 9:
        total = loss.detach() / num_ranks  # slices are equal, so the mean over ranks is the global loss
        if num_ranks > 1:
            torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}  loss {total:.6f}")
if num_ranks > 1:
    torch.distributed.destroy_process_group()
