"""Run the methods of a plan in turn on one rank of a launch."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from laboratory.exchangers import RANKS
from laboratory.files import write_json
from laboratory.methods import Method, parse


class Rank:
    """One rank, which writes folder/rank-R.json after each method.

    The file holds "methods", {label: what ``measure`` returns}, and "now", the label of the method
    at work, so that the launcher knows in which method a launch ended; "failed", if one has failed.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.ranks = plan, RANKS[plan["backend"]]()
        self.file = Path(plan["folder"]) / f"rank-{self.ranks.rank}.json"
        self.found: dict[str, Any] = {"methods": {}, "now": None}

    def measure(self, method: Method) -> dict[str, Any]:
        """Return the figures of a method."""
        raise NotImplementedError

    def run(self) -> None:
        """Measure each method, and write what was found."""
        for method in parse(self.plan["methods"]):
            self._write(now=method.label)
            try:
                self.found["methods"][method.label] = self.measure(method)
            except Exception as error:
                traceback.print_exc()
                self._write(failed=f"{type(error).__name__}: {error}".splitlines()[0])
                sys.stdout.flush()
                os._exit(1)  # the others may wait in a collective: the launcher ends them
        self._write(now=None)

    def _write(self, **news: Any) -> None:
        self.found |= news
        write_json(self.file, self.found)


def main(kind: type[Rank]) -> None:
    """Run the plan that the command line names."""
    torch.set_num_threads(1)
    rank = kind(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    rank.run()
    rank.ranks.barrier()
    rank.ranks.close()
