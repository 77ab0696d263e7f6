"""Simulated training: records, files, minibatches, buffers, the trajectory of SGD, refusals."""

from __future__ import annotations

import csv
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from hvd_adaptive import ALQ, AMQ, QSGD, simulate

INPUTS = torch.randn(90, 12, generator=torch.Generator().manual_seed(3))
TARGETS = INPUTS[:, :4].argmax(1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 4))


def sgd(parameters, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def run(**keywords) -> tuple[simulate.Result, nn.Module]:
    """A short run of three ranks."""
    model = make_model()
    usual = {"optimizer": sgd, "workers": 3, "steps": 7, "batch_size": 8, "progress": False}
    if not callable(keywords.get("data")):
        keywords = {"data": (INPUTS, TARGETS)} | keywords
    return simulate.train(model, **usual | keywords), model


LEAST = {"bits": 3, "bucket_size": 100, "min_numel": 100}


def alq(**keywords) -> ALQ:
    return ALQ(**LEAST | {"update_steps": [0, 3]} | keywords)


def test_records_of_a_run():
    result, model = run(
        compressor=alq(),
        validation=(INPUTS, TARGETS),
        evaluate_every=3,
        variance_steps=[2, 6],
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1),
    )
    assert [row["step"] for row in result.rows] == list(range(7))
    for row in result.rows:
        assert not [v for v in row.values() if isinstance(v, np.generic | torch.Tensor)]
    assert [row["learning_rate"] for row in result.rows] == [0.1] * 5 + [pytest.approx(0.01)] * 2
    assert [row["table_version"] for row in result.rows] == [1, 1, 1, 2, 2, 2, 2]
    assert [table["step"] for table in result.tables] == [-1, 0, 3]
    told = [row["step"] for row in result.rows if row["validation_loss"] is not None]
    assert told == [2, 5, 6]
    measured = [row["step"] for row in result.rows if row["minibatch"] is not None]
    assert measured == [2, 6]
    # The last evaluation is that of the model as it was left.
    loss, accuracy = simulate.evaluate(model, INPUTS, TARGETS)
    assert (result.rows[-1]["validation_loss"], result.rows[-1]["validation_accuracy"]) == (
        loss,
        accuracy,
    )
    assert accuracy == int((model.eval()(INPUTS).argmax(1) == TARGETS).sum()) / len(TARGETS)
    assert all(0 < row["relative_error"] < 1 for row in result.rows)
    assert all(3 < row["bits_per_coordinate"] < 10 for row in result.rows)
    assert result.settings["workers"] == 3 and "bits=3" in result.settings["compressor"]


def test_a_run_repeats_bit_for_bit():
    first, second, other = (run(compressor=alq(seed=s))[0].rows for s in (1, 1, 2))
    assert first == second
    assert [row["loss"] for row in first] != [row["loss"] for row in other]
    assert run(seed=5)[0].rows != run(seed=6)[0].rows


