"""Runs whose rows come from readers: the same weights as from files, and refusals."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bad_input.commands import Ended, run_here
from data.new_files import NUM_TRAIN, columns, part, without, write_csv
from data.service.tier import SlowFiles, Tier, running
from distributed.pool import RankPool
from meseta.comm import World
from meseta.config import RunConfig
from meseta.data import Dataset
from meseta.data.dataset import part_files
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.service import dispatcher_client
from meseta.data.service.dispatcher_client import DispatcherClient
from meseta.data.service.keys import CLIENT_FILE, KEY_FILE, TOKEN_FILE, TlsServerKeys
from meseta.data.service.messages import TableRequest
from meseta.data.service.server.key_folder import make_keys
from meseta.embedding import EmbeddingBagCollection
from meseta.spec import MesetaError
from meseta.telemetry.span import NO_READER
from meseta.train.setup.build import make_reader
from meseta.train.setup.memory import run_bytes
from meseta.train.setup.meta_model import make_meta_model
from meseta.train.setup.source import make_row_source
from meseta.train.setup.specs import make_specs
from meseta.train.trained_model import load_trained
from meseta.train.trainer import Trainer
from meseta.train.verify.steps import run_steps
from sampling import case_id, product
from small_run import final_checksum, metrics, settings, tiny_with_valid, train, without_times, write_config

COMMON = {"train__epochs": 2, "train__eval_every_steps": 9, "checkpoint__every_steps": 5}
TWO_RANKS = {"tables": {"user": "row_wise", "*": "table_wise"}}
"""Plan of runs on two ranks. Its search would take longer than the run."""


@pytest.fixture(scope="module")
def data(tiny: Path) -> Path:
    """Return the tiny data with a validation split."""
    return tiny_with_valid(tiny)


@pytest.fixture(scope="module")
def tier(data: Path) -> Iterator[Tier]:
    with running({"click": data}, 2) as tier:
        yield tier


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def served(tier: Tier, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return a config like `settings`, but with rows from the tier."""
    document = settings(run_dir, run_dir, **{**COMMON, **changes})
    document["data"] |= {"dir": None, "service": {"url": tier.dispatcher.url, "reader_timeout_s": 20.0}}
    return document


def local(data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return settings(data, run_dir, **{**COMMON, **changes})


def train_on(num_ranks: int, two_ranks: RankPool, document: dict[str, Any]) -> None:
    if num_ranks == 1:
        train(document)
    else:
        two_ranks.run(train, {**document, "plan": TWO_RANKS})


# Same weights


ORDERS = product(num_ranks=[1, 2], order=["served", "served, local, served", "local, served, local"])
FIRST = ({"num_ranks": 1, "order": "served"}, {"num_ranks": 2, "order": "served, local, served"})


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case_id(case), marks=() if case in FIRST else pytest.mark.soak) for case in ORDERS],
)
def test_a_run_ends_with_the_same_bits(
    tier: Tier, data: Path, two_ranks: RankPool, tmp_path: Path, case: dict[str, Any]
) -> None:
    """An epoch has 10 or 11 steps, so steps 8 and 12 are in the middle of one."""
    num_ranks, order = case["num_ranks"], case["order"]
    expected, run = tmp_path / "expected", tmp_path / "run"
    train_on(num_ranks, two_ranks, local(data, expected, train__max_steps=14))
    make = {"served": lambda **c: served(tier, run, **c), "local": lambda **c: local(data, run, **c)}
    sources = order.split(", ")
    for source, stop in zip(sources, (8, 12, 14)[-len(sources) :], strict=True):
        train_on(num_ranks, two_ranks, make[source](train__max_steps=stop))
    assert final_checksum(run) == final_checksum(expected)
    lines = {line["step"]: line for line in without_times(metrics(run)) if line["kind"] == "train"}
    assert list(lines.values()) == [line for line in without_times(metrics(expected)) if line["kind"] == "train"]
    before, now = Dataset.load(expected), Dataset.load(run)
    assert now.to_dict() == before.to_dict()
    assert (run / "touched.parquet").read_bytes() == (data / "touched.parquet").read_bytes()


