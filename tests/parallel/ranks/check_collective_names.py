"""Collectives that a step submits have the names that other versions of the package expect.

Ranks of one job may not mix versions, but tools that read Horovod's timeline know these names.
"""

from __future__ import annotations

import re

import horovod.torch as hvd
import pytest
from conftest import make_model, train
from rank_optimizers import distributed

from hvd_adaptive import ALQ

pytestmark = pytest.mark.gloo

# Hash of layout and settings, then the number of optimizers before this one.
PREFIX = r"hvd_adaptive\.[0-9a-f]{16}\.\d+"
GROUP = rf"{PREFIX}\.group0\.names\.\w+\.0\.bias-names\.\w+\.4\.weight"
# An allgather may travel as an alltoall of equal parts.
NAMES = {
    "allgather": {rf"(alltoall|allgather)_async {GROUP}", rf"allgather_async {PREFIX}\.corrupt"},
    "scatter_reduce": {
        rf"alltoall_async {GROUP}",
        rf"(alltoall|allgather)_async {GROUP}\.stage1",
        rf"allgather_async {PREFIX}\.corrupt",
    },
}


@pytest.mark.parametrize("exchange", NAMES)
def test_names_of_groups(exchange, monkeypatch):
    seen: set[str] = set()
    for call in ("allgather_async", "alltoall_async"):
        real = getattr(hvd, call)

        def recorded(*args, _real=real, _call=call, **keywords):
            seen.add(f"{_call} {keywords['name']}")
            return _real(*args, **keywords)

        monkeypatch.setattr(hvd, call, recorded)
    model = make_model()
    optimizer = distributed(
        model,
        ALQ(bits=3, bucket_size=256, update_steps=[], exchange=exchange),
        prefix=f"names.{exchange}.",
    )
    train(model, optimizer, 2)
    for pattern in NAMES[exchange]:
        assert any(re.fullmatch(pattern, name) for name in seen), (pattern, seen)
    assert all(re.match(rf"\w+ {PREFIX}", name) for name in seen), seen
