"""The workload of a run: statistics of the dataset, and FLOPs of the dense part by hand."""

from pathlib import Path

import pytest
from torch.nn import Linear

from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.planner.cost.loads import WorkloadLoads
from meseta.spec import MesetaError
from meseta.spec.workload import read_workload
from meseta.train.setup.meta_model import dense_only_flops, make_meta_model
from meseta.train.setup.specs import make_specs, make_workload
from small_run import settings


def test_data_and_model_determine_the_workload(tiny: Path, tmp_path: Path) -> None:
    config, dataset = RunConfig.model_validate(settings(tiny, tmp_path / "run")), Dataset.load(tiny)
    model = make_meta_model(config, dataset, EmbeddingBagCollection(*make_specs(config, dataset)))
    work = make_workload(config, dataset, *make_specs(config, dataset), model)
    assert work.batch_size == config.train.batch_size
    num_samples = dataset.split("train").num_rows
    for column in dataset.sparse:
        load = work.loads[column.name]
        assert load.pooling_factor == column.statistics.mean_pooling_factor
        assert not load.is_sorted and load.reuse is not None
        assert load.reuse.window_samples == num_samples  # fewer than a window of the histogram
    products = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    first = model.bottom_mlp[0].weight.numel()  # its inputs have no gradient
    assert work.dense.parameter_bytes == 4 * sum(weight.numel() for weight in model.parameters())
    assert work.dense.flops_per_sample == 6 * products - 2 * first + 6 * 4 * 10  # five vectors of 4, in pairs


def test_distinct_rows_match_the_counts_of_prepare(tiny: Path, tmp_path: Path) -> None:
    config, dataset = RunConfig.model_validate(settings(tiny, tmp_path / "run")), Dataset.load(tiny)
    loads = WorkloadLoads(make_workload(config, dataset, *make_specs(config, dataset)))
    distinct_rows = loads.distinct_rows(loads.whole_tables(), float(dataset.split("train").num_rows))
    for distinct, column in zip(distinct_rows, dataset.sparse, strict=True):
        assert abs(distinct - column.statistics.num_uniques) <= 0.1 * column.statistics.num_uniques + 1


@pytest.mark.parametrize(
    ("name", "has_layers"),
    [("dlrm", True), ("dlrm_dcnv2", True), ("own_models:Regularised", False)],
)
def test_operations_of_layers_that_read_dense_inputs_alone(
    tiny: Path, tmp_path: Path, name: str, has_layers: bool
) -> None:
    """The FLOPs of the bottom MLP are counted, forward and twice backward."""
    config = RunConfig.model_validate(settings(tiny, tmp_path, model__name=name))
    dataset = Dataset.load(tiny)
    outline = make_meta_model(config, dataset, EmbeddingBagCollection(*make_specs(config, dataset)))
    flops = dense_only_flops(outline, 64, len(dataset.dense)) / 64
    layers = [
        layer for path, layer in outline.named_modules() if path.startswith("bottom") and isinstance(layer, Linear)
    ]
    forward = [2 * layer.in_features * layer.out_features for layer in layers]
    assert flops == 3 * sum(forward) - sum(forward[:1])  # the data have no gradient
    assert (flops > 0) is has_layers


def test_a_workload_file_may_contain_the_overlap() -> None:
    document = {"batch_size": 8, "tables": {"t": {"num_embeddings": 3, "embedding_dim": 4}}}
    dense = {"flops_per_sample": 100.0, "before_flops_per_sample": 20.0}
    workload = read_workload({**document, "dense": dense, "overlap": ["dense", "ids"]})
    assert workload.overlap == ("ids", "dense") and workload.dense.before_flops_per_sample == 20.0
    assert read_workload(document).overlap == ()
    for wrong, words in (
        ({"overlap": ["idz"]}, "overlap 'idz' is unknown; did you mean 'ids'"),
        ({"overlap": "auto"}, "overlap must be a list"),
        ({"dense": {**dense, "before_flops_per_sample": 200.0}}, r"before_flops_per_sample must be in 0\.\.flops"),
    ):
        with pytest.raises(MesetaError, match=words):
            read_workload({**document, **wrong})
