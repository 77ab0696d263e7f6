"""Commands that start ranks: `doctor`, `bench exchange`, and what `plan` measures."""

from __future__ import annotations

import json
import re

import pytest

from hvd_adaptive.tools import launch
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.launch import Ranks, RanksError, run_ranks
from hvd_adaptive.tools.plan.worker import constants

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]


@pytest.fixture(autouse=True)
def as_root(monkeypatch):
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_doctor_finds_nothing_wrong_here(monkeypatch, tmp_path, capsys):
    timeline = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(timeline))
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    subjects = {finding["subject"]: finding["status"] for finding in told["findings"]}
    for subject in ("ranks, mpirun", "ranks, horovodrun --gloo", "mpi4py", "Horovod", "torch"):
        assert subjects[subject] == "fine", told
    # Horovod's own timeline shows collectives, whose names tell the group's parameters: those of
    # gradients, and of averages in scatter_reduce.
    names = set(re.findall(r"hvd_adaptive\.[\w.-]+", timeline.read_text()))
    (group,) = [name for name in names if name.endswith(".group0.weight")]
    prefix = group.removesuffix(".group0.weight")
    # A hash of layout and settings, then the number of optimizers before this one.
    assert re.fullmatch(r"hvd_adaptive\.[0-9a-f]{16}\.\d+", prefix)
    assert {f"{group}.stage1", f"{prefix}.corrupt"} <= names


def test_bench_exchange(capsys):
    methods = ["float32", "QSGD(bits=4, norm='linf', bucket_size=512)"]
    command = ["bench", "exchange", "--params", "100000", "--steps", "2", "--json", "--methods"]
    assert main([*command, *methods]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["hosts"], told["tensors"]) == (2, 1, 1)
    stock, scheme = told["methods"]
    assert (stock["method"], stock["wire_bytes"]) == ("float32", None)
    assert 0 < stock["seconds"] < 5 and stock["quartiles"][0] <= stock["quartiles"][1]
    # Codes (in whole blocks), scales, header; to one other rank.
    assert scheme["wire_bytes"] == pytest.approx(100_000 // 2 + 4 * 196 + 96, abs=256)
    assert 0.05 < scheme["relative_error"] < 0.25


@pytest.mark.parametrize("launcher", ["mpi", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_constants_of_collectives(launcher):
    found = constants(["float16", "QSGD(bits=8)"], 4, launcher)
    (codec,) = found.codecs
    assert codec.label == "QSGD(bits=8)" and codec.second_bits < 9
    assert 1e-11 < found.copy_s < 1e-6  # between 1 MB/s and 100 GB/s of one core
    assert found.launcher == launcher
    assert 0 < found.stock_call_s < 0.01 and 0 < found.scheme_call_s < 0.01


def test_ranks_that_fail_or_hang(monkeypatch):
    with pytest.raises(RanksError, match="ended with status") as failed:
        run_ranks(["-m", "no_such_module"], Ranks(2), 60)
    assert "No module named" in failed.value.output
    with pytest.raises(RanksError, match="did not end within"):
        run_ranks(["-m", "hvd_adaptive.tools.bench.worker"], Ranks(2), 0.2)
    monkeypatch.setattr(launch, "_found", lambda name: None)
    with pytest.raises(RanksError, match="mpirun was not found"):
        run_ranks(["-m", "hvd_adaptive.tools.bench.worker"], Ranks(2), 1)
