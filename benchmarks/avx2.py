"""Time the codecs without AVX-512, as on processors that have AVX2 alone.

    python benchmarks/avx2.py [arguments of `hvd-adaptive bench codec`]

Numba compiles for a Haswell processor, with those of its features that this processor has.
PyTorch's memcpy, to which the ratios are, is this processor's own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from llvmlite.binding import get_host_cpu_features

NAME = "haswell"
# What came with AVX-512 or after it, though some of it can be used without.
NEWER = ("avx512", "avx10", "evex", "gfni", "vaes", "vpclmulqdq", "amx")


def main(arguments: list[str]) -> int:
    """Measure and print; return the exit status of `hvd-adaptive bench codec`."""
    features = get_host_cpu_features()
    if not features.get("avx2"):
        print("this processor does not have AVX2", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "hvd_adaptive", "bench", "codec", *arguments]
    environment = os.environ | {
        "NUMBA_CPU_NAME": NAME,
        "NUMBA_CPU_FEATURES": without_newer(features),
    }
    return subprocess.run(command, env=environment, check=False).returncode


def without_newer(features: dict[str, bool]) -> str:
    """Return the features as Numba reads them, without the newer ones."""
    return ",".join(
        ("+" if has and not name.startswith(NEWER) else "-") + name
        for name, has in sorted(features.items())
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
