"""Public names are listed here, so that they change only on purpose."""

import importlib
from functools import cache

import pytest

from source_tree import SOURCE

PUBLIC = {
    "meseta": """
        Callback Communication EmbeddingBagCollection FeatureLoad FeatureSpec InitSpec JaggedTensor KeyedJaggedTensor
        OptimizerSpec Plan Run Shard ShardingType TableSpec Topology Workload __version__ ahead fit make_plan open_run
        shard
    """,
    "meseta.api": "Callback Run fit open_run",
    "meseta.checkpoint": """
        CheckpointDifference CheckpointSummary DamagedCheckpoint LoadedCheckpoint Mirror SaveOptions WriteRateLimiter
        compact compare export fallback_checkpoint_error fetch find_checkpoint latest_complete list_checkpoints load
        newest prune save summarize verify
    """,
    "meseta.comm": "BatchSlice BatchTotals DenseGradients ExchangeScope PendingCollective World retain_until_exit",
    "meseta.config": """
        CheckpointConfig DataConfig DenseConfig DenseOptimizerConfig EarlyStoppingConfig EmbeddingConfig MetricsConfig
        ModelConfig PlannerConfig RunConfig ScheduleConfig TableConfig TrainConfig load_config read_config_document
        set_default validate_document
    """,
    "meseta.config.models": """
        MODEL_NAMES LayeredModelConfig ModelConfig CustomModelConfig VectorModelConfig model_sections section_class
    """,
    "meseta.data": "Batch Dataset PrepareOptions Reader ReaderOptions",
    "meseta.data.hash_categories": "feature_seed hash_categories hash_to_rows",
    "meseta.data.parse_tsv": "parse_tsv",
    "meseta.data.prepare": """
        PrepareOptions Progress find_teacher load_prepared prepare read_layout with_training_defaults
    """,
    "meseta.data.synth": """
        CARDINALITIES CHUNK_ROWS ClickLog DENSE_MEDIANS SHIFTED_DENSE_FEATURE DENSE_SPREAD LogRows MAX_COUNT
        MISSING_DENSE MISSING_SPARSE MISSING_COUNT NUM_DENSE NUM_SPARSE PlantedProduct SynthOptions SynthWorld WORLDS
        ZIPF_EXPONENTS ZIPF_SHIFT category_codes encode_tsv find_world write_click_log zipf_probabilities zipf_ranks
    """,
    "meseta.data.whole_numbers": "are_whole_numbers respell_whole_numbers",
    "meseta.embedding": "EmbeddingBagCollection ShardedEmbeddingBagCollection resolve_plan shard",
    "meseta.sparse": "Embeddings JaggedTensor KeyedJaggedTensor KeyedTensor",
    "meseta.models": """
        AutoInt CrossShape DCNv2 DHEN DHENShape DLRM DLRMDCNv2 DeepFM FM FinalMLP FinalNet FinalShape GDCN
        LogisticRegression MLP MLPOptions MMoE MaskNet MaskShape StreamShape WideDeep Wukong WukongShape XDeepFM
        fill_glorot make_model
    """,
    "meseta.ops.row_file": "DiskEngine EngineInfo RowFileSnapshot RowFile RowFileCounters PendingRowRead probe_engine",
    "meseta.ops.row_update": "Bags FeatureGradient SortedRowIds TableRows UpdateGroup apply_row_update row_update "
    "sort_row_ids",
    "meseta.optim": "Hyper RowOptimizer element_state make_dense_optimizer make_row_optimizer row_state where",
    "meseta.pipeline": "LateNonFiniteLoss Pipeline StageTimes StepResult ahead choose_overlap",
    "meseta.planner": """
        STEP_COMPONENTS DoesNotFitError PlanResult Prediction choose_exchange_algorithms documented_cost_model find_plan
        make_plan predict
    """,
    "meseta.spec": """
        COLUMN_BLOCK Communication CostModel DenseLoad DeviceKind FeatureLoad FeatureSpec IdPolicy InitSpec Link
        MesetaError OptimizerSpec Plan Pooling Reuse Shard ShardingType StorageOptions TablePlan TableSpec Tier Topology
        Workload check_features suggest
    """,
    "meseta.storage": """
        ROW Lease CacheCapacityError SelectedRows TableShard TableStorage TieredShard as_stored fetch_rows
        make_storages
    """,
    "meseta.system": "FolderLock git_version hardware_summary read_processor set_wait_policy write_atomic",
    "meseta.train": "grid_settings open_trained parse_setting random_settings run_workload",
    "meseta.train.metrics": """
        NUM_RELIABILITY_BINS BinnedAuc GroupedMetric LifetimeMetrics LifetimeWindow MetricWindow Metrics ReliabilityBin
        Segment TaskWindows auc base_rate_entropy binned_auc calibration compute_metrics grouped_auc grouped_ndcg
        logloss normalized_entropy pr_auc regret reliability_curve segment_metrics task_metrics
    """,
    "meseta.report": "write_report",
    "meseta.train.verify": "Mismatch Verification compare record",
}


@cache
def packages() -> dict[str, set[str]]:
    """Return the names in `__all__` of every package that has one."""
    names_by_package = {}
    for init in sorted(SOURCE.rglob("__init__.py")):
        name = ".".join(("meseta", *init.parent.relative_to(SOURCE).parts))
        names = getattr(importlib.import_module(name), "__all__", None)
        if names is not None:
            names_by_package[name] = set(names)
    return names_by_package


def test_every_package_with_public_names_is_pinned() -> None:
    assert set(packages()) == set(PUBLIC)


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_pinned(package: str) -> None:
    assert packages()[package] == set(PUBLIC[package].split())


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in packages()[package] if not hasattr(module, name)] == []
