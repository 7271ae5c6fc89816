"""Tests of models that continue with other columns: same predictions, gradients everywhere, moments, and errors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.config import ModelConfig
from meseta.config.models import MODEL_NAMES, CustomModelConfig
from meseta.models import DLRM, make_model
from meseta.models.carry import CarriedTensors, carry_over
from meseta.models.columns import InputColumns, describe_changes
from meseta.models.registry import MODELS, check_columns
from meseta.spec import FeatureSpec, InitSpec, MesetaError, TableSpec
from meseta.train.state import set_dense_tensors
from sampling import sample
from small_run import of_its_model

VARIANTS: dict[str, dict[str, Any]] = {
    "logistic_regression": {},
    "fm": {},
    "deepfm": {},
    "wide_deep": {},
    "dlrm": {"bottom_mlp": [8], "top_mlp": [8]},
    "dlrm without hidden layers": {"name": "dlrm", "bottom_mlp": [], "top_mlp": []},
    "dlrm with batch norm": {"name": "dlrm", "bottom_mlp": [8], "top_mlp": [8], "batch_norm": True},
    "dlrm without products": {"name": "dlrm", "bottom_mlp": [8], "top_mlp": [8], "interaction": "none"},
    "dlrm_dcnv2": {"bottom_mlp": [8], "top_mlp": [8]},
    **{
        f"dcnv2 {cross} {structure}": {"name": "dcnv2", "cross": cross, "structure": structure}
        for cross, structure in itertools.product(("full", "low_rank", "mixture"), ("stacked", "parallel"))
    },
    "mmoe": {"num_experts": 3, "expert_mlp": [8, 4], "tower_mlp": [4]},
}
SIZES = {"embedding_dim": 4, "deep_mlp": [8], "cross_layers": 2, "cross_low_rank": 3}
WITH_BOTTOM_MLP = [variant for variant in VARIANTS if variant.startswith("dlrm")]
EIGHT = ["logistic_regression", "fm", "deepfm", "wide_deep", "dlrm", "dlrm_dcnv2", "dcnv2 full parallel", "mmoe"]
"""A variant of each model."""
NUM_ROWS, BATCH_SIZE = 6, 256
EVERY = {"new_price": 0, "new_site": 1, "new_tag": 2, "price": 3, "age": 4, "user": 5, "item": 6, "shop": 7}
"""Seed of the values of each column."""
SEEDS = {"dlrm": 12, "dlrm with batch norm": 12, "dlrm without products": 12, "dlrm_dcnv2": 9}
"""Seeds of bottom MLPs in which any two units of consecutive layers are positive together for some samples. Otherwise a
weight between units could never move."""
EVERY_NEW = ("new_price", "new_site", "new_tag")


def columns_of(variant: str, dense: str, sparse: str) -> InputColumns:
    """Return columns with the table widths of the model."""
    width = config_of(variant).table_width()
    return InputColumns(tuple(dense.split()), tuple((name, width) for name in sparse.split()))


def before_and_now(variant: str) -> tuple[InputColumns, InputColumns]:
    """Return columns without and with new columns, which are first, between others and last."""
    before = columns_of(variant, "price age", "user item shop")
    return before, columns_of(variant, "price new_price age", "new_tag user item new_site shop")


def config_of(variant: str) -> ModelConfig:
    return ModelConfig(**of_its_model({"name": variant, **SIZES, **VARIANTS[variant]}))


class NamedRows(nn.Module):
    """Replacement of an embedding collection with rows that depend only on the feature's name."""

    def __init__(self, columns: InputColumns, init: InitSpec) -> None:
        super().__init__()
        self.tables = [
            TableSpec(name=f"{name} table", num_embeddings=NUM_ROWS, embedding_dim=dim, init=init)
            for name, dim in columns.sparse
        ]
        self.features = [FeatureSpec(name=name, table=f"{name} table") for name, _ in columns.sparse]
        draws = {name: torch.randn(NUM_ROWS, dim, generator=generator_of(name)) for name, dim in columns.sparse}
        scale = 0.3 if init.scale is None else init.scale
        self.rows = nn.ParameterDict({name: nn.Parameter(scale * rows) for name, rows in draws.items()})


