"""Compare training of the interaction models with the same models in torch modules.

    python benchmarks/bench_models.py [--quick] [--device cuda] [--batch 2048] [MODEL ...]

Criteo's 26 tables of 16 columns, two threads, SGD. Both start from equal weights and must have equal logits. Steps
alternate in one process. On a GPU, the batches of both are in pinned memory, whole turns are timed, our steps are CUDA
graphs, and bfloat16 is compared with torch under autocast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import Any, NamedTuple, cast, get_args

import torch
from common.command import make_parser, parse_arguments
from common.packed_batches import PackedBatches
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
ROUNDS, STEPS, NUM_WARM_UP_TURNS = 15, 6, 2
GPU_TURN_SAMPLES = 32_768
"""On a GPU, turns of small batches have more steps, so that the final wait is a small part of them."""


class PlainTraining:
    """Training of torch modules. On a GPU it reads no loss, because reading one waits for the device."""

    def __init__(self, name: str, training: DlrmWorkload, device: str, *, autocast: bool = False) -> None:
        self.device, self.autocast = device, autocast
        self._pinned: dict[int, Tensor] = {}
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
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            vectors = torch.stack([table(ids[f]) for f, table in enumerate(self.tables)], dim=1)
            return cast(Tensor, self.model(self.moved(samples.dense), vectors)).float()

    def step(self, samples: TrainingBatch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.binary_cross_entropy_with_logits(self.logits(samples), self.moved(samples.label))
        loss.backward()
        self.optimizer.step()
        if self.device == "cpu":
            loss.item()  # ours looks at it as well


class OurTraining:
    """Training with a Pipeline. For a GPU, batches are packed into pinned memory before the timed steps."""

    def __init__(self, model: Any, samples: list[TrainingBatch], device: str) -> None:
        world = World.single(device)
        self._batches = PackedBatches(cycle(samples), make_batch, world.device)
        self._steps = make_pipeline(model, LR, world).steps(self._batches)

    def prepare(self, num_steps: int) -> None:
        self._batches.pack(num_steps)

    def step(self) -> None:
        next(self._steps)


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


def in_turns(turns: Mapping[str, Turn], rounds: int, device: str, num_steps: int) -> dict[str, float]:
    """Return median seconds of a step. On a GPU, a whole turn is timed, because steps are asynchronous."""

    def run(turn: Turn) -> list[float]:
        turn.prepare(num_steps)
        if device == "cpu":
            return [seconds(turn.step) for _ in range(num_steps)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            turn.step()
        torch.cuda.synchronize()
        return [(time.perf_counter() - start) / num_steps]

    times = alternate({name: partial(run, turn) for name, turn in turns.items()}, rounds + NUM_WARM_UP_TURNS)
    return {name: statistics.median(chain(*values[NUM_WARM_UP_TURNS:])) for name, values in times.items()}


class Turn(NamedTuple):
    step: Callable[[], object]
    prepare: Callable[[int], object] = int
    """Called with the number of steps before the timed steps of a turn."""


def plain_turn(plain: PlainTraining, samples: list[TrainingBatch]) -> Turn:
    batches = cycle(samples)
    return Turn(lambda: plain.step(next(batches)))


def measure(
    name: str,
    training: DlrmWorkload,
    samples: list[TrainingBatch],
    rounds: int,
    device: str,
    implementations: Sequence[str],
) -> dict[str, float]:
    """Return samples per second by implementation. Ours are named by their dtype.

    'torch' computes in float32. 'torch autocast' computes in bfloat16 where autocast does. 'torch compiled' computes in
    float32 with a compiled dense part, which CUDA graphs replay.
    """
    plain = PlainTraining(name, training, device)
    turns: dict[str, Turn] = {}
    for implementation in implementations:
        if implementation in get_args(DenseDtype):
            model = our_model(name, training, cast(DenseDtype, implementation), device)
            if implementation == "float32":
                copy_weights(model, plain)
                check(model, plain, samples[0])
            ours = OurTraining(model, samples, device)
            turns[implementation] = Turn(ours.step, ours.prepare)
            continue
        peer = plain
        if implementation != "torch":
            peer = PlainTraining(name, training, device, autocast=implementation == "torch autocast")
            peer.model.load_state_dict(plain.model.state_dict())
        if implementation == "torch compiled":
            # A second batch size would otherwise be compiled with dynamic shapes.
            peer.model.compile(mode="reduce-overhead", dynamic=False)
        turns[implementation] = plain_turn(peer, samples)
    num_steps = STEPS if device == "cpu" else max(STEPS, GPU_TURN_SAMPLES // training.lookups.batch_size)
    step_s = in_turns(turns, rounds, device, num_steps)
    return {who: training.lookups.batch_size / value for who, value in step_s.items()}


def make_workload(batch_size: int, *, quick: bool = False) -> DlrmWorkload:
    """Return Criteo's tables, or small ones for a trial run."""
    [training] = (one for one in E2E_WORKLOADS if one.name == "d16_2k")
    if quick:
        lookups = shrink(training.lookups, max_rows=1000, max_batch=256)
        return DlrmWorkload(lookups=lookups, bottom_mlp=(8,), top_mlp=(8,))
    return replace(training, lookups=replace(training.lookups, batch_size=batch_size))


def result_case(name: str, batch_size: int, dtype: str, card: str) -> str:
    """Return the case of a stored result. `card` is empty for a CPU."""
    parts = "" if batch_size == 2048 else f"B {batch_size}", card, name, dtype
    return " ".join(filter(None, parts))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", default=list(PLAIN))
    parser.add_argument("--quick", action="store_true", help="small tables and two turns: to try the command")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=2048, help="samples of one")
    chosen = parse_arguments(parser)
    torch.set_num_threads(2)
    keep_freed_memory()
    training = make_workload(chosen.batch, quick=chosen.quick)
    samples = make_training_batches(training)
    card = torch.cuda.get_device_name() if chosen.device == "cuda" else ""
    peers = {"float32": "torch", "bfloat16": "torch autocast" if chosen.device == "cuda" else "torch"}
    implementations = list(dict.fromkeys([*peers, *peers.values()]))
    for name in chosen.models:
        rates = measure(name, training, samples, 2 if chosen.quick else ROUNDS, chosen.device, implementations)
        for dtype, peer in peers.items():
            if chosen.quick:
                print(name, {who: round(rate) for who, rate in rates.items()})
            else:
                record("models", result_case(name, chosen.batch, dtype, card), "training", rates[dtype], "samples/s",
                       peer=peer.replace("torch", "torch modules"), peer_value=rates[peer])  # fmt: skip


if __name__ == "__main__":
    main()
