"""CUDA tensors through encode and decode, where there is no GPU: payloads are the CPU's byte for
byte, nothing waits for the device on the way."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import triton_interpreter  # noqa: F401
from fake_gpu import OnGPU, off_gpu, on_gpu, pretended, quick  # noqa: F401
from scheme_cases import schemes

from hvd_adaptive import ALQ, QSGD
from hvd_adaptive.coding.payload import read_header

# The last bucket is not full, nor is the only block of codes.
N, BUCKET = 300, 128

SCHEMES = schemes(
    *("qsgd-3", "qsgd-4-linf-symmetric-clip2.0", "alq-3", "amq-4", "nuqsgd-5", "terngrad"),
    *("orq-5", "orq-3-half", "quantile-4", "bingrad", "bingrad-biased", "signsgd", "onebit"),
    *("natural", "qcs-gain8", "sparse-0.1", "ecdq-3", "eden-1", "eden-5"),
    bucket_size=BUCKET,
)
# Tensors are copied to the host.
ON_HOST = ("sparse-0.1", "ecdq-3")
# Triton's interpreter runs these; the others have the CPU's kernels, as unit/kernels compares each.
INTERPRETED = ("qsgd-4-linf-symmetric-clip2.0", "orq-5", "qcs-gain8", "eden-1")
FITTED = {"alq, normal": lambda **k: ALQ(bits=3, bucket_size=BUCKET, statistics="normal", **k)}


def flat(seed: int = 0, dtype: torch.dtype = torch.float32, n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_payloads_are_the_cpus(scheme, gpu, request, caplog):
    """Schemes that encode on the host warn once."""
    if scheme not in INTERPRETED:
        request.getfixturevalue("quick_kernels")
    compressor, values = SCHEMES[scheme](), flat()
    wanted = compressor.encode(values, seed=5)
    gpu.uploads_allowed = True
    with gpu.waiting() if scheme in ON_HOST else nullcontext():
        payloads = [compressor.encode(on_gpu(values.clone()), seed=5) for _ in range(2)]
    for payload in payloads:
        assert isinstance(payload, OnGPU) and torch.equal(off_gpu(payload), wanted)
    told = [r.message for r in caplog.records if "copied to the host" in r.message]
    assert len(told) == (scheme in ON_HOST)
    with gpu.waiting():  # for the header
        decoded = compressor.decode(payload)
    assert isinstance(decoded, OnGPU)
    assert torch.equal(off_gpu(decoded), compressor.decode(wanted))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("n", (0, 1, BUCKET + 1))
def test_dtypes_lengths_and_tails(dtype, n, gpu, quick_kernels):
    compressor, values = QSGD(bits=4, bucket_size=BUCKET, tail="full"), flat(1, dtype, n)
    wanted = compressor.encode(values, seed=5)
    payload = compressor.encode(on_gpu(values.clone()), seed=5)
    assert torch.equal(off_gpu(payload), wanted)
    with gpu.waiting():
        assert torch.equal(off_gpu(compressor.decode(payload)), compressor.decode(wanted))


def test_a_second_payload_waits_for_nothing(gpu):
    """Not even for tables; the host goes on while the GPU has done nothing yet."""
    compressor = ALQ(bits=3, bucket_size=BUCKET)
    gpu.uploads_allowed = True
    compressor.encode(on_gpu(flat()), seed=1)
    gpu.uploads_allowed = False
    with gpu.never_waiting():
        compressor.encode(on_gpu(flat()), seed=2)
    assert not gpu.waits


@pytest.mark.parametrize("coding", ("huffman", "elias"))
def test_lossless_coding_is_refused(coding, gpu):
    compressor = QSGD(bits=3, bucket_size=BUCKET, coding=coding)
    with pytest.raises(ValueError, match=f"coding='{coding}': must be 'fixed' for tensors on cuda"):
        compressor.encode(on_gpu(flat()))


@pytest.mark.parametrize("keep", (True, False))
def test_zeros_are_waited_for_by_one_event(keep, gpu):
    """Whether there are zeros is waited for if a scheme keeps them, and has no level for them; what
    a hook measures is not."""
    compressor = SCHEMES["signsgd"](keep_zeros=keep)
    payloads, flats = compressor.parts.default.payloads, [flat(n=40) for _ in range(2)]
    gpu.uploads_allowed = True
    compressor.encode(on_gpu(flat(n=40)))
    gpu.uploads_allowed = False
    for act in (compressor.encode, lambda values: payloads.roundtrip(values, 7)):
        gpu.waits.clear()
        found = act(on_gpu(flats.pop()))
        assert gpu.waits == ["an event's synchronize"] * keep
    assert torch.equal(off_gpu(found), payloads.roundtrip(flat(n=40), 7))


@pytest.mark.parametrize("scheme", ("qsgd-4-linf-symmetric-clip2.0", "ecdq-3", "eden-1", "signsgd"))
def test_payloads_with_zeros_are_the_cpus(scheme, gpu, quick_kernels):
    """Plain torch finds, describes and restores zeros; the host waits for it."""
    compressor, values = SCHEMES[scheme](keep_zeros=True), [flat(seed) for seed in (1, 2)]
    for seed, value in enumerate(values):
        value[50 * seed : 90], value[::5] = 0.0, -0.0
    gpu.uploads_allowed = True
    wanted = [compressor.encode(value, seed=5) for value in values]
    with gpu.waiting():
        payloads = [compressor.encode(on_gpu(value.clone()), seed=5) for value in values]
        found = compressor.parts.default.payloads.sum(payloads, read_header(wanted[0]), 0.5)
    for payload, want in zip(payloads, wanted, strict=True):
        assert isinstance(payload, OnGPU) and torch.equal(off_gpu(payload), want)
    total = compressor.parts.default.payloads.sum(wanted, read_header(wanted[0]), 0.5)
    assert isinstance(found, OnGPU) and torch.equal(off_gpu(found), total)
    assert not total[(values[0] == 0) & (values[1] == 0)].any() and total.any()


@pytest.mark.parametrize("scheme", ("alq-3", "alq, normal", "ecdq-3"))
def test_statistics_are_the_cpus_by_two_copies(scheme, gpu, quick_kernels):
    """Of the norms, and of what the levels are fitted to."""
    compressor = (SCHEMES | FITTED)[scheme]()
    buckets = list(flat(n=5 * BUCKET).split(BUCKET))
    buckets[1] = torch.zeros(BUCKET)
    buckets[3] = torch.full((BUCKET,), torch.nan)
    wanted = compressor.parts.default.collect(buckets)
    found = compressor.parts.default.collect([on_gpu(bucket.clone()) for bucket in buckets])
    assert gpu.waits == ["an event's synchronize"] * 2
    assert (found == wanted).all() and wanted[:2].tolist() == [3, 5]
