"""Steps that are replayed as CUDA graphs train as eager steps do, on an emulated GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("gpu_path", reason="the emulated GPU is in benchmarks/, which does not belong to a wheel")
if torch.cuda.is_available():
    pytest.skip("Triton compiles for the GPU here", allow_module_level=True)

from gpu_path.patches import emulated_gpu
from gpu_path.records import StepRecording, compare_steps

from meseta.config.models import MODEL_NAMES
from meseta.data.read.batch import Batch
from meseta.data.read.packing import PackedLayout
from meseta.models import global_layers
from meseta.ops.random_rows import table_key
from meseta.optim import dense
from meseta.optim.dense import GradientClipper, dense_parameters
from meseta.pipeline import LateNonFiniteLoss, Pipeline, step_graph
from meseta.pipeline.device_copy import StaticPart
from meseta.pipeline.losses import SkippedUpdate
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import Communication, MesetaError, Plan
from meseta.spec.optimizer import USED_FIELDS
from meseta.spec.stages import Overlap
from own_models import AddsRows, AsksForNumbers, GlobalLoss, Plain, TwoBlocks
from pipeline.graph_cases import NUM_ROWS, GraphCase, GraphTraining, different_tensors
from sampling import diagonal, product, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity in masked lanes
PARTS = [tuple(USED_FIELDS)[first::3] for first in range(3)]
"""Row optimizers, in parts."""
IS_SOAK, NUM_REPLAYED = bool(os.environ.get("MESETA_SOAK")), 30
FIRST, SHORT = "first step of a layout", "short batch"
REGULARIZED = {"dropout": 0.2, "batch_norm": True}


# Captured constants


def capture_twice(case: GraphCase) -> tuple[StepRecording, StepRecording]:
    """Return the captured operators of two steps with different batches, rates, step numbers and votes."""
    with emulated_gpu():
        training, captured = GraphTraining(case), list[tuple[PackedLayout, StepRecording]]()
        steps = training.steps(case.make_batches())
        for _ in range(2):
            next(steps)
            next(steps)
            [(key, step)] = training.graphs._steps.items()
            captured.append((key.layout, name_buffer(step)))
            training.graphs.begin_loop(None, object())  # drops the graph
        steps.close()
    (layout, first), (other_layout, second) = captured
    num_ids, other_num_ids = (case.make_batch(number).sparse.values.numel() for number in (1, 3))
    assert layout == other_layout and num_ids != other_num_ids
    return first, second


def name_buffer(step: step_graph.CapturedStep) -> StepRecording:
    """Return the captured operators. Each capture has another buffer, so its address is replaced by its name."""
    address = hex(step.buffer.untyped_storage().data_ptr())
    records = [
        replace(
            record,
            tensors=tuple(
                replace(tensor, memory="buffer") if tensor.memory == address else tensor for tensor in record.tensors
            ),
        )
        for record in step.graph.capture.records
    ]
    return StepRecording(tuple(records), 0)


CAPTURED = product(model=MODEL_NAMES, dense=["sgd", "adam", "adamw"], part=range(len(PARTS)))


@pytest.mark.parametrize("case", sample(CAPTURED, k=1, seed=2))
def test_a_graph_has_no_constants_of_its_batch(case: dict[str, Any]) -> None:
    """The tables have the row optimizers of one part."""
    rows = PARTS[case["part"]]
    first, second = capture_twice(GraphCase(model=case["model"], dense=case["dense"], rows=rows, num_tables=len(rows)))
    assert len(first.select("kernel")) > 20 and compare_steps(first, second) == []


@pytest.mark.parametrize("model", ["dlrm", pytest.param(TwoBlocks, marks=pytest.mark.soak)])
def test_regularization_and_loss_terms_have_no_constants(model: Any) -> None:
    layers = REGULARIZED if model == "dlrm" else {}
    assert compare_steps(*capture_twice(GraphCase(model=model, layers=layers))) == []


def keep_host_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "rates_on_device", lambda *_: nullcontext())


def keep_host_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(seed: int, layer: str, batch: Any) -> int:
        return table_key(seed, f"dropout/{layer}/{batch.step}")

    monkeypatch.setattr(global_layers, "_step_key", key)


def keep_host_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(pipeline: Pipeline, dtype: torch.dtype) -> Tensor:
        assert pipeline.scalars is not None
        return torch.full((), 1.0 / pipeline.scalars._numbers.divisor, dtype=dtype, device="cuda")

    monkeypatch.setattr(Pipeline, "_device_scale", scale)


def keep_number_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(part: StaticPart, *, padded: bool = True) -> Batch:
        return part.layout.unpack(part.batch, part.buffer)

    monkeypatch.setattr(StaticPart, "wait", wait)


FAULTS = {
    "rate": (keep_host_rates, "scalar"),
    "step": (keep_host_step, "scalar"),
    "divisor": (keep_host_divisor, "scalar"),
    "number of ids": (keep_number_of_ids, "shape"),
}


@pytest.mark.parametrize("name", [*list(FAULTS)[:3], pytest.param("number of ids", marks=pytest.mark.soak)])
def test_a_planted_constant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, aspect = FAULTS[name]
    plant(monkeypatch)
    differences = compare_steps(*capture_twice(GraphCase(layers=REGULARIZED)))
    assert aspect in {difference.aspect for difference in differences}


# Replayed training

SEPARATE: dict[str, GraphCase] = {
    "capacities": GraphCase(lengths=((0, 3), (5, 6), (7, 8))),
    "single ids": GraphCase(lengths=((1, 1),), is_weighted=False),
    "id policies": GraphCase(num_tables=3),
    "padded batches": GraphCase(padded_interval=3),
    "padded single ids": GraphCase(padded_interval=3, lengths=((1, 1),), is_weighted=False),
    "short last batch": GraphCase(last_batch_size=5),
    "bfloat16 dense part": GraphCase(dtype="bfloat16"),
    "bfloat16 rows": GraphCase(row_dtype="bfloat16"),
    "float16 rows": GraphCase(row_dtype="float16"),
    "dropout and batch norm": GraphCase(layers=REGULARIZED),
    "loss terms": GraphCase(model=TwoBlocks),
    "several tasks": GraphCase(model="mmoe", pipeline_options={"task_weights": [1.0, 0.25]}),
    "clipped values": GraphCase(pipeline_options={"clip": GradientClipper(value=0.001)}),
    "overlap": GraphCase(pipeline_options={"overlap": get_args(Overlap)}),
    "sgd": GraphCase(dense="sgd"),
    "adamw": GraphCase(dense="adamw"),
}
SEPARATE |= {f"row optimizers {part}": GraphCase(rows=rows, num_tables=len(rows)) for part, rows in enumerate(PARTS)}
COMBINED: dict[str, GraphCase] = {
    "all but dtypes": replace(
        SEPARATE["capacities"], layers=REGULARIZED, padded_interval=3, last_batch_size=5, num_batches=9
    ),
    "dtypes and tasks": replace(SEPARATE["several tasks"], dtype="bfloat16", row_dtype="bfloat16", dense="sgd"),
}
CASES = {**SEPARATE, **COMBINED}


def train(
    case: GraphCase, *, is_captured: bool, batches: list[Batch] | None = None
) -> tuple[dict[str, Tensor], Counter[str], int]:
    """Return what the training has learned and computed, the reasons of eager steps, and the number of replays."""
    with emulated_gpu():
        training = GraphTraining(case, is_captured=is_captured)
        training.train(case.make_batches() if batches is None else batches)
        learned = {**training.state(), **training.outputs()}
        graphs = training.pipeline.graphs
        return learned, Counter() if graphs is None else graphs.eager_reasons, graphs.num_replayed if graphs else 0


@pytest.mark.parametrize("name", [*COMBINED, *sample(SEPARATE, k=0, seed=1)])
def test_replayed_training_equals_eager_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fourth replay is timed, in a separate graph."""
    monkeypatch.setattr(step_graph, "TIMED_STEP_INTERVAL", 4)
    case = CASES[name]
    if IS_SOAK:
        case = replace(case, num_batches=NUM_REPLAYED + 10)
    expected, _, _ = train(case, is_captured=False)
    learned, reasons, num_replayed = train(case, is_captured=True)
    assert different_tensors(learned, expected) == []
    assert num_replayed == case.num_batches - reasons.total() and num_replayed >= (NUM_REPLAYED if IS_SOAK else 3)
    assert reasons[SHORT] == (case.last_batch_size is not None) and set(reasons) <= {FIRST, SHORT}
    assert reasons[FIRST] >= len(case.lengths) + (case.padded_interval is not None)


