"""`hvd-adaptive report`: what it reads, what it reckons, and the page."""

from __future__ import annotations

import contextlib
import functools
import html
import io
import json
import operator
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from written import start, step, table, write

from hvd_adaptive.monitor.log import LogError, read_logs
from hvd_adaptive.tools.cli import main
from hvd_adaptive.tools.report.summary import costs, describe, verdict


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of that run, which is made once."""
    pytest.importorskip("matplotlib")
    folder, out, err = tmp_path_factory.mktemp("run"), io.StringIO(), io.StringIO()
    write_run(folder)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["report", str(folder), "--title", "a <run>"]) == 0
    assert out.getvalue().strip() == str(folder / "report.html")
    assert "it <hurts>" in err.getvalue()
    return (folder / "report.html").read_text(encoding="utf-8")


def write_run(folder: Path) -> None:
    """A run that was restarted once."""
    warning = {"kind": "warning", "compressor": 0, "time": 3.5, "about": "error"}
    write(
        folder / "net-rank0-20260101T000000-7.jsonl",
        start(1),
        table(1.5, 0, 0),
        step(2, 9, 10),
        step(3, 19, 10, wire_bytes=1500.0),
        warning | {"text": "it <hurts>"},
        '{"kind":"step","compr',
    )
    write(
        folder / "net-rank0-20260102T000000-8.jsonl",
        start(4, ranks=2),
        table(4.5, 20, 1),
        step(5, 20),
        step(6, 21, relative_error=None),
    )


def test_restarts_follow_each_other_and_cut_lines_are_left_out(folder, caplog):
    (log,) = read_logs(folder)
    assert (log.label, log.rank) == ("net", 0)
    assert [record["step"] for record in log.steps] == [9, 19, 20, 21]
    assert [record["ranks"] for record in log.starts] == [4, 2]
    assert "line 6 is no record" in caplog.text


def fields(record: dict | list, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all values in a record."""
    for name, value in record.items() if isinstance(record, dict) else enumerate(record):
        yield (*path, name)
        if isinstance(value, (dict, list)):
            yield from fields(value, (*path, name))


def test_a_record_of_another_form_is_left_out(tmp_path, caplog):
    """Any field may be missing, or hold anything: what is not left out is reported."""
    page = pytest.importorskip("hvd_adaptive.tools.report.page")
    stock = {"float32": 0.02, "float16": 0.005}
    warning = {"kind": "warning", "compressor": 0, "time": 2.5, "text": "it hurts"}
    whole = [start(1, stock=stock), table(1.5, 0, 1), warning, step(2, 9, 10)]
    path, skipped = tmp_path / "x.jsonl", 0
    for record in whole:
        for *parents, name in fields(record):
            for value in (None, "x", 0, [], {}):
                copy = json.loads(json.dumps(record))
                parent = functools.reduce(operator.getitem, parents, copy)
                parent[name] = value
                caplog.clear()
                write(path, copy, *whole)
                (log,) = read_logs(path)
                assert describe(log)["steps"] >= 10 and page.tiles(describe(log))
                skipped += "line 1 is no record, skipped" in caplog.text
    assert skipped > 250


def test_a_page_that_cannot_be_written(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["report", str(folder), "--output", str(folder)]) == 1
    assert capsys.readouterr().err.replace("\n", "") == f"error: {folder}: Is a directory"


def test_a_page_on_standard_output(folder, page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder), "--title", "a <run>", "--output", "-"]) == 0
    assert capsys.readouterr().out == page + "\n"
    assert not Path("-").exists() and not (folder / "report.html").exists()


def test_the_lowest_rank_of_each_compressor_is_read(tmp_path):
    for rank in (3, 1):
        write(
            tmp_path / f"g-rank{rank}-20260101T000000-{rank}.jsonl",
            start(1, rank=rank),
            step(2, rank),
            start(1, rank=rank, compressor=1),
            step(2, 10 + rank, compressor=1),
            start(1, rank=rank, compressor=2),
        )
    found = [(log.label, log.rank, log.steps[0]["step"]) for log in read_logs(tmp_path)]
    assert found == [("g", 1, 1), ("g 1", 1, 11)]  # the third never ended a step


