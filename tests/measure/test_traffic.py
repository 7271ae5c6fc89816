"""Ids of benchmarks against closed forms."""

from dataclasses import asdict, replace
from json import dumps, loads

import numpy as np
import pytest

from meseta.measure.synthetic_batches import (
    DlrmWorkload,
    LookupWorkload,
    make_id_batches,
    make_training_batches,
    permute_rows,
    uniform_ids,
    zipf_ids,
)

TRAFFIC = LookupWorkload(name="t", rows=(1, 7, 1000), dims=(4, 8, 16), batch_size=6, bag_size=3, id_distribution="zipf")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 1000, 2_654_435_761])
def test_scatter_is_a_bijection(num_rows: int) -> None:
    ranks = np.arange(min(num_rows, 1000))
    scattered = permute_rows(ranks, num_rows)
    assert np.unique(scattered).size == ranks.size
    assert scattered.min() >= 0 and scattered.max() < num_rows


def test_zipf_has_the_shares_of_its_law() -> None:
    num_rows, count = 1000, 400_000
    ids = zipf_ids(np.random.default_rng(0), count, num_rows)
    counts = np.bincount(ids, minlength=num_rows)[permute_rows(np.arange(num_rows), num_rows)]
    # The share of rank k is the integral of x^-1.05 over [k + 1, k + 2), divided by that over [1, 1001).
    edges = np.arange(1.0, num_rows + 2) ** -0.05
    shares = np.diff(edges) / (edges[-1] - edges[0])
    error = np.abs(counts / count - shares)
    assert (error < 6 * np.sqrt(shares / count)).all()


def test_uniform_ids_are_uniform() -> None:
    counts = np.bincount(uniform_ids(np.random.default_rng(0), 100_000, 10), minlength=10)
    assert np.abs(counts - 10_000).max() < 6 * np.sqrt(10_000)


@pytest.mark.parametrize("ragged", [False, True])
def test_batches_fit_their_tables(ragged: bool) -> None:
    traffic = replace(TRAFFIC, ragged=ragged, weighted=ragged)
    for batch in make_id_batches(traffic, 3):
        assert batch.lengths.shape == (18,) and batch.offsets[-1] == batch.ids.size
        assert batch.lengths.min() >= 0 and batch.lengths.max() <= 6
        assert ragged or (batch.lengths == 3).all()
        assert (batch.weights is not None) == ragged
        for f, rows in enumerate(traffic.rows):
            ids = batch.ids[batch.offsets[6 * f] : batch.offsets[6 * f + 6]]
            assert not ids.size or (ids.min() >= 0 and ids.max() < rows)


def test_every_process_makes_the_same_batches() -> None:
    again = LookupWorkload.from_json(loads(dumps(asdict(TRAFFIC))))
    assert again == TRAFFIC
    for a, b in zip(make_id_batches(TRAFFIC, 2), make_id_batches(again, 2), strict=True):
        assert (a.ids == b.ids).all()


def test_ranks_share_the_samples() -> None:
    training = DlrmWorkload(lookups=TRAFFIC, bottom_mlp=(4,), top_mlp=(4,), num_dense=2)
    assert DlrmWorkload.from_json(loads(dumps(asdict(training)))) == training
    whole, parts = (
        make_training_batches(training)[0],
        [make_training_batches(training, rank, 2)[0] for rank in range(2)],
    )
    assert whole.ids.shape == (3, 6, 3) and whole.dense.shape == (6, 2)
    assert (np.concatenate([part.ids for part in parts], axis=1) == whole.ids).all()
    assert (np.concatenate([part.label for part in parts]) == whole.label).all()


def test_the_number_of_batches_is_bounded() -> None:
    assert TRAFFIC.num_batches == 64
    assert replace(TRAFFIC, batch_size=10**6, bag_size=100).num_batches == 4