def generator_of(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(EVERY[name])


def new_model(
    variant: str, columns: InputColumns, dtype: torch.dtype = torch.float32, init: InitSpec | None = None
) -> Any:
    """Return the model with its initial weights, which predicts two labels if it can."""
    embeddings = NamedRows(columns, init or InitSpec())
    labels = ("label", "other") if variant == "mmoe" else ("label",)
    return make_model(config_of(variant), embeddings, len(columns.dense), SEEDS.get(variant, 5), labels=labels).to(
        dtype
    )


def trained_model(variant: str, columns: InputColumns, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model with other weights, none of which is zero."""
    model = new_model(variant, columns, dtype)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            draw = torch.rand(value.shape, generator=generator)
            # Norms have positive weights and biases, so that no hidden unit is always zero.
            is_norm = ".norms." in name
            value.copy_((0.1 + 0.5 * draw) * (1.0 if is_norm else torch.sign(draw - 0.4)))
    return model.eval()


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return dense tensors whose average and moments are functions of the values: -v, 2 v and v squared."""
    values = {name: v.clone() for name, v in model.state_dict().items() if not name.startswith("embeddings.")}
    tensors = {f"model.{name}": value for name, value in values.items()}
    for name in (name for name, _ in model.named_parameters() if name in values):
        tensors[f"average.{name}"] = -values[name]
        tensors[f"optimizer.{name}.step"] = torch.tensor(7.0)
        tensors[f"optimizer.{name}.exp_avg"] = 2 * values[name]
        tensors[f"optimizer.{name}.exp_avg_sq"] = values[name].square()
    return {**tensors, "metrics.sums": torch.ones(3)}


def continued(
    parent: Any, variant: str, before: InputColumns, now: InputColumns, init: InitSpec | None = None
) -> tuple[Any, CarriedTensors]:
    """Return a model with the carried tensors and the rows of `parent`, and these tensors."""
    dtype = next(parent.parameters()).dtype
    model = new_model(variant, now, dtype, init)
    carried = carry_over(saved_tensors(parent), before, model, now)
    model.load_state_dict(
        {key.removeprefix("model."): value for key, value in carried.tensors.items() if key.startswith("model.")}
        | {
            f"embeddings.rows.{name}": rows
            for name, rows in parent.embeddings.rows.items()
            if (name, rows.shape[1]) in now.sparse
        },
        strict=False,
    )
    with torch.no_grad():
        for table, zeros in carried.zero_table_columns.items():
            model.embeddings.rows[table.removesuffix(" table")][:, zeros] = 0.0
    return model.eval(), carried


def draw_inputs(size: int = BATCH_SIZE) -> dict[str, Tensor]:
    """Return the values of all columns: dense values, or ids of all rows but the last."""
    inputs = {}
    for name in EVERY:
        generator = generator_of(name)
        is_dense = name.endswith(("price", "age"))
        inputs[name] = (
            torch.randn(size, generator=generator, dtype=torch.float64)
            if is_dense
            else torch.randint(0, NUM_ROWS - 1, (size,), generator=generator)
        )
    return inputs


def logits_of(model: Any, columns: InputColumns, inputs: Mapping[str, Tensor], zeros: tuple[str, ...] = ()) -> Tensor:
    """Return logits. The values or rows of columns in `zeros` are replaced by zeros."""
    dtype = next(model.parameters()).dtype
    size = len(inputs["price"])
    dense = [inputs[name].to(dtype) * (name not in zeros) for name in columns.dense]
    rows = [model.embeddings.rows[name][inputs[name]] * (name not in zeros) for name, _ in columns.sparse]
    stacked = torch.stack(dense, 1) if dense else torch.empty(size, 0, dtype=dtype)
    return model.score(stacked, torch.cat(rows, 1))


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert a.std() > 0.01  # A constant model would prove nothing.
    return float((a.sigmoid() - b.sigmoid()).abs().max().detach())


PRECISIONS = [(torch.float32, 1e-6), (torch.float64, 1e-14)]


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in EIGHT else pytest.mark.soak) for name in VARIANTS]
)
def test_new_columns_change_no_prediction(variant: str) -> None:
    before, now = before_and_now(variant)
    for dtype, tolerance in PRECISIONS:
        parent = trained_model(variant, before, dtype)
        child, _ = continued(parent, variant, before, now)
        inputs = draw_inputs(10_000)
        for name in ("fields.dense_vectors", "top_mlp.0.weight", "deep_mlp.0.weight", "linear.weight"):
            if name in child.state_dict():
                assert child.state_dict()[name].shape != parent.state_dict()[name].shape
        difference = largest_difference(logits_of(parent, before, inputs), logits_of(child, now, inputs))
        assert difference <= tolerance


