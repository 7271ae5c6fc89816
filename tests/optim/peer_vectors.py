"""Make tests/optim/fbgemm_vectors.json: a few rows trained by FBGEMM's CPU operators.

    PEER_PYTHON tests/optim/peer_vectors.py tests/optim/fbgemm_vectors.json

PEER_PYTHON is an interpreter that has torch and fbgemm-gpu-cpu; the tests themselves need neither. Every sample reads
one row, so the gradient of a row is the gradient of its sample. These are all the optimizers that FBGEMM 1.8.0 runs on
CPUs; its CPU operators ignore the weight decay.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

ROWS, DIM, STEPS = 4, 8, 4
LR = 0.1
CASES = {
    "sgd": (EmbOptimType.EXACT_SGD, {}),
    "rowwise_adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, {"eps": 1e-4}),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, {"eps": 1e-4}),
}


def rounded(tensor: torch.Tensor) -> list:
    """Return numbers of few digits, which are exact in float32 and in JSON."""
    return [[round(x, 3) for x in row] for row in tensor.tolist()]


def train(optimizer: EmbOptimType, constants: dict) -> dict:
    """Return the first rows, gradients, rows of each step, and last rows and state."""
    generator = torch.Generator().manual_seed(0)
    start = rounded(torch.randn(ROWS, DIM, generator=generator))
    gradients = [rounded(torch.randn(ROWS, DIM, generator=generator)) for _ in range(STEPS)]
    touched = [[0, 1, 2, 3], [0, 2], [3], [2, 1, 0]]
    operator = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optimizer,
        learning_rate=LR,
        **constants,
    )
    [weight] = operator.split_embedding_weights()
    weight.copy_(torch.tensor(start))
    for rows, gradient in zip(touched, gradients, strict=True):
        ids = torch.tensor(rows, dtype=torch.int64)
        out = operator(ids, torch.arange(len(rows) + 1, dtype=torch.int64))
        out.backward(torch.tensor(gradient)[ids])
    states = [] if optimizer is EmbOptimType.EXACT_SGD else operator.split_optimizer_states()[0]
    return {
        "start": start,
        "gradients": gradients,
        "touched": touched,
        "rows": weight.tolist(),
        "states": [state.flatten().tolist() for state in states],
    }


def main() -> None:
    packages = {name: version(name) for name in ("torch", "fbgemm-gpu-cpu")}
    cases = {name: train(*case) for name, case in CASES.items()}
    Path(sys.argv[1]).write_text(json.dumps({"versions": packages, "lr": LR, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
