"""`meseta checkpoint export`, then `import --from meseta`, gives the same model and the same next step."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bad_input.commands import run_here
from distributed.pool import RankPool
from meseta import checkpoint
from meseta.checkpoint.exporting import EXPORT_FORMATS, ExportReader
from meseta.checkpoint.files.layout import BlockSchema, TableLayout
from meseta.config import RunConfig
from meseta.spec import MesetaError, TableSpec
from meseta.train.interop.importing import import_export, import_model
from sampling import case_id, product
from small_run import settings, train, write_config

NUM_STEPS = 3
"""Steps of an epoch of the tiny data. Without shuffling, every epoch starts with the same batch."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam and rowwise_adagrad": {"embedding__tables": {"user": {"optimizer": {"name": "adam", "lr": 0.01}}}},
    "adam and rowwise_adagrad, norms": {
        "embedding__tables": {"user": {"optimizer": {"name": "adam", "lr": 0.01}}},
        "dense__optimizer": {"name": "sgd", "momentum": 0.9},
        "model__name": "dcnv2",
        "model__batch_norm": True,
    },
    "lamb, 16 bits": {
        "embedding__dtype": "bfloat16",
        "embedding__tables": {"user": {"optimizer": {"name": "rowwise_lamb"}}},
        "dense__optimizer": {"name": "lamb"},
    },
    "momentum, norms": {
        "embedding__optimizer": {"name": "sgd", "momentum": 0.5},
        "dense__optimizer": {"name": "sgd", "momentum": 0.9},
        "model__name": "dcnv2",
        "model__batch_norm": True,
    },
    "momentum, dropout": {
        "embedding__optimizer": {"name": "sgd", "momentum": 0.5},
        "model__name": "dcnv2",
        "model__dropout": 0.2,
    },
    "adamw, float64": {"embedding__dtype": "float64", "dense__optimizer": {"name": "adamw"}},
    "adagrad": {"embedding__optimizer": {"name": "rowwise_adam"}, "dense__optimizer": {"name": "adagrad"}},
}


def config_of(data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return settings(data, run_dir, data__shuffle=False, train__batch_size=500, **changes)


def newest(run_dir: Path) -> Path:
    path = checkpoint.latest_complete(run_dir / "checkpoints")
    assert isinstance(path, Path)
    return path


def contents(run_dir: Path) -> dict[str, Tensor]:
    """Return all rows, states, parameters and moments of the newest checkpoint."""
    out = run_dir / "exported"
    checkpoint.export(newest(run_dir), out, "safetensors", states=True)
    tensors = {f"{file.stem}.{name}": t for file in (out / "tables").iterdir() for name, t in load_file(file).items()}
    dense = load_file(out / "dense.safetensors")
    shutil.rmtree(out)
    return tensors | {name: tensor for name, tensor in dense.items() if name.startswith(("model.", "optimizer."))}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name].dtype != other[name].dtype or bits(one[name]) != bits(other[name])]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


CASES = product(optimizers=list(OPTIMIZERS), form=EXPORT_FORMATS, ranks=[1, 2])
IN_MAKE_TEST = {"optimizers": "adam and rowwise_adagrad, norms", "form": "numpy", "ranks": 1}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case_id(case), marks=[pytest.mark.soak] * (case != IN_MAKE_TEST)) for case in CASES],
)
def test_the_step_after_an_import_is_that_of_the_run(
    tiny: Path, tmp_path: Path, request: pytest.FixtureRequest, case: dict[str, Any]
) -> None:
    """The bits are equal. An import without states has the same model, but makes another step."""
    pool = request.getfixturevalue("two_ranks") if case["ranks"] == 2 else None
    check_next_step(tiny, tmp_path, pool, **case)


