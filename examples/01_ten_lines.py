"""Embedding tables in your own training loop: the same file on one process and, under torchrun, on several.

    python examples/01_ten_lines.py
    torchrun --nproc-per-node 2 examples/01_ten_lines.py

Both print the same losses, to rounding.
"""

import os

import torch
from torch import nn

import meseta

rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Model(nn.Module):
    """Your model: a collection of tables somewhere inside, and whatever you like around it."""

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
    """This rank's slice of global batch `step`: users click on items that are odd like themselves."""
    random = torch.Generator().manual_seed(step)
    who = torch.randint(100, (batch_size, 1), generator=random)
    clicked = torch.randint(200, (batch_size, 3), generator=random)
    shown = torch.randint(200, (batch_size, 1), generator=random)
    label = (who % 2 == shown % 2).float().squeeze(1)
    mine = torch.arange(batch_size).chunk(num_ranks)[rank]
    bags = {"who": who[mine], "clicked": clicked[mine], "shown": shown[mine]}
    return meseta.KeyedJaggedTensor.from_lists({name: ids.tolist() for name, ids in bags.items()}), label[mine]


torch.manual_seed(0)
plan = {"tables": {"user": "data_parallel", "item": "row_wise"}}  # or leave it out and have one searched
model = meseta.shard(Model(), plan)  # the one line that several processes need
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(50):
    sparse, label = local_batch(step)
    loss = nn.functional.binary_cross_entropy_with_logits(model(sparse), label)
    optimizer.zero_grad()
    loss.backward()  # tables learn here, row by row
    optimizer.step()  # dense parameters learn here
    if step % 10 == 9:
        total = loss.detach() / num_ranks  # slices are equal, so the mean over ranks is the global loss
        if num_ranks > 1:
            torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}  loss {total:.6f}")
if num_ranks > 1:
    torch.distributed.destroy_process_group()
