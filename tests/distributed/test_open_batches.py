"""Several batches in context have the bits of one after the other, and a batch used wrongly raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.embedding.batch_context import OutOfRangeIds
from meseta.models import DLRM, MLPOptions
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, Plan, TableSpec

from .pool import RankPool
from .scenario import samples_of

Ranks = Callable[[int], RankPool]
DIM, ROWS = 32, (6, 30, 11, 4)
SLICES = {1: ((8,), (8,)), 2: ((5, 3), (2, 6)), 4: ((5, 0, 2, 1), (1, 3, 0, 4))}
"""Samples of each rank, by number of ranks, of the first batch and of the second."""


def make_model(optimizer: str = "frozen", dense: str = "replicated") -> Any:
    lr = {} if optimizer == "frozen" else {"lr": 0.1}
    tables = [
        TableSpec(name=f"t{n}", num_embeddings=rows, embedding_dim=DIM, optimizer=OptimizerSpec(name=optimizer, **lr))
        for n, rows in enumerate(ROWS)
    ]
    features = [
        FeatureSpec(name=f"f{n}", table=f"t{n}", pooling="mean" if n == 2 else "sum", weighted=n == 1, id_policy="drop")
        for n in range(len(ROWS))
    ]
    options = MLPOptions(dropout=0.3, batch_norm=True, seed=5)
    collection = EmbeddingBagCollection(tables, features, seed=3)
    model = DLRM(collection, num_dense=2, bottom_mlp=(8, DIM), top_mlp=(16, 8), options=options, seed=1)
    schemes = ["data_parallel", "table_wise", "column_wise", "row_wise"]
    size = World.current().size
    document = {"devices_per_host": size, "tables": {t.name: s for t, s in zip(tables, schemes, strict=True)}}
    plan = None if size == 1 else Plan.from_dict(document, tables, size)
    return shard(model, plan, world=World.current(), dense=dense)


def local_batch(number: int) -> Batch:
    """Return this rank's slice of a global batch. Some ids are out of range."""
    world, size = World.current(), 8
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (len(ROWS), size), generator=draw)
    ids = [torch.randint(0, rows + 2, (int(n.sum()),), generator=draw) for rows, n in zip(ROWS, lengths, strict=True)]
    sizes = SLICES[world.size][number]
    first = sum(sizes[: world.rank])
    local = slice(first, first + sizes[world.rank])
    whole = KeyedJaggedTensor(
        keys=tuple(f"f{n}" for n in range(len(ROWS))),
        values=torch.cat(ids),
        lengths=lengths.reshape(-1),
        weights=torch.rand(int(lengths.sum()), generator=draw),
    )
    return Batch(
        dense=torch.randn(size, 2, generator=draw)[local],
        sparse=samples_of(whole, local),
        label=torch.randint(0, 2, (size,), generator=draw).float()[local],
    )


