"""Run a step whose result is known, as one rank of the doctor's exchange.

Each rank reports its number, the number of ranks, whether Horovod runs on MPI, the MPI libraries in
its process, the one that mpi4py uses, and the relative error of the average, which is that of 8
bits.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from hvd_adaptive import QSGD
from hvd_adaptive.tools.launch import send_result

COORDINATES = 20_000


def gradient(rank: int) -> torch.Tensor:
    """Return a rank's own gradient (float32)."""
    return torch.randn(COORDINATES, generator=torch.Generator().manual_seed(rank))


def main() -> None:
    """Exchange once, compare, and send what this rank found."""
    import horovod.torch as hvd

    hvd.init()
    found = {"rank": hvd.rank(), "ranks": hvd.size(), "mpi": bool(hvd.mpi_enabled())}
    weight = torch.nn.Parameter(torch.zeros(COORDINATES))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        named_parameters=[("weight", weight)],
        compression=QSGD(bits=8, norm="linf", bucket_size=512, exchange="scatter_reduce"),
    )
    (weight * gradient(hvd.rank())).sum().backward()
    optimizer.step()
    expected = sum(gradient(rank) for rank in range(hvd.size())) / hvd.size()
    error = float((weight.detach() + expected).norm() / expected.norm())
    digests = hvd.allgather(weight.detach().view(torch.int32).sum()[None], name="doctor.digest")
    found |= {"error": error, "equal": len(set(digests.tolist())) == 1}
    found |= _mpi() if found["mpi"] else {}
    hvd.barrier()
    send_result(found)
    hvd.shutdown()


def _mpi() -> dict[str, Any]:
    """Return the MPI libraries that this process has loaded, and the one that mpi4py uses."""
    found: dict[str, Any] = {}
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        found["mpi4py"] = MPI.Get_library_version().splitlines()[0].split(",")[0]
    except ImportError as error:
        found |= {"mpi4py": None, "mpi4py_error": str(error)}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = re.findall(r"\S*/libmpi(?:ch)?\.so\S*", maps)
    return found | {"libraries": sorted(set(map(os.path.realpath, paths)))}


if __name__ == "__main__":
    main()