def check_next_step(tiny: Path, folder: Path, pool: RankPool | None, *, optimizers: str, form: Any, ranks: int) -> None:
    changes = OPTIMIZERS[optimizers]
    if ranks == 2:
        changes = {**changes, "plan": {"tables": {"user": "row_wise", "*": "table_wise"}}}
    run_training: Callable[[dict[str, Any]], Any] = (
        train if pool is None else lambda document: pool.run(train, document)
    )
    run_training(config_of(tiny, folder / "run", **changes))
    before = contents(folder / "run")
    out = folder / "out"
    checkpoint.export(newest(folder / "run"), out, form, states=True)
    facts = json.loads((out / "export.json").read_text())
    assert (facts["step"], facts["embedding_step"], set(facts["tables"])) == (NUM_STEPS, NUM_STEPS, {
        "user", "item", "city", "tags"})  # fmt: skip
    one_step = {**changes, "train__max_steps": 1}
    for name, states in (("imported", True), ("model", False)):
        import_export(out, RunConfig.model_validate(config_of(tiny, folder / name, **one_step)), states=states)
    assert differing(before, contents(folder / "imported")) == []
    fresh = contents(folder / "model")
    assert [
        n for n in before if n.startswith("model.") or n.endswith(".row") if bits(before[n]) != bits(fresh[n])
    ] == []

    run_training(config_of(tiny, folder / "run", **changes, train__max_steps=NUM_STEPS + 1, train__epochs=2))
    after = contents(folder / "run")
    assert differing(after, before)
    for name in ("imported", "model"):
        run_training(config_of(tiny, folder / name, **one_step))
    assert differing(after, contents(folder / "imported")) == []
    assert any(name in after and bits(after[name]) != bits(value) for name, value in contents(folder / "model").items())


