"""Check LocalSGD's arguments."""

from __future__ import annotations

from typing import Any

import torch

from hvd_adaptive.base.checks import is_real
from hvd_adaptive.base.device import check_supported
from hvd_adaptive.compressor import GradientCompressor, check_compressor
from hvd_adaptive.hooks.ddp.names import plain_names
from hvd_adaptive.hooks.wrapped_optimizer import WrappedOptimizer


def check_arguments(optimizer: Any, compressor: Any, momentum: Any, lr: Any) -> None:
    """Raise ValueError if an argument of LocalSGD is not allowed."""
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "synchronize"):
        raise ValueError(
            "optimizer: must be a torch optimizer, not hvd.DistributedOptimizer, which averages at "
            "every step"
        )
    if isinstance(optimizer, WrappedOptimizer):
        raise ValueError("optimizer: must not be a LocalSGD itself")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        check_supported(parameter.device)
    if any(map(torch.is_complex, parameters)):
        raise ValueError("optimizer: complex parameters are not supported")
    if not is_real(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r}: must be a number of at least 0 and below 1")
    if not is_real(lr) or not 0 < lr < float("inf"):
        raise ValueError(f"lr={lr!r}: must be a number above 0")
    if compressor is None:
        return
    check_compressor("compression", compressor)
    if compressor._training.connection is not None:
        raise ValueError("compression: already serves an optimizer or a model; create another")
    if compressor.settings.process_set is not None:
        raise ValueError("process_set: give it to LocalSGD, not to the compressor")


def names_of(given: Any, compressor: GradientCompressor | None) -> dict[torch.nn.Parameter, str]:
    """Return names by parameter, without those of wrappers; none if none are given."""
    named = list(given or ())
    if compressor is not None:
        bits = compressor.settings.parameter_bits
        if bits is not None and not named:
            raise ValueError(
                "parameter_bits: the parameters' names are unknown: give LocalSGD named_parameters="
            )
        named = plain_names(named, bits or ())
        if named:
            compressor.parts.warn_of_idle_patterns([name for name, _ in named])
    return {parameter: name for name, parameter in named}


def check_mixing(mixing: Any, delay: int) -> float:
    """Return ``mixing``, or its default; raise ValueError if it is not allowed."""
    if mixing is None:
        return 0.5 if delay else 0.0
    if not is_real(mixing) or not 0 <= mixing < 1:
        raise ValueError(f"mixing={mixing!r}: must be a number of at least 0 and below 1")
    if mixing and not delay:
        raise ValueError(f"mixing={mixing!r}: needs a delay of at least 1")
    return float(mixing)
