"""DistributedOptimizer's own options, each beside an uncompressed twin on the same data."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from conftest import assert_same_everywhere, batches, flat_parameters, make_model

from hvd_adaptive import ALQ

CASES = {
    "two_passes": ({"backward_passes_per_step": 2}, {}),
    "predivide": ({"gradient_predivide_factor": 3.0}, {}),
    "groups": ({"groups": 2}, {}),
    "cut_tensors": ({}, {"fusion_bytes": 20_000}),
    "small_window": ({}, {"fusion_bytes": 20_000, "in_flight_bytes": 60_000}),
}


@pytest.mark.parametrize("name", CASES)
def test_close_to_the_uncompressed_twin(name):
    """After 4 steps at 8 bits the parameters have moved as the twin's, within a few percent."""
    options, keywords = CASES[name]
    passes = options.get("backward_passes_per_step", 1)
    compressors = {"exact": hvd.Compression.none, "alq": ALQ(bits=8, bucket_size=256, **keywords)}
    moved = {}
    for kind, compressor in compressors.items():
        model = make_model()
        before = flat_parameters(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=[(f"{name}.{kind}.{n}", p) for n, p in model.named_parameters()],
            compression=compressor,
            **options,
        )
        batch = batches(hvd.rank())
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                x, y = batch()
                torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert_same_everywhere(flat_parameters(model), f"{name}.{kind}")
        moved[kind] = flat_parameters(model) - before
    error = (moved["alq"] - moved["exact"]).square().sum() / moved["exact"].square().sum()
    assert 0 < error < 0.002
    if "fusion_bytes" in keywords:
        assert len(compressors["alq"]._session._binding.layout.groups) > 5


def test_a_step_that_is_given_up():
    """load_state_dict between backward and step makes Horovod forget the gradients in flight."""
    model = make_model()
    compressor = ALQ(bits=8, bucket_size=256, update_steps=[])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=[(f"abandoned.{n}", p) for n, p in model.named_parameters()],
        compression=compressor,
    )
    x, y = batches(hvd.rank())()
    for step in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if step == 1:
            handles = [handle for handle, _ in optimizer._handles.values()]
            optimizer.load_state_dict(optimizer.state_dict())
            for handle in handles:  # or stock Horovod refuses their names
                hvd.synchronize(handle)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert compressor.step == 3
    assert_same_everywhere(flat_parameters(model), "abandoned")
