"""What importing and encoding need: no Horovod, no MPI, no folder that can be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_adaptive

PACKAGE = Path(hvd_adaptive.__file__).parent

ROUNDTRIP = """
import torch
from hvd_adaptive import ALQ
compressor = ALQ(bits=3, bucket_size=100)
flat = torch.linspace(-1, 1, 1000)
decoded = compressor.decode(compressor.encode(flat, seed=1))
assert decoded.shape == flat.shape and bool(decoded.isfinite().all())
"""

SMALL_KERNEL = """
import numpy as np
from hvd_adaptive.kernels.numba import scan
scan.histogram(np.ones(5, np.float32), np.float32(1))
"""

COMPRESS = """
import torch
try:
    ALQ().compress(torch.ones(5))
except RuntimeError as error:
    print(error)
"""

# A finder that refuses whole packages, installed or not.
BLOCK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
"""


def run(code: str, root: Path = PACKAGE.parent, **environment: str) -> str:
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


# What dir() shows: schemes, other names, modules.
PUBLIC = """
ALQ AMQ BinGrad DRIVE ECDQ EDEN LinearQuantile NUQSGD NaturalCompression ORQ OneBitSGD QCS QSGD
SignSGD SparseSGD TernGrad
Auto Hierarchical LocalSGD Monitor PayloadError RankMismatchError ResidualError ScatterReduce Tuning
average describe
"""
MODULES = {"checkpoint", "custom", "ddp", "fsdp", "integrations", "optim", "simulate", "theory"}


def test_import_loads_next_to_nothing():
    """Nor do the commands' help and dir(); the names' modules are loaded when they are used."""
    show = "print(*{m.split('.')[0] for m in sys.modules})\n"
    listed, *loaded = run(
        f"import sys, hvd_adaptive\nprint(*dir(hvd_adaptive))\n{show}"
        "assert 'hvd_adaptive.ddp' not in sys.modules\n"
        f"from hvd_adaptive.tools import cli\ncli.make_parser().format_help()\n{show}"
        f"for name in {MODULES}: assert getattr(hvd_adaptive, name).__doc__\n{show}"
    ).splitlines()[:4]
    assert {name for name in listed.split() if name[:2] != "__"} == {*PUBLIC.split(), *MODULES}
    plotting = {"matplotlib", "mlxtend", "sklearn"}
    slow = {"torch", "scipy", "numba"}
    for seen, unwanted in zip(loaded, ({*slow, "rich"}, slow, set()), strict=True):
        assert not set(seen.split()) & {"horovod", "mpi4py", "triton", *plotting, *unwanted}


def test_names_are_loaded_when_they_are_used():
    run(
        "import hvd_adaptive\n"
        "assert set(hvd_adaptive.__all__) <= set(dir(hvd_adaptive))\n"
        "assert hvd_adaptive.ALQ is __import__('hvd_adaptive.schemes', fromlist=['ALQ']).ALQ\n"
        "assert callable(hvd_adaptive.instances.start_over)  # a module of the package\n"
        "for name in ('no_such', '_private'):\n"
        "    try:\n        getattr(hvd_adaptive, name)\n"
        "    except AttributeError as error:\n        assert name in str(error)\n"
        "    else:\n        raise SystemExit(name)\n"
        "from hvd_adaptive import *\n"
        "assert ALQ(bits=3).encode and issubclass(PayloadError, Exception)\n"
    )
    run("from hvd_adaptive.schemes.qsgd import QSGD\nQSGD(bits=4)\n")  # a host is loaded


def test_import_needs_neither_numba_nor_triton():
    """A GPU's kernels do without the one, the CPU's without the other."""
    modules = "import hvd_adaptive.exchange.auto, hvd_adaptive.tools.bench.codec\n"
    run(BLOCK.format(blocked={"numba", "llvmlite", "triton"}) + modules)


def test_encode_decode_and_fit_without_horovod_mpi_and_triton():
    """And compress() says what to do."""
    fit = "compressor.fit(flat); assert compressor.report()['table_version'] == 1\n"
    blocked = BLOCK.format(blocked={"horovod", "mpi4py", "triton"})
    told = run(blocked + ROUNDTRIP + fit + COMPRESS)
    assert "install-horovod" in told and "hvd_adaptive.average()" in told


def test_the_package_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "hvd_adaptive", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"hvd-adaptive {hvd_adaptive.__version__}\n", done.stderr


def test_compressor_is_horovods_where_horovod_came_first():
    """And compress() before hvd.init() says what to do."""
    pytest.importorskip("horovod.torch")
    told = run(
        "import horovod.torch as hvd\nfrom hvd_adaptive import ALQ\n"
        "from horovod.torch.compression import Compressor\n"
        "assert isinstance(ALQ(), Compressor) and not hvd.is_initialized()\n" + COMPRESS
    )
    assert "before hvd.init()" in told and "hvd_adaptive.average()" in told


def test_kernels_run_where_no_cache_folder_can_be_written(tmp_path):
    """A read-only installation (its __pycache__ folders are plain files, which binds root as well),
    a home that is no folder, a cache folder that cannot be made."""
    copy = tmp_path / "site" / "hvd_adaptive"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [copy, *(p for p in copy.rglob("*") if p.is_dir())]:
        (folder / "__pycache__").write_text("no folder")
    nowhere = str(copy / "__pycache__" / "home")
    where = "import hvd_adaptive; print(hvd_adaptive.__file__)\n"
    run(SMALL_KERNEL, NUMBA_CACHE_DIR="/proc/nowhere/cache")
    told = run(
        SMALL_KERNEL + where,
        root=tmp_path / "site",
        NUMBA_CACHE_DIR=nowhere,
        HOME=nowhere,
        XDG_CACHE_HOME=nowhere,
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONSAFEPATH="1",
    )
    assert str(copy) in told
    assert told.count("each process compiles them at every start") == 1
    assert "set the environment variable NUMBA_CACHE_DIR" in told
