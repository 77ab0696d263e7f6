"""A freeze: what the code gave earlier, which no change of its shape may move (facts.py).

It does not say that these results are right: other tests do, by independent computation.
"""

from __future__ import annotations

import json

import facts
import pytest


@pytest.mark.parametrize("section", facts.SECTIONS)
def test_nothing_moved(section):
    golden = json.loads(facts.GOLDEN.read_text(encoding="utf-8"))[section]
    now = facts.facts(section)
    assert sorted(now) == sorted(golden)
    assert {name: value for name, value in now.items() if value != golden[name]} == {}
