"""The network laboratory's parts that need neither root nor ranks; seconds to a quality."""

from __future__ import annotations

import math
import time

import overlap
import pytest
import torch
from laboratory import curves, gradients, hosts, measure, shapes, tables, tasks, trained
from laboratory.methods import parse, refusals
from laboratory.sharded import ShardedNetwork

from hvd_adaptive.tools.bench.backward import FakeNetwork


def test_shapes():
    """Tables are as large as MODELS and SIZES say, or are refused. ResNets' are compared with the
    models in tests/integration/example_runs.py."""
    for model in shapes.SIZES:
        table = shapes.read_shapes(model)
        assert len({name for name, _ in table}) == len(table) == shapes.SIZES[model][0]
    lstm = torch.nn.LSTM(472, 472, num_layers=2, device="meta")
    expected = {f"lstm.{name}": tuple(p.shape) for name, p in lstm.named_parameters()}
    found = dict(shapes.read_shapes("lstm"))
    assert {name: found[name] for name in expected} == expected
    assert set(found) - set(expected) == {"embedding.weight", "output.weight", "output.bias"}


def test_wrong_shapes_are_noticed(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="model='vgg19'"):
        shapes.read_shapes("vgg19")
    text = (shapes.FOLDER / "tiny.txt").read_text()
    (tmp_path / "tiny.txt").write_text(text.replace("1024", "1025"))
    monkeypatch.setattr(shapes, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"tiny\.txt"):
        shapes.read_shapes("tiny")


def test_methods():
    texts = ["mpi/float32", "alq(bits=3, update_steps=(0, 100))", "ddp/powersgd(rank=4)"]
    found = parse([*texts, "ddp/eden(bits=1)"])
    read = [(method.backend, method.name, method.method.keywords) for method in found]
    assert read == [
        ("mpi", "float32", {}),
        ("mpi", "ALQ", {"bits": 3, "update_steps": (0, 100)}),
        ("ddp", "PowerSGD", {"rank": 4}),
        ("ddp", "EDEN", {"bits": 1}),
    ]
    assert [method.is_scheme for method in found] == [False, True, False, True]
    assert [method.is_powersgd for method in found] == [False, False, True, False]
    found += parse(["ddp:4/eden(bits=1)", "fsdp/bfloat16"])
    assert [method.bucket_cap_mb for method in found] == [None] * 4 + [4, None]
    assert found[-1].label == "fsdp/bfloat16" and not found[-1].is_scheme
    (nothing,) = parse(["ddp/nothing"])
    assert nothing.is_nothing and not nothing.is_scheme
    assert [m.label for m in parse(m.label for m in found)] == [m.label for m in found]
    texts = ["gloo/ALQ(bits=2|3, coding='fixed'|'huffman')", "gloo/alq(bits=3,coding='fixed')"]
    assert [method.label for method in parse(texts)] == [
        f"gloo/ALQ(bits={bits}, coding='{coding}')"
        for bits in (2, 3)
        for coding in ("fixed", "huffman")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nccl/float32", "no backend 'nccl'"),
        ("ddp/PowerSGD", r"PowerSGD\(rank=R\)"),
        ("ddp/PowerSGD(rank=1, warm=2)", r"PowerSGD\(rank=R\)"),
        ("ddp/PowerSGD(rank=0)", "above 0"),
        ("ddp:4/PowerSGD(rank=1)", "one bucket"),
        ("mpi:4/float16", "ddp:MB/METHOD"),
        ("ddp:0/float16", "above 0"),
    ],
)
def test_wrong_methods_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse([text])


def test_what_the_package_refuses_is_told():
    bad = ["ALQ(bits=99)", "ALQ(bit=3)", "ALQ(exchange='pigeon')", "algebra(bits=3)"]
    refused = refusals(parse(["ALQ(bits=3)", *bad, "mpi/float32"]))
    assert list(refused) == [f"mpi/{text}" for text in bad]
    hooks = refusals(parse([f"ddp/{text}" for text in bad] + ["ddp/PowerSGD(rank=1)"]))
    assert list(hooks) == [f"ddp/{text}" for text in bad]
    expected = ["bits=99", "'bit'", "exchange='pigeon'", "must be one of float32, float16, ALQ"]
    for message, words in zip(refused.values(), expected, strict=True):
        assert words in message


