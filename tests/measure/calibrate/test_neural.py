"""Networks learn what constants cannot say, are the same in numpy as in torch, and go into a cost model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from meseta.measure.calibrate import calibration
from meseta.measure.calibrate.calibration import ShardTimings, random_combination, rank_loads
from meseta.measure.calibrate.networks import CostNetwork, TrainingExamples, to_arrays
from meseta.measure.calibrate.neural import (
    CollectiveTiming,
    make_examples,
    pairwise_bytes,
    predict_collective,
    random_collectives,
    score_fit,
    train_networks,
)
from meseta.planner import documented_cost_model
from meseta.planner.cost.neural import collective_correction, rank_corrections
from meseta.planner.cost.operators import operator_seconds
from meseta.spec import CostModel, Link, Topology


def combinations(number: int) -> list[ShardTimings]:
    """Lookup takes the longer of two resources, one of which is six times as slow beyond some work, which no sum of
    constants gives; update is noise around a sum."""
    model, random, found = documented_cost_model("cpu"), np.random.default_rng(0), []
    for seed in range(number):
        task = random_combination(seed, 1e9)
        pieces = tuple((n, (0, table.num_rows), (0, table.dim)) for n, table in enumerate(task.tables))
        own = ShardTimings(task, pieces, 1.0, 1.0)
        loads = rank_loads(own, model.cache.cache_bytes)
        lookup, update = (float(part.sum()) for part in operator_seconds(model, loads))
        found.append(replace(own, lookup_s=lookup, update_s=update * float(np.exp(0.02 * random.normal()))))
    middle = float(np.median([own.lookup_s for own in found]))
    return [replace(own, lookup_s=1e-5 + max(own.lookup_s, 6.0 * own.lookup_s - 5.0 * middle)) for own in found]


def collectives() -> list[CollectiveTiming]:
    """Bytes beyond a megabyte go three times as slowly, as when a buffer is full; no latency and bandwidth say that."""
    found = []
    for own in random_collectives(2):
        most = float(np.maximum(own.sent_intra_host, own.received_intra_host).max())
        found.append(CollectiveTiming(own, 1e-4 + (most + 2.0 * max(most - 1e6, 0.0)) / 1e9))
    return found


@pytest.fixture(scope="module")
def learned() -> tuple[CostModel, dict[str, object], list[ShardTimings]]:
    measured = combinations(150)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "CACHE_BYTES_CANDIDATES", (documented_cost_model("cpu").cache.cache_bytes,))
        held = measured[calibration.HELD_OUT_STRIDE - 1 :: calibration.HELD_OUT_STRIDE]
        lookup, update, cache, _ = calibration.fit_operators(measured, [held], "a test")
    model = replace(documented_cost_model("cpu"), lookup=lookup, update=update, cache=cache)
    link = Link(latency_s=1e-4, bytes_per_s=6e8)
    model = replace(model, exchange=replace(model.exchange, inside_all_to_all=link, inside_all_reduce=link))
    told: list[str] = []
    found, compared = train_networks(
        measured, [held], collectives(), model, source="a test", log=lambda text, share: told.append(text)
    )
    assert "network of lookup, 1 of 4" in told and "network of 2 devices, 4 of 4" in told
    return found, dict(compared), measured


def test_networks_learn_what_no_sum_of_constants_gives(learned: tuple) -> None:
    _, compared, _ = learned
    lookup, both = compared["lookup"], compared["collectives, 2 devices"]
    assert lookup.networks.error.median < 0.8 * lookup.constants.error.median
    assert lookup.networks.error.p95 < 0.6 * lookup.constants.error.p95
    assert lookup.networks.rank_correlation > 0.95 and lookup.networks.error.count == 18
    assert both.networks.error.median < 0.5 * both.constants.error.median
    # Nothing is to be learned of what the constants know already, and little is spoiled.
    assert compared["update"].networks.error.median < 0.03


def test_the_same_measurements_give_the_same_networks(learned: tuple) -> None:
    model, _, measured = learned
    both = [
        train_networks(measured[:20], [measured[:2]], [], model, source="a test", log=lambda text, share: None)
        for _ in range(2)
    ]
    assert both[0] == both[1]


def test_numpy_gives_what_torch_does() -> None:
    random = np.random.default_rng(1)
    sizes = random.integers(1, 9, 40)
    ranks = []
    for size in sizes:
        shares = random.random(size)
        ranks.append((random.normal(size=(size, 19)), shares / shares.sum(), random.normal(size=2)))
    examples = TrainingExamples.from_ranks(ranks, 9.0 * random.normal(size=40))
    members = []
    for seed in range(3):
        torch.manual_seed(seed)
        members.append(CostNetwork(examples))
        torch.nn.init.normal_(members[-1].head[2].weight)
    arrays = to_arrays(members, examples.target)
    far = [(3.0 * inputs, shares, 3.0 * told) for inputs, shares, told in ranks]  # clipped to what was seen
    for own in (ranks, far):
        padded = TrainingExamples.from_ranks(own, examples.target)
        inputs = [torch.tensor(part) for part in (padded.features, padded.shard_features, padded.shard_shares)]
        with torch.no_grad():
            expected = torch.stack([member.double()(*inputs) for member in members]).mean(0).numpy()
        owner = np.repeat(np.arange(40), sizes)
        pieces, shares = (np.concatenate([one[k] for one in own]) for k in (0, 1))
        found = rank_corrections(arrays, pieces, shares, owner, np.stack([told for _, _, told in own]))
        assert np.abs(expected).max() > 0.3
        assert np.abs(found - expected).max() < 1e-6


def test_the_order_of_pieces_is_nothing(learned: tuple) -> None:
    model, _, measured = learned
    own = max(measured, key=lambda one: len(one.shards))
    examples = make_examples([own, replace(own, shards=own.shards[::-1])], model, 0)
    assert examples.shard_features is not None and examples.shard_shares is not None and len(own.shards) > 8
    network, one = model.neural.lookup, np.zeros(len(own.shards), np.int64)
    both = [
        rank_corrections(
            network, examples.shard_features[k], examples.shard_shares[k], one, examples.features[k : k + 1]
        )[0]
        for k in (0, 1)
    ]
    assert both[0] == pytest.approx(both[1], abs=1e-12) and abs(both[0]) > 1e-3


def test_bytes_between_devices_are_those_of_the_collective() -> None:
    for own in random_collectives(4):
        if not own.reduces:
            matrix = np.array(pairwise_bytes(own))
            assert not matrix.diagonal().any()
            assert matrix.sum(axis=1) == pytest.approx(own.sent_intra_host, abs=4)
            assert matrix.sum(axis=0) == pytest.approx(own.received_intra_host, abs=4)


def test_a_collective_keeps_to_links_of_the_topology(learned: tuple) -> None:
    model, own = learned[0], random_collectives(2)[1]
    given = Topology(devices_per_host=2, inside=Link(bytes_per_s=1e9, latency_s=1e-5))
    assert collective_correction(model, given, own) == 1.0
    assert predict_collective(own, model) != predict_collective(own, replace(model, neural=None))
    assert predict_collective(random_collectives(4)[1], model) > 0.0  # no network of four


def test_a_perfect_prediction_scores_so() -> None:
    seconds = np.array([3.0, 1.0, 2.0])
    assert score_fit(seconds, seconds[None]).rank_correlation == pytest.approx(1.0)
    # Spearman's: 1 - 6 (sum of squared differences of ranks) / (n (n^2 - 1)).
    assert score_fit(seconds[::-1].copy(), seconds[None]).rank_correlation == pytest.approx(1 - 6 * 2 / (3 * 8))
    assert score_fit(seconds[:1], seconds[None, :1]).rank_correlation == 0.0
