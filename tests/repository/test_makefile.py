"""`make demo` installs what the demonstration needs, `make setup` the rest, too; the Dockerfile and
the devcontainer agree with each other and with the package (building them needs Docker)."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from imported_names import imported

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").is_file(), reason="the tests lie apart from the repository"
)


def commands(target: str, folder: Path) -> str:
    """What make would run where nothing is installed yet."""
    made = ["make", "--dry-run", "--no-print-directory", target, f"VENV={folder / 'none'}"]
    return subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def installed(target: str, folder: Path) -> list[list[str]]:
    """Extras of each installation of this package."""
    return [e.split(",") for e in re.findall(r"\.\[([\w,]+)\]", commands(target, folder))]


def test_the_demo_installs_its_own_packages_alone(tmp_path):
    (of_demo,) = installed("demo", tmp_path)
    assert of_demo == ["horovod", "examples"]
    first, rest = installed("setup", tmp_path)
    assert first == of_demo and set(rest) == {*of_demo, "test", "dev", "docs"}
    assert "hvd_adaptive.kernels" in commands("setup", tmp_path)
    assert "hvd_adaptive.kernels" not in commands("demo", tmp_path)


def test_the_demos_imports_are_installed():
    """Each distribution that its scripts import is among the requirements."""
    scripts, found = ["mnist"], set[str]()
    for script in scripts:
        names = {n.partition(".")[0] for n in imported(EXAMPLES / f"{script}.py")} - {""}
        scripts += [n for n in names if (EXAMPLES / f"{n}.py").is_file() and n not in scripts]
        found |= names
    assert {"mnist_demo", "compression", "lenet", "plots", "progress"} <= set(scripts)
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    texts = (
        declared["options"]["install_requires"],
        *(declared["options.extras_require"][extra] for extra in ("horovod", "examples")),
    )
    required = {re.split(r"[<>=;\[]", line)[0] for t in texts for line in t.split()}
    of_module = importlib.metadata.packages_distributions()
    own = {*sys.stdlib_module_names, *scripts, "hvd_adaptive", "horovod"}
    missing = {m for m in found - own if not required & set(of_module.get(m, ()))}
    assert not missing and "mlxtend" in found


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")


def test_copied_files_exist_and_are_enough():
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile(), re.MULTILINE)
    copied = " ".join(copies).split()
    assert all((ROOT / one).exists() for one in copied)
    # What a build of the package reads: setup.py reads the README, setup.cfg names the licence.
    assert {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(copied) & set(ignored)


def test_the_devcontainer_uses_the_dockerfile():
    told = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / told["build"]["dockerfile"]).samefile(ROOT / "Dockerfile")
    assert f" AS {told['build']['target']}\n" in dockerfile()
    extras = re.findall(r"\[([\w,]+)\]", told["postCreateCommand"])[0].split(",")
    declared = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert all(f"\n{extra} =\n" in declared for extra in extras)
