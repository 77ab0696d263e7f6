"""What `make setup` compiles: every kernel, into a cache that it empties first."""

from __future__ import annotations

import subprocess
import sys

# In this process from the cache that is there: compiling anew takes minutes.
CODE = """
import importlib, pkgutil, sys
from concurrent.futures import ThreadPoolExecutor
from numba.core.dispatcher import Dispatcher
from hvd_adaptive.kernels import numba as kernels
from hvd_adaptive.kernels.numba import warm
modules = [importlib.import_module(f"{kernels.__name__}.{found.name}")
           for found in pkgutil.iter_modules(kernels.__path__)]
warm.__file__ = sys.argv[1]
warm.ProcessPoolExecutor = lambda count, context: ThreadPoolExecutor(1)
warm.compile_all()
for module in modules:
    for name, kernel in vars(module).items():
        if isinstance(kernel, Dispatcher) and not kernel.targetoptions.get("no_cpython_wrapper"):
            print(module.__name__, name, len(kernel.signatures))
"""


def test_every_kernel_is_compiled(tmp_path):
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    for kind in ("encode-1.py311.nbi", "encode-1.py311.1.nbc", "cpython-311.pyc"):
        (cache / f"tables.{kind}").touch()
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "warm.py")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) > 20
    # Only compiled code calls these: they are in the caches of what does.
    called = {"apply", "add_blocks"}
    assert {name for _, name, signatures in kernels if signatures == "0"} <= called
    assert [path.name for path in cache.iterdir()] == ["tables.cpython-311.pyc"]