def backward(model: Any, logits: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Return the dense gradients of the mean loss of a batch."""
    model.zero_grad(set_to_none=True)
    binary_cross_entropy_with_logits(logits, batch.label).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [getattr(grad, "full_tensor", lambda grad=grad: grad)().clone() for grad in grads]


def one_after_the_other(dense: str) -> dict[str, Any]:
    model, batches = make_model(dense=dense), [local_batch(0), local_batch(1)]
    logits, gradients = [], []
    for batch in batches:
        logits.append(model(batch.dense, batch.sparse))
        gradients.append(backward(model, logits[-1], batch))
    return result_of(model, logits, gradients)


def both_open(dense: str, between: str, hold: bool) -> dict[str, Any]:
    """Run every stage of both batches before the next stage of any. With `hold` the backward passes run with their
    batch active; otherwise autograd alone identifies the batch."""
    model, batches = make_model(dense=dense), [local_batch(0), local_batch(1)]
    embeddings = model.embeddings
    contexts = [embeddings.start_input_dist(batch.sparse, step=step) for step, batch in enumerate(batches)]
    for context in contexts:
        embeddings.input_dist(context)
    pooled = [embeddings.output_dist(context).pooled.values for context in contexts]
    logits = []
    for context, batch, bags in zip(contexts, batches, pooled, strict=True):
        with embeddings.active_batch(context):
            logits.append(model.score(batch.dense, bags))
    if between == "evaluation":
        evaluate(model, batches[1])
    gradients = []
    for context, batch, scores in zip(contexts, batches, logits, strict=True):
        with embeddings.active_batch(context) if hold else nullcontext():
            gradients.append(backward(model, scores, batch))
        if between == "evaluation":
            evaluate(model, batches[0])
    return result_of(model, logits, gradients)


def evaluate(model: Any, batch: Batch) -> None:
    model.eval()
    with torch.no_grad():
        context = model.embeddings.start_input_dist(batch.sparse, out_of_range_ids=OutOfRangeIds())
        model.score(batch.dense, model.embeddings(model.embeddings.input_dist(context)).pooled.values)
    model.train()


def result_of(model: Any, logits: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> dict[str, Any]:
    assert model.embeddings.step == 2 and model.embeddings.batch_slice.num_samples == 8
    return {
        "logits": [scores.detach() for scores in logits],
        "gradients": gradients,
        "outside": model.embeddings.num_out_of_range,
        "buffers": [buffer.clone() for buffer in model.buffers()],
    }


IN_MAKE_TEST = ((1, "nothing"), (1, "evaluation"), (4, "evaluation"))


def equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(got, expected)
    return all(equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("hold", [True, False], ids=["active", "by autograd"])
@pytest.mark.parametrize(
    ("size", "between"),
    [
        pytest.param(size, between, marks=[] if (size, between) in IN_MAKE_TEST else pytest.mark.soak)
        for size in (1, 2, 4)
        for between in ("nothing", "evaluation")
    ],
)
def test_two_open_batches_have_the_bits_of_one_after_the_other(
    ranks: Ranks, size: int, hold: bool, between: str
) -> None:
    alone = ranks(size).run(one_after_the_other, "replicated")
    for got, expected in zip(ranks(size).run(both_open, "replicated", between, hold), alone, strict=True):
        for what, value in expected.items():
            assert equal(got[what], value), what
        assert expected["outside"].sum() > 0
    # Gradients of the batches differ, so that a swap would be noticed.
    assert not equal(alone[0]["gradients"][0], alone[0]["gradients"][1])


def test_sharded_dense_parts_use_the_active_batch(ranks: Ranks) -> None:
    for got, expected in zip(
        ranks(2).run(both_open, "fsdp", "evaluation", True), ranks(2).run(one_after_the_other, "fsdp"), strict=True
    ):
        assert equal(got["logits"], expected["logits"]) and equal(got["gradients"], expected["gradients"])


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(MesetaError) as caught:
        call()
    return str(caught.value)


def sharded_and_not_active() -> str:
    return message_of(lambda: both_open("fsdp", "nothing", False))


def test_gradients_weighted_by_another_batch_are_rejected(ranks: Ranks) -> None:
    """Sharded layers reduce their gradients before autograd reaches the tables of the batch."""
    for text in ranks(2).run(sharded_and_not_active):
        assert text == (
            "a backward pass reached a batch of [5, 3] samples per rank after it weighted dense gradients for [2, 6]; "
            "run one backward pass per batch, each in embeddings.active_batch(flight)"
        )


def good_step(model: Any) -> float:
    """Run a step that would hang or break if a collective were still in context."""
    batch = local_batch(1)
    loss = binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.label)
    loss.backward()
    return float(loss.detach())


def wrong_uses() -> tuple[list[str], float]:
    """Return the errors of stages entered twice or too early, and the loss of a step after them."""
    model, ids = make_model("sgd"), local_batch(0).sparse
    embeddings = model.embeddings
    context = embeddings.start_input_dist(ids)
    texts = [message_of(lambda: embeddings.output_dist(context))]
    embeddings.input_dist(context)
    texts.append(message_of(lambda: embeddings.input_dist(context)))
    loss = embeddings.output_dist(context).pooled.values.sum()
    texts.append(message_of(lambda: embeddings(context)))
    loss.backward(retain_graph=True)
    texts.append(message_of(loss.backward))
    assert embeddings.step == 1
    return texts, good_step(model)


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_goes_through_each_stage_once(ranks: Ranks, size: int) -> None:
    message = "a batch in stage '{}' cannot enter stage '{}', which follows stage '{}'; {}"
    expected = [
        message.format("started", "finished", "looked up", "call input_dist next"),
        message.format("exchanged", "exchanged", "started", "call lookup, then output_dist"),
        message.format("finished", "finished", "looked up", "run its backward pass next, or drop the batch"),
        message.format("used", "used", "finished", "start another of the same ids"),
    ]
    for texts, loss in ranks(size).run(wrong_uses):
        assert texts == expected and 0 < loss < 10


def other_order() -> tuple[list[str], float]:
    """Return the errors if rank 1 starts the second batch first."""
    model = make_model("sgd")
    embeddings, rank = model.embeddings, model.embeddings.world.rank
    steps = (0, 1) if rank == 0 else (1, 0)
    contexts = [embeddings.start_input_dist(local_batch(step).sparse, step=step) for step in steps]
    texts = [message_of(lambda context=context: embeddings.input_dist(context)) for context in contexts]
    texts.append(message_of(lambda: embeddings.output_dist(contexts[0])))
    assert embeddings.num_out_of_range is None and embeddings.step == 0
    return texts, good_step(model)


def test_ranks_that_start_batches_in_another_order_raise(ranks: Ranks) -> None:
    diverged = (
        "rank 1 is at another batch than rank 0; start the same batches on all ranks in the same order, and run their "
        "stages in the same order"
    )
    for texts, loss in ranks(2).run(other_order):
        assert texts[:2] == [diverged, diverged] and 0 < loss < 10
        assert texts[2].startswith("a batch in stage 'dropped' cannot enter stage 'finished'")


def other_order_of_ends() -> tuple[list[str], float]:
    """Return the errors if rank 1 finishes the second batch first."""
    model = make_model("sgd")
    embeddings, rank = model.embeddings, model.embeddings.world.rank
    contexts = [embeddings.start_input_dist(local_batch(step).sparse, step=step) for step in (0, 1)]
    for context in contexts:
        embeddings.input_dist(context)
    texts = [
        message_of(lambda context=context: embeddings.output_dist(context)) for context in contexts[:: 1 - 2 * rank]
    ]
    texts.append(message_of(lambda: embeddings.output_dist(contexts[0])))
    assert embeddings.step == 0
    return texts, good_step(model)


def test_ranks_that_finish_batches_in_another_order_raise(ranks: Ranks) -> None:
    for rank, (texts, loss) in enumerate(ranks(2).run(other_order_of_ends)):
        for text in texts[:2]:
            assert text.startswith(f"rank {rank} is at 'embeddings' of batch ") and "of tables t0, t1" in text
            assert f"with rank {1 - rank}, which is at 'embeddings' of batch " in text and 0 < loss < 10
        assert texts[2].startswith("a batch in stage 'dropped' cannot enter stage 'finished'")


def refused_on_one() -> tuple[str, str, float]:
    """Return the errors if rank 1's second batch lacks a feature. The first batch, already in context, completes."""
    model = make_model("sgd")
    embeddings, rank = model.embeddings, model.embeddings.world.rank
    good, bad = local_batch(0), KeyedJaggedTensor.from_lists({"f0": [[1]]})
    first = embeddings.start_input_dist(good.sparse)
    second = embeddings.start_input_dist(good.sparse if rank == 0 else bad)
    embeddings.input_dist(first)
    text = message_of(lambda: embeddings.input_dist(second))
    with embeddings.active_batch(first):
        loss = binary_cross_entropy_with_logits(
            model.score(good.dense, embeddings.output_dist(first).pooled.values), good.label
        )
        loss.backward()
    return text, message_of(lambda: embeddings.output_dist(second)), good_step(model)


def test_a_rejected_batch_is_dropped_on_all_ranks_and_others_continue(ranks: Ranks) -> None:
    for text, dropped, loss in ranks(2).run(refused_on_one):
        assert text.startswith("rank 1: KeyedJaggedTensor: no key 'f1'") and 0 < loss < 10
        assert dropped.endswith("its error was raised: start another")


def rates() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables after an update with a rate of the batch, and with one of the collection that is set between
    forward and backward."""
    tables = []
    for for_batch in (True, False):
        model = make_model("sgd")
        embeddings = model.embeddings
        context = embeddings.start_input_dist(local_batch(0).sparse, lr_factor=0.25 if for_batch else None)
        pooled = embeddings(embeddings.input_dist(context)).pooled.values
        embeddings.lr_factor = 7.0 if for_batch else 0.25
        pooled.square().sum().backward()
        tables.append(torch.cat([shard.weight.reshape(-1) for shard in embeddings.shards]))
    return tables[0], tables[1]


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_has_the_rate_of_its_start_or_of_its_update(ranks: Ranks, size: int) -> None:
    for by_batch, by_collection in ranks(size).run(rates):
        assert torch.equal(by_batch, by_collection)
