"""Write a compiler wrapper that raises the C++ standard and leaves Horovod's source unchanged."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

# Every spelling of each standard that compilers accept.
_SPELLINGS = {
    98: ("98", "03"),
    11: ("0x", "11"),
    14: ("1y", "14"),
    17: ("1z", "17"),
    20: ("2a", "20"),
    23: ("2b", "23"),
}

_SCRIPT = """\
#!/bin/sh
# Written by hvd_adaptive: the real compiler, with the C++ standard that torch's headers need, and
# without debugging symbols, which take a quarter of the time, unless HOROVOD_DEBUG is 1.

# nvcc preprocesses for its own front end with the standard it was given: leave its passes alone.
for word in "$@"; do
    case "$word" in
        -D__CUDACC__* | -D__CUDA_ARCH*) exec {compiler} "$@" ;;
    esac
done

named=no compiles=no shared=no
for word in "$@"; do
    shift
    case "$word" in
        {lower})
            named=yes word=-std=c++{standard} ;;
        -std=* | --std=*) named=yes ;;
        -g) if [ "$HOROVOD_DEBUG" != 1 ]; then word=-g0; fi ;;
        -c) compiles=yes ;;
        -shared) shared=yes ;;
    esac
    set -- "$@" "$word"
done
if [ $compiles$named = yesno ]; then set -- -std=c++{standard} "$@"; fi
if [ $shared = yes ]; then set -- {rpaths}"$@"; fi
exec {compiler} "$@"
"""


def wrapper_script(compiler: Sequence[str], standard: int, rpaths: Sequence[str] = ()) -> str:
    """Return the wrapper's text.

    Args:
        compiler: the real compiler's command, which may be several words.
        standard: the C++ standard to which lower ones are raised; higher ones stay.
        rpaths: library folders, relative to the library ($ORIGIN/...), searched before any other.
            They keep a cached wheel from loading the MPI of the environment it was built in.
    """
    numbers = [text for year in _lower(standard) for text in _SPELLINGS[year]]
    lower = [f"-std={kind}++{number}" for number in numbers for kind in ("c", "gnu")]
    return _SCRIPT.format(
        compiler=shlex.join(compiler),
        standard=standard,
        lower=" | ".join([*lower, *(f"-{flag}" for flag in lower)]),
        rpaths="".join(shlex.quote(f"-Wl,-rpath,{path}") + " " for path in rpaths),
    )


def write_wrapper(path: Path, script: str) -> None:
    """Write the wrapper and make it executable."""
    path.write_text(script, encoding="utf-8")
    path.chmod(0o755)


def _lower(standard: int) -> list[int]:
    return [year for year in _SPELLINGS if year == 98 or year < standard]
