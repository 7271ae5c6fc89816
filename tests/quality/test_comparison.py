"""Paired differences of configs, Holm's adjustment over a suite, tables and result files."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from scipy import stats

from tools.quality.comparison import (
    COMPARED_METRICS,
    ConfigScores,
    EvalDataset,
    SeedScore,
    SuiteResult,
    compare_configs,
    reverse_difference,
)
from tools.quality.intervals import ConfidenceInterval
from tools.quality.page import JSON_FILE, PAGE_FILE, TEXT_FILE, write_suite_result
from tools.quality.tables import configs_table, strengths_table, to_markdown

SEEDS = range(1, 6)


def make_scores(name: str, regrets: dict[int, float], shift: float = 0.0) -> ConfigScores:
    return ConfigScores(
        name=name,
        scores={
            seed: SeedScore(
                regret=value, ne=0.8 + value + shift, auc=0.8 - value, num_dense_parameters=10, flops_per_sample=5e3,
                samples_per_s=100.0 * seed,
            )
            for seed, value in regrets.items()
        },
    )  # fmt: skip


WEAK = {seed: 0.05 + 0.01 * seed for seed in SEEDS}
GOOD = {seed: value - 0.02 + 0.0001 * (seed % 3) for seed, value in WEAK.items()}
NOISY = {seed: value + (-1) ** seed * 0.01 for seed, value in WEAK.items()}


def make_result(*strengths: float) -> SuiteResult:
    datasets = [
        (
            EvalDataset(name=f"orders S={s:g}", world="orders", strength=s,
                        best_reachable={"regret": 0.0, "auc": 0.85}),
            [make_scores("weak", WEAK), make_scores("good", {k: WEAK[k] + s * (v - WEAK[k]) for k, v in GOOD.items()}),
             make_scores("noisy", NOISY), make_scores("weak again", WEAK)],
        )
        for s in strengths
    ]  # fmt: skip
    return SuiteResult(
        name="suite",
        reference="weak",
        num_trials=2,
        num_seeds=5,
        eval_datasets=tuple(compare_configs(datasets, {})),
        problems=(),
    )


def test_all_pairs_are_compared_by_all_metrics() -> None:
    result = make_result(1.0, 0.0)
    assert result.num_comparisons == 2 * 6 * 3
    names = {(one.first, one.second) for one in result.eval_datasets[0].differences}
    assert names == set(itertools.combinations(("weak", "good", "noisy", "weak again"), 2))


def test_p_values_are_adjusted_over_the_whole_suite() -> None:
    result = make_result(1.0, 0.0)
    all_ps = [stats.ttest_1samp([*one.by_seed.values()], 0.0).pvalue if len(set(one.by_seed.values())) > 1 else
              float(not any(one.by_seed.values()))
              for dataset in result.eval_datasets for one in dataset.differences]  # fmt: skip
    adjusted = [0.0] * len(all_ps)
    order = sorted(range(len(all_ps)), key=all_ps.__getitem__)
    for place, index in enumerate(order):
        adjusted[index] = max([min(1.0, all_ps[i] * (len(all_ps) - k)) for k, i in enumerate(order[: place + 1])])
    assert [one.p_holm for dataset in result.eval_datasets for one in dataset.differences] == pytest.approx(
        adjusted, abs=1e-12
    )


def test_better_configs_have_lower_regret_and_ne_and_higher_auc() -> None:
    strong = make_result(1.0).eval_datasets[0]
    verdicts = {(one.first, one.second, one.metric.key): one.better_config for one in strong.differences}
    for metric in ("regret", "ne", "auc"):
        assert verdicts["weak", "good", metric] == "good" and verdicts["good", "weak again", metric] == "good"
        assert verdicts["weak", "noisy", metric] is None


def test_copies_of_a_config_do_not_differ() -> None:
    for dataset in make_result(1.0, 0.0).eval_datasets:
        for one in dataset.differences:
            if {one.first, one.second} == {"weak", "weak again"}:
                assert (
                    one.seed_interval == ConfidenceInterval(0.0, 0.0, 0.0, 1.0)
                    and one.p_holm == 1.0
                    and one.better_config is None
                )


def test_only_common_seeds_are_compared() -> None:
    dataset = EvalDataset(name="g")
    half = make_scores("half", {1: 0.01, 2: 0.02})
    [result] = compare_configs([(dataset, [make_scores("weak", WEAK), half])], {})
    assert [set(one.by_seed) for one in result.differences] == [{1, 2}] * 3
    [result] = compare_configs([(dataset, [make_scores("weak", WEAK), make_scores("one", {1: 0.0})])], {})
    assert all(one.better_config is None and one.p_value == 1.0 for one in result.differences)


def test_intervals_over_rows_limit_significance() -> None:
    configs = [make_scores("weak", WEAK), make_scores("good", GOOD)]
    wide = {
        ("g", "weak", "good", metric.key): ConfidenceInterval(0.02, -0.01, 0.05, 0.2) for metric in COMPARED_METRICS
    }
    [result] = compare_configs([(EvalDataset(name="g"), configs)], wide)
    assert [one.better_config for one in result.differences] == [None] * 3 and {
        one.p_value for one in result.differences
    } == {0.2}


def test_reversed_differences_are_negated() -> None:
    result = make_result(1.0).eval_datasets[0]
    one = result.paired_difference("good", "weak", COMPARED_METRICS[0])
    assert one is not None and one.seed_interval.mean == pytest.approx(-0.02, abs=1e-3) and one.better_config == "good"
    assert reverse_difference(reverse_difference(one)) == one and result.paired_difference(
        "weak", "good", COMPARED_METRICS[0]
    ) == reverse_difference(one)


def test_tables_have_ratios_and_true_probabilities() -> None:
    result = make_result(1.0)
    table = configs_table(result.eval_datasets[0], "weak")
    cells = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert next(iter(cells)) == "good" and list(cells)[-1] == "true probabilities"
    assert cells["weak"]["regret / that of weak"] == "1.000"
    mean = sum(GOOD.values()) / sum(WEAK.values())
    assert cells["good"]["regret / that of weak"] == f"{mean:.3f}" and cells["good"]["samples/s"] == "300"
    assert cells["true probabilities"]["AUC"] == "0.85000"


def test_strengths_state_whether_intervals_overlap() -> None:
    rows = {(row[1], row[2]): row[-1] for row in strengths_table(make_result(0.0, 1.0)).rows}
    assert rows["regret", "good"] == "disjoint" and rows["regret", "noisy"] == "overlap"
    assert strengths_table(make_result(1.0)).rows == []


def test_result_files_are_complete(tmp_path: Path) -> None:
    result = make_result(1.0, 0.0)
    write_suite_result(result, tmp_path)
    document = json.loads((tmp_path / JSON_FILE).read_text())
    assert document["num_comparisons"] == 36 and len(document["grounds"][0]["differences"]) == 18
    assert (tmp_path / TEXT_FILE).read_text() == to_markdown(result)
    page = (tmp_path / PAGE_FILE).read_text()
    assert page.count('class="interval-row better"') == 3
    assert page.count('class="interval-row open"') == 2 * 9 - 3 and 'class="interval-row worse"' not in page
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_names_are_escaped(tmp_path: Path) -> None:
    [compared] = compare_configs([(EvalDataset(name="<b>g"), [make_scores("<i>", WEAK), make_scores("a|b", GOOD)])], {})
    result = SuiteResult(
        name="<s>", reference="<i>", num_trials=0, num_seeds=1, eval_datasets=(compared,), problems=("<u>",)
    )
    write_suite_result(result, tmp_path)
    page = (tmp_path / PAGE_FILE).read_text()
    assert not any(mark in page for mark in ("<b>g", "<i>", "<s>", "<u>"))
    assert "a\\|b" in to_markdown(result)