def test_keys_change_no_bit_and_appear_in_no_output(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys, short = tmp_path / "keys", {"train__max_steps": 6}
    make_keys(keys, ["127.0.0.1"], days=2)
    train(local(data, tmp_path / "expected", **short))
    with running({"click": data}, 2, TlsServerKeys.load(keys)) as tier:
        document = served(tier, tmp_path / "run", **short)
        document["data"]["service"]["keys"] = str(keys)
        train(document)
    assert final_checksum(tmp_path / "run") == final_checksum(tmp_path / "expected")
    assert f"keys: {keys}" in (tmp_path / "run/config.yaml").read_text()
    secrets = [(keys / name).read_bytes().strip() for name in (TOKEN_FILE, CLIENT_FILE, KEY_FILE)]
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    for text in (*written, *(stream.encode() for stream in capfd.readouterr())):
        assert not [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_waits_for_rows_are_reported(
    tier: Tier, two_ranks: RankPool, tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits are reported by reader and cause, as part of a stage, and for every rank at the end."""
    monkeypatch.setattr(part_files, "io", SlowFiles())
    run_dir = tmp_path / "run"
    short = {"data__prefetch_batches": 0, "train__log_every_steps": 5, "train__max_steps": 10}
    train_on(num_ranks, two_ranks, served(tier, run_dir, **short))
    lines = [line for line in metrics(run_dir) if "row_waits" in line]
    for line in lines:
        by_cause = [wait for waits in line["row_waits"].values() for wait in waits.values()]
        assert all(wait >= 0 for wait in by_cause) and sum(by_cause) <= line["stages_s"]["data"]
        assert set(line["row_waits"]) <= {NO_READER, *(reader.url for reader in tier.readers)}
    assert max(wait["storage_s"] for line in lines for wait in line["row_waits"].values()) > 0.001
    summary = json.loads((run_dir / "summary.json").read_text())
    assert len(summary["row_waits_by_rank"]) == num_ranks and all(summary["row_waits_by_rank"])
    assert "rows were waited for" in (run_dir / "report.html").read_text()


def test_waits_for_rows_of_files_are_not_reported(data: Path, tmp_path: Path) -> None:
    train(local(data, tmp_path / "local", train__max_steps=8))
    assert not any("row_waits" in line for line in metrics(tmp_path / "local"))
    assert "row_waits_by_rank" not in json.loads((tmp_path / "local/summary.json").read_text())


def test_rows_are_selected_and_counted_identically(tier: Tier, data: Path, tmp_path: Path) -> None:
    chosen = {"data__filter": "age >= 30", "data__negative_keep": 0.5, "data__last_batch": "drop", "train__epochs": 1}
    summaries = [
        train(local(data, tmp_path / "expected", **chosen)),
        train(served(tier, tmp_path / "run", **chosen)),
    ]
    assert final_checksum(tmp_path / "run") == final_checksum(tmp_path / "expected")
    assert summaries[0]["excluded_rows"] == summaries[1]["excluded_rows"]
    assert summaries[0]["excluded_rows"]["by_filter"] > 100


@pytest.fixture(scope="module")
def run(tier: Tier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has ended, with rows from the tier."""
    folder = tmp_path_factory.mktemp("served") / "run"
    train(served(tier, folder, train__max_steps=6))
    return folder


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_every_split_is_evaluated_without_files(run: Path, data: Path, split: str) -> None:
    ended, expected = (run_here("eval", run, "--split", split, *more) for more in ([], ["--data", data]))
    assert ended.code == expected.code == 0, ended.err + expected.err
    assert ended.out == expected.out


def test_plan_and_plan_diff_query_the_dispatcher(tier: Tier, data: Path, tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text("devices_per_host: 2\ndevice: cpu\nhbm_bytes: 8000000000\n")
    outs = []
    for name, document in (("served", served(tier, tmp_path / "a")), ("local", local(data, tmp_path / "a"))):
        config, out = write_config(tmp_path / f"{name}.yaml", document), tmp_path / f"{name}.json"
        ended = run_here("plan", config, "--topology", tmp_path / "machine.yaml", "--out", out)
        assert ended.code == 0, ended.err
        ended = run_here("plan", "diff", out, out, config)
        assert ended.code == 0, ended.err
        outs.append((out.read_text(), ended.out.replace(name, "")))
    assert outs[0] == outs[1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_verified_steps_read_from_the_tier(tier: Tier, two_ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    """Each rank reads its slices, and whole batches as well, like `meseta verify`."""
    document = {**served(tier, tmp_path / "run"), "plan": TWO_RANKS}
    sizes = two_ranks.run(recorded, document) if num_ranks == 2 else [recorded(document)]
    assert all(one == [90] * 3 for one in sizes)


def recorded(document: dict[str, Any]) -> list[int]:
    """Return the numbers of samples of whole batches."""
    config, world = RunConfig.model_validate(document), World.current()
    return [
        step.batch.lengths.numel() // len(step.batch.keys)
        for step in run_steps(config, world, "training", 3, world.size)
    ]


# Attempts


def test_an_earlier_attempt_is_refused(tier: Tier, tmp_path: Path) -> None:
    document = served(tier, tmp_path / "run", train__max_steps=3)
    former, later = (Trainer(RunConfig.model_validate(document), World.single()) for _ in range(2))
    later.run()
    expected = final_checksum(tmp_path / "run")
    with pytest.raises(MesetaError, match=r"rank 0 belongs to an earlier attempt of run '.*run'"):
        former.run()
    shutil.rmtree(tmp_path / "run")
    train(document)
    assert final_checksum(tmp_path / "run") == expected


def test_refused_clients_do_not_disturb_a_run(tier: Tier, run: Path, tmp_path: Path) -> None:
    """The run is started a second time and evaluated while it is in progress."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    document = served(tier, folder, train__max_steps=8)
    running_trainer = Trainer(RunConfig.model_validate(document), World.single())
    with pytest.raises(MesetaError, match="is in use"):
        Trainer(RunConfig.model_validate(document), World.single())
    assert load_trained(folder, "valid", World.single()).reader.num_rows == 337
    running_trainer.run()
    train(served(tier, tmp_path / "whole", train__max_steps=8))
    assert final_checksum(folder) == final_checksum(tmp_path / "whole")


# New rows


def vocabularies(folder: Path) -> Path:
    """Prepare a dataset with vocabularies, and test.csv with other rows."""
    table = without(columns(), "tags", "importance")
    source = write_csv(folder / "train.csv", part(table, 0, NUM_TRAIN))
    write_csv(folder / "test.csv", part(table, NUM_TRAIN, 500))
    prepare(PrepareOptions(sources=[str(source)], out=folder / "data", test_fraction=0.2, vocabulary=True, min_count=2,
                           sparse=["shop", "city", "hour"], ignore=["when"]))  # fmt: skip
    return folder / "data"


def test_new_rows_are_predicted_without_the_data(tmp_path: Path) -> None:
    data = vocabularies(tmp_path)
    train(settings(data, tmp_path / "local", train__max_steps=4))
    with running({"click": data, "other": data}, 1) as tier:
        document = served(tier, tmp_path / "run", train__eval_every_steps=None, train__max_steps=3)
        document["data"]["service"]["dataset"] = "click"
        train(document)
        kept = sorted((tmp_path / "run/vocabulary").iterdir())
        assert [path.read_bytes() for path in kept] == [(data / "vocabulary" / p.name).read_bytes() for p in kept]
        assert len(kept) == 6 and sum("candidates" in path.name for path in kept) == 3
        shutil.rmtree(data / "vocabulary")  # existing vocabularies are not fetched again
        train({**document, "train": {**document["train"], "max_steps": 4}})
    shutil.rmtree(data)
    results = {}
    for name in ("local", "run"):
        out = tmp_path / f"{name}.parquet"
        ended = run_here("predict", tmp_path / name, "--data", tmp_path / "test.csv", "--out", out)
        assert ended.code == 0, ended.err
        results[name] = pq.read_table(out), ended.out.replace(name, "")
    assert results["run"] == results["local"]
    assert "not seen" in results["run"][1] and results["run"][0].num_rows == 500 - NUM_TRAIN


def test_a_vocabulary_that_has_changed_is_refused(tmp_path: Path) -> None:
    data = vocabularies(tmp_path)
    with running({"click": data}, 1) as tier:
        path = data / "vocabulary/city.parquet"
        table = pq.read_table(path)
        pq.write_table(table.set_column(0, "value", [table["value"].to_pylist()[::-1]]), path)
        with pytest.raises(MesetaError, match="'city' from the dispatcher is not the one that its ids"):
            train(served(tier, tmp_path / "run", train__eval_every_steps=None))
    assert not list((tmp_path / "run").rglob(".*.tmp"))


@pytest.mark.parametrize(
    ("feature", "problem"),
    [("../../dataset.json", "has no vocabulary of a feature"), ("price", "has no vocabulary of a feature 'price'")],
)
def test_vocabularies_are_requested_by_feature(tier: Tier, feature: str, problem: str) -> None:
    dispatcher = DispatcherClient(tier.dispatcher.url)
    described = dispatcher.describe(None)
    with pytest.raises(MesetaError, match=problem):
        list(dispatcher.fetch_table(TableRequest(dataset="click", digest=described.digest, feature=feature)))
    with pytest.raises(MesetaError, match="has been prepared again since the run started"):
        list(dispatcher.fetch_table(TableRequest(dataset="click", digest="0" * 64, feature=None)))


def test_the_size_of_a_file_is_bounded(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_client, "MAX_TABLE_BYTES", 10)
    dispatcher = DispatcherClient(tier.dispatcher.url)
    digest = dispatcher.describe(None).digest
    with pytest.raises(MesetaError, match="sent a file of more than 10 bytes"):
        list(dispatcher.fetch_table(TableRequest(dataset="click", digest=digest, feature=None)))


# Refusals


def refused(ended: Ended, *words: str) -> None:
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert ended.code == 1 and ended.err.splitlines()[-1] == line
    for word in words:
        assert word in line


def test_predictions_of_a_split_need_its_files(run: Path, tier: Tier, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.parquet"
    ended = run_here("predict", run, "--out", out)
    refused(ended, f"the readers of {tier.dispatcher.url}", "pass their folder with --data DIR", "--data FILE")
    assert not out.exists()
    assert run_here("predict", run, "--out", out, "--data", data).code == 0


def test_a_dispatcher_that_does_not_run(tier: Tier, run: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    document = served(tier, tmp_path / "run")
    document["data"]["service"]["url"] = f"grpc://127.0.0.1:{port}"
    begin_s = time.monotonic()
    ended = run_here("train", write_config(tmp_path / "c.yaml", document))
    refused(ended, f"dispatcher grpc://127.0.0.1:{port} cannot be reached")
    assert time.monotonic() - begin_s < 8
    assert not (tmp_path / "run").exists()


def test_data_that_the_dispatcher_lacks(tier: Tier, tmp_path: Path) -> None:
    def config(**changes: Any) -> Path:
        return write_config(tmp_path / "c.yaml", served(tier, tmp_path / "run", **changes))

    refused(run_here("train", config(), "data.service.dataset=clik"), "no dataset 'clik'; did you mean 'click'?")
    refused(run_here("train", config(data__labels=["buy"])), "is not a label of dataset 'click at 127.0.0.1:")
    refused(run_here("train", config(data__filter="size > 3")), "size")
    refused(run_here("train", config(), "--data", "x.csv"), "--data 'x.csv' and data.service.url", "omit one of them")
    assert not (tmp_path / "run").exists()


def test_data_that_change_while_a_command_begins(tier: Tier, tmp_path: Path) -> None:
    config = RunConfig.model_validate(served(tier, tmp_path / "run"))
    dataset = make_row_source(config.data).dataset()
    assert make_reader(config, dataset, "test", World.single()).num_rows == 279
    with pytest.raises(MesetaError, match="was prepared again while this command ran"):
        make_reader(config, dataset.model_copy(update={"seed": 5}), "test", World.single())


# Memory


def test_memory_includes_the_buffers_of_a_client(tier: Tier, data: Path, tmp_path: Path) -> None:
    def reading(document: dict[str, Any], num_ranks: int, num_rows: int) -> int:
        config = RunConfig.model_validate(document)
        dataset = make_row_source(config.data).dataset()
        split = dataset.splits["train"].model_construct(num_rows=num_rows, num_positives=1.0, files=(), positives={})
        dataset = dataset.model_copy(update={"splits": {**dataset.splits, "train": split}})
        tables, features = make_specs(config, dataset)
        outline = make_meta_model(config, dataset, EmbeddingBagCollection(tables, features))
        return run_bytes(config, dataset, outline, num_ranks, 1, on_cpu=True).reading_bytes

    # A sample has a label, two dense values, three ids, and some tags.
    tags = Dataset.load(data).sparse[3].statistics.mean_pooling_factor
    sample_bytes = 4 * (1 + 2) + 8 * (3 + tags)
    large = {"data__shuffle_window_rows": 1_000_000, "pipeline__overlap": "off"}
    for num_ranks, batch_size in ((1, 90), (2, 45)):
        rows = 9 * 3 * 16_384 + 2 * batch_size
        num_bytes = reading(served(tier, tmp_path, **large), num_ranks, 10_000_000)
        assert num_bytes == int(rows * sample_bytes)
    num_bytes = reading(served(tier, tmp_path, **{**large, "data__shuffle_window_rows": 1000}), 2, 10_000_000)
    assert num_bytes == int((9 * 500 + 2 * 45) * sample_bytes)
    assert reading(local(data, tmp_path, **large), 1, 10_000_000) == int((3_000_000 + 2 * 90) * sample_bytes)