@pytest.mark.parametrize("variant", sample(VARIANTS, k=2, seed=1))
def test_reordered_columns_are_matched_by_name(variant: str) -> None:
    before = columns_of(variant, "price age new_price", "user item shop new_tag")
    now = columns_of(variant, "new_price price age", "new_tag item shop user")
    for dtype, tolerance in PRECISIONS:
        parent = trained_model(variant, before, dtype)
        child, carried = continued(parent, variant, before, now)
        assert carried.zero_table_columns == {}
        for key, value in saved_tensors(parent).items():  # A permutation of each tensor
            assert torch.equal(value.flatten().sort().values, carried.tensors[key].flatten().sort().values)
        inputs = draw_inputs()
        assert largest_difference(logits_of(parent, before, inputs), logits_of(child, now, inputs)) <= tolerance


@pytest.mark.parametrize("variant", sample(VARIANTS, k=2, seed=2))
def test_a_model_without_columns_is_the_old_one_with_zeros_there(variant: str) -> None:
    now, before = before_and_now(variant)
    parent = trained_model(variant, before, torch.float64)
    child, carried = continued(parent, variant, before, now)
    assert carried.zero_table_columns == {}
    inputs = draw_inputs()
    # In each of these models a dense value of 0 and a row of zeros contribute nothing.
    expected = logits_of(parent, before, inputs, zeros=EVERY_NEW)
    assert largest_difference(expected, logits_of(child, now, inputs)) <= 1e-14


@pytest.mark.parametrize("variant", sample(VARIANTS, k=2, seed=3))
def test_moments_and_averages_follow_their_weights(variant: str) -> None:
    before, now = before_and_now(variant)
    parent = trained_model(variant, before)
    saved, fresh = saved_tensors(parent), new_model(variant, now)
    tensors = carry_over(saved, before, fresh, now).tensors
    assert tensors.keys() == saved.keys()
    assert torch.equal(tensors["metrics.sums"], saved["metrics.sums"])
    for name, parameter in fresh.named_parameters():
        if name.startswith("embeddings."):
            continue
        value, mean = tensors[f"model.{name}"], tensors[f"optimizer.{name}.exp_avg"]
        assert value.shape == mean.shape == parameter.shape
        is_old = mean != 0
        # Each saved entry is in the new tensor once.
        assert torch.equal(value[is_old].sort().values, saved[f"model.{name}"].flatten().sort().values)
        assert torch.equal(mean[is_old], 2 * value[is_old])
        assert torch.equal(tensors[f"optimizer.{name}.exp_avg_sq"], torch.where(is_old, value.square(), 0.0))
        assert torch.equal(tensors[f"average.{name}"], torch.where(is_old, -value, value))
        assert tensors[f"optimizer.{name}.step"] == 7
        new = value[~is_old]
        assert ((new == 0) | (new == parameter[~is_old])).all()