# Reasons for eager steps

Change = Callable[[Pipeline], None]


def set_world_size(pipeline: Pipeline) -> None:
    pipeline.world = replace(pipeline.world, size=2)


def cache_rows(pipeline: Pipeline) -> None:
    embeddings: Any = pipeline.model.embeddings
    plan = {"tables": {"*": {"sharding": "table_wise", "tier": "cached", "cache_rows": NUM_ROWS}}}
    embeddings.apply_plan(Plan.from_dict(plan, embeddings.tables, 1))


def shard_parameter(pipeline: Pipeline) -> None:
    [parameter, *_] = dense_parameters(pipeline.optimizer)
    parameter.to_local = lambda: parameter  # type: ignore[attr-defined]


def round_exchanges(pipeline: Pipeline) -> None:
    embeddings: Any = pipeline.model.embeddings
    embeddings.emulate_rounding(Communication(precision="bf16"))


def mask_labels(pipeline: Pipeline) -> None:
    pipeline.num_masked_tasks = 1


def use_stale_embeddings(pipeline: Pipeline) -> None:
    pipeline.uses_stale_embeddings = True


EAGER: dict[str, tuple[GraphCase, Change | None]] = {
    "several ranks": (GraphCase(), set_world_size),
    "gradient accumulation": (GraphCase(pipeline_options={"accumulate_steps": 2}), None),
    "gradient clipping": (GraphCase(pipeline_options={"clip": GradientClipper(norm=1.0)}), None),
    "dense optimizer Adagrad": (GraphCase(dense="adagrad"), None),
    "dense optimizer Lamb": (GraphCase(dense="lamb"), None),
    "sharded dense parameters": (GraphCase(), shard_parameter),
    "rows outside of the GPU's memory": (GraphCase(), cache_rows),
    "unpooled features": (GraphCase(model=AddsRows, pooling=("none", "sum")), None),
    "id policy 'drop'": (GraphCase(policies=("error", "drop")), None),
    "several batches of features": (GraphCase(model=Plain, groups=("", "user")), None),
    "row optimizer that steps untouched rows": (GraphCase(row_options={"stepped_rows": "all"}), None),
    "row optimizer with a penalty of looked-up rows": (GraphCase(row_options={"stepped_rows": "looked_up"}), None),
    "float64 rows": (GraphCase(row_dtype="float64"), None),
    "emulated rounding of exchanges": (GraphCase(), round_exchanges),
    "losses of the global batch": (GraphCase(model=GlobalLoss), None),
    "missing labels": (GraphCase(), mask_labels),
    "stale embeddings": (GraphCase(), use_stale_embeddings),
}


