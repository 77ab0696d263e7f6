"""Lossless coding of payloads: what is decoded, how long they are, whose book it is."""

from __future__ import annotations

import functools
import itertools
import time

import numpy as np
import pytest
import torch
import unit_oracles as oracle
import wire_decoder as wire
from hypothesis import given, settings
from hypothesis import strategies as st
from scheme_cases import EVERY, schemes

from hvd_adaptive import ALQ, NUQSGD, QSGD, PayloadError, TernGrad
from hvd_adaptive.coding import coders
from hvd_adaptive.coding.coders import CODERS
from hvd_adaptive.coding.payload import read_header
from hvd_adaptive.kernels.numba.codes import pack, unpack
from hvd_adaptive.kernels.packing import packing_of

SCHEMES = schemes(
    *("alq-2", "alq-2-paper", "alq-3", "alq-3-l2", "alq-3-paper", "alq-8", "alq-8-paper"),
    *("amq-3", "amq-3-paper", "qsgd-3", "qsgd-4-linf", "nuqsgd-3", "terngrad"),
    "terngrad-unclipped",
)
# Of table schemes' bits: their packing is in Numba's cache.
ALPHABETS = (3, 4, 5, 7, 8, 9, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256)


def sample(law: str, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    return {"normal": x, "heavy": x * x * x, "sparse": x * (x > 2), "zeros": 0 * x}[law]


def coding_of(payload: torch.Tensor) -> int:
    return oracle.read_field(payload.numpy().tobytes(), "coding")


def pair(scheme: str, law: str = "normal", **keywords):
    """One with a code book, one without, fitted alike."""
    made = [SCHEMES[scheme](coding=coding, **keywords) for coding in ("huffman", "fixed")]
    for each in made:
        each.load_state_dict(fitted_state(scheme, law, keywords.get("bucket_size", 8192)))
    return made


@functools.cache
def fitted_state(scheme: str, law: str, bucket_size: int) -> dict:
    made = SCHEMES[scheme](coding="huffman", bucket_size=bucket_size)
    made.fit(sample(law, 20_000, 9))
    return made.state_dict()


class TestPayloads:
    @pytest.mark.many
    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("law", ("normal", "heavy", "sparse", "zeros"))
    def test_the_same_numbers_in_fewer_bytes(self, scheme, law):
        coded, fixed = pair(scheme, "normal", bucket_size=1000, keep_zeros=False)
        makers = [(1, coded)]
        if (coded.levels == 0).any():
            makers.append((2, SCHEMES[scheme](coding="elias", bucket_size=1000, keep_zeros=False)))
            makers[-1][1].parts.default.install(coded.parts.default.table.magnitudes, 1)
        for (number, maker), count in itertools.product(makers, (0, 1, 511, 512, 7_777)):
            flat = sample(law, count)
            ours, theirs = maker.encode(flat, seed=1), fixed.encode(flat, seed=1)
            assert torch.equal(maker.decode(ours), fixed.decode(theirs))
            assert ours.numel() <= theirs.numel()
            assert coding_of(ours) == number * (ours.numel() < theirs.numel())
            if law == "zeros" and count > 600:
                assert coding_of(ours) == number, "zero buckets are cheap"

    @pytest.mark.parametrize("scheme", ("alq-3", "qsgd-3", "terngrad"))
    def test_a_book_of_other_data_falls_back_to_fixed(self, scheme):
        """Never longer, whatever was fitted: here a book that makes the frequent codes longest."""
        coded, fixed = pair(scheme, "normal", bucket_size=100)
        flat = torch.tensor([1.0, -1.0] * 2500)
        size = coded.parts.default.alphabet
        far = np.abs(np.arange(size) - (size - 1) / 2) > 0.3 * size
        for codec in (coded.parts.default, fixed.parts.default):
            # No zeros are sent here under linf, many under l2.
            codec.install(codec.table.magnitudes, 2, 1e-9 + (far != (codec.norm == "linf")))
        ours, theirs = coded.encode(flat, seed=1), fixed.encode(flat, seed=1)
        assert coding_of(ours) == 0 and ours.numel() == theirs.numel()
        assert torch.equal(coded.decode(ours), fixed.decode(theirs))

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_fixed_until_the_first_fit(self, scheme):
        coded, fixed = SCHEMES[scheme](coding="huffman"), SCHEMES[scheme]()
        flat = sample("normal", 5000)
        ours = coded.encode(flat, seed=1)
        assert coded.parts.default.coder is None and torch.equal(ours, fixed.encode(flat, seed=1))

    def test_sums_are_the_same_bits(self):
        """Coded and packed payloads of several ranks, expanded one at a time."""
        coded, fixed = (each.parts.default for each in pair("qsgd-3", bucket_size=100))
        flats = [sample("normal", 3000, seed) for seed in range(3)] + [torch.ones(3000)]
        sums, expanded, original = [], [], coded.decode_bodies
        coded.decode_bodies = lambda bodies, *rest: (
            expanded.append(len(bodies)),
            original(bodies, *rest),
        )
        for codec in (coded, fixed):
            payloads = [codec.payloads.encode(f, 3000, key).bytes for key, f in enumerate(flats)]
            sums.append(codec.payloads.sum(payloads, read_header(payloads[0]), 1 / 3))
        assert torch.equal(*sums) and expanded == [1] * 4


class TestUpdates:
    def update(self, scheme, gradients: list[torch.Tensor]) -> np.ndarray:
        codec, size = scheme.parts.default, scheme.settings.bucket_size
        return codec.refit([codec.collect(list(g.split(size))) for g in gradients])

    @pytest.mark.many
    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("statistics", ("histogram", "normal"))
    def test_one_update_gives_all_ranks_one_book(self, scheme, statistics):
        ranks = [
            SCHEMES[scheme](coding="huffman", bucket_size=500, statistics=statistics)
            for _ in range(2)
        ]
        gradients = [sample("normal", 10_000, seed) for seed in (0, 1)]
        update = self.update(ranks[0], gradients)
        a, b = (rank.parts.default for rank in ranks)
        assert all(codec.apply_update(update, 0) for codec in (a, b))
        assert a.table_version == b.table_version == 1
        assert a.table_fingerprint == b.table_fingerprint != a.table.fingerprint
        payload = ranks[0].encode(gradients[0], seed=3)
        assert coding_of(payload) == 1
        assert torch.equal(ranks[1].decode(payload), ranks[0].decode(payload))

    def test_probabilities_count_every_bucket_alike(self):
        """Not by their norms, whatever the levels are fitted to: a million times larger buckets
        of another law are half of the coordinates."""
        large, small = 1e6 * sample("sparse", 50_000), sample("normal", 50_000)
        found = []
        for flats in ([large, small], [large], [small]):
            scheme = QSGD(bits=3, coding="huffman", bucket_size=500)
            scheme.parts.default.apply_update(self.update(scheme, flats), 0)
            found.append(scheme.parts.default.table.probabilities)
        mean = (found[1] + found[2]) / 2
        assert np.allclose(found[0], mean, atol=1e-3)
        assert not np.allclose(found[1], mean, atol=1e-2)

    @pytest.mark.parametrize("scheme", ("qsgd-3", "terngrad", "alq-3"))
    def test_clipping_is_seen(self, scheme):
        """Of what is sent, not of the gradients."""
        flat = sample("heavy", 50_000)
        counts = {}
        for clip in (1.0, None):
            made = {"qsgd-3": QSGD, "terngrad": TernGrad, "alq-3": ALQ}[scheme]
            fitted = made(coding="huffman", clip=clip, bucket_size=1000)
            fitted.fit(flat)
            payload, p = fitted.encode(flat, seed=1), fitted.parts.default.table.probabilities
            words = fitted.parts.default.fixed_body(payload[96:], 50_000)[200:].view(torch.int32)
            codes = torch.empty(50_000, dtype=torch.uint8)
            unpack(words, packing_of(p.size), codes)
            counts[clip] = np.bincount(codes.numpy(), minlength=p.size) / 50_000
            # 5 standard errors, and that signs are taken to be equally likely.
            folded = counts[clip] + counts[clip][::-1]
            assert np.all(abs(folded - p - p[::-1]) < 10 * np.sqrt(p / 50_000) + 1e-4)
        assert abs(counts[1.0] - counts[None]).max() > 0.01

    @pytest.mark.parametrize("scheme", (QSGD, NUQSGD, TernGrad))
    def test_fixed_levels_are_updated_only_for_a_book(self, scheme):
        plain, coded = scheme(update_steps=[3]), scheme(update_steps=[3], coding="huffman")
        assert [s for s in range(9) if plain._training.updates.due(s)] == []
        assert [s for s in range(9) if coded._training.updates.due(s)] == [3]
        for each in (plain, coded):
            levels = each.levels
            each.fit(sample("normal", 20_000))
            assert torch.equal(each.levels, levels)
        assert (plain.parts.default.table_version, coded.parts.default.table_version) == (0, 1)
        assert plain.parts.default.coder is None and coded.parts.default.coder is not None

    def test_states_of_other_levels_or_bad_books_are_refused(self):
        scheme, _ = pair("qsgd-3")
        state = scheme.state_dict()
        with pytest.raises(ValueError, match="state"):
            NUQSGD(bits=3).load_state_dict(state)
        for p in ([1.0], [0.0] * 7, [0.2] * 6 + [-0.2], [np.nan] + [0.1] * 6):
            table = state["table"] | {"probabilities": torch.tensor(p)}
            with pytest.raises(ValueError, match="probabilities"):
                QSGD(bits=3).load_state_dict(state | {"table": table})
        with pytest.raises(ValueError, match="are not"):
            QSGD(bits=3).load_state_dict(state | {"table": QSGD(intervals=2).state_dict()["table"]})


def test_receivers_of_other_codings_or_books():
    coded, fixed = pair("alq-3")
    payload, table = coded.encode(sample("normal", 20_000), seed=1), coded.parts.default.table
    other = ALQ(bits=3, coding="huffman")
    codec = other.parts.default
    for receiver in (fixed, other):
        with pytest.raises(PayloadError, match="coding 'huffman'"):
            receiver.decode(payload)
    assert codec.settings_fingerprint != ALQ().parts.default.settings_fingerprint
    codec.install(table.magnitudes, 1, np.full(7, 1 / 7))
    with pytest.raises(PayloadError, match="fingerprint"):
        other.decode(payload)
    codec.install(table.magnitudes, 1, table.probabilities)
    assert torch.equal(other.decode(payload), coded.decode(payload))


def test_schemes_without_a_table_say_so():
    made = schemes(*EVERY).values()
    without = [make for make in made if make().parts.default.codings == ("fixed",)]
    assert len(without) == 11
    for make, coding in itertools.product(without, CODERS):
        scheme = type(make()).__name__
        with pytest.raises(ValueError, match=rf"coding='{coding}': {scheme} allows 'fixed'"):
            make(coding=coding)


class TestStreams:
    """The container: segments, offsets, ranges, threads."""

    def made(self, name: str, alphabet: int, count: int, bucket: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.full(alphabet, 0.3))
        coder = CODERS[name](packing_of(alphabet), bucket, p)
        codes = rng.choice(alphabet, count, p=p).astype(np.uint8)
        words = torch.zeros(coder.packing.words(count), dtype=torch.int32)
        pack(torch.from_numpy(codes), coder.packing, words)
        return coder, codes, words

    @settings(max_examples=40)
    @given(
        name=st.sampled_from(sorted(CODERS)),
        alphabet=st.sampled_from(ALPHABETS),
        bucket=st.sampled_from((1, 100, 512, 8192, 10**6)),
        count=st.one_of(st.integers(0, 600), st.integers(600, 20_000)),
        seed=st.integers(0, 3),
    )
    def test_words_come_back(self, monkeypatch, name, alphabet, bucket, count, seed):
        monkeypatch.setattr(coders, "SEGMENT", 2048)
        if name == "elias" and alphabet % 2 == 0:
            alphabet = 5  # one with a zero
        coder, _, words = self.made(name, alphabet, count, bucket, seed)
        stream = coder.encode(words, count, 10**7)
        assert coder.least_stream_bytes(count) <= stream.numel()
        padded = torch.cat([stream, torch.zeros(seed, dtype=torch.uint8)])
        assert torch.equal(coder.decode(padded, count), words)
        assert coder.encode(words, count, stream.numel() - 1) is None or count == 0
        assert torch.equal(coder.encode(words, count, stream.numel()), stream)

    @pytest.mark.parametrize("alphabet", ALPHABETS)
    def test_segments_are_those_of_the_wire_format(self, alphabet):
        for bucket in (1, 100, 512, 8192, 60_000, 2**31):
            found = coders.segment_size(packing_of(alphabet), bucket)
            assert found == wire.segment_size(alphabet, bucket)

    @pytest.mark.parametrize("name", CODERS)
    def test_threads_make_the_same_bytes(self, name):
        coder, _, words = self.made(name, 15, 400_000, 8192)
        alone = coder.encode(words, 400_000, 10**7)
        torch.set_num_threads(3)
        try:
            assert torch.equal(coder.encode(words, 400_000, 10**7), alone)
            assert torch.equal(coder.decode(alone, 400_000), words)
            assert coder.encode(words, 400_000, alone.numel() - 1) is None
            alone[0] += 1
            with pytest.raises(PayloadError):
                coder.decode(alone, 400_000)
        finally:
            torch.set_num_threads(1)


def test_no_thread_runs_on_after_an_error(monkeypatch):
    """A caller that catches it may use its memory again."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    done = []

    def work(item: int) -> None:
        if item == 0:
            raise ValueError(item)
        time.sleep(0.05)
        done.append(item)

    with pytest.raises(ValueError):
        list(coders.mapped(work, range(4)))
    assert sorted(done) == [1, 2, 3]