@pytest.mark.parametrize("variant", sample(VARIANTS, k=2, seed=4))
def test_a_column_that_is_added_back_starts_fresh(variant: str) -> None:
    without, before = before_and_now(variant)
    parent = trained_model(variant, before)
    dropped, _ = continued(parent, variant, before, without)
    # A model that never had the columns, with the same weights for the others.
    never = trained_model(variant, without)
    again, never_had = (
        carry_over(saved_tensors(model), without, new_model(variant, before), before) for model in (dropped, never)
    )
    slices = {"logistic_regression": slice(0, 1), "fm": slice(0, 5), "deepfm": slice(0, 5), "wide_deep": slice(4, 5)}
    zeros = {f"{name} table": slices[variant] for name in ("new_tag", "new_site")} if variant in slices else {}
    assert again.zero_table_columns == never_had.zero_table_columns == zeros
    num_new = 0
    for key in again.tensors:
        if key.endswith(".exp_avg"):
            name = key.removeprefix("optimizer.").removesuffix(".exp_avg")
            is_new = again.tensors[key] == 0
            assert torch.equal(is_new, never_had.tensors[key] == 0)
            values = [carried.tensors[f"model.{name}"][is_new] for carried in (again, never_had)]
            assert torch.equal(*values)
            num_new += values[0].numel()
            assert not (values[0] == parent.get_parameter(name)[is_new]).any() or not values[0].numel()
    assert num_new > 0


@pytest.mark.parametrize(
    ("variant", "num_steps"),
    [
        *((variant, 20) for variant in ("deepfm", "dlrm")),
        *(pytest.param(variant, 200, marks=pytest.mark.soak) for variant in VARIANTS),
    ],
)
def test_everything_new_moves_and_is_used(variant: str, num_steps: int) -> None:
    before, now = before_and_now(variant)
    model, carried = continued(trained_model(variant, before), variant, before, now)
    train_on_new_columns(model, carried, now, num_steps)


def train_on_new_columns(model: Any, carried: CarriedTensors, now: InputColumns, num_steps: int) -> None:
    """Train on labels that need the new columns. Check that all new entries moved and are used."""
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    rows = dict(model.embeddings.rows)
    dense = [parameter for name, parameter in model.named_parameters() if not name.startswith("embeddings.")]
    optimizer = torch.optim.Adam(dense, lr=0.01)
    set_dense_tensors(
        model,
        optimizer,
        {**carried.tensors, **{f"model.embeddings.rows.{name}": value.detach() for name, value in rows.items()}},
    )
    row_optimizer = torch.optim.SGD(rows.values(), lr=0.5)
    inputs = draw_inputs()
    effect = torch.linspace(-2, 2, NUM_ROWS, dtype=torch.float64)
    score = (
        inputs["new_price"]
        + effect[inputs["new_site"]]
        + effect[inputs["new_tag"]] * (1 + 0.5 * inputs["price"].sign())
    )
    label = (score > 0).float()

    def loss_of(inputs: Mapping[str, Tensor]) -> Tensor:
        logits = logits_of(model, now, inputs)
        return functional.binary_cross_entropy_with_logits(
            logits, label.view(-1, *(1,) * (logits.dim() - 1)).expand_as(logits)
        )

    first_loss = float(loss_of(inputs).detach())
    for _ in range(num_steps):
        optimizer.zero_grad()
        row_optimizer.zero_grad()
        loss_of(inputs).backward()
        optimizer.step()
        row_optimizer.step()
    loss = float(loss_of(inputs).detach())
    assert loss < first_loss
    for name, parameter in model.named_parameters():
        moved = parameter.detach() != start[name]
        if not name.startswith("embeddings."):
            mean = carried.tensors.get(f"optimizer.{name}.exp_avg", torch.zeros_like(parameter))
            assert moved[mean == 0].all(), name
        elif name.rpartition(".")[2].startswith("new_"):
            assert moved[:-1].all() and not moved[-1].any(), name  # The last row is never looked up.
    for name in filter(EVERY_NEW.__contains__, (*now.dense, *dict(now.sparse))):
        order = torch.randperm(BATCH_SIZE, generator=torch.Generator().manual_seed(3))
        permuted = float(loss_of({**inputs, name: inputs[name][order]}).detach())
        assert permuted > loss + 0.001, name


