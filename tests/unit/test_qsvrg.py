"""QSVRG: its constants, its updates, its rate, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_adaptive.base.errors import RankMismatchError
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.optim import QSVRG, LocalRanks, Portion, theorem_parameters

N, RANKS = 12, 3


class LeastSquares:
    """f_j = (a_j x - b_j)²/2 + ridge |x|²/2 with rows of length 1: L = 1 + ridge."""

    def __init__(self, rows: int = 60, n: int = N, ridge: float = 0.2, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.a = generator.standard_normal((rows, n))
        self.a /= np.linalg.norm(self.a, axis=1, keepdims=True)
        self.b = generator.standard_normal(rows)
        self.ridge = ridge
        hessian = self.a.T @ self.a / rows + ridge * np.eye(n)
        self.best = np.linalg.solve(hessian, self.a.T @ self.b / rows)
        self.smoothness, self.convexity = 1 + ridge, float(np.linalg.eigvalsh(hessian)[0])

    def portion(self, rows: slice) -> Portion:
        a, b = torch.from_numpy(self.a[rows]), torch.from_numpy(self.b[rows])

        def gradient(x: torch.Tensor, index: int | None) -> torch.Tensor:
            own = slice(None) if index is None else slice(index, index + 1)
            wide = x.double()
            mean = a[own].T @ (a[own] @ wide - b[own]) / a[own].shape[0]
            return (mean + self.ridge * wide).to(x.dtype)

        return Portion(len(a), gradient)

    def portions(self, ranks: int) -> list[Portion]:
        return [self.portion(slice(rank, None, ranks)) for rank in range(ranks)]


def start(n: int = N, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)


def left(c: float, iterations: float, condition: float, a: float) -> float:
    """What an epoch leaves at η = c/L, by the proof of Johnson and Zhang."""
    return condition / (c * (1 - a * c) * iterations) + a * c / (1 - a * c)


@pytest.mark.parametrize("gamma", (0.0, 0.5, 1.0, 4.0))
def test_the_theorems_constants_leave_nine_tenths_and_no_fewer_iterations_do(gamma):
    smoothness, convexity, a = 3.0, 0.01, 2 * (1 + gamma)
    lr, iterations = theorem_parameters(smoothness, convexity, gamma)
    condition = smoothness / convexity
    assert left(lr * smoothness, iterations, condition, a) <= 0.9
    for c in np.linspace(0.001, 0.999, 5000) / a:
        assert left(c, iterations - 1, condition, a) > 0.9


def test_it_reaches_the_minimum_to_the_precision_of_the_point():
    problem = LeastSquares()
    run = QSVRG(start(), problem.portions(RANKS), lr=0.2, iterations=150)
    for _ in range(25):
        run.epoch()
    np.testing.assert_allclose(run.point.numpy(), problem.best, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("n", "intervals", "bucket"),
    [(1, 1, 1), (16, 4, 16), (17, 5, 17), (16130, 127, 16129), (40_000, 127, 16129)],
)
def test_intervals_are_the_root_rounded_up_and_buckets_keep_the_bound(n, intervals, bucket):
    flat = Portion(1, lambda x, index: x)
    run = QSVRG(start(n), [flat], lr=0.1, iterations=1)
    assert run.intervals == intervals and run.codec.settings.bucket_size == bucket
    assert bucket / intervals**2 <= 1
    vector = torch.from_numpy(np.random.default_rng(0).standard_normal(n)).float()
    error = run.codec.payloads.roundtrip(vector, 0) - vector
    assert float(error.square().sum()) <= float(vector.square().sum())


def test_bits_of_an_epoch():
    """Counted again from what would travel, number by number."""
    problem = LeastSquares()
    run = QSVRG(start(), problem.portions(RANKS), lr=0.1, iterations=4, seed=2)
    full, sent, lengths = run._full_gradient(run.point), 64 * N, {1: 1, 2: 3, 3: 3, 4: 6, 5: 6}
    run.iterations, x = 1, run.point
    payload = run._updates(x, x, full, 0)[0]
    scale = np.frombuffer(payload.numpy().tobytes(), "<f4", 1, 96)[0]
    numbers = np.rint(
        run.codec.payloads.sum([payload], read_header(payload), 1.0).numpy() / scale * 4
    ).astype(int)
    sent += 32 + sum(lengths[abs(k) + 1] + (k != 0) for k in numbers.tolist())
    run.epoch()
    assert run.bits.coded == sent
    assert run.bits.theorem == (32 + 2.8 * N) * 2 + 64 * N
    assert run.bits.payloads == 64 * N + 8 * payload.numel()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_resumed_run_is_the_same_to_the_bit(dtype):
    problem = LeastSquares()
    runs = [
        QSVRG(start(dtype=dtype), problem.portions(RANKS), lr=0.1, iterations=9) for _ in range(2)
    ]
    for _ in range(3):
        runs[0].epoch()
    runs[1].load_state_dict(runs[0].state_dict())
    assert torch.equal(runs[0].epoch(), runs[1].epoch()) and runs[1].point.dtype == dtype
    with pytest.raises(ValueError, match=r"state: point is \(5,\)"):
        runs[0].load_state_dict({"point": torch.zeros(5), "epochs": 1})


def test_ranks_that_start_apart_are_told():
    class Apart(LocalRanks):
        def gather(self, own, name):
            return [own[0], own[0] + 1]

    with pytest.raises(RankMismatchError, match="rank 1 has another start"):
        QSVRG(start(), LeastSquares().portions(2), lr=0.1, iterations=1, ranks=Apart(2))


def make(**changes) -> QSVRG:
    arguments = {"start": start(), "lr": 0.1, "iterations": 3} | changes
    return QSVRG(arguments.pop("start"), LeastSquares().portions(RANKS), **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(lr=0), "lr=0: must be a finite number above 0"),
        (lambda: make(iterations=0), "iterations=0: must be an integer >= 1"),
        (lambda: make(intervals=128), "intervals=128: must be an integer from 1 to 127"),
        (lambda: make(start=torch.zeros(4, dtype=torch.int64)), "start: must be"),
        (lambda: make(ranks=LocalRanks(2)), "portions: 3 given, this process has 2 ranks"),
        (lambda: theorem_parameters(0, 1), "smoothness=0"),
        (lambda: theorem_parameters(1, 2), "convexity=2: must be at most smoothness=1"),
        (lambda: theorem_parameters(1, 1, -0.1), "relative_variance=-0.1"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