def test_gradients_of_a_trained_network(tmp_path, monkeypatch):
    """Those of another rank can be computed again, and belong to the model's shapes."""
    monkeypatch.setattr(trained, "STEPS", 1)
    trains, waits = (trained.Trained(tmp_path / "net.pt", first, list) for first in (True, False))
    names = [(name, tuple(p.shape)) for name, p in trains.network.named_parameters()]
    assert names == shapes.read_shapes(trained.MODEL)
    own = [trains.gradients(0, 2), waits.gradients(1, 2)]
    assert not torch.equal(own[0][0], own[1][0])
    for mean, *parts in zip(gradients.exact_mean(trains, 2, 2), *own, strict=True):
        torch.testing.assert_close(mean, (parts[0].double() + parts[1].double()) / 2)


def test_gradients_are_alike_but_not_equal():
    shape, ranks = (256, 1152), 4
    own = [gradients.gradient(5, shape, rank, 0).double() for rank in range(ranks)]
    (*_, mean) = gradients.exact_mean(gradients.Drawn([(1,)] * 5 + [shape]), ranks, 0)
    torch.testing.assert_close(mean, sum(own) / ranks)
    assert torch.equal(gradients.gradient(5, shape, 1, 0).double(), own[1])
    energy = float(own[0].square().sum())
    # The common part is what two ranks, or two steps of one rank, share.
    others = [own[1], gradients.gradient(5, shape, 0, 1).double()]
    for other in others:
        shared = float((own[0] * other).sum()) / energy
        assert abs(shared - gradients.COMMON) < 0.1
    root = (energy / own[0].numel()) ** 0.5
    assert gradients.SCALES[0] / 2 < root < gradients.SCALES[1] * 2
    values = torch.linalg.svdvals(own[0]).square()
    assert 0.1 < float(values[0] / values.sum()) < 0.4
    assert float((own[0] / root).pow(4).mean()) > 4


@pytest.mark.parametrize("kind", [FakeNetwork, ShardedNetwork])
def test_a_fake_backward_pass_has_its_gradients_after_a_pause(kind):
    """Hooks of a network of single layers are called from the last to the first."""
    table = shapes.read_shapes("tiny")
    drawn = gradients.Drawn([shape for _, shape in table])
    variants = [drawn.gradients(0, variant) for variant in range(gradients.VARIANTS)]
    network = kind(table, torch.zeros(shapes.SIZES["tiny"][1]), variants, seconds=0.05)
    fired = []
    for name, parameter in network.named():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for index, own in enumerate(variants):
        network.zero_grad()
        network.fill(index)
        begin = time.perf_counter()
        (network() if kind is FakeNetwork else network.output()).backward()
        assert time.perf_counter() - begin >= 0.05
        for (_, parameter), gradient in zip(network.named(), own, strict=True):
            assert torch.equal(parameter.grad, gradient)
            assert parameter.grad.data_ptr() != gradient.data_ptr()
    if kind is FakeNetwork:
        assert fired == [name for name, _ in table][::-1] * gradients.VARIANTS


def test_rates_and_what_is_missing(monkeypatch):
    assert hosts.bits_per_second("1gbit") == 1e9
    assert hosts.bits_per_second("2.5mbit") == 2.5e6
    for wrong in ("1", "gbit", "1gbps", "0gbit", "1gbit; reboot", "-1gbit"):
        with pytest.raises(ValueError, match="rate="):
            hosts.bits_per_second(wrong)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None)
    with pytest.raises(hosts.LaboratoryError, match=r"root.*ip .*iproute2.*tc .*iproute2"):
        hosts.Hosts(2, "1gbit").__enter__()


