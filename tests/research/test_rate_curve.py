"""rate_curve.py from end to end, on part of one gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_error import exact_error

from hvd_adaptive import QCS, TernGrad

pytestmark = pytest.mark.integration


@pytest.mark.thorough
def test_end_to_end_and_kept(tmp_path, monkeypatch):
    """Page and figure; a second call measures nothing. ECDQ is ahead here, too."""
    pytest.importorskip("mlxtend")
    pytest.importorskip("matplotlib")
    import rate_bound
    import rate_curve
    import rate_methods

    few = [f for f in rate_methods.FAMILIES if f.name.startswith(("ECDQ", "QSGD L∞", "Sign"))]
    monkeypatch.setattr(rate_curve, "FAMILIES", few)
    monkeypatch.setattr(rate_bound, "COORDINATES", 1 << 16)
    page = tmp_path / "docs" / "rate.md"
    arguments = ["--folder", str(tmp_path / "runs"), "--page", str(page)]
    arguments += ["--stages", "0", "--draws", "8", "--coordinates", "50000"]
    rate_curve.main(arguments)
    text = page.read_text(encoding="utf-8")
    assert "**Holds** (p" in text and "to 8 bits, on these gradients" in text
    assert "bound, dither not known" in text
    assert "| ECDQ | " in text and "SignSGD |" not in text
    assert (tmp_path / "docs" / "images" / "rate_curve.png").stat().st_size > 10_000
    monkeypatch.setattr(rate_curve, "measure", None)
    page.unlink()
    rate_curve.main(arguments)
    assert page.read_text(encoding="utf-8") == text


def test_exact_errors_count_the_bias_of_clipping():
    """Mean of draws within five sigma; and no formula is said to exist where there is none.

    Those of tables alone are checked in tests/unit/monitor/test_reported_error.py."""
    v = torch.from_numpy(np.random.default_rng(1).standard_t(3, 4096)).float()
    codec = TernGrad(bucket_size=1024)
    decoded = [codec.decode(codec.encode(v, seed=seed)) for seed in range(200)]
    errors = np.array([float((d - v).square().sum() / v.square().sum()) for d in decoded])
    deviation = errors.std(ddof=1) / np.sqrt(len(errors))
    assert abs(errors.mean() - exact_error(codec, v)) < 5 * deviation
    assert exact_error(QCS(gain=10, bucket_size=1024), v) is None
