"""Find torch, and the C++ standard that its headers need.

The module reads torch's files instead of importing torch: that is quick, and works even if torch's
own libraries cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import MISSING, InstallError

KNOWN_STANDARDS = (11, 14, 17, 20, 23, 26)
# Used only if torch's files name no standard: the first version that needs each standard.
BY_VERSION = (((2, 13), 20), ((2, 1), 17), ((0, 0), 14))

_HEADERS = (
    "include/ATen/ATen.h",
    "include/torch/csrc/api/include/torch/all.h",
    "include/torch/headeronly/macros/Macros.h",
    "include/c10/macros/Macros.h",
    "include/c10/util/C++17.h",
)
_CMAKE = ("share/cmake/Torch/TorchConfig.cmake", "share/cmake/Caffe2/Caffe2Targets.cmake")
_EXTENSIONS = "utils/cpp_extension.py"

# The pattern matches "#if ... __cplusplus < 201703L" with an "#error" close behind, which makes it
# a requirement.
_DEMANDED = re.compile(
    r"^#\s*if.*__cplusplus\s*<\s*20(\d\d)\d\dL?.*\n(?:.*\n){0,2}?#\s*error", re.M
)
_CMAKE_STANDARD = re.compile(r"CXX_STANDARD\s+(\d\d)\b|cxx_std_(\d\d)\b")
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
        cxx11_abi="_GLIBCXX_USE_CXX11_ABI=0" not in _read(root / _CMAKE[0]),
        standard=required_standard(root, version[1]),
    )


def required_standard(root: Path, version: str) -> int:
    """Return the C++ standard that torch's own files require of code compiled against them.

    The result is the highest of the standard that the headers require by `#error`, the one that
    torch's CMake files request, and the flag that torch.utils.cpp_extension passes: headers use a
    newer standard before they require it.
    """
    found = {standard for standard in _mentioned(root) if standard in KNOWN_STANDARDS}
    if found:
        return max(found)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return next(standard for first, standard in BY_VERSION if numbers >= first)


def _mentioned(root: Path) -> Iterator[int]:
    for header in _HEADERS:
        yield from map(int, _DEMANDED.findall(_read(root / header)))
    for config in _CMAKE:
        for pair in _CMAKE_STANDARD.findall(_read(root / config)):
            yield int(pair[0] or pair[1])
    for line in _read(root / _EXTENSIONS).splitlines():
        if not line.lstrip().startswith(("#", ">>>", "...")):
            yield from map(int, _FLAG.findall(line))


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