def test_means_are_over_steps(folder):
    (log,) = read_logs(folder)
    told = describe(log)
    assert told["steps"] == 22 and told["ranks"] == 2
    assert told["wire_bytes"] == (12 * 4500 + 10 * 1500) / 22
    assert told["ring_bytes"] == 4 * 3000  # 2 (N - 1) / N = 1
    assert told["relative_error"] == 0.5 and told["peak_bytes"] == 210


def test_bytes_are_shared_out_among_parameters(folder):
    (log,) = read_logs(folder)
    first, second, third = costs(log)
    # 100 coordinates in full precision take 400 bytes; 1,100 belong to 2,900 quantised ones.
    names = [row["name"] for row in (first, second, third)]
    assert names == ["<b>.weight", "a.bias", "a.weight"]
    assert first["payload_bytes"] == pytest.approx(1100 * 2400 / 2900)
    assert (second["payload_bytes"], second["bits"]) == (400, 32)
    assert third["payload_bytes"] == pytest.approx(1100 * 500 / 2900) and third["groups"] == (0,)
    assert sum(row["payload_bytes"] for row in costs(log)) == pytest.approx(1500)


def test_a_group_in_bfloat16_is_shared_out_by_coordinates(tmp_path):
    plain = start(1)
    plain["groups"][0] |= {"quantized": 0, "exchange": "bfloat16"}
    plain["groups"][0]["members"] = [["a", 0, 1000], ["b", 0, 2000]]
    write(tmp_path / "x.jsonl", plain, step(2, 0, payload_bytes=6000.0, relative_error=None))
    (log,) = read_logs(tmp_path / "x.jsonl")
    found = [(row["name"], row["payload_bytes"], row["bits"]) for row in costs(log)]
    assert found == [("b", 4000, 16), ("a", 2000, 16)]


def test_the_page_stands_alone(page):
    # Nothing is loaded from anywhere; names of namespaces are no addresses to fetch.
    assert not re.search(
        r"<(script|link|img|iframe)\b|\b(src|href)=[\"'](?!#)|@import|url\((?!#)", page
    )
    shown = ["a &lt;run&gt;", "&lt;b&gt;.weight", "it &lt;hurts&gt;", "ALQ over 2 ranks", "3.14 kB"]
    for text in (*shown, "1.5 kB", "12 kB", "26.7 %", "began, or changed"):
        assert text in page, text
    drawn = re.findall(r"<svg .*?</svg>", page, re.S)
    labels = [ET.fromstring(_namespaced(svg)).get("aria-label") for svg in drawn]
    assert labels == ["bytes", "error", "time", "levels 0"]


def test_figures_have_the_pages_colours(page):
    """They follow a dark ground; nothing is painted white."""
    from hvd_adaptive.tools.report import page as figures

    assert "prefers-color-scheme: dark" in page
    for svg in re.findall(r"<svg .*?</svg>", page, re.S):
        assert "var(--ink)" in svg and figures.INK not in svg and "#ffffff" not in svg


def test_figures_of_groups_are_no_parameters(page, folder):
    """A parameter is shown with its group; seconds and errors are the group's."""
    of_parameters, of_groups = re.findall(r"<tr><th>(?:parameter|group)<.*?</tr>", page, re.S)
    assert "relative error" not in of_parameters and "encode" not in of_parameters
    assert "<th>group</th>" in of_parameters
    assert "relative error" in of_groups and "encode" in of_groups
    (told,) = [describe(log) for log in read_logs(folder)]
    assert all(row["groups"] == (0,) for row in told["parameters"])
    assert told["groups"][0]["relative_error"] == 0.5


def _namespaced(svg: str) -> str:
    """HTML knows xlink; XML must be told."""
    return svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)


