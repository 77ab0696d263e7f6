"""Check whether the installed Horovod imports and has the requested features."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from .facts import Facts, Options

_PROBE = """
import json
import horovod, horovod.torch as hvd
from importlib.resources import files
built = json.loads(files("horovod").joinpath("metadata.json").read_text())
print(json.dumps({
    "version": horovod.__version__,
    "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()),
    "torch": built.get("pytorch"),
}))
"""


@dataclass(frozen=True)
class Installed:
    """Describe the Horovod in this environment; `key` is None if it was installed otherwise."""

    version: str
    key: str | None


def find_installed() -> Installed | None:
    """Return the installed Horovod, read from its metadata."""
    try:
        found = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    # pip notes the file it installed from; kept wheels lie in a folder named by their key.
    folder = Path(unquote(urlparse(origin.get("url", "")).path)).parent.name
    return Installed(found.version, folder if re.fullmatch(r"[0-9a-f]{16}", folder) else None)


def problems(options: Options, facts: Facts) -> list[str]:
    """Return how the installed Horovod differs from the request; empty if it is good."""
    seen, trouble = probe()
    return [trouble] if seen is None else differences(seen, options, facts)


def probe() -> tuple[dict[str, object] | None, str]:
    """Return what the installed Horovod reports: version, mpi, gloo, nccl, torch (the version that
    it was built for); or None and why it cannot be imported.
    """
    # The probe runs in a folder of its own, so that no ./horovod hides the installed one.
    with tempfile.TemporaryDirectory(prefix="hvd_adaptive-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", _PROBE],
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=300,
            )
        except subprocess.TimeoutExpired:
            return None, "importing horovod.torch did not end within 300 s"
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-3:] or [f"exit status {done.returncode}"]
        return None, "import horovod.torch fails: " + " | ".join(words)
    return json.loads(done.stdout.splitlines()[-1]), ""


def differences(seen: dict[str, object], options: Options, facts: Facts) -> list[str]:
    """Compare the probe's result with the request."""
    wanted = {
        "version": options.version,
        "torch": facts.torch.version,
        "mpi": facts.mpi is not None,
        "gloo": options.gloo,
        "nccl": facts.gpu.nccl is not None,
    }
    return [
        f"{name} is {seen.get(name)}, not {value}"
        for name, value in wanted.items()
        if seen.get(name) != value
    ]