@pytest.mark.parametrize("reason", EAGER)
def test_a_training_that_cannot_be_captured_has_a_reason(reason: str) -> None:
    case, change = EAGER[reason]
    with emulated_gpu():
        pipeline = case.make_pipeline()
        if change is not None:
            change(pipeline)
        assert pipeline._find_eager_reason() == reason


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"accumulate_steps": 2, "overlap": ["ids"]}, None),
        pytest.param({}, use_stale_embeddings, marks=pytest.mark.soak),
        pytest.param({}, cache_rows, marks=pytest.mark.soak),
    ],
)
def test_batches_that_are_started_ahead_run_eagerly(options: dict[str, Any], change: Change | None) -> None:
    """Each batch is copied once, and the graphs of the pipeline change nothing."""
    case, states = GraphCase(pipeline_options=options, num_batches=2), []
    with emulated_gpu() as gpu:
        for is_captured in (True, False):
            training = GraphTraining(case, is_captured=is_captured)
            if change is not None:
                change(training.pipeline)
            gpu.begin()
            training.train(case.make_batches())
            num_copies = [record.source for record in gpu.end() if "device_copy" in record.source]
            states.append((training.state(), training.outputs(), len(num_copies)))
            assert not is_captured or training.graphs.eager_reasons.total() == case.num_batches
    (state, outputs, num_copies), (expected_state, expected_outputs, expected_copies) = states
    assert different_tensors(state, expected_state) == different_tensors(outputs, expected_outputs) == []
    assert num_copies == expected_copies


