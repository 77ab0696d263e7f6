"""The Dockerfile and the devcontainer agree with each other and with the package.

Nothing here builds them: that needs Docker.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not (ROOT / "Dockerfile").is_file(), reason="the tests lie apart from the repository"
)


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, its words) in order; lines that end with a backslash go on."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    whole = re.sub(r"\\\n\s*", "", lines).split("\n")
    pairs = [line.split(maxsplit=1) for line in whole if line.strip()]
    return [(name, words) for name, words in pairs]


def test_copied_files_exist_and_are_enough():
    copied = [
        word
        for name, words in instructions()
        if name == "COPY" and not words.startswith("--from")
        for word in words.split()[:-1]
    ]
    assert all((ROOT / one).exists() for one in copied)
    # What a build of the package reads: setup.py reads the README, setup.cfg names the licence.
    assert {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(copied) & set(ignored)


def test_the_devcontainer_uses_the_dockerfile():
    told = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    build = told["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f" AS {build['target']}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = re.findall(r"\[([\w,]+)\]", told["postCreateCommand"])[0].split(",")
    declared = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert all(f"\n{extra} =\n" in declared for extra in extras)
