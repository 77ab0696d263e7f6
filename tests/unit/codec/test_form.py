"""What payloads of a frame have in common is computed once, and anew if the table changes."""

from __future__ import annotations

import copy

import torch

from hvd_adaptive import ALQ, ECDQ, QSGD
from hvd_adaptive.codec.payloads import MOST_FORMS
from hvd_adaptive.coding.payload import Frame, read_header
from hvd_adaptive.custom import Scheme, Settings

FRAME = Frame(1000, 10, torch.float32, 7)


class Fixed(Scheme):
    """Sends every coordinate in ``size`` bytes."""

    name = "fixed"

    def __init__(self, size: int = 4, **shared):
        self.size, self.codes = size, 2
        super().__init__(Settings.from_keywords("Fixed", shared))

    @property
    def alphabet(self):
        return self.codes

    def codec_settings(self):
        return {"size": self.size}

    def body_bytes(self, n):
        return self.size * n

    def encode_body(self, flat, body, key):
        body.zero_()
        body.view(flat.numel(), self.size)[:, :4] = flat.view(torch.uint8).view(-1, 4)


def test_form_is_kept_until_a_fit():
    for scheme in (ALQ(bits=3, bucket_size=64), ECDQ(bits=3, bucket_size=64)):
        payloads = scheme.parts.default.payloads
        first = payloads.form(FRAME)
        assert payloads.form(FRAME) is first is payloads.form(first.header)
        assert payloads.form(FRAME._replace(layout=8)) is not first
        scheme.fit(torch.randn(4096, generator=torch.Generator().manual_seed(1)))
        second = payloads.form(FRAME)
        assert (first.header.table_version, second.header.table_version) == (0, 1)
        assert second.header.table_fingerprint != first.header.table_fingerprint
        assert payloads.form(FRAME) is second


def test_form_has_the_header_of_payloads():
    """All but key and checksum, before and after a fit."""
    scheme, flat = ALQ(bits=3, bucket_size=64), torch.linspace(-1, 1, 1000)
    payloads = scheme.parts.default.payloads
    for _ in range(2):
        header = read_header(payloads.encode(flat, 990, 5, layout=7).bytes)
        assert header.key == 5 and header.checksum
        assert header._replace(key=0, checksum=0) == payloads.form(FRAME).header
        scheme.fit(flat)


def test_form_follows_a_scheme_whose_alphabet_changes():
    scheme = Fixed()
    before = scheme.payloads.form(FRAME)
    scheme.codes = 3
    assert (before.header.alphabet, scheme.payloads.form(FRAME).header.alphabet) == (2, 3)


def test_form_follows_a_custom_scheme_that_is_set():
    """Its constructor is called again, on the same object."""
    scheme = Fixed(size=4)
    before = scheme.payloads.form(FRAME)
    fingerprint = scheme.settings_fingerprint
    scheme.set(size=8)
    after, new = scheme.payloads.form(FRAME), Fixed(size=8)
    assert (before.body, after.body) == (4 * 990, 8 * 990)
    assert after.header == new.payloads.form(FRAME).header != before.header
    assert scheme.settings_fingerprint == new.settings_fingerprint != fingerprint
    assert "size=8" in repr(scheme)


class Late(Fixed):
    """It knows whether it has a zero only after its constructor has returned."""

    def __init__(self, zero: bool, **shared):
        super().__init__(**shared)
        self.zero = zero

    @property
    def has_zero(self):
        return self.zero

    def codec_settings(self):
        return {"zero": self.zero}


def test_zeros_are_left_out_by_custom_schemes_that_have_none():
    assert [Late(zero, keep_zeros=True).leaves_zeros_out for zero in (True, False)] == [False, True]


def test_copies_have_forms_of_their_own():
    scheme = ALQ(bits=3, bucket_size=64)
    scheme.parts.default.payloads.form(FRAME)
    twin = copy.deepcopy(scheme)
    twin.fit(torch.linspace(-1, 1, 1000))
    own, other = (each.parts.default.payloads for each in (scheme, twin))
    assert own.quantizer is scheme.parts.default and other.quantizer is twin.parts.default
    versions = [each.form(FRAME).header.table_version for each in (own, other)]
    assert versions == [0, 1]


def test_few_forms_are_kept():
    payloads = ALQ(bits=3, bucket_size=64).parts.default.payloads
    for count in range(MOST_FORMS + 100):
        payloads.form(Frame(count, 0, torch.float32, 0))
    assert 0 < len(payloads._forms[1]) <= MOST_FORMS


def test_averages_stay_finite_and_sums_do_not():
    """Levels of 6e4 in float16 are up to 4.8e5, the buckets' L2 norm."""
    payloads = QSGD(bits=2, bucket_size=64).parts.default.payloads
    flat = torch.full((64,), 6e4, dtype=torch.float16)
    encoded = [payloads.encode(flat, 64, key) for key in range(2)]
    received, header = [payload.bytes for payload in encoded], encoded[0].header
    average, total = (payloads.sum(received, header, factor) for factor in (0.5, 1.0))
    assert average.max() == torch.finfo(torch.float16).max and total.isinf().any()
