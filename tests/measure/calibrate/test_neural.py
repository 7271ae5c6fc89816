"""Networks learn effects that constants do not express, agree in numpy and torch, and are stored in a cost model."""

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
    """Return times of lookups that no sum of constants gives, and times of updates that are noise around a sum. A
    lookup takes the longer of two resources, one of which is six times as slow above some work."""
    model, random, timings = documented_cost_model("cpu"), np.random.default_rng(0), []
    for seed in range(number):
        task = random_combination(seed, 1e9)
        pieces = tuple((n, (0, table.num_rows), (0, table.dim)) for n, table in enumerate(task.tables))
        untimed = ShardTimings(task, pieces, 1.0, 1.0)
        loads = rank_loads(untimed, model.cache.cache_bytes)
        lookup, update = (float(part.sum()) for part in operator_seconds(model, loads))
        timings.append(replace(untimed, lookup_s=lookup, update_s=update * float(np.exp(0.02 * random.normal()))))
    middle = float(np.median([timing.lookup_s for timing in timings]))
    return [
        replace(timing, lookup_s=1e-5 + max(timing.lookup_s, 6.0 * timing.lookup_s - 5.0 * middle))
        for timing in timings
    ]


def collectives() -> list[CollectiveTiming]:
    """Return times in which bytes above a megabyte take three times as long, as if a buffer were full. No latency and
    bandwidth express that."""
    timings = []
    for collective in random_collectives(2):
        most = float(np.maximum(collective.sent_intra_host, collective.received_intra_host).max())
        timings.append(CollectiveTiming(collective, 1e-4 + (most + 2.0 * max(most - 1e6, 0.0)) / 1e9))
    return timings


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
    messages: list[str] = []
    trained, compared = train_networks(
        measured, [held], collectives(), model, source="a test", log=lambda text, share: messages.append(text)
    )
    assert "network of lookup, 1 of 4" in messages and "network of 2 devices, 4 of 4" in messages
    return trained, dict(compared), measured


def test_networks_learn_effects_that_constants_do_not_express(learned: tuple) -> None:
    _, compared, _ = learned
    lookup, both = compared["lookup"], compared["collectives, 2 devices"]
    assert lookup.networks.error.median < 0.8 * lookup.constants.error.median
    assert lookup.networks.error.p95 < 0.6 * lookup.constants.error.p95
    assert lookup.networks.rank_correlation > 0.95 and lookup.networks.error.count == 18
    assert both.networks.error.median < 0.5 * both.constants.error.median
    # The constants already predict updates, and the networks add little error.
    assert compared["update"].networks.error.median < 0.03


def test_the_same_measurements_give_the_same_networks(learned: tuple) -> None:
    model, _, measured = learned
    both = [
        train_networks(measured[:20], [measured[:2]], [], model, source="a test", log=lambda text, share: None)
        for _ in range(2)
    ]
    assert both[0] == both[1]


def test_numpy_agrees_with_torch() -> None:
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
    # Inputs outside the range of the examples are clipped to it.
    outside = [(3.0 * inputs, shares, 3.0 * features) for inputs, shares, features in ranks]
    for case in (ranks, outside):
        padded = TrainingExamples.from_ranks(case, examples.target)
        inputs = [torch.tensor(part) for part in (padded.features, padded.shard_features, padded.shard_shares)]
        with torch.no_grad():
            expected = torch.stack([member.double()(*inputs) for member in members]).mean(0).numpy()
        owner = np.repeat(np.arange(40), sizes)
        pieces, shares = (np.concatenate([one[k] for one in case]) for k in (0, 1))
        corrections = rank_corrections(arrays, pieces, shares, owner, np.stack([features for _, _, features in case]))
        assert np.abs(expected).max() > 0.3
        assert np.abs(corrections - expected).max() < 1e-6


def test_the_order_of_shards_does_not_matter(learned: tuple) -> None:
    model, _, measured = learned
    largest = max(measured, key=lambda one: len(one.shards))
    examples = make_examples([largest, replace(largest, shards=largest.shards[::-1])], model, 0)
    assert examples.shard_features is not None and examples.shard_shares is not None and len(largest.shards) > 8
    network, one = model.neural.lookup, np.zeros(len(largest.shards), np.int64)
    both = [
        rank_corrections(
            network, examples.shard_features[k], examples.shard_shares[k], one, examples.features[k : k + 1]
        )[0]
        for k in (0, 1)
    ]
    assert both[0] == pytest.approx(both[1], abs=1e-12) and abs(both[0]) > 1e-3


def test_bytes_between_devices_are_those_of_the_collective() -> None:
    for collective in random_collectives(4):
        if not collective.reduces:
            matrix = np.array(pairwise_bytes(collective))
            assert not matrix.diagonal().any()
            assert matrix.sum(axis=1) == pytest.approx(collective.sent_intra_host, abs=4)
            assert matrix.sum(axis=0) == pytest.approx(collective.received_intra_host, abs=4)


def test_a_collective_is_not_corrected_for_other_links(learned: tuple) -> None:
    model, collective = learned[0], random_collectives(2)[1]
    topology = Topology(devices_per_host=2, inside=Link(bytes_per_s=1e9, latency_s=1e-5))
    assert collective_correction(model, topology, collective) == 1.0
    assert predict_collective(collective, model) != predict_collective(collective, replace(model, neural=None))
    assert predict_collective(random_collectives(4)[1], model) > 0.0  # there is no network of four


def test_a_perfect_prediction_scores_so() -> None:
    seconds = np.array([3.0, 1.0, 2.0])
    assert score_fit(seconds, seconds[None]).rank_correlation == pytest.approx(1.0)
    # Spearman's: 1 - 6 (sum of squared differences of ranks) / (n (n^2 - 1)).
    assert score_fit(seconds[::-1].copy(), seconds[None]).rank_correlation == pytest.approx(1 - 6 * 2 / (3 * 8))
    assert score_fit(seconds[:1], seconds[None, :1]).rank_correlation == 0.0
