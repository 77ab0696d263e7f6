"""rate_curve.py from end to end, on part of one gradient."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.integration


def test_end_to_end_and_kept(tmp_path, monkeypatch):
    """Page and figure; a second call measures nothing. ECDQ is ahead here, too."""
    pytest.importorskip("mlxtend")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import rate_bound
    import rate_curve
    import rate_methods

    few = [f for f in rate_methods.FAMILIES if f.name.startswith(("ECDQ", "QSGD L∞", "Sign"))]
    monkeypatch.setattr(rate_curve, "FAMILIES", few)
    monkeypatch.setattr(rate_bound, "COORDINATES", 1 << 16)
    page = tmp_path / "docs" / "rate.md"
    arguments = ["--stages", "0", "--draws", "8", "--coordinates", "50000",
                 "--folder", str(tmp_path / "runs"), "--page", str(page)]  # fmt: skip
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
    for name in ("rate_bound", "rate_curve", "rate_methods", "rate_page"):
        sys.modules.pop(name, None)
