"""The batch scripts in slurm/, submitted to a real Slurm."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import Cluster, Unavailable, install, left_over, slurm

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400
MNIST = ("--epochs", "1", "--batch-size", "64", "--lr", "0.01", "--momentum", "0.9")
# Script -> (options of sbatch, words). Two slurmd of one machine share the folder that PMIx meets
# in, so srun has one node for both ranks.
JOBS = {
    "one_node": ((), MNIST),
    "nodes_mpirun": ((), MNIST),
    "nodes_srun": (("--nodes=1", "--ntasks-per-node=2"), MNIST),
    "nodes_horovodrun": (("--partition=local",), MNIST),
    "elastic": (("--partition=local",), ("--epochs", "1", "--batch-size", "64")),
    "gpus": (("--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--gres=none"), ()),
}
# Other trainings than the first are left to `make ranks`.
if "HVD_ADAPTIVE_EVERY_CASE" not in os.environ:
    JOBS = {name: JOBS[name] for name in ("nodes_mpirun", "gpus")}
# What an untrained net gets right is about a tenth.
TRAINED = 0.7


# Of a job that has ended: what scontrol tells of it, what it printed, what --json wrote.
Ended = tuple[dict[str, str], str, dict]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        install()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running
    assert not left_over(running)


@pytest.fixture(scope="module")
def ended(cluster: Cluster, tmp_path_factory) -> dict[str, Ended]:
    """All of them at once, from a folder that looks like the repository."""
    folder = tmp_path_factory.mktemp("submitted")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "examples").symlink_to(ROOT / "examples")
    cluster.environment.update(
        PYTHONPATH=str(ROOT),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_mpi_yield_when_idle="1",  # Slurm counts more cores than there are
    )
    numbers = {}
    for name, (options, words) in JOBS.items():
        wanted = () if name == "gpus" else ("--json", f"{name}.json")
        own = {"words": (*words, *wanted), "options": options}
        numbers[name] = cluster.submit(name, folder, **own)

    def output(name: str) -> str:
        path = folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    end, warned = time.monotonic() + SECONDS, False
    while cluster.run("squeue", "--noheader").strip():
        # As Slurm does some time before the limit; this soon, training stops at its first save.
        elastic = numbers.get("elastic")
        if elastic and not warned and (folder / f"elastic-{elastic}.pt.hosts.sh").exists():
            cluster.run("scancel", "--batch", "--signal=USR1", elastic)
            warned = True
        if time.monotonic() > end:
            told = [f"{name}:\n{output(name)}" for name in JOBS]
            pytest.fail("\n".join([cluster.run("squeue"), *told, cluster.log()]))
        time.sleep(0.3)
    results = {}
    for name, number in numbers.items():
        path = folder / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        results[name] = cluster.job(number), output(name), result
    return results


@pytest.mark.parametrize("name", [name for name in JOBS if "node" in name])
def test_training(ended: dict[str, Ended], name: str) -> None:
    """The job ends well; both ranks took part, learned, and hold the same bits."""
    job, output, result = ended[name]
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), f"{job}\n{output}"
    assert "parameters equal on 2 ranks" in output
    assert result["settings"]["ranks"] == 2
    (run,) = result["runs"]
    assert run["accuracy"] >= TRAINED and run["replicas_equal"]
    assert 10.5 <= run["uncompressed_bytes"] / run["payload_bytes"] <= 11.5
    assert job["NumNodes"] == ("2" if name in ("nodes_mpirun", "nodes_horovodrun") else "1")


@pytest.mark.thorough
def test_elastic_goes_on_after_a_requeue(ended: dict[str, Ended]) -> None:
    """The warning before the time limit: training saves itself, the job runs once more and ends."""
    job, output, result = ended["elastic"]
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), output
    stopped = int(output.partition("stopped after step ")[2].partition(",")[0])
    assert f"goes on from step {stopped}" in output
    assert 5 <= stopped < result["step"]
    assert result["step"] == 31  # 4,000 images in batches of 64 on 2 ranks: none is seen twice
    assert result["done"] and result["ranks"] == 2
    assert result["accuracy"] >= TRAINED


def test_gpus_asks_for_nccl(ended: dict[str, Ended]) -> None:
    """A Horovod without it is told before any rank starts."""
    job, output, _ = ended["gpus"]
    if "[X] NCCL" in output or "has no NCCL" not in output:
        pytest.skip("this Horovod has NCCL")
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0")
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in output
