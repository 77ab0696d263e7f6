"""The kernels for CPU tensors, in Numba.

Functions without docstring and types are described in the module of the same name in reference/,
which has the same arguments and computes the same integers.
"""

from __future__ import annotations

import os
import sys

# Numba's coloured error messages initialise colorama, which writes a colour reset to every terminal
# at the end of the process; ranks under mpirun have pseudo-terminals. Numba reads the variable when
# it is imported.
_VARIABLE = "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"
if "numba" not in sys.modules and _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "1"
    try:
        import numba  # noqa: F401
    finally:
        del os.environ[_VARIABLE]
