"""What a group has received is freed with the group, not with its step."""

from __future__ import annotations

import gc
import weakref

import pytest
from ddp_oracles import backward, make_net, wrap

from hvd_adaptive import QSGD
from hvd_adaptive.run.ordered import WINDOW
from hvd_adaptive.transport.torch_world import TorchWorld


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce"])
def test_payloads_are_freed_with_their_group(exchange, monkeypatch):
    sent: list[weakref.ref] = []
    received: list[weakref.ref] = []
    most = 0

    def alive(known: list[weakref.ref]) -> int:
        return sum(find() is not None for find in known)

    def watched(submit):
        def submitted(self, data, *arguments):
            nonlocal most
            handle = submit(self, data, *arguments)
            sent.append(weakref.ref(data))
            received.append(weakref.ref(handle))
            most = max(most, alive(sent), alive(received))
            return handle

        return submitted

    net = make_net()
    compressor = QSGD(bits=4, bucket_size=128, fusion_bytes=20_000, exchange=exchange)
    model, _ = wrap(net, compressor)
    for step in range(3):
        backward(model, step)
    for kind in ("allgather", "alltoall"):
        monkeypatch.setattr(TorchWorld, kind, watched(getattr(TorchWorld, kind)))
    gc.disable()  # no cycle may keep them
    try:
        backward(model, 3)
    finally:
        gc.enable()
    assert len(received) > 2 * WINDOW
    assert most <= WINDOW
    assert not alive(sent) and not alive(received)
