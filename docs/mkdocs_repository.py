"""Hook of mkdocs: pages link to the repository if setup.py has its address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Set the repository's address; mkdocs calls this at the start."""
    setup = (Path(__file__).parents[1] / "setup.py").read_text(encoding="utf-8")
    config.repo_url = address(setup) or None
    return config


def address(setup: str) -> str:
    """Return the repository's address in the text of setup.py; "" while it is unknown."""
    (found,) = re.findall(r'^REPOSITORY = "(.*)"$', setup, re.MULTILINE)
    return found
