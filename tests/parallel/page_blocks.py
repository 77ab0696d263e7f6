"""The code blocks of README.md and docs/: which there are, and a program that runs them on a rank.

A page's Python blocks are run in order, in one namespace. Before each, ``model``, ``optimizer``,
``inputs`` and ``targets`` are made anew where the block hands an optimizer to Horovod, since pages
speak of a user's own. A block that cannot be run has a comment in front of its fence that says why:

    <!-- not run: the reason -->
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON, SHELL, OTHERS = ("python",), ("sh",), ("text", "json", "ini", "html")
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; reason: why it is not run, None where it is."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None

    @property
    def is_doctest(self) -> bool:
        return self.code.startswith(">>>")

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, match.start("code")) + 1,
            match["language"],
            match["code"],
            match["reason"],
        )
        for match in FENCE.finditer(text)
    ]


def to_run(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if block.language in PYTHON and block.reason is None and not block.is_doctest
    ]


def main(folder: str) -> None:
    """Run every page's blocks on this rank, in ``folder``."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    os.chdir(folder)
    # For DistributedDataParallel.
    meeting = {
        "init_method": f"file://{folder}/ranks",
        "rank": hvd.rank(),
        "world_size": hvd.size(),
    }
    torch.distributed.init_process_group("gloo", **meeting)
    for page in pages():
        names: dict[str, object] = {"__name__": page.stem, "torch": torch, "hvd": hvd}
        for block in to_run(page):
            if "hvd.DistributedOptimizer(" in block.code or "optimizer" not in names:
                names |= a_users_own()
                names |= {"net": names["model"], "rank": hvd.rank()}
            source = "\n" * (block.line - 1) + block.code
            exec(compile(source, str(page), "exec", dont_inherit=True), names)
            sys.stderr.write(f"ran {block}\n")
            if "fully_shard(" in block.code:
                del names["optimizer"]  # the next block has a whole model
    torch.distributed.destroy_process_group()


def a_users_own() -> dict[str, object]:
    """What pages take as given, the same on every rank."""
    import torch

    from hvd_adaptive import ALQ

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    inputs, targets = torch.randn(8, 40), torch.randn(8, 3)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    return {
        "ALQ": ALQ,
        "model": model,
        "inputs": inputs,
        "targets": targets,
        "loss": loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


if __name__ == "__main__":
    main(sys.argv[1])
