"""The Dockerfile and the devcontainer agree with each other and with the package; building them
needs Docker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if not (ROOT / "Dockerfile").is_file():
    pytest.skip("the tests lie apart from the repository", allow_module_level=True)
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")


def test_copied_files_exist_and_are_enough():
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied = " ".join(copies).split()
    assert all((ROOT / one).exists() for one in copied)
    # What a build of the package reads: setup.py reads the README, setup.cfg names the licence.
    assert {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(copied) & set(ignored)


def test_the_devcontainer_uses_the_dockerfile():
    told = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / told["build"]["dockerfile"]).samefile(ROOT / "Dockerfile")
    assert f" AS {told['build']['target']}\n" in DOCKERFILE
    extras = re.findall(r"\[([\w,]+)\]", told["postCreateCommand"])[0].split(",")
    declared = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert all(f"\n{extra} =\n" in declared for extra in extras)