def test_weights_of_pairs_follow_the_names_of_both_vectors() -> None:
    before, now = before_and_now("dlrm without hidden layers")

    def weights_by_loop(columns: InputColumns) -> dict[frozenset[str], int]:
        """Return the position of each pair in the top layer's input: the bottom MLP's vector, 4 wide, then pairs."""
        vectors = ["bottom", *dict(columns.sparse)]
        positions: dict[frozenset[str], int] = {}
        for i in range(len(vectors)):
            for j in range(i):
                positions[frozenset((vectors[i], vectors[j]))] = 4 + len(positions)
        return positions

    parent = trained_model("dlrm without hidden layers", before)
    saved = saved_tensors(parent)
    fresh = new_model("dlrm without hidden layers", now)
    weight = carry_over(saved, before, fresh, now).tensors["model.top_mlp.0.weight"][0]
    old, new = weights_by_loop(before), weights_by_loop(now)
    assert len(new) == 15 and weight.shape == (19,)
    assert torch.equal(weight[:4], saved["model.top_mlp.0.weight"][0, :4])
    for pair, position in new.items():
        expected = saved["model.top_mlp.0.weight"][0, old[pair]] if pair in old else 0.0
        assert weight[position] == expected, pair


@pytest.mark.parametrize("variant", sample(VARIANTS, k=2, seed=6))
def test_the_first_dense_columns_change_no_prediction(variant: str) -> None:
    before = columns_of(variant, "", "user item shop")
    now = columns_of(variant, "new_price price", "shop user item")
    parent = trained_model(variant, before, torch.float64)
    child, _ = continued(parent, variant, before, now)
    inputs = draw_inputs()
    assert largest_difference(logits_of(parent, before, inputs), logits_of(child, now, inputs)) <= 1e-14


@pytest.mark.parametrize("variant", sample(WITH_BOTTOM_MLP, k=1, seed=3))
def test_a_bottom_mlp_is_built_dropped_and_built_again(variant: str) -> None:
    without = columns_of(variant, "", "user item shop new_tag")
    before = columns_of(variant, "price", "user item shop")
    parent = trained_model(variant, before)
    child, _ = continued(parent, variant, before, without)
    assert child.bottom_mlp is None
    now = columns_of(variant, "age new_price", "user item new_site shop new_tag")
    grandchild = new_model(variant, now)
    rebuilt = carry_over(saved_tensors(child), without, grandchild, now).tensors
    bottom = {name: value for name, value in grandchild.state_dict().items() if name.startswith("bottom_mlp.")}
    for name, value in bottom.items():
        assert torch.equal(rebuilt[f"model.{name}"], value)
    averages = {name.removeprefix("average.") for name in rebuilt if name.startswith("average.bottom_mlp.")}
    assert averages == dict(grandchild.bottom_mlp.named_parameters(prefix="bottom_mlp")).keys()
    assert not any(name.startswith("optimizer.bottom_mlp.") for name in rebuilt)
    # Exchanging all dense columns in one step does the same.
    exchanged = carry_over(saved_tensors(parent), before, new_model(variant, now), now).tensors
    assert exchanged.keys() == rebuilt.keys()
    for name, value in exchanged.items():
        if ".bottom_mlp." in name:
            assert torch.equal(value, rebuilt[name])


