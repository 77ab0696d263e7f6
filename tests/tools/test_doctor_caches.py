"""Which folders of the kernels' caches the doctor finds read-only."""

from __future__ import annotations

import os

from hvd_adaptive import kernels
from hvd_adaptive.tools.doctor import checks


def test_read_only_caches(monkeypatch):
    (fine,) = checks.check_kernels(checks.Context(1.0))
    assert fine.status == "fine"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = checks._read_only_caches()
    assert found and all(str(path).startswith(os.path.dirname(kernels.__file__)) for path in found)
    assert {path.name for path in found} == {"__pycache__"}
    notes = list(checks.check_kernels(checks.Context(1.0)))[1:]
    assert [note.status for note in notes] == ["note"] * len(found)
    assert all("cannot be written" in note.text and note.hints for note in notes)
