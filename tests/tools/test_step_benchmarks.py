"""benchmarks/first_step.py and whole_steps.py: what they make of the ranks' seconds."""

from __future__ import annotations

import first_step
import pytest
import torch
import whole_steps


def cells_of(printed: str) -> list[list[str]]:
    """Cells of a printed table's rows."""
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_a_cold_and_a_warm_launch_share_a_folder(monkeypatch, capsys):
    folders = []

    def launched(method, count, folder):
        folders.append(folder)
        cold = folders.count(folder) == 1
        return [10.0 * count if cold else 0.5 * count, 0.2, *[0.1] * 10]

    monkeypatch.setattr(first_step, "launched", launched)
    words = ["--ranks", "2", "4", "--methods", "ALQ(bits=3)", "--launches", "2"]
    assert first_step.main(words) == 0
    assert len(folders) == 8 and len(set(folders)) == 4
    assert cells_of(capsys.readouterr().out) == [
        ["ALQ(bits=3)", "2", "20", "1", "0.2", "0.1"],
        ["ALQ(bits=3)", "4", "40", "2", "0.2", "0.1"],
    ]


def test_rows_are_medians_and_ratios_to_float16(monkeypatch, capsys):
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
    cells = cells_of(capsys.readouterr().out)
    assert cells[:2] == [
        ["10x20", "float16", "30.0", "1.00", "20.0", "1.00"],
        ["10x20", "ALQ(bits=3)", "60.0", "2.00", "30.0", "1.50"],
    ]
    assert [row[0] for row in cells] == ["10x20", "10x20", "conv", "conv"]


@pytest.mark.parametrize("case", ["7x30", "conv"])
def test_a_backward_pass_fires_every_hook(case):
    named, backward = whole_steps.conv(0) if case == "conv" else whole_steps.chain(case, 0)
    fired = []
    for name, parameter in named:
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    backward()
    assert sorted(fired) == sorted(name for name, _ in named)
    assert all(torch.isfinite(parameter.grad).all() for _, parameter in named)
    assert sum(p.numel() for _, p in named) == {"7x30": 210, "conv": 2_641_674}[case]


def test_too_few_ranks_are_refused(capsys):
    cases = ((first_step, "0", "must be one or more, not 0"), (whole_steps, "1", "must be two or"))
    for module, ranks, told in cases:
        with pytest.raises(SystemExit):
            module.main(["--ranks", ranks])
        assert f"--ranks: {told}" in capsys.readouterr().err
