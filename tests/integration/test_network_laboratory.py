"""The network laboratory, end to end on two hosts: what it measures, and that nothing is left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from laboratory import hosts
from laboratory.launch import missing_programs
from script_runs import ROOT, run

pytestmark = [pytest.mark.integration, pytest.mark.parallel, pytest.mark.timeout(200)]

NETWORK = [sys.executable, str(ROOT / "benchmarks" / "network.py")]
NETWORK += ["--hosts", "2", "--model", "tiny", "--steps", "2", "--rounds", "1"]


@pytest.fixture(scope="module", autouse=True)
def laboratory():
    """Skips where hosts cannot be built; otherwise leaves some remains of a killed run."""
    if lacks := hosts.missing() + missing_programs({"mpi", "gloo"}):
        pytest.skip(f"no laboratory without {'; '.join(lacks)}")
    try:
        with hosts.Hosts(1, "1gbit"):
            pass
    except hosts.LaboratoryError as error:
        pytest.skip(str(error))


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(hosts.PREFIX)]


@pytest.mark.thorough
def test_measures_and_removes_everything(tmp_path):
    # What a killed run leaves: a host, with a process on it.
    subprocess.run(["ip", "netns", "add", f"{hosts.PREFIX}left"], check=True)
    left = subprocess.Popen(["ip", "netns", "exec", f"{hosts.PREFIX}left", "sleep", "300"])
    methods = ["mpi/float32", "mpi/float16", "ALQ(bits=3|99)", "ddp/ALQ(bits=3)"]
    methods += ["ALQ(bits=2, tuning=Tuning(in_flight_bytes=4096))"]
    methods += ["fsdp/bfloat16", "fsdp/EDEN(bits=4)"]
    command = [*NETWORK, *["--json", "found.json", "--plot", "found.png", "--methods"], *methods]
    run(command, tmp_path, 150)
    assert left.wait(10) == -signal.SIGKILL
    assert namespaces() == [] and not hosts.FOLDER.exists()
    assert not list(hosts.FILES.glob(f"{hosts.PREFIX}*"))
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"
    results = {r["label"]: r for r in json.loads((tmp_path / "found.json").read_text())["results"]}
    float32, float16, three = (results[f"mpi/{m}"] for m in ("float32", "float16", "ALQ(bits=3)"))
    for result in (float32, float16, three):
        assert len(result["seconds"]) == 2 and result["replicas_equal"]
    # A ring of two sends each number once. The interface counts headers, too, and what Horovod
    # tells each millisecond, in a step that may take long here.
    assert 1 <= float32["sent_bytes"][0] / (4 * 121_892) < 1.15
    assert 1 <= float16["sent_bytes"][0] / (2 * 121_892) < 1.25
    assert 1 <= three["sent_bytes"][0] / three["reports"][0]["wire_bytes"] < 1.6
    assert float32["relative_error"] < 1e-12 < float16["relative_error"] < 1e-5
    assert 0.05 < three["relative_error"] < 0.6
    hook = results["ddp/ALQ(bits=3)"]
    assert len(hook["seconds"]) == 2 and hook["replicas_equal"]
    assert 1 <= hook["sent_bytes"][0] / hook["reports"][0]["wire_bytes"] < 1.6
    assert 0.05 < hook["relative_error"] < 0.6
    half, sharded = results["fsdp/bfloat16"], results["fsdp/EDEN(bits=4)"]
    assert half["replicas_equal"] and sharded["replicas_equal"]
    assert 1e-8 < half["relative_error"] < 1e-4 < sharded["relative_error"] < 0.03
    gathered = 4 * 121_892 / 2  # this rank's half of the parameters, in the forward pass
    sent = sharded["sent_bytes"][0] - gathered
    assert 1 <= sent / sharded["reports"][0]["wire_bytes"] < 1.6
    assert "bits=99" in results["mpi/ALQ(bits=99)"]["trouble"]
    assert (
        "in_flight_bytes=4096"
        in results["mpi/ALQ(bits=2, tuning=Tuning(in_flight_bytes=4096))"]["trouble"]
    )


@pytest.mark.thorough
def test_two_ranks_on_each_host_share_its_link(tmp_path):
    command = [*NETWORK, *["--ranks-per-host", "2", "--json", "found.json", "--methods"]]
    command.append("ALQ(bits=3, exchange='allgather'|'hierarchical')")
    run(command, tmp_path, 150)
    gathered, sliced = json.loads((tmp_path / "found.json").read_text())["results"]
    assert gathered["replicas_equal"] and sliced["replicas_equal"]
    # Of a rank's three payloads two leave the host; of its slice's, one.
    for result, share in ((gathered, 2 / 3), (sliced, 1)):
        leaves = 2 * share * result["reports"][0]["wire_bytes"]
        assert 1 <= result["sent_bytes"][0] / leaves < 1.4


@pytest.mark.thorough
def test_overlap_of_every_kind_of_hook(tmp_path):
    asked = ["ddp/float16", "ddp/PowerSGD(rank=1)", "ddp/EDEN(bits=1)", "mpi/EDEN(bits=1)"]
    asked += ["fsdp/float32", "fsdp/EDEN(bits=1)"]
    command = [NETWORK[0], NETWORK[1].replace("network.py", "overlap.py"), "--hosts", "2"]
    command += ["--models", "tiny", "--steps", "2", "--rounds", "1", "--backward-ms", "30"]
    command += ["--json", "found.json", "--methods", *asked]
    run(command, tmp_path, 180)
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert list(row["methods"]) == asked
    for found in row["methods"].values():
        assert found["exchange"] > 0 and found["both"] >= found["backward"] >= 0.03


def test_a_signal_removes_everything():
    process = subprocess.Popen(NETWORK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while not _has_ranks(process) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(namespaces()) == 3
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert namespaces() == [] and not hosts.FOLDER.exists()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


def _has_ranks(process: subprocess.Popen) -> bool:
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            if "laboratory.worker" in child.cmdline():
                return True
    return False


def test_one_laboratory_at_a_time():
    with hosts.LOCK.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(hosts.LaboratoryError, match="another laboratory is open"):
            hosts.Hosts(2, "1gbit").__enter__()


@pytest.mark.thorough
@pytest.mark.timeout(420)
def test_time_to_accuracy_goes_on_where_it_was_cut_off(tmp_path):
    script = NETWORK[1].replace("network.py", "time_to_accuracy.py")
    command = [sys.executable, script, "--hosts", "2", "--rate", "1gbit", "--steps", "4"]
    command += ["--every", "2", "--output-dir", "out", "--methods", "ddp/float32", "EDEN(bits=2)"]
    kept = tmp_path / "out" / "mnist-2x1gbit-4steps.json"
    runs = []
    for seeds in (1, 2):
        told = run([*command, "--seeds", str(seeds)], tmp_path, 180)
        found = json.loads(kept.read_text())
        runs.append({label: own["0"] for label, own in found.items()})
    assert runs[0] == runs[1]
    assert set(found) == {"ddp/float32", "mpi/EDEN(bits=2)"}
    for own in found.values():
        for curve in own.values():
            steps, seconds, accuracies = zip(*curve, strict=True)
            assert steps == (0, 2, 4, 5) and seconds[0] == 0 < seconds[1] < seconds[2]
            assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    assert "mpi/EDEN(bits=2)" in told and " of 2 " in told
    assert kept.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
