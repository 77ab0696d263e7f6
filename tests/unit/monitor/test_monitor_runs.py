"""Records of several runs in a folder."""

from __future__ import annotations

from written import start, step, write

from hvd_adaptive.monitor.log import read_logs
from hvd_adaptive.tools.report.summary import describe


def test_runs_of_different_settings_are_told(tmp_path):
    """A restarted run shares settings with an earlier file, though it may have changed them."""

    def warnings(*files: tuple[str, ...]) -> list[str]:
        for time, schemes in enumerate(files):
            starts = [start(10 * time + at, scheme=scheme) for at, scheme in enumerate(schemes)]
            path = tmp_path / f"net-rank0-2026010{1 + time}T000000-{time}.jsonl"
            write(path, *starts, step(10 * time + 9, 1))
        return describe(read_logs(tmp_path)[0])["warnings"]

    assert warnings(("A()",), ("A()", "B()"), ("B()",)) == []
    assert warnings(("A()",), ("B()",), ("B()", "A()")) == []
    told = "records of 2 runs with different settings: give each run its own folder"
    assert warnings(("A()",), ("B()",), ("B()", "C()")) == [told]
