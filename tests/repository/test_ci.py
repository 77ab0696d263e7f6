"""pre-commit's hooks and the workflow of GitHub Actions do what the Makefile and .ci/run do."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
HOOKS = ROOT / ".pre-commit-config.yaml"

pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci/run").is_file(), reason="the tests lie apart from the repository"
)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def suite() -> dict[str, Any]:
    return read(WORKFLOW)["jobs"]["suite"]


def step(word: str) -> dict[str, Any]:
    """The only step with this word in what it runs or uses."""
    (only,) = [s for s in suite()["steps"] if word in s.get("run", s.get("uses", ""))]
    return only


def test_every_supported_python_runs_the_suite():
    tested = suite()["strategy"]["matrix"]["python"]
    assert tested == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    classified = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert classified == tested
    assert setup["options"]["python_requires"] == f">={tested[0]}"


def test_horovods_wheel_is_kept_where_the_builder_looks():
    """By Python's and torch's versions, in the folder that XDG_CACHE_HOME names."""
    cache, home = step("actions/cache")["with"], suite()["env"]["XDG_CACHE_HOME"]
    folder = home.replace("${{ github.workspace }}/", "")
    assert cache["path"] == f"{folder}/hvd_adaptive/wheels"
    assert "versions.outputs.python" in cache["key"] and "versions.outputs.torch" in cache["key"]
    constraints = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8")
    assert len(re.findall("^torch==", constraints, re.MULTILINE)) == 1


def test_hooks_are_what_make_lint_runs():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    made = {re.sub(r"@\$\(BIN\)/| --check| \.", "", line).strip() for line in lint.splitlines()}
    (local,) = read(HOOKS)["repos"]
    entries = [hook["entry"] for hook in local["hooks"]]
    hooked = {
        entry.removeprefix(".venv/bin/").removesuffix(" --force-exclude") for entry in entries
    }
    assert local["repo"] == "local" and hooked == made
    assert made == {"ruff check", "ruff format", "mypy"}
