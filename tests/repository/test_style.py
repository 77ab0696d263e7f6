"""What `make lint` looks at: style, formatting and types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.cfg").is_file(), reason="the tests lie apart from the repository"
)


@pytest.mark.parametrize(
    "words",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=lambda words: " ".join(words),
)
def test_lint(words: tuple[str, ...]) -> None:
    pytest.importorskip(words[0])
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
