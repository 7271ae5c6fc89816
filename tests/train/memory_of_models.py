"""Compare the memory that training takes, as /proc reports it, with the prediction from the shapes of models.

    python memory_of_models.py NAME:BATCH_SIZE ...

Each model reads 13 dense inputs and 26 features, as Criteo's log has them. Prints {name: [predicted, peak]} in bytes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch

from meseta.comm import BatchSlice, World
from meseta.config import ModelConfig
from meseta.embedding import EmbeddingBagCollection
from meseta.embedding.batch_context import BatchContext
from meseta.models import make_model
from meseta.ops.allocator import keep_freed_memory
from meseta.spec import FeatureSpec, TableSpec
from meseta.train.setup.meta_model import step_peak_bytes

NUM_DENSE, NUM_SPARSE, NUM_STEPS = 13, 26, 3


def build(config: ModelConfig, device: str) -> Any:
    names = [f"c{number}" for number in range(NUM_SPARSE)]
    tables = [TableSpec(name=name, num_embeddings=10, embedding_dim=config.table_width()) for name in names]
    collection = EmbeddingBagCollection(tables, [FeatureSpec(name=name, table=name) for name in names])
    with torch.device(device):
        return make_model(config, collection, NUM_DENSE, 0)


def train(model: Any, batch_size: int) -> int:
    """Run a few steps of the dense part and return the bytes of its parameters."""
    batch: BatchContext[Any] = BatchContext(
        batch_slice=BatchSlice(world=World.single(), step=0, batch_size_per_rank=(batch_size,))
    )
    parameters = list(model.parameters())
    for _ in range(NUM_STEPS):
        pooled = torch.rand(batch_size, model.pooled_width, requires_grad=True)
        with model.embeddings.active_batch(batch):
            logits = model.score(torch.rand(batch_size, NUM_DENSE), pooled)
        torch.autograd.grad(logits, [pooled, *parameters], torch.ones_like(logits))
        del logits, pooled
    return sum(parameter.nbytes for parameter in parameters)


def held(name: str) -> int:
    """Return the bytes of a line of /proc/self/status."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def measure(name: str, batch_size: int) -> list[int]:
    """Return [predicted, peak] of activations, parameters and their gradients."""
    config = ModelConfig(name=name)
    train(build(config, "cpu"), 64)  # allocates everything that is allocated once
    predicted = step_peak_bytes(build(config, "meta"), batch_size, NUM_DENSE, on_heap=True)
    ctypes.CDLL(None).malloc_trim(0)
    before = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    parameter_bytes = train(build(config, "cpu"), batch_size)
    return [predicted + 2 * parameter_bytes, held("VmHWM") - before]


if __name__ == "__main__":
    keep_freed_memory()
    torch.set_num_threads(2)
    cases = (argument.split(":") for argument in sys.argv[1:])
    print(json.dumps({name: measure(name, int(batch_size)) for name, batch_size in cases}))