def test_only_one_factor_of_each_path_is_zero() -> None:
    def new_entries(variant: str, name: str) -> tuple[Tensor, Tensor]:
        before, now = before_and_now(variant)
        fresh = new_model(variant, now)
        tensors = carry_over(saved_tensors(trained_model(variant, before)), before, fresh, now).tensors
        return tensors[f"model.{name}"], fresh.get_parameter(name)

    # x_0 is price, new_price, age, then new_tag, user, item, new_site and shop, 4 wide each.
    is_new = torch.tensor([0, 1, 0] + [1] * 4 + [0] * 8 + [1] * 4 + [0] * 4, dtype=torch.bool)
    crossed, initial = new_entries("dcnv2 full stacked", "cross.layers.1.weight")
    # The products of a new input are new, and no old weight reads them, so old ones must not read the new input.
    assert torch.equal(crossed[is_new], initial[is_new])
    assert (crossed[~is_new][:, is_new] == 0).all() and (crossed[~is_new][:, ~is_new] != 0).all()
    up, initial = new_entries("dcnv2 low_rank stacked", "cross.up.0.weight")
    assert torch.equal(up[is_new], initial[is_new]) and (initial != 0).all()
    for variant, name in (
        ("dcnv2 low_rank stacked", "cross.down.0.weight"),
        ("dcnv2 low_rank stacked", "deep_mlp.0.weight"),
        ("mmoe", "gates.1.weight"),
    ):
        weight, _ = new_entries(variant, name)
        assert (weight[:, is_new] == 0).all() and (weight[:, ~is_new] != 0).all()
    # Vectors of new columns are zero, so that weights that read them are not.
    deep, initial = new_entries("deepfm", "deep_mlp.0.weight")
    is_new = torch.tensor([0, 1, 0, 1, 0, 0, 1, 0], dtype=torch.bool).repeat_interleave(4)
    assert torch.equal(deep[:, is_new], initial[:, is_new]) and (deep != 0).all()
    vectors, _ = new_entries("deepfm", "fields.dense_vectors")
    assert (vectors[1] == 0).all() and (vectors[[0, 2]] != 0).all()


@pytest.mark.soak
# The parent with batch norm has a hidden unit that is never positive, whose weights never move.
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "norm" not in variant])
def test_a_first_dense_column_moves_and_is_used(variant: str) -> None:
    before, now = (
        columns_of(variant, "", "user item shop"),
        columns_of(variant, "new_price price age", "user item shop"),
    )
    model, carried = continued(trained_model(variant, before), variant, before, now)
    train_on_new_columns(model, carried, now, 200)


@pytest.mark.parametrize(
    ("variant", "num_steps"),
    [("dlrm", 3), *(pytest.param(variant, 200, marks=pytest.mark.soak) for variant in VARIANTS)],
)
def test_rows_that_start_at_zero_are_read_by_weights_that_do_not(variant: str, num_steps: int) -> None:
    before, now = before_and_now(variant)
    parent = trained_model(variant, before)
    zeros = InitSpec(kind="constant", scale=0.0)
    model, carried = continued(parent, variant, before, now, zeros)
    inputs = draw_inputs()
    assert largest_difference(logits_of(parent, before, inputs), logits_of(model, now, inputs)) <= 1e-6
    logits_of(model, now, inputs).sum().backward()
    for name in ("new_site", "new_tag"):
        assert (model.embeddings.rows[name].grad[:-1] != 0).any(dim=1).all()
    if num_steps > 100:
        train_on_new_columns(model, carried, now, num_steps)


@pytest.mark.parametrize("variant", sample(VARIANTS, k=2, seed=5))
def test_without_a_common_column_weights_start_as_in_a_new_model(variant: str) -> None:
    before, now = columns_of(variant, "price", "user item"), columns_of(variant, "age", "new_tag new_site")
    fresh = new_model(variant, now)
    carried = carry_over(saved_tensors(trained_model(variant, before)), before, fresh, now)
    assert carried.zero_table_columns == {}
    old = new_model(variant, before).state_dict()
    changed = [name for name, value in fresh.named_parameters() if value.shape != getattr(old.get(name), "shape", None)]
    for name in changed:
        if not name.startswith("embeddings.") and name != "head.weight":  # Its other inputs are hidden units.
            assert torch.equal(carried.tensors[f"model.{name}"], fresh.get_parameter(name))


