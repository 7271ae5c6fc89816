"""CUDA graphs of the emulated GPU repeat what eager torch does on a CPU, and refuse what CUDA refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here", allow_module_level=True)

from gpu_path.dispatch import EmulatedGpu
from gpu_path.patches import emulated_gpu
from gpu_path.records import StepRecording, compare_steps
from gpu_path.training import Training, TrainingCase, record_steps

from meseta.ops.triton_shared import padded_address_count, write_addresses

NUM_STEPS, NUM_WARM_UP_STEPS = 30, 2


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


def capture(function: Callable[[], Any], **options: Any) -> Any:
    """Capture a function and return its graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
        function()
    return graph


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two float32 tensors have the same bits."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


class Regression:
    """Training of a linear layer with static inputs."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 3)
        self.layer.to(device)
        self.inputs, self.labels = torch.zeros(7, 5, device=device), torch.zeros(7, 3, device=device)
        self.lr = torch.full((), 0.0, device=device)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=self.lr, fused=True, capturable=device == "cuda")
        self.losses: list[float] = []

    def load(self, step: int) -> None:
        """Copy the batch and the learning rate of a step."""
        random = torch.Generator().manual_seed(step)
        self.inputs.copy_(torch.randn(7, 5, generator=random))
        self.labels.copy_(torch.randn(7, 3, generator=random))
        self.lr.copy_(torch.tensor(0.1 / (1 + step)))

    def train(self) -> None:
        """Train on the loaded batch."""
        self.optimizer.zero_grad()
        self.loss = mse_loss(self.layer(self.inputs), self.labels)
        self.loss.backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        """Return all weights and moments on the host."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().cpu().clone() for tensor in (*self.layer.parameters(), *moments)]


def run(training: Regression, *, is_replayed: bool) -> tuple[list[Tensor], list[float]]:
    """Train and return the state and the losses of the steps after the warm-up."""
    graph, losses = None, []
    for step in range(NUM_WARM_UP_STEPS + NUM_STEPS):
        training.load(step)
        if not is_replayed or step < NUM_WARM_UP_STEPS:
            training.train()
        else:
            graph = graph or capture(training.train)
            graph.replay()
        losses.append(training.loss.item())
    return training.state(), losses


def test_replayed_training_equals_eager_torch() -> None:
    expected, expected_losses = run(Regression("cpu"), is_replayed=False)
    with emulated_gpu():
        got, losses = run(Regression("cuda"), is_replayed=True)
    assert losses == expected_losses
    assert len(got) == len(expected) and all(map(same_bits, got, expected))


def test_a_capture_changes_no_memory_that_existed_before(gpu: EmulatedGpu) -> None:
    training = Regression("cuda")
    for step in range(NUM_WARM_UP_STEPS):
        training.load(step)
        training.train()
    before = training.state()
    capture(training.train)
    assert all(map(same_bits, training.state(), before))
    assert torch.isnan(training.loss).item() and torch.isnan(training.layer.weight.grad).all().item()


def test_a_capture_reads_no_values(gpu: EmulatedGpu) -> None:
    """Ids outside of the rows are an error only for operators that run."""
    rows, ids = torch.ones(4, 2, device="cuda"), torch.full((3,), 9, device="cuda")
    results: list[Tensor] = []

    def look_up() -> None:
        results.append(rows.index_select(0, ids))
        results.append(torch.repeat_interleave(rows, ids[:1].expand(4), dim=0, output_size=5))

    graph = capture(look_up)
    assert [list(result.shape) for result in results] == [[3, 2], [5, 2]]
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        graph.replay()


def test_results_in_the_graph_are_undefined_until_its_replay(gpu: EmulatedGpu) -> None:
    source = torch.arange(4, device="cuda")
    results: list[Tensor] = []
    graph = capture(lambda: results.extend((source + 1, source > 1, torch.empty(2, device="cuda"))))
    sums, is_large, empty = results
    assert sums.tolist() == [0x7F7F7F7F7F7F7F7F] * 4  # not what torch's deterministic algorithms leave in new memory
    graph.replay()
    assert sums.tolist() == [1, 2, 3, 4] and is_large.tolist() == [False, False, True, True]
    assert torch.isnan(empty).all().item()


def test_a_replay_reads_the_captured_memory_even_if_names_change(gpu: EmulatedGpu) -> None:
    source, results = torch.zeros(3, device="cuda"), list[Tensor]()
    graph = capture(lambda: results.append((source * 2.0).view(3, 1)))
    alias = source.view(3)
    source.set_(torch.full((3,), 9.0, device="cuda"))
    alias.fill_(4.0)
    graph.replay()
    assert results[0].tolist() == [[8.0]] * 3


