"""research/fine_tuning.py: its runs on few steps; its tables pair the seeds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.mark.thorough
def test_runs_of_both_tasks():
    """Codes of a LoRA contain the adapters and the classifier alone."""
    import fine_tuning as script

    data = script.texts(0, 600)
    body = script.pretrained(data[0], 0, 2)
    for task in script.TASKS:
        exact, again, coded = (
            script.tuned(task, method, body, 0, data, 31)
            for method in ("float32", "float32", "ALQ(bits=3)")
        )
        assert exact == again  # all methods see the same
        assert exact[0] == 32 and 3 < coded[0] < 4
    texts, styles = script.texts(0, 600)
    assert torch.equal(texts, data[0]) and not torch.equal(texts, script.texts(1, 600)[0])
    assert set(styles.tolist()) == set(range(script.STYLES))


def test_differences_are_paired():
    import fine_tuning as script

    one = [[32.0, 2.0, 1.0, 0.1, 70.0], [32.0, 3.0, 2.0, 0.1, 60.0]]
    other = [[3.5, 2.5, 1.25, 0.2, 71.0], [3.5, 3.5, 2.25, 0.4, 61.0]]
    exact, coded = script.lines({"float32": one, "X()": other})
    assert exact == ["`float32`", "32.00", "2.500", "-", "1.500", "-", "0.10", "65.00"]
    assert coded[3] == "+0.50 (+0.50 to +0.50)" and coded[5] == "+0.25 (+0.25 to +0.25)"
    assert coded[6:] == ["0.30", "+1.00 (+1.00 to +1.00)"]
