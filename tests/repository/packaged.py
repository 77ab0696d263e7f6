"""Build sdist and wheel; run the tests of one process against the wheel in an empty environment.

python tests/repository/packaged.py [arguments of pytest]    (make package-test)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

TESTS = ["unit", "tools", "repository", "research"]
ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(
    ".*", "build", "dist", "site", "runs", "*.egg-info", "__pycache__", "*.log"
)


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, made from a copy of the repository, and the wheel, made from the sdist."""
    copy, out = folder / "repository", folder / "dist"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def unpacked(sdist: Path, folder: Path) -> Path:
    """The sdist's files but for the package itself, so that only an installed one can be found."""
    with tarfile.open(sdist) as archive:
        # Early releases of Python 3.10 and 3.11 have no filters.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safe)
    (root,) = folder.iterdir()
    shutil.rmtree(root / "hvd_adaptive")
    return root


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("[1/3] sdist and wheel", flush=True)
        sdist, wheel = build(folder)
        files = unpacked(sdist, folder / "sdist")
        print("[2/3] an empty environment", flush=True)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        constraints = ["--constraint", str(ROOT / "requirements" / "constraints.txt")]
        install = [python, "-m", "pip", "install", "--quiet", *constraints, f"{wheel}[test,report]"]
        subprocess.run(install, check=True)
        print("[3/3] tests", flush=True)
        whole = ["-m", "not integration", *(f"tests/{name}" for name in TESTS)]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        pytest = [python, *["-m", "pytest", "-q", "-p", "no:cacheprovider"], *(arguments or whole)]
        return subprocess.run(pytest, cwd=files, env=clean).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