def test_triton_launches_are_replayed(gpu: EmulatedGpu) -> None:
    addresses = torch.zeros(padded_address_count(2), dtype=torch.int64, device="cuda")
    source, results = torch.ones(3, device="cuda"), list[Tensor]()

    def launch() -> None:
        results.append(source + 1.0)
        write_addresses(addresses, [source, results[0]])

    graph = capture(launch)
    assert addresses.tolist() == [0] * len(addresses)
    assert [record.name for record in graph.capture.records if record.kind == "kernel"] == [
        "aten::add",
        "_write_addresses",
    ]
    graph.replay()
    assert addresses[:2].tolist() == [source.data_ptr(), results[0].data_ptr()]


def test_copies_use_the_captured_pinned_memory(gpu: EmulatedGpu) -> None:
    source, target = (torch.ones(3).pin_memory() for _ in range(2))
    on_device = torch.zeros(3, device="cuda")

    def copy() -> None:
        on_device.copy_(source, non_blocking=True)
        moved = source.to("cuda", non_blocking=True)
        target.copy_(on_device + moved, non_blocking=True)

    graph = capture(copy)
    assert target.tolist() == [1.0] * 3  # The capture copied nothing.
    for value in (1.0, 2.0):
        source.fill_(value)
        graph.replay()
        assert target.tolist() == [2 * value] * 3


@pytest.mark.parametrize("is_constant", [False, True])
def test_scalars_of_the_host_are_captured_by_value(is_constant: bool) -> None:
    """A planted learning rate on the host makes the replay differ from eager training."""

    def train(device: str, *, is_replayed: bool) -> list[float]:
        weight, rate = torch.zeros(3, device=device), torch.full((), 1.0)
        graph = None
        for step in range(3):
            rate.fill_(1.0 if is_constant else 1.0 + step)
            if is_replayed:
                graph = graph or capture(lambda: weight.sub_(rate))
                graph.replay()
            else:
                weight.sub_(rate)
        return weight.tolist()

    expected = train("cpu", is_replayed=False)
    with emulated_gpu():
        assert (train("cuda", is_replayed=True) == expected) == is_constant


def synchronize_stream() -> None:
    torch.cuda.current_stream().synchronize()


FORBIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda tensor: tensor.sum().item(),
    "tolist": lambda tensor: tensor.tolist(),
    "bool": lambda tensor: bool(tensor.isfinite().all()),
    "cpu": lambda tensor: tensor.cpu(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "masked_index": lambda tensor: tensor[tensor > 0],
    "host_index": lambda tensor: tensor[torch.tensor([0, 1])],
    "pageable_source": lambda tensor: tensor.copy_(torch.ones(3), non_blocking=True),
    "pageable_target": lambda tensor: torch.ones(3).copy_(tensor, non_blocking=True),
    "host_constant": lambda tensor: torch.tensor([1.0, 2.0], device="cuda"),
    "pinned_allocation": lambda tensor: torch.empty(3, pin_memory=True),
    "pinned_copy": lambda tensor: torch.ones(3).pin_memory(),
    "synchronize": lambda tensor: torch.cuda.synchronize(),
    "stream_synchronize": lambda tensor: synchronize_stream(),
    "event_synchronize": lambda tensor: torch.cuda.Event().synchronize(),
    "event_query": lambda tensor: torch.cuda.Event().query(),
    "elapsed_time": lambda tensor: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
    "random": torch.rand_like,
    "nested": lambda tensor: capture(lambda: None),
    "other_stream": lambda tensor: on_other_stream(lambda: tensor + 1.0),
}


def on_other_stream(function: Callable[[], Any]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        function()


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_capture_refuses(gpu: EmulatedGpu, name: str) -> None:
    tensor, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    FORBIDDEN[name](tensor) if name not in ("elapsed_time", "nested") else None  # permitted outside
    kept = tensor.tolist()
    with pytest.raises(RuntimeError, match=r"CUDA|emulated GPU"), torch.cuda.graph(graph):
        tensor.add_(1.0)
        FORBIDDEN[name](tensor)
    with pytest.raises(RuntimeError, match="previous error"), torch.cuda.graph(graph), pytest.raises(RuntimeError):
        FORBIDDEN[name](tensor)
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert tensor.tolist() == kept and not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("name", ["pageable_source", "pageable_target", "host_index", "host_constant"])
def test_the_error_of_a_copy_names_pinned_memory(gpu: EmulatedGpu, name: str) -> None:
    tensor = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
        capture(lambda: FORBIDDEN[name](tensor))


def test_another_thread_may_allocate_pinned_memory(gpu: EmulatedGpu) -> None:
    def pin() -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.empty, 3, pin_memory=True).result()

    capture(pin)
    with pytest.raises(RuntimeError, match="not permitted"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pin()  # The mode "global" is for all threads.


def test_other_streams_join_a_capture(gpu: EmulatedGpu) -> None:
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    tensor = torch.zeros(3, device="cuda")

    def fork(*, joins: bool = True) -> None:
        assert torch.cuda.current_stream() is stream and torch.cuda.is_current_stream_capturing()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            tensor.add_(1.0)
        if joins:
            stream.wait_stream(side)

    capture(fork, stream=stream).replay()
    assert tensor.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="unjoined"):
        capture(lambda: fork(joins=False), stream=stream)
    event = torch.cuda.Event()
    event.record()
    with pytest.raises(RuntimeError, match="uncaptured work"):
        capture(lambda: stream.wait_event(event), stream=stream)


