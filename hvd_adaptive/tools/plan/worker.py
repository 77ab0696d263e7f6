"""Time steps of small and of large gradients, as one of two ranks: ``worker METHOD`` (JSON)."""

from __future__ import annotations

import json
import sys

from hvd_adaptive.tools.bench.worker import measured, networks
from hvd_adaptive.tools.launch import send_result
from hvd_adaptive.tools.methods import parse

TENSORS, SMALL, LARGE = 100, 1_600, 1 << 22  # tensors of a step, and their numbers
STEPS = 5


def main() -> None:
    """Measure the least seconds of a step, and send what the first rank found."""
    import horovod.torch as hvd

    hvd.init()
    (method,) = parse([json.loads(sys.argv[1])])
    none, found = hvd.Compression.none, {}
    cases = {"small": (SMALL, none), "large": (LARGE, none), "scheme": (SMALL, method.scheme())}
    for name, (size, compression) in cases.items():
        network = next(networks(TENSORS, size, hvd.rank()))
        found[name] = min(measured(hvd, network, compression, STEPS)["seconds"])
    if hvd.rank() == 0:
        send_result(found)
    hvd.shutdown()


if __name__ == "__main__":
    main()
