"""Support a scheme's class as compressor: ``compression=ALQ``, like ``hvd.Compression.fp16``.

Horovod stores the class and calls ``compress`` on it. The first such call creates a compressor for
each optimizer that holds the class, and replaces the class by it. Every optimizer then has its own
compressor, ``optimizer._compression``, as if it had been given ``ALQ()``.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from hvd_adaptive.hooks.horovod.owner import optimizer_given, optimizers_given

logger = logging.getLogger("hvd_adaptive")

_replacing = threading.Lock()


def compressor_for_caller(scheme: type) -> Any:
    """Return the compressor of the calling optimizer, which was given the class ``scheme``.

    The first call creates compressors for all optimizers that hold the class, in the order of their
    parameters' names, so that ranks create them in the same order.

    Raises:
        ValueError: No optimizer is among the callers, or the class needs keywords.
    """
    name = scheme.__name__
    with _replacing:
        caller = optimizer_given(scheme)
        if caller is None:
            raise ValueError(
                f"compression={name}: is a class, and no optimizer of Horovod calls it; give an "
                f"instance, compression={name}()"
            )
        if caller._compression is scheme:
            for optimizer in optimizers_given(scheme, caller):
                optimizer._compression = _make(scheme)
        return caller._compression


def _make(scheme: type) -> Any:
    name = scheme.__name__
    try:
        compressor = scheme()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"compression={name}: the class cannot be used without keywords ({error}); give an "
            f"instance, compression={name}(...)"
        ) from error
    logger.info("compression=%s: the class is used as %s()", name, name)
    return compressor