def test_csv_reads_back(tmp_path):
    result, _ = run(compressor=alq(), variance_steps=[1], validation=(INPUTS, TARGETS))
    path = tmp_path / "deep" / "run.csv"
    result.write(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.csv"]
    again = simulate.Result.read(path)
    assert again == result
    with path.open(newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    plain = list(csv.DictReader(lines))
    assert [float(row["loss"]) for row in plain] == [row["loss"] for row in result.rows]
    assert plain[0]["minibatch"] == ""


def test_csv_of_odd_values(tmp_path):
    rows = [
        {"a": math.inf, "b": None, "c": "text, with a comma"},
        {"a": 1e-300, "b": 7, "c": "# not a setting"},
    ]
    records = simulate.Records({"x": {"y": [1, None, "z: # \n"]}, "nothing": []}, rows)
    records.write(tmp_path / "r.csv")
    assert simulate.Records.read(tmp_path / "r.csv") == records
    records.rows[0]["a"] = math.nan
    records.write(tmp_path / "r.csv")
    assert math.isnan(simulate.Records.read(tmp_path / "r.csv").rows[0]["a"])
    assert records.column("b") == [7]


def test_minibatches_share_an_epoch_out():
    batches = simulate.Minibatches(torch.arange(50), torch.arange(50), 4, 3, seed=9)
    assert batches.steps_per_epoch == 4
    epochs = []
    for epoch in range(2):
        drawn = [batches(rank, 4 * epoch + step)[0] for step in range(4) for rank in range(3)]
        epochs.append(torch.cat(drawn).tolist())
        assert len(set(epochs[-1])) == 48
    assert epochs[0] != epochs[1]
    # In any order of calls, and for one rank with as large a batch.
    assert batches(1, 2)[0].tolist() == epochs[0][28:32]
    single = simulate.Minibatches(torch.arange(50), torch.arange(50), 12, 1, seed=9)
    assert single(0, 2)[0].tolist() == epochs[0][24:36]
    inputs, targets = batches(2, 1)
    assert torch.equal(inputs, targets)


def test_every_rank_has_its_own_buffers():
    """The model ends with rank 0's running statistics: those of its minibatches alone."""
    _, model = run(steps=3, optimizer=functools.partial(sgd, lr=0.0))
    alone = make_model()
    batches = simulate.Minibatches(INPUTS, TARGETS, 8, 3)
    for step in range(3):
        alone(batches(0, step)[0])
    assert torch.equal(model[1].running_mean, alone[1].running_mean)
    assert int(model[1].num_batches_tracked) == 3
    assert model.training


def test_targets_that_are_no_classes():
    model = nn.Linear(12, 2)
    result = simulate.train(
        model,
        lambda rank, step: (INPUTS[:8], INPUTS[:8, :2]),
        optimizer=sgd,
        steps=3,
        workers=2,
        loss=nn.functional.mse_loss,
        validation=(INPUTS, INPUTS[:, :2]),
        progress=False,
    )
    assert result.rows[-1]["validation_accuracy"] is None
    assert result.rows[-1]["loss"] < result.rows[0]["loss"]


def test_variance_on_the_trajectory_of_sgd():
    """The model follows rank 0's plain SGD; each scheme is measured on the same gradients."""
    fixed = {"symmetric": True, "norm": "linf", "min_numel": 100}
    schemes = {
        "ALQ": alq(update_steps=[0, 4]),
        "AMQ": AMQ(**LEAST, update_steps=[0, 4]),  # whose layout is the same
        "QSGDinf": QSGD(bits=3, bucket_size=100, **fixed),
        "coarse": QSGD(bits=2, bucket_size=50, min_numel=100),
    }
    batches = simulate.Minibatches(INPUTS, TARGETS, 8, 3)
    first, model, plain = make_model(), make_model(), make_model()
    ranks = simulate.Ranks(first.named_parameters(), schemes["QSGDinf"], 3)
    for rank in range(3):
        first.zero_grad()
        x, y = batches(rank, 0)
        nn.functional.cross_entropy(first(x), y).backward()
        ranks.take(rank)
    expected = ranks.variance(0)

    keywords = {"optimizer": sgd, "steps": [0, 5], "workers": 3, "batch_size": 8}
    data = (INPUTS, TARGETS)
    records = simulate.variance_on_trajectory(model, data, schemes, progress=False, **keywords)
    assert [(row["step"], row["method"]) for row in records.rows] == [
        (step, method) for step in (0, 5) for method in ("SGD", "SuperSGD", *schemes)
    ]
    versions = [scheme.parts.default.table_version for scheme in schemes.values()]
    assert versions == [2, 2, 0, 0]
    keywords = {"optimizer": sgd, "steps": 6, "workers": 1, "progress": False}
    simulate.train(plain, lambda rank, step: batches(0, step), **keywords)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    by_name = {(row["step"], row["method"]): row for row in records.rows}
    assert by_name[0, "QSGDinf"]["excess"] == pytest.approx(expected.excess, rel=1e-12)
    assert by_name[0, "QSGDinf"]["estimator"] == pytest.approx(expected.estimator, rel=1e-12)
    for step in (0, 5):
        excess = [by_name[step, name]["excess"] for name in schemes]
        assert max(excess[:3]) < excess[3]
        sgd_row, average = by_name[step, "SGD"], by_name[step, "SuperSGD"]
        assert sgd_row["estimator"] == pytest.approx(3 * average["estimator"])
        assert sgd_row["excess"] == average["excess"] == 0


def test_no_bar_where_there_is_no_terminal(capfd):
    run(steps=2, progress=None)
    assert capfd.readouterr().err == ""
    run(steps=2, progress=True)
    assert "step" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch_size": None}, "batch_size: must be given"),
        ({"batch_size": 31}, "90 examples are not enough for workers=3"),
        ({"data": (INPUTS, TARGETS[:5])}, "90 inputs but 5 targets"),
        ({"evaluate_every": -1}, "evaluate_every=-1"),
        ({"data": lambda rank, step: (INPUTS, TARGETS)}, "batch_size: must not be given"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_refuses(keywords, message):
    with pytest.raises(ValueError, match=message):
        run(**keywords)
    with pytest.raises(ValueError, match="workers=1"):
        own = {"optimizer": sgd, "steps": [0], "workers": 1, "batch_size": 8}
        simulate.variance_on_trajectory(make_model(), (INPUTS, TARGETS), {}, **own)
