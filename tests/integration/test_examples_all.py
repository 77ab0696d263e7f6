"""The smaller examples, shortened: what example_runs.py checks on two ranks, and torchrun's."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import forked
import pytest
from script_runs import BIN, ROOT, run

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(320)]


def test_examples_on_two_ranks(tmp_path: Path) -> None:
    """One start for all of them: most of an example's time is its imports."""
    pytest.importorskip("mlxtend")
    program = Path(__file__).parent / "example_runs.py"
    told = forked.run(2, program, [str(tmp_path)], {}, tmp_path, 300)
    assert told.count("all examples ran") == 2


def elastic_command() -> list[str]:
    """The command of its docstring, which is the page's."""
    text = (ROOT / "examples/elastic.py").read_text(encoding="utf-8")
    documented = re.search(r"^horovodrun.*?elastic\.py$", text, re.MULTILINE | re.DOTALL)[0]
    return shlex.split(documented.replace("\\\n", ""))


def test_elastics_page_has_its_command() -> None:
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert f"`{shlex.join(elastic_command())}`" in page


def test_elastic_as_documented(tmp_path: Path) -> None:
    """Until the stop file is seen. (test_examples_on_two_ranks runs it without horovodrun.)"""
    pytest.importorskip("mlxtend")
    command = elastic_command()
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "stop").touch()
    done = run([*command, "--no-cuda", "--stop-file", "stop"], tmp_path, 120)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("a worker has started") == 2
    assert "stopped after step 5, 2 ranks" in done.stdout


def torchrun(example: str) -> list[str]:
    """Two processes of it."""
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    return [*command, str(ROOT / "examples" / f"{example}.py")]


def test_ddp_hook(tmp_path: Path) -> None:
    """torchrun, two processes: it learns, they stay equal, about log2(7) bits travel."""
    pytest.importorskip("mlxtend")
    done = run(
        [*torchrun("ddp_hook"), *["--no-cuda", "--steps", "40", "--bucket-cap-mb", "0.5"]],
        tmp_path,
        300,
    )
    assert done.returncode == 0, done.stdout
    assert "parameters equal on 2 processes" in done.stdout
    accuracy = float(done.stdout.partition("accuracy ")[2].partition("%")[0])
    assert accuracy > 60
    sent, bits = done.stdout.partition(" ms a step")[2].split("\n")[1].split(" bytes sent")
    assert 2.8 < float(bits.rsplit(",", 1)[1].split()[0]) < 3.1
    assert 10.5 < 4 * 431_080 / int(sent.replace(",", "")) < 32 / math.log2(7)


def test_local_sgd(tmp_path: Path) -> None:
    """torchrun, two processes: four rounds, of which the last one is shorter; it learns."""
    pytest.importorskip("mlxtend")
    done = run([*torchrun("local_sgd"), "--steps", "70", "--every", "20"], tmp_path, 300)
    assert done.returncode == 0, done.stdout
    assert "after 4 rounds" in done.stdout
    assert float(done.stdout.partition("accuracy ")[2].partition("%")[0]) > 60
    # 4 of 32 bits, every 20th step.
    sent = int(done.stdout.rpartition(" rounds, ")[2].split()[0].replace(",", ""))
    assert 7.5 < 4 * 431_080 / 20 / sent < 8


def test_ppo(tmp_path: Path) -> None:
    """torchrun, two processes: the carts learn to stay at 0, with 3 of 32 bits."""
    done = run(torchrun("ppo"), tmp_path, 300)
    assert done.returncode == 0, done.stdout
    rewards = [float(part.split(",")[0]) for part in done.stdout.split("reward ")[1:]]
    assert rewards[0] < -1 and rewards[-1] > -0.3


def test_fsdp2(tmp_path: Path) -> None:
    """torchrun, two processes: the transformer learns with 4 bits."""
    done = run(torchrun("fsdp2"), tmp_path, 300)
    assert done.returncode == 0, done.stdout
    losses = [float(part.split()[0]) for part in done.stdout.split("loss ")[1:]]
    assert losses[0] > 5 and losses[-1] < 3
    sent = int(done.stdout.split(" bytes sent")[0].split()[-1].replace(",", ""))
    assert 7.5 < 4 * 470_000 / 2 / sent < 8.2  # float32 would send half of the gradients