def test_equal_columns_and_models_that_cannot_change_them() -> None:
    able = ["logistic_regression", "fm", "deepfm", "wide_deep", "dlrm", "dlrm_dcnv2", "dcnv2", "mmoe"]
    assert sorted(able) == [name for name in MODEL_NAMES if MODELS[type(ModelConfig(name=name))].can_change_columns]
    configs = [ModelConfig(**of_its_model({"name": name, "embedding_dim": 4})) for name in MODEL_NAMES]
    for config in (*configs, CustomModelConfig(name="own_models:Plain")):
        width = config.table_width()
        before = InputColumns(("price",), (("user", width), ("item", width)))
        now = replace(before, sparse=(*before.sparse, ("shop", width)))
        check_columns(config, before, before)
        if config.name in able:
            check_columns(config, before, now)
            continue
        message = f"{config.name!r} cannot change its columns .sparse 'shop' added.; .*--reset dense; .*: dcnv2, deepfm"
        with pytest.raises(MesetaError, match=message):
            check_columns(config, before, now)
        if config.name in MODEL_NAMES:
            model = make_model(config, NamedRows(now, InitSpec()), 1, 0)
            with pytest.raises(MesetaError, match="cannot change its columns"):
                carry_over({}, before, model, now)
            saved = saved_tensors(model)
            assert carry_over(saved, now, model, now).tensors == saved


def test_a_subclass_must_declare_its_own_axes() -> None:
    class WithAnotherLayer(DLRM):
        pass

    before, now = before_and_now("dlrm")
    model = WithAnotherLayer(NamedRows(now, InitSpec()), num_dense=3, bottom_mlp=(8, 4), top_mlp=(8,))
    with pytest.raises(MesetaError, match="WithAnotherLayer cannot change its columns"):
        carry_over(saved_tensors(trained_model("dlrm", before)), before, model, now)


def test_changes_are_described_by_kind_and_name() -> None:
    before = InputColumns(("a", "b"), (("u", 4), ("v", 4)))
    assert describe_changes(before, before) == ""
    now = InputColumns(("b", "c", "a"), (("v", 8),))
    assert describe_changes(before, now) == (
        "dense 'c' added; dense 'a', 'b' reordered; sparse 'u' dropped; sparse 'v' resized"
    )


def test_errors_name_the_parameter_and_the_remedy() -> None:
    before, now = before_and_now("dlrm")
    saved, model = saved_tensors(trained_model("dlrm", before)), new_model("dlrm", now)
    with pytest.raises(MesetaError, match=r"the columns .* are not those of the model, .* 3 dense columns"):
        carry_over(saved, before, model, replace(now, dense=("price",)))
    resized = replace(before, sparse=(("user", 8), *before.sparse[1:]))
    with pytest.raises(MesetaError, match=r"feature 'user' has width 4, but 8 in the saved model; .* --reset user"):
        carry_over(saved, resized, model, now)
    key = "optimizer.top_mlp.0.weight.exp_avg"
    with pytest.raises(
        MesetaError, match=rf"dense tensor '{key}' is saved as \[8\], but .* has \[8, 10\]; use the config"
    ):
        carry_over({**saved, key: torch.zeros(8)}, before, model, now)


@pytest.mark.parametrize(
    ("columns", "others"),
    [(("", "user"), ("", "user item")), (("", "user"), ("price", "user")), (("", "user item"), ("", "item"))],
)
def test_dlrm_reads_a_single_vector_differently(columns: tuple[str, str], others: tuple[str, str]) -> None:
    before, now = columns_of("dlrm", *columns), columns_of("dlrm", *others)
    saved = saved_tensors(trained_model("dlrm", before))
    kept = others[1] if others[1] == "item" else "user"
    with pytest.raises(MesetaError, match=f"top_mlp.0.weight reads '{kept}' in products .*; .* --reset dense"):
        carry_over(saved, before, new_model("dlrm", now), now)
    assert carry_over(saved, before, new_model("dlrm", before), before).tensors == saved