def _rows(seconds: list[float]) -> list[dict]:
    """Two ranks' figures of a round."""
    row = {
        "seconds": seconds,
        "sent_bytes": 1100.0,
        "received_bytes": 1100.0,
        "cpu_s": 0.1,
        "machine_cpu_s": 0.3,
        "crc": 7,
        "relative_error": 0.25,
        "report": {"wire_bytes": 1000.0, "encode_s": 0.1, "exchange_s": 0.2, "decode_s": 0.3},
    }
    return [row, row | {"report": row["report"] | {"wire_bytes": 1200.0}}]


def test_results_and_tables(capsys):
    asked = parse(["mpi/float32", "ALQ(bits=3)", "ALQ(bits=99)"])
    results = [measure.Result(method) for method in asked]
    results[0].add(_rows([2.0, 4.0, 6.0]), [0.5])
    results[1].add(_rows([1.0, 1.0, 1.0]), [0.5])
    results[2].trouble = "refused: bits=99"
    assert results[0].median == 4.0 and results[0].replicas_equal
    assert results[0].reported("wire_bytes") == 1100.0
    told = {"model": "tiny", "hosts": 2, "rate": "1gbit", "steps": 3, "rounds": 1}
    tables.print_tables(results, told)
    printed = capsys.readouterr().out
    assert "0.250" in printed and "mpi/ALQ(bits=99): refused: bits=99" in printed
    assert "HOROVOD_CYCLE_TIME" in printed
    unequal = _rows([1.0])
    unequal[1] = unequal[1] | {"crc": 8}
    results[1].add(unequal, [0.5])
    assert not results[1].replicas_equal


def test_the_method_in_which_a_launch_ended_is_blamed():
    first, second = (measure.Result(method) for method in parse(["ALQ(bits=2)", "ALQ(bits=3)"]))
    ranks = [{"now": "mpi/ALQ(bits=2)"}, {"now": "mpi/ALQ(bits=2)", "failed": "ValueError: x"}]
    assert measure._without_culprit([first, second], ranks, "exit status 1") == [second]
    assert first.trouble == "failed: ValueError: x"
    # No launch got as far as a method.
    assert measure._without_culprit([second], [], "exit status 1") == []
    assert second.trouble == "failed: exit status 1"


@pytest.mark.parametrize(
    ("endings", "last"),
    [
        ([{"ranks": [], "error": "139"}, {"ranks": [{"now": None}]}], 1),
        ([{"ranks": [{"now": "x"}], "error": "1"}], 0),
        ([{"ranks": [], "error": str(i)} for i in range(measure.LAUNCHES)], measure.LAUNCHES - 1),
    ],
    ids=["crashed once", "failed in a method", "never starts"],
)
def test_a_launch_that_no_rank_saw_is_tried_again(monkeypatch, endings, last):
    left = iter(endings)
    monkeypatch.setattr(measure, "launch", lambda *arguments: next(left))
    assert measure._launched(None, {}, 1.0) is endings[last]
    assert next(left, None) is None


def test_the_share_that_is_hidden():
    method = parse(["mpi/float32"])[0]
    cases = [(0.12, 0.08, 0.2, 0.0), (0.12, 0.08, 0.12, 1.0), (0.1, 0.3, 0.35, 0.5)]
    for backward, exchange, both, hidden in cases:
        alone = measure.Result(method, seconds=[exchange])
        together = measure.Result(method, seconds=[both], backward_s=[backward])
        assert overlap.figures(alone, together)["hidden"] == pytest.approx(hidden)


def curve(qualities, second=1.0):
    return [(10 * i, second * i, quality) for i, quality in enumerate(qualities)]


def test_seconds_are_linear_between_means_of_three_tests():
    rising = curve([0.0, 0.3, 0.6, 0.9, 0.9])
    # Means: 0, 0.15, 0.3, 0.6, 0.8.
    assert curves.seconds_to(rising, 0.3, True) == pytest.approx(2.0)
    assert curves.seconds_to(rising, 0.45, True) == pytest.approx(2.5)
    assert curves.seconds_to(rising, 0.81, True) is None
    falling = curve([-q for q in (0.0, 0.3, 0.6, 0.9, 0.9)], 2.0)
    assert curves.seconds_to(falling, -0.45, False) == pytest.approx(5.0)