def test_only_external_events_can_be_read_after_a_replay(gpu: EmulatedGpu) -> None:
    def events(external: bool) -> list[Any]:
        return [torch.cuda.Event(enable_timing=True, external=external) for _ in range(2)]

    (begin, end), captured = events(True), events(False)
    graph = capture(lambda: [event.record() for event in (begin, end, *captured)])
    with pytest.raises(RuntimeError, match="not recorded"):
        begin.elapsed_time(end)
    graph.replay()
    assert begin.query() and begin.elapsed_time(end) == 0.0
    for read in (captured[0].query, captured[0].synchronize, lambda: begin.elapsed_time(captured[1])):
        with pytest.raises(RuntimeError, match="capturing stream"):
            read()


def test_graphs_of_a_pool_share_memory(gpu: EmulatedGpu) -> None:
    """A replay may overwrite the results of graphs that were captured later in the same pool."""
    source, results = torch.ones(3, device="cuda"), list[Tensor]()
    pool = torch.cuda.graph_pool_handle()
    graphs = [capture(lambda: results.append(source + 1.0), pool=pool) for _ in range(2)]
    assert graphs[1].pool() == pool
    for graph in graphs:
        graph.replay()
    assert [result.tolist() for result in results] == [[2.0] * 3] * 2
    graphs[0].replay()
    assert results[0].tolist() == [2.0] * 3 and torch.isnan(results[1]).all().item()
    separate = capture(lambda: results.append(source + 2.0))
    separate.replay()
    graphs[0].replay()
    assert results[2].tolist() == [3.0] * 3


def test_a_replay_is_one_record(gpu: EmulatedGpu) -> None:
    training = Regression("cuda")
    training.train()
    graph = capture(training.train)
    gpu.begin()
    graph.replay()
    recording = StepRecording(tuple(gpu.end()), gpu.python_calls.num_calls)
    [record] = recording.records
    assert record.kind == "graph replay"
    assert {"aten::mse_loss", "aten::_fused_adam_"} <= {operator.name for operator in record.operators}
    assert {name: number for name, number in recording.counts().items() if number} == {
        "graph replays": 1,
        "Python calls": 1,
    }


def test_captured_constants_are_found(gpu: EmulatedGpu) -> None:
    """Regions of eager steps and graphs are compared in the same way."""
    source = torch.ones(3, device="cuda")

    def eager(num_before: int, factor: float) -> StepRecording:
        gpu.begin()
        before = [torch.zeros(2, device="cuda") for _ in range(num_before)]
        with gpu.region("graph"):
            (source * factor).add_(1.0)
        assert len(before) == num_before
        return StepRecording(tuple(gpu.end()), 0).in_region("graph")

    def captured(num_before: int, factor: float) -> StepRecording:
        return StepRecording(tuple(capture(lambda: (source * factor).add_(1.0)).capture.records), 0)

    for record in (eager, captured):
        first, same, other = record(0, 2.0), record(1, 2.0), record(1, 3.0)
        assert compare_steps(first, same) == []
        assert [str(one.detail) for one in compare_steps(first, other)] == ["other 2.0, then 3.0"]
    assert [one.name for one in eager(1, 2.0).records] == [one.name for one in captured(1, 2.0).records]


def test_a_graph_keeps_its_memory(gpu: EmulatedGpu) -> None:
    target = torch.zeros(3, device="cuda")

    def add_temporary(source: Tensor) -> None:
        target.copy_(source + 1.0)

    graph = capture(partial(add_temporary, torch.ones(3, device="cuda")))
    gc.collect()
    graph.replay()
    assert target.tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes
def test_a_replayed_training_step_is_one_graph_and_one_copy(gpu: EmulatedGpu) -> None:
    case = TrainingCase(model="dlrm", batch_size=8, num_tables=3, num_rows=20)
    [recording] = record_steps(gpu, Training(case, "cuda", uses_graphs=True))
    counts = recording.counts()
    numbers = {name: counts[name] for name in ("graph replays", "copies to device", "synchronizations")}
    assert numbers == {"graph replays": 1, "copies to device": 1, "synchronizations": 0}
    [replay] = recording.select("graph replay")
    stages = {operator.stage for operator in replay.operators}
    assert {"lookup", "dense_forward", "backward", "table_update", "dense_update"} <= stages
