"""What is built and installed: complete, typed, and at work from a folder of its own.

``make package-test`` runs all tests of one process against the wheel in an empty environment.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaged import ROOT, build, unpacked

import hvd_adaptive

pytestmark = pytest.mark.skipif(
    not (ROOT / "hvd_adaptive").is_dir(), reason="there is no package to build beside the tests"
)
# Quick: without compiled kernels, which a new folder would compile again.
SMOKE = ("adapt/test_schedule.py", "hooks/test_fragments.py", "levels/test_levels_multiplier.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    pytest.importorskip("build")
    return build(tmp_path_factory.mktemp("built"))


def sources() -> set[str]:
    """Every file of the package that is not made by running it."""
    paths = (ROOT / "hvd_adaptive").rglob("*")
    return {str(p.relative_to(ROOT)) for p in paths if p.is_file() and "__pycache__" not in p.parts}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == sources()
        assert "hvd_adaptive/py.typed" in names
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        told = Parser().parsestr(archive.read(metadata).decode())
    assert told["Version"] == hvd_adaptive.__version__
    assert told["License-Expression"] == "Apache-2.0" or told["License"] == "Apache-2.0"
    assert {"horovod", "test", "docs", "dev"} <= set(told.get_all("Provides-Extra"))
    assert told["Description-Content-Type"] == "text/markdown"
    text = told.get_payload()
    assert "hvd.DistributedOptimizer(" in text and "compression=ALQ(bits=3)" in text
    # Nothing on PyPI lies beside the page.
    assert not [t for t in re.findall(r"\]\(([^)]+)\)", text) if not t.startswith(("http", "#"))]


def test_links_lead_into_the_repository():
    sys.path.insert(0, str(ROOT))
    try:
        setup = importlib.import_module("setup")
    finally:
        sys.path.remove(str(ROOT))
        sys.modules.pop("setup", None)
    readme = "![a b](docs/a.png) [c](docs/c.md#d) [e](#e) [f](https://g.org)"
    assert setup.description(readme, "https://host/owner/name") == (
        "![a b](https://host/owner/name/raw/main/docs/a.png) "
        "[c](https://host/owner/name/blob/main/docs/c.md#d) [e](#e) [f](https://g.org)"
    )
    alone = setup.description(readme, "")
    assert alone.startswith(" c [e](#e) [f](https://g.org)")


def test_the_sdist_holds_what_its_tests_need(built):
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() <= names
    wanted = ["CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "README.md", "mkdocs.yml"]
    wanted += ["docs/theory.md", "research/compare.py", "tests/conftest.py"]
    wanted += ["tests/unit/conftest.py", "benchmarks/laboratory/worker.py"]
    assert set(wanted) <= names
    assert not [name for name in names if name.endswith((".pyc", ".nbi", ".nbc"))]


def test_an_editable_install_is_a_path(built, tmp_path):
    """Type checkers follow a path; they do not run an import hook."""
    files = unpacked(built[0], tmp_path / "sdist")
    program = "import sys; from setuptools import build_meta as b; b.build_editable(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=files, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert Path(archive.read(path).decode().strip()) == files.resolve()


def test_from_a_folder_of_its_own(built, tmp_path):
    sdist, wheel = built
    site, files = tmp_path / "site", unpacked(sdist, tmp_path / "sdist")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([sys.executable, *install, "--target", str(site), str(wheel)], check=True)
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    program = (
        "import sys, hvd_adaptive, pytest; print(hvd_adaptive.__file__);"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    tests = [str(files / "tests" / "unit" / name) for name in SMOKE]
    done = subprocess.run(
        [sys.executable, "-c", program, *tests],
        cwd=files,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.startswith(str(site / "hvd_adaptive" / "__init__.py"))
    assert " passed" in done.stdout and " skipped" not in done.stdout