def test_steps_without_compression_are_estimated(tmp_path, capsys):
    """30 of 50 ms are the step's own; 8 ms pass while gradients arrive, which 20 ms exceed and
    5 ms do not."""
    own = {"step_s": 0.05, "blocked_s": 0.02, "arrival_s": 0.008}
    stock = {"float32": 0.02, "float16": 0.005}
    path = tmp_path / "x.jsonl"
    before = step(2, 0, step_s=9.0, blocked_s=1.0, arrival_s=1.0)  # with other ranks
    write(path, start(1), before, start(3, stock=stock), step(4, 1, **own), step(5, 2, **own))
    (log,) = read_logs(path)
    rows = describe(log)["stock"]
    told = {one["name"]: (one["exchange_s"], one["least_s"], one["most_s"]) for one in rows}
    assert told["float32"] == pytest.approx((0.02, 0.042, 0.05))
    assert told["float16"] == pytest.approx((0.005, 0.03, 0.035))
    pytest.importorskip("matplotlib")
    assert main(["report", str(path)]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert f"<h1>{'/'.join(tmp_path.parts[-2:])}</h1>" in page
    assert "No: a step took 50 ms; stock float16 takes at most 35 ms." in page
    assert describe(log)["helped"].startswith("No: ")
    row = re.search(r", this run</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert row.groups() == ("50 ms", "20 ms")  # of the compared steps alone
    assert "Did it help?" in page and "42 ms to 50 ms" in page and "30 ms to 35 ms" in page


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        (0.029, "Yes: a step took 29 ms; stock float16 takes at least 30 ms."),
        (0.036, "No: a step took 36 ms; stock float16 takes at most 35 ms."),
        (0.032, "Unclear: a step took 32 ms; stock float16 takes 30 to 35 ms."),
    ],
)
def test_the_verdict_compares_with_the_fastest_stock_exchange(step_s, told):
    rows = ("float32", 0.02, 0.042, 0.05), ("float16", 0.005, 0.03, 0.035)
    names = ("name", "exchange_s", "least_s", "most_s")
    stock = [dict(zip(names, row, strict=True)) for row in rows]
    assert verdict(step_s, stock) == told


def test_a_run_that_ended_early_without_levels_or_errors(tmp_path):
    path = tmp_path / "x.jsonl"
    alone = start(1, ranks=1, stock={"float32": 0.02})
    write(path, alone, step(2, 0, relative_error=None, step_s=None))
    (log,) = read_logs(path)
    (one,) = describe(log)["stock"]
    assert (one["exchange_s"], one["least_s"], one["most_s"]) == (0.02, None, None)
    assert describe(log)["helped"] == "Unknown: the run has no time of a step."
    pytest.importorskip("matplotlib")
    assert main(["report", str(path), "--output", str(tmp_path / "o.html")]) == 0
    assert (tmp_path / "o.html").read_text().count("<svg") == 2


def test_json(folder, capsys):
    assert main(["report", str(folder), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["scheme"], told["settings"]) == ("ALQ", {"bits": 3, "norm": "l2"})
    assert told["warnings"] == ["it <hurts>"] and told["parameters"][0]["name"] == "<b>.weight"
    assert not (folder / "report.html").exists()


NO_RANK = json.dumps({"kind": "start", "compressor": 0}) + "\n"


@pytest.mark.parametrize("content", [None, "", "no json\n", NO_RANK, json.dumps(start(1)) + "\n"])
def test_no_log(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(LogError, match="missing: No such file or directory"):
        read_logs(tmp_path / "missing")
    with pytest.raises(LogError, match=re.escape(str(tmp_path))):
        read_logs(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err.replace("\n", "")


def test_a_missing_folder_is_refused_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from hvd_adaptive.tools.cli import main\n"
        f"status = main(['report', {str(tmp_path / 'missing')!r}])\n"
        "sys.exit(99 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'missing'}: there is no such file or folder\n"


NAMES = [r"$\frac{$", "$x^2$", "{{ 7 * 7 }}", "]]>", "a_b$", "_private.weight", "", "x" * 500]
NAMES += ["w&amp;<script>f()</script>", "two\nlines", "nul\x00", "half \ud800", "\u202eback"]
NAMES += ["\"quoted'"]


def test_any_name_of_a_parameter_is_shown_as_it_is(tmp_path, capsys):
    first, own = start(1)["groups"][0], step(2, 9, 10)
    groups = [
        first | {"group": number, "members": [[name, 2900, 100]], "part": name}
        for number, name in enumerate(NAMES)
    ]
    tables = [table(1.5, 0, 1) | {"part": name} for name in NAMES]
    first = own["groups"][0]
    own["groups"] = [
        first | {"group": number, "payload_bytes": 1500.0 - number} for number in range(len(NAMES))
    ]
    write(tmp_path / "net-rank0-1.jsonl", start(1, groups=groups), *tables, own)
    assert main(["report", str(tmp_path)]) == 0, capsys.readouterr().err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(_namespaced(svg))
    cells = [html.unescape(cell) for cell in re.findall(r"<tr><td>(.*?)</td>", page, re.DOTALL)]
    assert {name.replace("\ud800", "?") for name in NAMES} <= set(cells)