def test_the_default_training_can_be_captured() -> None:
    with emulated_gpu():
        assert GraphCase().make_pipeline()._find_eager_reason() is None


@pytest.mark.soak
def test_float64_rows_run_eagerly() -> None:
    case = GraphCase(row_dtype="float64", num_batches=3)
    expected, _, _ = train(case, is_captured=False)
    learned, reasons, num_replayed = train(case, is_captured=True)
    assert different_tensors(learned, expected) == [] and (reasons, num_replayed) == ({"float64 rows": 3}, 0)


def test_a_model_that_waits_for_the_device_runs_eagerly() -> None:
    case = GraphCase(model=AsksForNumbers, num_batches=3)
    expected, _, _ = train(case, is_captured=False)
    learned, reasons, num_replayed = train(case, is_captured=True)
    assert different_tensors(learned, expected) == [] and num_replayed == 0
    assert reasons == {FIRST: 2, "a model that waits for the device": 1}


@pytest.mark.soak
def test_a_wait_in_the_first_step_alone_delays_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    case, score, calls = GraphCase(num_batches=5), Pipeline._score, count(1)

    def wait_once(pipeline: Pipeline, *arguments: Any) -> Any:
        logits, *others = score(pipeline, *arguments)
        if next(calls) == 1:
            logits.sum().item()
        return logits, *others

    monkeypatch.setattr(Pipeline, "_score", wait_once)
    _, reasons, num_replayed = train(case, is_captured=True)
    assert reasons == {FIRST: 2} and num_replayed == 3