def test_a_method_of_twice_the_speed_is_twice_as_fast():
    base = {seed: curve([0, 0.5 + seed / 100, 0.8, 0.9, 0.95], 4.0) for seed in range(3)}
    fast = {seed: [(n, s / 2, q) for n, s, q in own] for seed, own in base.items()}
    poor = {seed: [(n, s, q / 2) for n, s, q in own] for seed, own in base.items()}
    every = {"base": base, "fast": fast, "poor": poor}
    found = curves.summary(every, "base", 30, True, paired=False)
    target = sum((0.5 + seed / 100 + 0.8 + 0.9) / 3 for seed in range(3)) / 3
    assert found["base"].seconds == pytest.approx(curves.seconds_to(base[1], target, True))
    assert found["fast"].ratio == pytest.approx((2.0, 2.0, 2.0))
    assert (found["fast"].reached, found["poor"].reached) == (3, 0)
    assert found["poor"].ratio is None and found["poor"].seconds is None
    assert found["fast"].step == pytest.approx(0.2)


def test_each_seed_has_the_baselines_quality_as_its_target():
    """Seeds whose baseline ends worse need less; the mean of all would leave them without."""
    base = {seed: curve([0, 0.5, 0.5 + seed, 0.5 + seed], 4.0) for seed in range(3)}
    fast = {seed: [(n, s / 2, q) for n, s, q in own] for seed, own in base.items()}
    better = {seed: [(n, s, q + 0.1 * seed) for n, s, q in own] for seed, own in base.items()}
    every = {"base": base, "fast": fast, "better": better}
    found = curves.summary(every, "base", 30, True)
    assert [found[label].reached for label in every] == [3, 3, 3]
    assert found["fast"].ratio == pytest.approx((2.0, 2.0, 2.0))
    assert found["fast"].apart == (0, 0)
    assert curves.summary(every, "base", 30, True, paired=False)["base"].reached < 3
    # By hand: 0, 0.1, 0.2 have the mean 0.1 and the deviation 0.1.
    assert found["better"].apart == pytest.approx((0.1, 4.302653 * 0.1 / math.sqrt(3)))


def test_curves_at_another_speed():
    """Seconds a step are the median of the timed runs', which have to learn the same."""
    known = {seed: curve([0.0, 0.4 + seed / 10, 0.8], 99.0) for seed in range(3)}
    timed = {seed: curve([0.0, 0.4 + seed / 10], 5.0 + seed) for seed in range(3)}
    found = curves.at_speed(known, timed)
    assert found[1] == [(0, 0.0, 0.0), (10, 6.0, 0.5), (20, 12.0, 0.8)]
    with pytest.raises(ValueError, match=r"seed 2, step 10: quality 0\.7 here, 0\.6 there"):
        curves.at_speed(known, timed | {2: curve([0.0, 0.7], 5.0)})


def test_intervals_are_students():
    """By hand: t of two degrees of freedom is 4.303."""
    logs = [math.log(x) for x in (1.0, 2.0, 4.0)]
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert curves.interval(logs) == pytest.approx((2.0, 2 * math.exp(-half), 2 * math.exp(half)))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_ranks_draw_the_same_data_in_every_run_and_other_data_than_others(name):
    task = tasks.TASKS[name]
    model = task.model(1)
    assert all(map(torch.equal, model.parameters(), task.model(1).parameters()))
    losses = {
        (rank, step): float(task.data(1, rank, 4).loss(model, step).detach())
        for rank in range(2)
        for step in range(2)
    }
    assert len(set(losses.values())) == 4
    assert float(task.data(1, 1, 4).loss(model, 1).detach()) == losses[1, 1]


def test_a_run_of_float32_learns():
    task = tasks.TASKS["mnist"]
    untrained = tasks.tuned(task, task.rate, 0, 0, 4)
    assert untrained < 0.3 < 0.6 < tasks.tuned(task, task.rate, 0, 25, 4)
