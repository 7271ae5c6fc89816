"""The workload of a run: what the dataset counted, and the dense part by hand."""

from pathlib import Path

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.planner.cost.loads import WorkloadLoads
from meseta.train.setup.build import make_sharded_model, make_specs
from meseta.train.setup.workload import make_workload
from small_run import settings


def test_a_run_is_described_by_its_data_and_its_model(tiny: Path, tmp_path: Path) -> None:
    config, dataset = RunConfig.model_validate(settings(tiny, tmp_path / "run")), Dataset.load(tiny)
    model = make_sharded_model(config, dataset, World.single())
    work = make_workload(config, dataset, *make_specs(config, dataset), model)
    assert work.batch_size == config.train.batch_size
    num_samples = dataset.split("train").num_rows
    for column in dataset.sparse:
        load = work.loads[column.name]
        assert load.pooling_factor == column.statistics.mean_pooling_factor
        assert not load.is_sorted and load.reuse is not None
        assert load.reuse.window_samples == num_samples  # fewer than a window of the histogram
    products = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    assert work.dense.parameter_bytes == 4 * sum(weight.numel() for weight in model.parameters())
    assert 6 * products <= work.dense.flops_per_sample <= 6 * products + 6 * 4 * 10  # five vectors of 4, in pairs


def test_distinct_rows_of_the_split_are_those_that_prepare_counted(tiny: Path, tmp_path: Path) -> None:
    config, dataset = RunConfig.model_validate(settings(tiny, tmp_path / "run")), Dataset.load(tiny)
    loads = WorkloadLoads(make_workload(config, dataset, *make_specs(config, dataset)))
    found = loads.distinct(loads.whole(), float(dataset.split("train").num_rows))
    for distinct, column in zip(found, dataset.sparse, strict=True):
        assert abs(distinct - column.statistics.num_uniques) <= 0.1 * column.statistics.num_uniques + 1