def test_a_capture_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The call is one that torch does not report as a wait."""
    case, score = GraphCase(num_batches=3), Pipeline._score

    def synchronize(pipeline: Pipeline, *arguments: Any) -> Any:
        torch.cuda.synchronize()
        return score(pipeline, *arguments)

    monkeypatch.setattr(Pipeline, "_score", synchronize)
    expected, _, _ = train(case, is_captured=False)
    learned, reasons, num_replayed = train(case, is_captured=True)
    assert different_tensors(learned, expected) == [] and num_replayed == 0
    [(reason, number)] = (reasons - Counter([FIRST])).items()
    assert number == 2 and reason.startswith("the step cannot be captured: CUDA error: operation not permitted")
    assert f"note: steps are not replayed from CUDA graphs: {reason}" in capsys.readouterr().err


@pytest.mark.soak
def test_a_batch_without_weight_runs_eagerly() -> None:
    case = GraphCase()
    batches = case.make_batches()
    batches[2] = replace(batches[2], weight=torch.zeros(case.batch_size))
    expected, _, _ = train(case, is_captured=False, batches=batches)
    learned, reasons, num_replayed = train(case, is_captured=True, batches=batches)
    assert different_tensors(learned, expected) == [] and num_replayed == 3
    assert reasons == {FIRST: 1, "no finite positive weight": 1}


@pytest.mark.soak
def test_a_batch_of_several_sizes_is_rejected_as_in_an_eager_step() -> None:
    case, messages = GraphCase(), []
    batches = case.make_batches()
    ids = batches[2].sparse
    sizes = (case.batch_size - 1, case.batch_size + 1)
    batches[2] = replace(
        batches[2], sparse=KeyedJaggedTensor(ids.keys, ids.values, ids.lengths, ids.weights, batch_sizes=sizes)
    )
    for is_captured in (False, True):
        with emulated_gpu():
            training = GraphTraining(case, is_captured=is_captured)
            with pytest.raises(MesetaError) as raised:
                training.train(batches)
            messages.append(str(raised.value))
    assert messages[0] == messages[1] and training.graphs.eager_reasons["features of several batch sizes"] == 1


@pytest.mark.soak
def test_the_number_of_layouts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "MAX_GRAPHS", 2)
    case = GraphCase(lengths=((1, 1), (2, 2), (6, 6)), num_batches=6, is_weighted=False)
    expected, _, _ = train(case, is_captured=False)
    learned, reasons, num_replayed = train(case, is_captured=True)
    assert different_tensors(learned, expected) == []
    assert reasons == {FIRST: 2, "more than 2 layouts of batches": 2} and num_replayed == 2


# Loops


@pytest.mark.soak
def test_single_calls_replay_a_graph() -> None:
    """The first call creates moments, whose addresses the graph of the third call contains."""
    case = GraphCase(num_batches=5)
    states = []
    for is_captured in (False, True):
        with emulated_gpu():
            training = GraphTraining(case, is_captured=is_captured)
            losses = [training.pipeline(batch, lr_factor=0.5).loss for batch in case.make_batches()]
            states.append({**training.state(), "losses": torch.tensor(losses)})
    assert different_tensors(*states) == []
    assert training.graphs.eager_reasons == {FIRST: 2} and training.graphs.num_replayed == 3


def stop_dropout(training: GraphTraining) -> None:
    model: Any = training.pipeline.model
    model.bottom_mlp.eval()


def freeze_bottom(training: GraphTraining) -> None:
    model: Any = training.pipeline.model
    for parameter in model.bottom_mlp.parameters():
        parameter.requires_grad_(False)


def change_decay(training: GraphTraining) -> None:
    for group in training.pipeline.optimizer.param_groups:
        group["weight_decay"] = 0.5


def restore_moments(training: GraphTraining) -> None:
    optimizer = training.pipeline.optimizer
    state = optimizer.state_dict()
    moments = {index: {key: value.clone() for key, value in one.items()} for index, one in state["state"].items()}
    optimizer.load_state_dict({**state, "state": moments})


CHANGES = [(stop_dropout, freeze_bottom), (change_decay, restore_moments)]


@pytest.mark.soak
@pytest.mark.parametrize("changes", CHANGES)
def test_a_change_between_loops_is_captured_again(changes: Sequence[Callable[[GraphTraining], None]]) -> None:
    """The first loop creates the moments, whose addresses the graph of the second loop contains."""
    case = GraphCase(layers=REGULARIZED, num_batches=3 + 2 * len(changes))
    batches, states = case.make_batches(), []
    for is_captured in (False, True):
        with emulated_gpu():
            training = GraphTraining(case, is_captured=is_captured)
            training.train(batches[:1])
            training.train(batches[1:3])
            for number, change in enumerate(changes):
                change(training)
                training.train(batches[3 + 2 * number :][:2])
            states.append({**training.state(), **training.outputs()})
    assert different_tensors(*states) == []
    assert training.graphs.eager_reasons == {FIRST: 2 + len(changes)}
    assert training.graphs.num_replayed == 1 + len(changes)


@pytest.mark.soak
def test_an_error_in_the_first_step_leaves_no_graph() -> None:
    """The moments do not exist after it. A graph that created them would reset them in each replay."""
    case = GraphCase(num_batches=4)
    states = []
    for is_captured in (False, True):
        with emulated_gpu():
            training = GraphTraining(case, is_captured=is_captured)
            with pytest.raises(ZeroDivisionError):
                list(training.pipeline.steps(iter(case.make_batches()), schedule=lambda: 1 / 0))
            training.train(case.make_batches())
            states.append({**training.state(), **training.outputs()})
    assert different_tensors(*states) == []
    assert training.graphs.eager_reasons == {FIRST: 2} and training.graphs.num_replayed == 3


def test_each_nth_replay_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "TIMED_STEP_INTERVAL", 3)
    case, num_timed = GraphCase(num_batches=8), list[int]()
    with emulated_gpu():
        training = GraphTraining(case)
        times = training.pipeline.stage_times
        add_replay = times.add_replay

        def add(captured: Any, num_steps: int) -> None:
            num_timed.append(num_steps)
            add_replay(captured, num_steps)

        monkeypatch.setattr(times, "add_replay", add)
        stages = []
        for _ in training.steps(case.make_batches()):
            stages.append(set(times.pop_means()))
    in_graph = {"input_dist", "lookup", "dense_forward", "backward", "table_update", "dense_update"}
    assert num_timed == [3, 3] and training.graphs.num_captured == 2
    assert [in_graph <= names for names in stages] == [True, False, False, True, False, False, True, False]
    assert all(in_graph.isdisjoint(names) for names in (stages[2], stages[4], stages[5]))


# Refused steps

REFUSED = diagonal(
    dense=["sgd", "adam", "adagrad"],
    fault=["id", "id and loss", "loss"],
    bad=[0, 1, 3],
    is_checkpoint_due=[True, False],
)
NUM_BEFORE = 4
BAD_SAMPLE, BAD_ID = 4, NUM_ROWS + 7


def spoil(batch: Batch, fault: str) -> None:
    """Plant a fault in `BAD_SAMPLE`."""
    if "id" in fault:
        batch.sparse.values[BAD_SAMPLE] = BAD_ID
    if "loss" in fault:
        batch.dense[BAD_SAMPLE, 1] = torch.nan


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_step_leaves_every_bit(case: dict[str, Any]) -> None:
    """The first feature has single ids, so that an id has the number of its sample."""
    bad, fault = case["bad"], case["fault"]
    graph_case = GraphCase(
        dense=case["dense"],
        rows=("sgd", "adam", "adagrad"),
        num_tables=3,
        layers=REGULARIZED,
        lengths=((1, 1),),
        num_batches=6,
    )
    batches, replaced = graph_case.make_batches(), graph_case.make_batches()
    spoil(replaced[bad], fault)
    with emulated_gpu():
        expected = GraphTraining(graph_case, is_captured=False)
        expected.train(batches[:bad])
        training, num_yielded = GraphTraining(graph_case), 0
        steps = training.steps(replaced[:NUM_BEFORE])
        with pytest.raises(SkippedUpdate) as raised:
            for _ in steps:
                num_yielded += 1
                if case["is_checkpoint_due"] and num_yielded == bad + 1:
                    training.pipeline.synchronize()
        steps.close()
        message = f"id {BAD_ID} from feature 'f0', sample {BAD_SAMPLE}, is outside" if "id" in fault else "loss is nan"
        assert message in str(raised.value) and isinstance(raised.value, LateNonFiniteLoss) == (fault == "loss")
        assert num_yielded == min(bad + 1, NUM_BEFORE) and training.pipeline.model.embeddings.step == bad
        assert training.pipeline.batch is replaced[bad]
        assert different_tensors(training.state(), expected.state()) == []
        before = training.graphs.num_replayed
        for one in (expected, training):
            one.results.clear()
            one.train(batches[NUM_BEFORE:])
        assert different_tensors(training.state(), expected.state()) == []
        # The first votes are those of the step before the loop.
        assert set(different_tensors(training.outputs(), expected.outputs())) <= {"votes 0"}
        assert (training.graphs.num_replayed - before == 1) == (case["dense"] != "adagrad")
