"""Exchanges between ranks of one process: numbers of ranks, and of ranks a node, for which
launchers would take long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, seed, settings
from settings_objects import grouped

import hvd_adaptive
from hvd_adaptive.simulate.ranks import Ranks
from oracle.drawn import training
from oracle.training import Case, Trial

SIZES = [1, 2, 3, 4, 6]
WAYS = ["allgather", "scatter_reduce", "hierarchical"]


def wrong_in(case: Case) -> list[str]:
    """What is wrong with the averages of simulated ranks."""
    parameters = case.parameters()
    compressor = getattr(hvd_adaptive, case.scheme)(**grouped(case.keywords))
    trial = Trial(case, compressor)
    ranks = Ranks(list(zip(case.names, parameters, strict=True)), compressor, case.ranks)
    for step in range(case.steps):
        for rank in range(case.ranks):
            for slot, parameter in enumerate(parameters):
                gradient = case.gradient(step, rank, slot)
                parameter.grad = None if gradient is None else gradient.view(parameter.shape)
            ranks.take(rank)
        if ranks.due(step):
            ranks.refit(step)
        ranks.average(step)
        results = [p.grad.reshape(-1).double().numpy().copy() for p in parameters]
        trial.judge(step, ranks.layout, results, residuals_of(ranks, case.ranks))
    return trial.wrong()


def residuals_of(ranks: Ranks, count: int) -> list[dict[str, np.ndarray]]:
    found: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for own, residuals in zip(found, ranks.residuals, strict=False):
        saved = residuals.state_dict().get("residuals", {"parameters": {}})
        own |= {name: r.double().numpy() for name, r in saved["parameters"].items()}
    return found


def can_be_simulated(case: Case) -> Case:
    """Without sums and changes of settings, and with nodes that are known."""
    keywords = dict(case.keywords)
    if keywords["exchange"] == "hierarchical":
        keywords["ranks_per_node"] = keywords["ranks_per_node"] or case.ranks
    return Case(**{**vars(case), "keywords": keywords, "summed": False, "then": {}})


@pytest.mark.many
@pytest.mark.parametrize("part", range(5))
def test_averages_are_within_the_error_that_exact_variances_allow(part):
    @seed(part)
    @settings(max_examples=30)
    @given(training(SIZES, WAYS).map(can_be_simulated))
    def check(case):
        assert wrong_in(case) == []

    check()


def test_a_wrong_average_is_found(monkeypatch):
    """As if the second rank had sent the first one's gradient again."""
    taken = Ranks.take

    def take(ranks, rank):
        if rank != 1:
            taken(ranks, rank)

    case = Case("QSGD", {"bits": 8, "bucket_size": 64}, 2, [(40, 40)])
    assert wrong_in(case) == []
    monkeypatch.setattr(Ranks, "take", take)
    assert wrong_in(case)
