"""One bad input of each kind, in the order of docs/errors.md: a function makes the input and returns the command."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from data.click_log import make_lines
from meseta.checkpoint.files import digest
from meseta.data import PrepareOptions
from meseta.data.prepare import prepare
from meseta.data.service.credentials import token_folders
from meseta.telemetry.rank_record import RECORD_BYTES, record_path
from small_run import settings, train, write_config

PART = "train/part-00000.parquet"


@dataclass(frozen=True)
class Place:
    """Folder of one test, and the data and run that the test may copy."""

    folder: Path
    tiny: Path
    """A prepared dataset."""
    finished: Path
    """A run over it, with a full checkpoint of step 4, which was pruned, and deltas of steps 8, 12 and 14."""

    def train(self, *overrides: str, **changes: Any) -> list[Any]:
        """Return `meseta train` over the dataset, or over its copy if `data` has made one."""
        copy = self.folder / "data"
        document = settings(copy if copy.exists() else self.tiny, self.folder / "run", **changes)
        return ["train", write_config(self.folder / "c.yaml", document), *overrides]

    def data(self) -> Path:
        return Path(shutil.copytree(self.tiny, self.folder / "data"))

    def recipe(self, name: str = "log.csv") -> Path:
        """Replace the dataset by a recipe, and return the raw file of the recipe."""
        source = self.folder / name
        text = "label,price,user\n" + "".join(f"{row % 2},{row},{row % 7}\n" for row in range(100))
        source.write_bytes(gzip.compress(text.encode()) if source.suffix == ".gz" else text.encode())
        prepare(PrepareOptions(sources=[str(source)], out=self.folder / "data", recipe_only=True))
        return source

    def run(self) -> Path:
        return Path(shutil.copytree(self.finished, self.folder / "run"))

    def prepare(self, name: str, content: bytes, *options: Any) -> list[Any]:
        """Return `meseta prepare` of one file."""
        (self.folder / name).write_bytes(content)
        return ["prepare", self.folder / name, "--out", self.folder / "out", *options]


def change_value(data: Path, column: str, row: int, value: Any, part: str = PART) -> None:
    table = pq.read_table(data / part)
    values = table[column].to_pylist()
    values[row] = value
    place = table.schema.get_field_index(column)
    array = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(place, column, array), data / part)


def change_description(data: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((data / "dataset.json").read_text())
    change(document)
    (data / "dataset.json").write_text(json.dumps(document))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CSV = "label,price,city\n" + "".join(f"{i % 2},{i}.5,c{i % 3}\n" for i in range(120))  # one bad row is under 1 %
TSV = "\n".join(make_lines(60)).encode()


def with_line(number: int, text: str) -> bytes:
    """Return the CSV file with another line at `number`, counted from 1."""
    lines = CSV.splitlines()
    lines[number - 1] = text
    return "\n".join(lines).encode()


def unknown_key(place: Place) -> list[Any]:
    return place.train("train.batchsize=4")


def ill_typed_value(place: Place) -> list[Any]:
    return place.train("train.batch_size=many")


def unknown_width(place: Place) -> list[Any]:
    return place.train("checkpoint.bits=5")


def number_too_long(place: Place) -> list[Any]:
    return place.train(f"seed=0x{'f' * 4000}")


def control_character_in_a_path(place: Place) -> list[Any]:
    return place.train('data.dir="a\\0b"')


def batch_too_large(place: Place) -> list[Any]:
    return place.train(f"train.batch_size={2**62}")


def initial_rows_too_large(place: Place) -> list[Any]:
    return place.train("embedding.dtype=float16", "embedding.init={kind: constant, scale: 1e5}")


def near_rows_too_large(place: Place) -> list[Any]:
    return place.train("plan={tables: {'*': {sharding: row_wise, tier: cached, cache_rows: 99999999999999999999}}}")


def bits_of_unknown_table(place: Place) -> list[Any]:
    return place.train("checkpoint.tables.usr.bits=4")


def no_file_of_bits(place: Place) -> list[Any]:
    return place.train(f"checkpoint.tables={place.folder / 'bits.yaml'}")


def bits_of_doubles(place: Place) -> list[Any]:
    return place.train("checkpoint.bits=auto", "embedding.dtype=float64")


def two_norms(place: Place) -> list[Any]:
    return place.train("train.clip_norm=1", "dense.clip_norm=1")


def pattern_of_no_parameter(place: Place) -> list[Any]:
    return place.train("dense.init={top_mlp.0.wight: {scale: 0.1}}")


def no_yaml(place: Place) -> list[Any]:
    command = place.train()
    command[1].write_text("run_dir: [")
    return command


def key_given_twice(place: Place) -> list[Any]:
    command = place.train()
    command[1].write_text(command[1].read_text() + "num_threads: 2\n")
    return command


def plan_of_other_tables(place: Place) -> list[Any]:
    return place.train("plan={tables: {usr: table_wise}}")


def plan_for_other_ranks(place: Place) -> list[Any]:
    return place.train("plan={num_ranks: 4, tables: {'*': row_wise}}")


def missing_column(place: Place) -> list[Any]:
    return place.prepare("log.csv", CSV.encode(), "--label", "clicked")


def unparsable_row(place: Place) -> list[Any]:
    return place.prepare("log.csv", with_line(41, "1,cheap,c1"), "--dense", "price")


def fields_missing(place: Place) -> list[Any]:
    return place.prepare("log.csv", with_line(41, "1,2.5"))


def label_outside(place: Place) -> list[Any]:
    return place.prepare("log.csv", with_line(41, "7,2.5,c1"))


def empty_file(place: Place) -> list[Any]:
    return place.prepare("log.csv", b"")


def header_alone(place: Place) -> list[Any]:
    return place.prepare("log.csv", b"label,price,city\n")


def too_many_columns(place: Place) -> list[Any]:
    header = ",".join(["label", *(f"column{number}" for number in range(13_000))])
    rows = "".join(f"{row % 2}{f',v{row}' * 13_000}\n" for row in range(3))
    return place.prepare("log.csv", f"{header}\n{rows}".encode())


def control_character_in_a_column(place: Place) -> list[Any]:
    return place.prepare("log.csv", b"label,a\x1bb\n0,x\n1,y\n1,x\n")


def truncated_gzip(place: Place) -> list[Any]:
    return place.prepare("log.tsv.gz", gzip.compress(TSV)[:-20])


def truncated_parquet(place: Place) -> list[Any]:
    path = place.folder / "log.parquet"
    pq.write_table(pa.table({"label": [0.0] * 1000, "city": [str(i) for i in range(1000)]}), path)
    return place.prepare("log.parquet", path.read_bytes()[:-50])


def no_dataset(place: Place) -> list[Any]:
    return place.train(f"data.dir={place.folder / 'nowhere'}")


def no_source_of_rows(place: Place) -> list[Any]:
    return place.train("data.dir=null")


def two_sources_of_rows(place: Place) -> list[Any]:
    return place.train("data.service.url=grpc://127.0.0.1:7077")


def no_address_of_readers(place: Place) -> list[Any]:
    return place.train("data.dir=null", "data.service.url=http://127.0.0.1:7077")


def no_dispatcher(place: Place) -> list[Any]:
    return place.train("data.dir=null", "data.service.url=grpc://127.0.0.1:1")


def readers_of_another_host(place: Place) -> list[Any]:
    return place.train("data.dir=null", "data.service.url=grpc://host7:7077")


def token_that_others_read(place: Place) -> list[Any]:
    path = token_folders()[0] / "2.token"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text("A" * 43)
    path.chmod(0o644)
    return place.train("data.dir=null", "data.service.url=grpc://127.0.0.1:2")


def filter_of_many_constants(place: Place) -> list[Any]:
    return place.train(f"data.filter=age in [{', '.join(map(str, range(5000)))}]")


def no_keys(place: Place) -> list[Any]:
    return place.train("data.dir=null", "data.service.url=grpc+tls://127.0.0.1:1")


def keys_that_are_not_there(place: Place) -> list[Any]:
    return place.train("data.dir=null", "data.service.url=grpc+tls://127.0.0.1:1", "data.service.keys=nowhere")


def split_at_readers(place: Place) -> list[Any]:
    config = place.run() / "config.yaml"
    document = yaml.safe_load(config.read_text())
    document["data"] |= {"dir": None, "service": {"url": "grpc://127.0.0.1:7077"}}
    write_config(config, document)
    return ["predict", place.folder / "run", "--out", place.folder / "p.csv"]


def prepared_column_missing(place: Place) -> list[Any]:
    path = place.data() / PART
    pq.write_table(pq.read_table(path).drop_columns(["price"]), path)
    return place.train()


def prepared_file_truncated(place: Place) -> list[Any]:
    cut(place.data() / PART)
    return place.train()


def source_of_a_recipe_changed(place: Place) -> list[Any]:
    cut(place.recipe())
    return place.train()


def recipe_of_zipped_files(place: Place) -> list[Any]:
    place.recipe("log.csv.gz")
    return place.train()


def damaged_recipe(place: Place) -> list[Any]:
    place.recipe()
    cut(place.folder / "data/recipe.json")
    return place.train()


def prepared_label_outside(place: Place) -> list[Any]:
    change_value(place.data(), "label", 7, 2.0)
    return place.train(data__shuffle_window_rows=5000)


def id_outside(place: Place) -> list[Any]:
    change_value(place.data(), "user", 7, 412)
    return place.train(data__shuffle=False)


def nan_in_dense(place: Place) -> list[Any]:
    change_value(place.data(), "price", 700, float("nan"))
    return place.train(data__shuffle=False, checkpoint__every_steps=2)


def loss_without_bound(place: Place) -> list[Any]:
    return place.train(dense__optimizer={"name": "sgd", "lr": 1e30}, checkpoint__every_steps=1)


def checkpoints_too_slow(place: Place) -> list[Any]:
    return place.train(checkpoint__max_bytes_per_s=1000)


def damaged_checkpoint(place: Place) -> list[Any]:
    cut(place.run() / "checkpoints/step-000000014/dense.safetensors")
    return place.train()


def file_that_others_need(place: Place) -> list[Any]:
    cut(place.run() / "checkpoints/step-000000012/tables/user/rows-00000.arrow")
    return place.train()


def partial_checkpoint(place: Place) -> list[Any]:
    (place.run() / "checkpoints/step-000000014/manifest.json").unlink()
    return place.train()


def checkpoint_of_another_model(place: Place) -> list[Any]:
    place.run()
    return place.train("model.embedding_dim=8")


def frozen_table_in_a_resumed_run(place: Place) -> list[Any]:
    place.run()
    return place.train(train__epochs=2, embedding__tables={"city": {"optimizer": {"name": "frozen"}}})


def checkpoints_out_of_reach(place: Place) -> list[Any]:
    return place.train("checkpoint.dir=nosuch://bucket/run")


def mirror_out_of_reach(place: Place) -> list[Any]:
    return place.train("checkpoint.mirror=nosuch://bucket/run")


def mirror_of_another_run(place: Place) -> list[Any]:
    mirror = place.folder / "mirror"
    shutil.copytree(place.run() / "checkpoints", mirror)
    for path in mirror.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["state"]["run_id"] = "0" * 32
        path.write_text(json.dumps({**manifest, "manifest_checksum": digest.hash_manifest(manifest)}))
    return place.train(f"checkpoint.mirror=file://{mirror}")


def checkpoints_at_no_url(place: Place) -> list[Any]:
    return place.train("checkpoint.dir=bucket/run")


def checkpoints_moved(place: Place) -> list[Any]:
    place.run()
    return place.train(f"checkpoint.dir=file://{place.folder}/elsewhere")


def run_on_other_data(place: Place) -> list[Any]:
    place.run()
    change_description(place.data(), lambda d: d["dense"][0].update(mean=d["dense"][0]["mean"] + 1))
    return place.train()


def not_a_run(place: Place) -> list[Any]:
    return ["eval", place.folder]


def unwritable_run_dir(place: Place) -> list[Any]:
    (place.folder / "taken").write_text("")
    return place.train(f"run_dir={place.folder / 'taken/run'}")


def unwritable_predictions(place: Place) -> list[Any]:
    return ["predict", place.run(), "--out", place.folder / "nowhere/p.parquet"]


def no_step_to_profile(place: Place) -> list[Any]:
    place.run()
    return [*place.train(), "--profile"]


def other_steps_to_profile(place: Place) -> list[Any]:
    return [*place.train(), "--profile-steps", "15:20"]


def steps_to_profile_ill_typed(place: Place) -> list[Any]:
    return [*place.train(), "--profile-steps", "3-5"]


def folder_for_a_timeline(place: Place) -> list[Any]:
    (place.run() / "timeline.json").mkdir()
    return [*place.train(train__epochs=2), "--profile"]


def advice_on_codes(place: Place) -> list[Any]:
    run = place.run()
    document = settings(
        place.tiny, run, train__epochs=2, train__max_steps=16, checkpoint__every_steps=15, checkpoint__bits=4
    )
    train(document)
    shutil.rmtree(run / "checkpoints" / "step-000000016")
    return ["checkpoint", "advise", run, "--out", place.folder / "bits.yaml"]


def no_records_of_ranks(place: Place) -> list[Any]:
    return ["status", place.folder]


def foreign_record_of_a_rank(place: Place) -> list[Any]:
    run = place.run()
    path = record_path(run, 0)
    path.parent.mkdir()
    path.write_bytes(b"PK" * RECORD_BYTES)
    return ["status", run]


def limit_without_a_disk(place: Place) -> list[Any]:
    return ["calibrate", "--max-reads-per-s", "1000", "--out", place.folder / "cost.yaml"]


def topology_without_memory(place: Place) -> list[Any]:
    (place.folder / "machines.yaml").write_text("devices_per_host: 2\n")
    config = write_config(place.folder / "c.yaml", settings(place.tiny, place.folder / "run"))
    return ["plan", config, "--topology", place.folder / "machines.yaml", "--out", place.folder / "plan.json"]


PREPARING = (missing_column, unparsable_row, fields_missing, label_outside, empty_file, header_alone)
PREPARING += (truncated_gzip, truncated_parquet, too_many_columns, control_character_in_a_column)
TRAINING = (unknown_width, bits_of_unknown_table, no_file_of_bits, bits_of_doubles, two_norms, pattern_of_no_parameter)
TRAINING += (number_too_long, control_character_in_a_path, batch_too_large, initial_rows_too_large)
TRAINING += (near_rows_too_large,)
TRAINING += (unknown_key, ill_typed_value, no_yaml, key_given_twice, plan_of_other_tables, plan_for_other_ranks)
TRAINING += (no_source_of_rows, two_sources_of_rows, no_address_of_readers, no_dispatcher, split_at_readers)
TRAINING += (
    no_keys,
    keys_that_are_not_there,
    readers_of_another_host,
    token_that_others_read,
    filter_of_many_constants,
)
TRAINING += (no_dataset, prepared_column_missing, prepared_file_truncated, prepared_label_outside, id_outside)
TRAINING += (source_of_a_recipe_changed, recipe_of_zipped_files, damaged_recipe)
TRAINING += (nan_in_dense, loss_without_bound, damaged_checkpoint, file_that_others_need)
TRAINING += (partial_checkpoint, checkpoint_of_another_model)
TRAINING += (frozen_table_in_a_resumed_run,)
TRAINING += (checkpoints_out_of_reach, mirror_out_of_reach, checkpoints_at_no_url, checkpoints_moved)
TRAINING += (mirror_of_another_run,)
TRAINING += (run_on_other_data, not_a_run, unwritable_run_dir, unwritable_predictions)
TRAINING += (no_step_to_profile, other_steps_to_profile, steps_to_profile_ill_typed, folder_for_a_timeline)
TRAINING += (checkpoints_too_slow,)
DIAGNOSING = (no_records_of_ranks, foreign_record_of_a_rank, advice_on_codes)
PLANNING = (limit_without_a_disk, topology_without_memory)
