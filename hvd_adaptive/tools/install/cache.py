"""Keep built wheels, one folder for each key."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .errors import MISSING, InstallError


def wheel_root(chosen: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the folder of all kept wheels: `chosen`, else one in the user's cache folder."""
    if chosen is not None:
        return chosen.expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    # By the XDG convention, a path that is not absolute counts as not set.
    cache = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return cache / "hvd_adaptive" / "wheels"


def find_wheel(root: Path, key: str) -> Path | None:
    """Return the wheel kept under `key`, or None."""
    return next(iter(sorted((root / key).glob("horovod-*.whl"))), None)


def keep_wheel(root: Path, key: str, wheel: Path, log: Path, parts: Mapping[str, object]) -> Path:
    """Move a new wheel and its log to where `find_wheel` looks; return its new path."""
    folder = root / key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "about.json").write_text(json.dumps(parts, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(log, folder / "build.log")
    for old in folder.glob("horovod-*.whl"):
        if old.name != wheel.name:
            old.unlink(missing_ok=True)
    # The move is one rename within one file system: another process sees the whole wheel or none.
    return wheel.replace(folder / wheel.name)


@contextmanager
def build_folder(root: Path) -> Iterator[Path]:
    """Make a folder for one build; keep it for its log only if the build fails."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=root))
    except OSError as error:
        raise InstallError(
            f"cannot write to {root}: {error}",
            exit_code=MISSING,
            hints=["name a folder that you may write to with --wheel-dir"],
        ) from error
    try:
        yield folder
    except InstallError as error:
        if error.log is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
