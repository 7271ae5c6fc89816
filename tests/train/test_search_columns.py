"""Share of planted noise columns that a search leaves out, and of useful columns that it keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meseta.comm import World
from meseta.config import validate_document
from meseta.data import Dataset, PrepareOptions
from meseta.data.prepare import prepare
from meseta.train.interop.default_settings import choose_settings, find_free_keys
from meseta.train.search.candidates import SEARCHED_KEYS
from meseta.train.search.search import search_settings

NUM_LOGS, NUM_ROWS = 12, 10_000


def write_log(folder: Path, seed: int) -> tuple[Dataset, set[str], set[str]]:
    """Return (dataset, useful columns, noise columns). Effects have standard deviations of 0.15 to 0.8 in the logit."""
    draw = np.random.default_rng([seed, 5])
    logits, useful, noise = np.full(NUM_ROWS, -1.0), {}, {}
    for num_ids in (4, 30, 300, 1500):
        ids = draw.integers(0, num_ids, NUM_ROWS)
        logits += draw.normal(0, draw.uniform(0.25, 0.8), num_ids)[ids]
        useful[f"useful_{num_ids}"] = [f"a{number}" for number in ids]
    for place in range(3):
        values = draw.normal(0, 1, NUM_ROWS)
        logits += draw.uniform(0.15, 0.6) * (values if place else np.abs(values))
        useful[f"number_{place}"] = np.exp(values) if place == 1 else values
    for num_ids in (5, 40, 800, NUM_ROWS // 2):
        noise[f"noise_{num_ids}"] = [f"a{number}" for number in draw.integers(0, num_ids, NUM_ROWS)]
    noise |= {"noise_normal": draw.normal(0, 1, NUM_ROWS), "noise_price": draw.lognormal(0, 1, NUM_ROWS)}
    noise["noise_tags"] = pa.array(draw.integers(0, 50, (NUM_ROWS, 3)).tolist(), pa.list_(pa.int64()))
    label = (draw.random(NUM_ROWS) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"label": label, **useful, **noise}), folder / "log.parquet")
    sparse = [name for name in (*useful, *noise) if name.split("_")[1].isdigit() and not name.startswith("number")]
    sources = [str(folder / "log.parquet")]
    options = PrepareOptions(sources=sources, out=folder / "data", sparse=[*sparse, "noise_tags"], valid_fraction=0.1)
    return prepare(options), set(useful), set(noise)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_noise_is_left_out_and_useful_columns_are_kept(tmp_path: Path) -> None:
    num_left_out, num_kept, num_noise, num_useful = 0, 0, 0, 0
    for seed in range(NUM_LOGS):
        dataset, useful, noise = write_log(tmp_path / str(seed), seed)
        document = {"run_dir": str(tmp_path / f"run-{seed}"), "data": {"dir": str(dataset.dir)}, "num_threads": 1}
        document["train"] = {"batch_size": 256, "search_budget": 2.5}
        free = find_free_keys(document, SEARCHED_KEYS)
        choose_settings(document, dataset)
        config = search_settings(validate_document(document), dataset, free, World.single())
        left_out = set(config.data.without)
        num_left_out, num_noise = num_left_out + len(noise & left_out), num_noise + len(noise)
        num_kept, num_useful = num_kept + len(useful - left_out), num_useful + len(useful)
    assert num_left_out >= 0.9 * num_noise
    assert num_kept >= 0.98 * num_useful
