"""research/qsvrg.py: its problem in NumPy; over Horovod and in one process the same bits."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import qsvrg
import torch
from script_runs import MPIRUN, png_size, run
from sklearn.datasets import load_breast_cancer

from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.optim import QSVRG, theorem_parameters

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(200)]

RIDGE, RANKS = 0.25, 2
FLAGS = ["--epochs", "2", "--convexity", str(RIDGE), "--png", "picture.png"]


@cache
def rows() -> np.ndarray:
    """b_j a_j, of length 1."""
    data = load_breast_cancer()
    features = (data.data - data.data.mean(0)) / data.data.std(0)
    found = np.column_stack([features, np.ones(len(features))])
    return found * ((2 * data.target - 1) / np.linalg.norm(found, axis=1))[:, None]


def value(x: np.ndarray) -> float:
    return float(np.logaddexp(0.0, -(rows() @ x)).mean() + RIDGE / 2 * x @ x)


def started(seed: int = 0) -> QSVRG:
    lr, iterations = theorem_parameters(0.25 + RIDGE, RIDGE)
    portions = [qsvrg.Logistic(RIDGE).portion(rank, RANKS) for rank in range(RANKS)]
    start = torch.zeros(rows().shape[1], dtype=torch.float64)
    return QSVRG(start, portions, lr=lr, iterations=iterations, seed=seed)


def test_the_problem_is_logistic_regression() -> None:
    """Gradients of every portion and function, by differences of the value in NumPy."""
    problem, x = qsvrg.Logistic(RIDGE), np.linspace(-1, 1, rows().shape[1])
    assert problem.value(torch.from_numpy(x)) == pytest.approx(value(x))
    for rank in range(RANKS):
        portion, own = problem.portion(rank, RANKS), rows()[rank::RANKS]
        assert portion.count == len(own)
        for index, picked in ((None, own), (7, own[7:8])):
            slope = RIDGE * x - (picked / (1 + np.exp(picked @ x))[:, None]).mean(0)
            np.testing.assert_allclose(portion.gradient(torch.from_numpy(x), index), slope)
    least = problem.minimum().numpy()
    for change in 1e-3 * np.eye(len(least)):
        assert value(least) < min(value(least + change), value(least - change))


def test_ranks_and_updates_round_by_numbers_of_their_own() -> None:
    run = started()
    x, full = run.point, run._full_gradient(run.point)
    headers = [read_header(p) for step in range(3) for p in run._updates(x, x, full, step)]
    assert len({header.key for header in headers}) == 3 * RANKS


def line(output: str, start: str) -> str:
    (only,) = (found for found in output.splitlines() if found.strip().startswith(start))
    return only.strip()


@pytest.mark.thorough
def test_one_process_and_two_ranks_agree_to_the_bit(tmp_path: Path) -> None:
    run_here, least = started(), value(qsvrg.Logistic(RIDGE).minimum().numpy())
    points = [run_here.point.numpy(), *(run_here.epoch().numpy().copy() for _ in range(2))]
    program = [sys.executable, str(qsvrg.__file__)]
    for command in ([*program, "--simulate", "--ranks", str(RANKS)], [*MPIRUN, *program]):
        told = run([*command, *FLAGS], tmp_path, 150)
        assert "QSVRG, 2 ranks, n = 31, s = 6" in told
        assert line(told, "point ") == f"point {points[-1].tobytes().hex()[:16]}"
        for p, point in enumerate(points):
            printed = float(line(told, f"│     {p} │").split("│")[2])
            assert printed == pytest.approx(value(point) - least, rel=6e-4)
        assert png_size(tmp_path / "picture.png")[0] > 1000
        (tmp_path / "picture.png").unlink()
