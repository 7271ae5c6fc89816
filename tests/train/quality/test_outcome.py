"""Pairs of configs: differences, the family of Holm's correction, verdicts, and what tables and the page show."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from scipy import stats

from meseta.report.quality.page import JSON_FILE, PAGE_FILE, TEXT_FILE, write_suite_result
from meseta.report.quality.statistics import ConfidenceInterval
from meseta.report.quality.suite_result import (
    COMPARED_METRICS,
    ConfigScores,
    EvalDataset,
    SeedScore,
    SuiteResult,
    compare_configs,
    reverse_difference,
)
from meseta.report.quality.tables import configs_table, strengths_table, to_markdown

SEEDS = range(1, 6)


def scores(name: str, regrets: dict[int, float], shift: float = 0.0) -> ConfigScores:
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


def outcome(*strengths: float) -> SuiteResult:
    grounds = [
        (
            EvalDataset(name=f"orders S={s:g}", world="orders", strength=s,
                        best_reachable={"regret": 0.0, "auc": 0.85}),
            [scores("weak", WEAK), scores("good", {k: WEAK[k] + s * (v - WEAK[k]) for k, v in GOOD.items()}),
             scores("noisy", NOISY), scores("weak again", WEAK)],
        )
        for s in strengths
    ]  # fmt: skip
    return SuiteResult(
        name="suite",
        reference="weak",
        num_trials=2,
        num_seeds=5,
        eval_datasets=tuple(compare_configs(grounds, {})),
        problems=(),
    )


def test_every_pair_and_figure_is_one_comparison_of_the_family() -> None:
    found = outcome(1.0, 0.0)
    assert found.num_comparisons == 2 * 6 * 3
    names = {(one.first, one.second) for one in found.eval_datasets[0].differences}
    assert names == set(itertools.combinations(("weak", "good", "noisy", "weak again"), 2))


def test_differences_are_paired_and_corrected_over_the_whole_suite() -> None:
    found = outcome(1.0, 0.0)
    all_ps = [stats.ttest_1samp([*one.by_seed.values()], 0.0).pvalue if len(set(one.by_seed.values())) > 1 else
              float(not any(one.by_seed.values()))
              for ground in found.eval_datasets for one in ground.differences]  # fmt: skip
    adjusted = [0.0] * len(all_ps)
    order = sorted(range(len(all_ps)), key=all_ps.__getitem__)
    for place, index in enumerate(order):
        adjusted[index] = max([min(1.0, all_ps[i] * (len(all_ps) - k)) for k, i in enumerate(order[: place + 1])])
    assert [one.p_holm for g in found.eval_datasets for one in g.differences] == pytest.approx(adjusted, abs=1e-12)


def test_better_is_said_where_it_stands_and_in_the_right_direction() -> None:
    strong = outcome(1.0).eval_datasets[0]
    verdicts = {(one.first, one.second, one.metric.key): one.better_config for one in strong.differences}
    for metric in ("regret", "ne", "auc"):  # less regret and NE, more AUC
        assert verdicts["weak", "good", metric] == "good" and verdicts["good", "weak again", metric] == "good"
        assert verdicts["weak", "noisy", metric] is None


def test_two_copies_differ_nowhere() -> None:
    for ground in outcome(1.0, 0.0).eval_datasets:
        for one in ground.differences:
            if {one.first, one.second} == {"weak", "weak again"}:
                assert (
                    one.seed_interval == ConfidenceInterval(0.0, 0.0, 0.0, 1.0)
                    and one.p_holm == 1.0
                    and one.better_config is None
                )


def test_seeds_that_only_one_config_has_are_left_out_and_one_seed_shows_nothing() -> None:
    ground = EvalDataset(name="g")
    half = scores("half", {1: 0.01, 2: 0.02})
    [found] = compare_configs([(ground, [scores("weak", WEAK), half])], {})
    assert [set(one.by_seed) for one in found.differences] == [{1, 2}] * 3
    [found] = compare_configs([(ground, [scores("weak", WEAK), scores("one", {1: 0.0})])], {})
    assert all(one.better_config is None and one.p_value == 1.0 for one in found.differences)


def test_chance_in_the_rows_counts_too() -> None:
    configs = [scores("weak", WEAK), scores("good", GOOD)]
    wide = {
        ("g", "weak", "good", metric.key): ConfidenceInterval(0.02, -0.01, 0.05, 0.2) for metric in COMPARED_METRICS
    }
    [found] = compare_configs([(EvalDataset(name="g"), configs)], wide)
    assert [one.better_config for one in found.differences] == [None] * 3 and {
        one.p_value for one in found.differences
    } == {0.2}


def test_a_pair_is_the_same_from_both_sides() -> None:
    found = outcome(1.0).eval_datasets[0]
    one = found.paired_difference("good", "weak", COMPARED_METRICS[0])
    assert one is not None and one.seed_interval.mean == pytest.approx(-0.02, abs=1e-3) and one.better_config == "good"
    assert reverse_difference(reverse_difference(one)) == one and found.paired_difference(
        "weak", "good", COMPARED_METRICS[0]
    ) == reverse_difference(one)


def test_tables_show_ratios_and_what_the_truth_reaches() -> None:
    found = outcome(1.0)
    table = configs_table(found.eval_datasets[0], "weak")
    cells = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert next(iter(cells)) == "good" and list(cells)[-1] == "true probabilities"
    assert cells["weak"]["regret / that of weak"] == "1.000"
    mean = sum(GOOD.values()) / sum(WEAK.values())
    assert cells["good"]["regret / that of weak"] == f"{mean:.3f}" and cells["good"]["samples/s"] == "300"
    assert cells["true probabilities"]["AUC"] == "0.85000"


def test_strengths_tell_whether_intervals_are_clear_of_each_other() -> None:
    rows = {(row[1], row[2]): row[-1] for row in strengths_table(outcome(0.0, 1.0)).rows}
    assert rows["regret", "good"] == "disjoint" and rows["regret", "noisy"] == "overlap"
    assert strengths_table(outcome(1.0)).rows == []


def test_files_hold_the_outcome(tmp_path: Path) -> None:
    found = outcome(1.0, 0.0)
    write_suite_result(found, tmp_path)
    document = json.loads((tmp_path / JSON_FILE).read_text())
    assert document["num_comparisons"] == 36 and len(document["grounds"][0]["differences"]) == 18
    assert (tmp_path / TEXT_FILE).read_text() == to_markdown(found)
    page = (tmp_path / PAGE_FILE).read_text()
    assert page.count('class="interval-row better"') == 3  # good beside weak, by each figure
    assert page.count('class="interval-row open"') == 2 * 9 - 3 and 'class="interval-row worse"' not in page
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_names_of_strangers_are_shown_as_text(tmp_path: Path) -> None:
    [ground] = compare_configs([(EvalDataset(name="<b>g"), [scores("<i>", WEAK), scores("a|b", GOOD)])], {})
    found = SuiteResult(
        name="<s>", reference="<i>", num_trials=0, num_seeds=1, eval_datasets=(ground,), problems=("<u>",)
    )
    write_suite_result(found, tmp_path)
    page = (tmp_path / PAGE_FILE).read_text()
    assert not any(mark in page for mark in ("<b>g", "<i>", "<s>", "<u>"))
    assert "a\\|b" in to_markdown(found)
