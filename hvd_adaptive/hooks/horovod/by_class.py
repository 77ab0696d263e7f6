"""A scheme's class in a compressor's place: ``compression=ALQ``, as ``hvd.Compression.fp16`` is.

Horovod keeps the class and calls ``compress`` on it. The first such call makes a compressor for
each optimizer that holds the class, and puts it in the class's place: from then on every optimizer
has one of its own, ``optimizer._compression``, as if it had been given ``ALQ()``.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from hvd_adaptive.hooks.horovod.owner import optimizer_given, optimizers_given

logger = logging.getLogger("hvd_adaptive")

_replacing = threading.Lock()


def compressor_for_caller(scheme: type) -> Any:
    """The compressor of the optimizer among the callers that was given the class ``scheme``; made
    now for all optimizers that hold the class, in the order of their parameters' names, so that
    ranks make them in the same order. ValueError where no optimizer calls, or where the class needs
    keywords."""
    name = scheme.__name__
    with _replacing:
        caller = optimizer_given(scheme)
        if caller is None:
            raise ValueError(
                f"compression={name}: is a class, and no optimizer of Horovod's calls it; give an "
                f"instance, compression={name}()"
            )
        if caller._compression is scheme:
            for optimizer in optimizers_given(scheme, caller):
                optimizer._compression = _made(scheme)
        return caller._compression


def _made(scheme: type) -> Any:
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
