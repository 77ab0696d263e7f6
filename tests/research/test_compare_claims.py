"""The claims of compare.py's page on made-up outcomes: all are there, and decided rightly."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

pytest.importorskip("mlxtend")
pytest.importorskip("sklearn")
import compare_studies as studies
import papers
import verdicts
from compare_budgets import BUDGETS
from compare_claims import CLOSE, check_claims
from compare_equal_claims import check_equal_claims
from compare_methods import ADAPTIVE, METHODS
from compare_paper_claims import check_fits, check_nuqsgd, check_qsgd
from compare_runs import Outcome, Run
from compare_scores import OnTrajectory, budget_scores, scores_of
from compare_sweep_claims import check_sweeps
from compare_tasks import TASKS
from papers_list import PAPERS

from hvd_adaptive.simulate import Records

ARGS = argparse.Namespace(
    task=list(TASKS),
    methods=list(METHODS),
    seeds=20,
    workers=4,
    bits=3,
    bucket_size=8192,
    steps=None,
    sweeps=list(studies.SWEEPS),
    budgets=list(BUDGETS),
    papers=True,
)
GAIN = 2.0


def outcome(rng: np.random.Generator, run: Run, best: tuple[str, ...]) -> Outcome:
    """Accuracies, losses, errors of one law for all methods, but for ``best``, which are ahead."""
    ahead = GAIN * (run.method in best)
    levels = tuple(rng.uniform(0.01, 0.3, 3)) if run.method in ADAPTIVE else ()
    return Outcome(
        run,
        rng.normal(90 + ahead, 0.3),
        *np.exp(rng.normal(-1 - ahead, 0.2, 2)),
        3.0,
        float(np.exp(rng.normal(-ahead, 0.2))),
        levels,
        tuple(np.exp(rng.normal(-ahead, 0.2, 5))),
    )


def trajectory(rng: np.random.Generator, task: str, best: tuple[str, ...]) -> OnTrajectory:
    methods = studies._on_trajectory(ARGS, task)
    names = ("normalized_minibatch", "excess", "normalized_excess", "squared_bias", "estimator")
    records = []
    for _ in range(ARGS.seeds):
        rows = [
            {
                "step": step,
                "method": m,
                "minibatch": 1.0,
                **{n: float(np.exp(rng.normal(-GAIN * (m in best), 0.2))) for n in names},
            }
            for step in studies.moments(TASKS[task].steps)
            for m in methods
        ]
        records.append(Records({}, rows))
    return OnTrajectory(records, ARGS.workers)


def fit(rng: np.random.Generator) -> Records:
    names = [
        f"{solver}, {start} start"
        for solver in ("coordinate descent", "gradient descent")
        for start in ("uniform", "exponential", "quantile")
    ] + ["AMQ, p = 0.5 at first"]
    rows = [
        {"objective": "expected variance", "fit": name, "sweep": i, "value": value}
        for name in names
        for i, value in enumerate((3.0, 1.5, 1.0 + 0.2 * rng.random()))
    ]
    return Records({}, rows)


def claims(seed: int, best: tuple[str, ...] = ()) -> list[verdicts.Claim]:
    rng = np.random.default_rng(seed)
    runs = (
        studies.main_runs(ARGS)
        + studies.paper_runs(ARGS)
        + studies.sweep_runs(ARGS)
        + studies.budget_runs(ARGS)
    )
    outcomes = [outcome(rng, run, best) for run in dict.fromkeys(runs)]
    scores = {task: scores_of(ARGS, outcomes, task) for task in ARGS.task}
    on_path = {task: trajectory(rng, task, best) for task in ARGS.task}
    sweeps = {setting: studies.swept(ARGS, setting, outcomes) for setting in ARGS.sweeps}
    equal = {task: budget_scores(ARGS, outcomes, task) for task in studies.budget_tasks(ARGS)}
    return [
        *check_claims(scores, on_path, ARGS.bits),
        *check_sweeps(sweeps),
        *check_qsgd(scores),
        *check_nuqsgd(scores, on_path),
        *check_fits([fit(rng) for _ in range(ARGS.seeds)]),
        *check_equal_claims(equal),
    ]


def test_every_item_of_the_papers_list_finds_its_claims(tmp_path, monkeypatch):
    (tmp_path / "results.md").write_text(verdicts.page([claims(0)]), encoding="utf-8")
    monkeypatch.setattr(papers, "DOCS", tmp_path)
    for items in PAPERS.values():
        for item in items:
            if item.page == "results.md":
                assert papers.verdicts_on("results.md", item.claims), item


def test_claims_have_different_texts():
    texts = [claim.text for claim in claims(0)]
    assert len(texts) == len(set(texts)) > 80


def _decided(found: list[verdicts.Claim]) -> dict[str, str]:
    decided = verdicts.decide(found)
    return {claim.text: v.word for claim, v in zip(found, decided, strict=True)}


AHEAD = ("more accurate than", "loses less accuracy", "lower validation loss", "less variance")
AHEAD += ("less mean squared", "is behind", "loses accuracy", "is ahead of")


def test_nothing_is_said_of_equal_methods():
    """Methods of one law: claims that one is ahead, or the least sensitive, are not decided on
    more than 5% of the pages, which for 8 is 3 within five sigma."""
    wrong = 0
    for seed in range(8):
        decided = _decided(claims(seed)).items()
        words = [word for text, word in decided if any(each in text for each in AHEAD)]
        assert len(words) > 35
        wrong += any(word != verdicts.OPEN for word in words)
    assert wrong <= 3


def test_what_is_better_is_found():
    """Adaptive methods two points ahead, with an eighth of the variance."""
    words = _decided(claims(1, ADAPTIVE))
    found = [word for text, word in words.items() if text.startswith("adaptive methods")]
    assert len(found) >= 3 + 3 + 3 and set(found) == {verdicts.HOLDS}
    assert words[f"ALQ is within {CLOSE:g} points of SuperSGD on {TASKS['fc'].title}"] == "Holds"
    behind = _decided(claims(1, tuple(m for m in METHODS if m not in ADAPTIVE)))
    found = [word for text, word in behind.items() if text.startswith("adaptive methods")]
    assert set(found) == {verdicts.FAILS}
