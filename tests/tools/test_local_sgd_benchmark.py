"""benchmarks/local_sgd.py: two processes train, and a second call trains nothing again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "local_sgd.py"
METHODS = 5


@pytest.mark.parallel
@pytest.mark.thorough
def test_it_trains_all_methods_once(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = [sys.executable, SCRIPT, "--steps", "7", "--seeds", "1", "--keep", kept]
    told = [
        subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
        for _ in range(2)
    ]
    assert told[0] == told[1] and "float32" in told[0]
    found = json.loads(kept.read_text())
    assert len(found) == METHODS
    for name, (quality, sent) in found.items():
        assert 3 < quality < 7, name
        assert sent == 32 if name.startswith("float32") else 0.5 < sent < 0.7