THREE_STEPS = {
    "train__max_steps": 3,
    "embedding__dtype": "bfloat16",
    "embedding__tables": {"user": {"optimizer": {"name": "adam"}}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Return a run. Next to it are its exports `safetensors`, `numpy`, `bare` (without states) and `some` (two
    tables)."""
    folder = tmp_path_factory.mktemp("own")
    train(config_of(tiny, folder / "run", **THREE_STEPS))
    for form in EXPORT_FORMATS:
        checkpoint.export(newest(folder / "run"), folder / form, form, states=True)
    checkpoint.export(newest(folder / "run"), folder / "bare", "safetensors")
    checkpoint.export(newest(folder / "run"), folder / "some", "numpy", tables=["user", "item"], states=True)
    return folder / "run"


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**changes: Any) -> RunConfig:
        return RunConfig.model_validate(config_of(tiny, tmp_path / "new", **{**THREE_STEPS, **changes}))

    return make


@pytest.mark.soak
def test_on_the_command_line(run: Path, tiny: Path, tmp_path: Path) -> None:
    """Evaluation gives the metrics of the run, training starts, and an existing run is not replaced."""
    out = tmp_path / "out"
    assert run_here("checkpoint", "export", run, "--out", out, "--states").code == 0
    config = write_config(tmp_path / "c.yaml", config_of(tiny, tmp_path / "new", **THREE_STEPS))
    arguments = ("checkpoint", "import", out, "--from", "meseta", "--config", config)
    ended = run_here(*arguments, "--states")
    assert ended.code == 0, ended.err
    assert "tables/user: exp_avg" in ended.out and "embeddings.user.weight" in ended.out
    assert "step-000000000: step 0, " in ended.out
    results = [json.loads(run_here("eval", folder).out) for folder in (tmp_path / "new", run)]
    assert [one.pop("step") for one in results] == [0, 3] and all(one.pop("run") for one in results)
    assert results[0] == results[1]
    ended = run_here(*arguments)
    assert ended.code == 1 and "already has a checkpoint" in ended.err and len(ended.err.splitlines()) == 1
    assert run_here("train", config).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "mesta"], "--from 'mesta' is unknown; did you mean 'meseta'?"),
        (["--from", "torch", "--states"], "--states needs --from meseta"),
        (["--from", "meseta", "--rename", "a=b"], "--rename and --ignore cannot be combined with --from meseta"),
        (["--from", "torch"], "is an export of `meseta checkpoint export`; use --from meseta"),
    ],
)
def test_wrong_options(run: Path, tiny: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    config = write_config(tmp_path / "c.yaml", config_of(tiny, tmp_path / "new"))
    ended = run_here("checkpoint", "import", run.parent / "bare", "--config", config, *arguments)
    assert ended.code == 1 and message in ended.err and not (tmp_path / "new").exists()


def change(document: Any, path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for name in parents:
        document = document[int(name) if isinstance(document, list) else name]
    document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "meseta.export/2", "format of export.json must be 'meseta.export/1'"),
        ("format", ["x"], "format of export.json must be"),
        ("files", "pickle", "'files': input should be"),
        ("step", -1, "'step': input should be greater"),
        ("step", 1.5, "'step'"),
        ("embedding_step", 1 << 60, "'embedding_step': input should be less"),
        ("embedding_step", None, "has no optimizer states"),
        ("dense_optimizer", "SGD", "trained with SGD, but the config has Adam"),
        ("states", False, "has no optimizer states; export the checkpoint again with --states"),
        ("states", "yes", "'states'"),
        ("more", 1, "'more' is an unknown key"),
        ("tables", [], "'tables'"),
        ("tables/user", None, "'tables.user.'"),
        ("tables/user/path", "/etc/passwd", "'tables.user.path' is an unknown key"),
        ("tables/../../x", {}, "'tables.../../x"),
        ("tables/user/num_embeddings", 10**15, "num_embeddings 1000000000000000 there, but 300 in the model"),
        pytest.param("tables/user/embedding_dim", 8, "has embedding_dim 8 there, but 4", marks=pytest.mark.soak),
        ("tables/user/dtype", "float32", "has dtype float32 there, but bfloat16"),
        ("tables/user/dtype", "object", "'tables.user.dtype'"),
        ("tables/user/optimizer/name", "sgd", "row optimizer 'sgd'"),
        ("tables/user/columns", [], "'tables.user.columns'"),
        ("tables/item/columns/0/dtype", "float64", "table 'item' was trained with"),
        ("tables/item/columns/1/name", "a\nb", "table 'item': "),
        ("tables/a\nb", "item", "table 'a\\nb': it must not be empty or contain control characters"),
    ],
)
def test_a_manifest_is_checked_before_it_is_used(
    run: Path, config: Callable[..., RunConfig], tmp_path: Path, path: str, value: Any, message: str
) -> None:
    copy = Path(shutil.copytree(run.parent / "safetensors", tmp_path / "copy"))
    document = json.loads((copy / "export.json").read_text())
    if path.startswith("tables/.."):
        document["tables"]["../../x"] = value
    else:
        change(document, path, document["tables"][value] if path == "tables/a\nb" else value)
    (copy / "export.json").write_text(json.dumps(document))
    with pytest.raises(MesetaError) as refused:
        import_export(copy, config(), states=True)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


def test_what_is_missing(run: Path, config: Callable[..., RunConfig], tmp_path: Path) -> None:
    for name, states, message in (
        ("bare", True, "has no optimizer states"),
        ("some", False, "table 'city' is missing in the export, which has item, user"),
        ("run", False, "choose a folder that `meseta checkpoint export`"),
        ("nowhere", False, "choose a folder that `meseta checkpoint export`"),
    ):
        with pytest.raises(MesetaError, match=message):
            import_export(run.parent / name, config(), states=states)
    with pytest.raises(MesetaError, match="use --from meseta"):
        import_model(run.parent / "bare", "torch", config())
    with pytest.raises(MesetaError, match=r"export '.*'model.top_mlp.0.bias' is saved as \(8,\), but the model"):
        import_export(run.parent / "bare", config(model__top_mlp=[9]))
    assert list(tmp_path.iterdir()) == []
    import_export(run.parent / "bare", config(embedding__optimizer__name="sgd", dense__optimizer__name="sgd"))


def spoil_safetensors(file: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file({**tensors, **({} if changed is None else {name: changed})}, file)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("user: row", lambda t: t[:-1].contiguous(), "type and shape of 'row' must be"),
        pytest.param("user: row", lambda t: t.float(), "type and shape of 'row' must be", marks=pytest.mark.soak),
        ("user: exp_avg", lambda t: None, "exp_avg"),
        (
            "item: row",
            lambda t: t.index_fill(0, torch.tensor([39]), float("nan")),
            "'row' has values that are not finite",
        ),
        ("user: exp_avg_sq", lambda t: t + float("inf"), "'exp_avg_sq' has values that are not finite"),
        ("model.top_mlp.0.bias", lambda t: t * float("nan"), "'model.top_mlp.0.bias' has values that are not finite"),
        ("model.top_mlp.0.bias", lambda t: None, "is saved as nothing, but the model has (8,)"),
        (
            "optimizer.top_mlp.0.bias.exp_avg",
            lambda t: None,
            "'optimizer.top_mlp.0.bias.exp_avg' must be floating-point [8], but is missing",
        ),
        (
            "optimizer.top_mlp.0.bias.exp_avg",
            lambda t: t[:3].clone(),
            "must be floating-point [8], but is torch.float32 [3]",
        ),
        ("optimizer.top_mlp.0.bias.step", lambda t: t.reshape(1).clone(), "must be floating-point []"),
        ("optimizer.top_mlp.0.bias.step", lambda t: t.long(), "is torch.int64 []"),
    ],
)
def test_tensors_are_checked_before_they_are_used(
    run: Path, config: Callable[..., RunConfig], tmp_path: Path, name: str, change: Any, message: str
) -> None:
    copy = Path(shutil.copytree(run.parent / "safetensors", tmp_path / "copy"))
    table, _, column = name.partition(": ")
    spoil_safetensors(copy / (f"tables/{table}.safetensors" if column else "dense.safetensors"), column or name, change)
    with pytest.raises(MesetaError) as refused:
        import_export(copy, config(), states=True)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


def test_a_moment_of_no_parameter(run: Path, config: Callable[..., RunConfig], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.parent / "safetensors", tmp_path / "copy"))
    tensors = load_file(copy / "dense.safetensors")
    save_file({**tensors, "optimizer.nowhere.exp_avg": torch.zeros(2)}, copy / "dense.safetensors")
    with pytest.raises(MesetaError, match=r"'optimizer.nowhere.exp_avg' belongs to no parameter"):
        import_export(copy, config(), states=True)


def test_links_and_other_arrays(run: Path, config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A link that leaves the export, pickled objects, a compressed archive, and float32 values that are no bfloat16."""
    rows = np.load(run.parent / "numpy/tables/user/row.npy")
    for number, (inner, message) in enumerate((
        ("tables/user/row.npy", "a link leads out"), ("tables/item/row.npy", "object"),
        ("dense.npz", "not an uncompressed .npy file"),
        ("tables/user/row.npy", "some values are not representable as bfloat16"),
    )):  # fmt: skip
        copy = Path(shutil.copytree(run.parent / "numpy", tmp_path / str(number)))
        file = copy / inner
        content = dict(np.load(file)) if file.suffix == ".npz" else None
        file.unlink()
        if message.startswith("a link"):
            file.symlink_to(run.parent / "numpy" / inner)
        elif content is not None:
            np.savez_compressed(file, **content)
        else:
            np.save(
                file, np.array([{}]) if message == "object" else np.nextafter(rows, np.float32(9)), allow_pickle=True
            )
        with pytest.raises(MesetaError, match=message):
            import_export(copy, config(), states=True)


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_spoiled_files_are_refused_or_have_the_right_shapes(run: Path, tmp_path: Path, form: str) -> None:
    """A file truncated, extended or changed at random raises a MesetaError in one line, or has values of the right
    shapes."""
    draw = random.Random(form)
    expected = ExportReader.open(run.parent / form).tables
    specs = {
        name: TableSpec(name=name, **{key: entry[key] for key in ("num_embeddings", "embedding_dim", "dtype")})
        for name, entry in expected.items()
    }
    layouts = [TableLayout(spec, BlockSchema.from_dict(expected[name])) for name, spec in specs.items()]
    copy = Path(shutil.copytree(run.parent / form, tmp_path / "copy"))
    files = sorted(file for file in copy.rglob("*") if file.is_file())
    for number in range(2000 if os.environ.get("MESETA_SOAK") else 30):
        file = files[number % len(files)]
        whole = file.read_bytes()
        file.write_bytes(spoiled(draw, whole))
        try:
            reader = ExportReader.open(copy)
            reader.read_dense()
            for layout in layouts:
                with reader.open_table(layout) as read:
                    values = read(0, layout.spec.num_embeddings)
                    assert {k: v.shape for k, v in values.items()} == {
                        c.name: layout.schema.shape(c, layout.spec.num_embeddings) for c in layout.schema.columns
                    }
            assert reader.tables.keys() == expected.keys() or file.name == "export.json"
        except MesetaError as error:
            assert "\n" not in str(error)
        file.write_bytes(whole)


def spoiled(draw: random.Random, content: bytes) -> bytes:
    """Return `content` truncated, extended, or with some bytes changed, most of them in headers."""
    place, kind = draw.randrange(len(content)), draw.randrange(4)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content + draw.randbytes(draw.randrange(1, 99))
    changed = bytearray(content)
    for _ in range(draw.randrange(1, 9)):
        place = draw.randrange(min(len(content), 300)) if kind == 2 else draw.randrange(len(content))
        changed[place] = draw.randrange(256)
    return bytes(changed)
