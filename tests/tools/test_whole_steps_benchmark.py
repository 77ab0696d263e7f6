"""benchmarks/whole_steps.py: what it makes of the ranks' seconds, and its networks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def whole_steps(monkeypatch):
    import whole_steps

    yield whole_steps
    sys.modules.pop("whole_steps")


def test_rows_are_medians_and_ratios_to_float16(whole_steps, monkeypatch, capsys):
    plans = []

    def launched(plan, ranks):
        plans.append((plan["case"], ranks))
        return {
            "float16": [(0.02, 0.01), (0.03, 0.02), (0.9, 0.9)],
            "ALQ(bits=3)": [(0.06, 0.03)],
        }

    monkeypatch.setattr(whole_steps, "launched", launched)
    assert whole_steps.main(["--cases", "10x20", "conv", "--ranks", "3"]) == 0
    assert plans == [("10x20", 3), ("conv", 3)]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells[:2] == [
        ["10x20", "float16", "30.0", "1.00", "20.0", "1.00"],
        ["10x20", "ALQ(bits=3)", "60.0", "2.00", "30.0", "1.50"],
    ]
    assert [row[0] for row in cells] == ["10x20", "10x20", "conv", "conv"]


@pytest.mark.parametrize("case", ["7x30", "conv"])
def test_a_backward_pass_fires_every_hook(whole_steps, case):
    named, backward = whole_steps.conv(0) if case == "conv" else whole_steps.chain(case, 0)
    fired = []
    for name, parameter in named:
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    backward()
    assert sorted(fired) == sorted(name for name, _ in named)
    assert all(torch.isfinite(parameter.grad).all() for _, parameter in named)
    assert sum(p.numel() for _, p in named) == {"7x30": 210, "conv": 2_641_674}[case]


def test_one_rank_is_refused(whole_steps, capsys):
    with pytest.raises(SystemExit):
        whole_steps.main(["--ranks", "1"])
    assert "--ranks: must be two or more" in capsys.readouterr().err
