"""benchmarks/plan_check.py, with the laboratory and the measuring of constants played."""

from __future__ import annotations

import contextlib
import json
import sys

import plan_check
import pytest
from laboratory import kept
from laboratory.measure import Result, Settings
from laboratory.methods import parse, refusals
from plan_machines import machine

from hvd_adaptive.tools.plan.model import Cost


@pytest.fixture
def played(monkeypatch):
    """Steps that take ``times`` what is predicted; labels that were measured, and failing ones."""
    asked, failing, times = [], set(), [1.0]

    def measure(place, methods, settings):
        results = [Result(method) for method in methods]
        for result in results:
            asked.append(result.method.label)
            if result.method.label in failing:
                result.trouble = "failed: exit status 1"
            else:
                result.seconds = [times[0] * seconds_of(result.method.label)] * 3
                result.sent_bytes = [1e6]
        return results

    def seconds_of(label):
        args = plan_check.arguments()
        own = constants(args.schemes)
        return plan_check.predictions(args, own, 2, "1gbit")[label].step_s

    def constants(schemes, *unused):
        return machine(*[Cost(label, 8.0, 0.0, 0.0, 0.1) for label in schemes])

    monkeypatch.setattr(kept, "measure", measure)
    monkeypatch.setattr(kept, "Hosts", lambda hosts, rate: contextlib.nullcontext())
    monkeypatch.setattr(plan_check, "constants", lambda args, hosts: constants(args.schemes))
    monkeypatch.setattr(plan_check, "check_programs", lambda backends: None)
    monkeypatch.setattr(plan_check.signal, "signal", lambda *handler: None)
    return asked, failing, times


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs it on two hosts at one rate, with a folder to keep things in."""

    def run(*more):
        words = ["--hosts", "2", "--rates", "1gbit", "--keep", str(tmp_path / "kept"), *more]
        monkeypatch.setattr(sys, "argv", ["plan_check.py", *words])
        return plan_check.main()

    return run


@pytest.mark.parametrize(("factor", "right"), [(0.6, 0), (1.4, 8), (1.6, 0)])
def test_the_exit_status_tells_whether_predictions_are_right(
    played, command, capsys, factor, right
):
    asked, _, times = played
    times[0] = factor
    assert command() == (right == 0) and len(asked) == 8
    assert refusals(parse(asked)) == {}
    assert f"{right} of 8 within a factor of 1.5" in capsys.readouterr().out


def test_what_was_measured_is_kept_and_what_failed_is_tried_again(played, command, tmp_path):
    asked, failing, _ = played
    failing.add("mpi/float16")
    assert command() == 1 and len(asked) == 8
    rows = tmp_path / "rows.json"
    assert command("--json", str(rows)) == 1 and asked[8:] == ["mpi/float16"]
    (row,) = (r for r in json.loads(rows.read_text()) if r["method"] == "mpi/float16")
    assert row["measured"] is None
    failing.clear()
    assert command() == 0 and asked[9:] == ["mpi/float16"]
    assert command() == 0 and len(asked) == 10
    # Of one scheme there is all that it takes.
    assert command("--schemes", "ALQ(bits=3)") == 0 and len(asked) == 10


def test_what_was_kept_of_other_steps_is_refused(played, command, capsys):
    assert command() == 0
    assert command("--steps", "9") == 2
    told = capsys.readouterr().err
    assert "was measured under" in told and "'steps': 9" in told


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("", "[]", "{}", '{"conditions": 1, "found": 2}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json: holds no measurements"):
            kept.measured(path, ["mpi/float32"], 2, "1gbit", Settings("tiny", 1, 1))
