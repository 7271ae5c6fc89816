"""Compare training of the interaction models with the same models in torch modules.

    python benchmarks/bench_models.py [--quick] [--device cuda] [--batch 2048] [MODEL ...]

Criteo's 26 tables of 16 columns, two threads, SGD. Both start from equal weights and must have equal logits. Steps
alternate in one process. On a GPU, torch's batches are in pinned memory, and whole turns are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import Any, cast

import torch
from common.command import make_parser, parse_arguments
from common.timing import alternate, seconds
from peers.e2e_meseta import make_batch, make_pipeline, make_specs
from peers.plain_models import DIM, NUM_DENSE, PLAIN
from peers.workloads import E2E_WORKLOADS, shrink
from record import record
from torch import Tensor, nn

from meseta.comm import World
from meseta.config import ModelConfig
from meseta.embedding import EmbeddingBagCollection
from meseta.measure.synthetic_batches import DlrmWorkload, TrainingBatch, make_training_batches
from meseta.models import make_model
from meseta.ops.allocator import keep_freed_memory
from meseta.spec import InitSpec, OptimizerSpec
from meseta.spec.tables import DenseDtype

LR, FILL = 0.001, 0.01
ROUNDS, STEPS = 15, 6


class PlainTraining:
    def __init__(self, name: str, training: DlrmWorkload, device: str) -> None:
        self.device, self._pinned = device, dict[int, Tensor]()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, _weight=torch.full((rows, DIM), FILL, device=device))
            for rows in training.lookups.rows
        )
        self.model = PLAIN[name]().to(device)
        self.optimizer = torch.optim.SGD([*self.tables.parameters(), *self.model.parameters()], lr=LR)

    def moved(self, array: Any) -> Tensor:
        """Copy an array to the device, from pinned memory."""
        tensor = self._pinned.get(id(array))
        if tensor is None:
            tensor = torch.from_numpy(array)
            self._pinned[id(array)] = tensor = tensor.pin_memory() if self.device == "cuda" else tensor
        return tensor.to(self.device, non_blocking=True)

    def logits(self, samples: TrainingBatch) -> Tensor:
        ids = self.moved(samples.ids)
        vectors = torch.stack([table(ids[f]) for f, table in enumerate(self.tables)], dim=1)
        return cast(Tensor, self.model(self.moved(samples.dense), vectors))

    def step(self, samples: TrainingBatch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.binary_cross_entropy_with_logits(self.logits(samples), self.moved(samples.label))
        loss.backward()
        self.optimizer.step()
        loss.item()  # ours looks at it as well


def our_model(name: str, training: DlrmWorkload, dtype: DenseDtype, device: str) -> Any:
    specs = make_specs(training, OptimizerSpec(name="sgd", lr=LR), InitSpec(kind="constant", scale=FILL))
    collection = EmbeddingBagCollection(*specs, device=device)
    return make_model(ModelConfig(name=name), collection, NUM_DENSE, 0, dtype).to(device)


def copy_weights(model: Any, plain: PlainTraining) -> None:
    ours = [p for n, p in model.named_parameters() if not n.startswith("embeddings.")]
    with torch.no_grad():
        for source, other in zip(ours, plain.model.parameters(), strict=True):
            other.copy_(source)


def check(model: Any, plain: PlainTraining, samples: TrainingBatch) -> None:
    batch = make_batch(samples).to(plain.device)
    with torch.no_grad():
        ours, expected = model(batch.dense, batch.sparse), plain.logits(samples)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def in_turns(steps: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Return median seconds of a step. On a GPU, a whole turn is timed, because steps are asynchronous."""

    def turn(step: Callable[[], object]) -> list[float]:
        if device == "cpu":
            return [seconds(step) for _ in range(STEPS)]
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return [(time.perf_counter() - start) / STEPS]

    turns = alternate({name: partial(turn, step) for name, step in steps.items()}, rounds + 1)
    # The first turn warms up.
    return {name: statistics.median(chain(*times[1:])) for name, times in turns.items()}


def measure(name: str, training: DlrmWorkload, rounds: int, device: str) -> dict[str, float]:
    """Return samples per second by implementation."""
    samples = make_training_batches(training)
    plain = PlainTraining(name, training, device)
    steps: dict[str, Callable[[], object]] = {}
    dtypes: tuple[DenseDtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        model = our_model(name, training, dtype, device)
        if dtype == "float32":
            copy_weights(model, plain)
            check(model, plain, samples[0])
        pipeline = make_pipeline(model, LR, World.single(device))
        running: Iterator[Any] = pipeline.steps(map(make_batch, cycle(samples)))
        steps[dtype] = running.__next__
    turn = cycle(samples)
    steps["torch"] = lambda: plain.step(next(turn))
    return {who: training.lookups.batch_size / step_s for who, step_s in in_turns(steps, rounds, device).items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", default=list(PLAIN))
    parser.add_argument("--quick", action="store_true", help="small tables and two turns: to try the command")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=2048, help="samples of one")
    chosen = parse_arguments(parser)
    torch.set_num_threads(2)
    keep_freed_memory()
    [training] = (one for one in E2E_WORKLOADS if one.name == "d16_2k")
    training = replace(training, lookups=replace(training.lookups, batch_size=chosen.batch))
    if chosen.quick:
        training = DlrmWorkload(
            lookups=shrink(training.lookups, max_rows=1000, max_batch=256), bottom_mlp=(8,), top_mlp=(8,)
        )
    case = "" if chosen.batch == 2048 else f"B {chosen.batch} "
    if chosen.device == "cuda":
        case += f"{torch.cuda.get_device_name()} "
    for name in chosen.models:
        rates = measure(name, training, 2 if chosen.quick else ROUNDS, chosen.device)
        for dtype in ("float32", "bfloat16"):
            if chosen.quick:
                print(name, {who: round(rate) for who, rate in rates.items()})
            else:
                record("models", case + f"{name} {dtype}", "training", rates[dtype], "samples/s", peer="torch modules",
                       peer_value=rates["torch"])  # fmt: skip


if __name__ == "__main__":
    main()
