"""Find torch, and the C++ standard that its headers need.

The module reads torch's files instead of importing torch: that is quick, and works even if torch's
own libraries cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import MISSING, InstallError

# Used only if torch names no standard: the first version that needs each standard.
BY_VERSION = (((2, 13), 20), ((2, 1), 17), ((0, 0), 14))

_CMAKE = "share/cmake/Torch/TorchConfig.cmake"
_EXTENSIONS = "utils/cpp_extension.py"

_FLAG = re.compile(r"""["'=:]c\+\+(\d\d)\b""")


@dataclass(frozen=True)
class Torch:
    """Describe torch for a build against it."""

    version: str
    root: Path
    cuda: str | None
    cxx11_abi: bool
    standard: int


def find_torch(root: Path | None = None) -> Torch:
    """Describe the torch in `root`, or the one this Python would import."""
    root = root or _installed_root()
    about = _read(root / "version.py")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", about, re.M)
    if version is None:
        raise InstallError(f"{root} does not say its torch version", exit_code=MISSING)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", about, re.M)
    return Torch(
        version=version[1],
        root=root,
        cuda=cuda[1] if cuda else None,
        cxx11_abi="_GLIBCXX_USE_CXX11_ABI=0" not in _read(root / _CMAKE),
        standard=required_standard(root, version[1]),
    )


def required_standard(root: Path, version: str) -> int:
    """Return the C++ standard of code that is compiled against torch.

    torch.utils.cpp_extension passes it to extensions' compilers.
    """
    lines = _read(root / _EXTENSIONS).splitlines()
    code = [line for line in lines if not line.lstrip().startswith(("#", ">>>", "..."))]
    if found := [int(number) for line in code for number in _FLAG.findall(line)]:
        return max(found)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return next(standard for first, standard in BY_VERSION if numbers >= first)


def _installed_root() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise InstallError(
            "torch is not installed in this environment",
            exit_code=MISSING,
            hints=["install torch first: python -m pip install torch"],
        )
    return Path(spec.origin).parent


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
