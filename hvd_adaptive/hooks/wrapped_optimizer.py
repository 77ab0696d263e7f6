"""Define WrappedOptimizer, a torch optimizer around another one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvd_adaptive.training import is_first_rank

logger = logging.getLogger("hvd_adaptive")
UNFINISHED = (
    "LocalSGD: the training ended within a round, so the ranks' parameters differ: call finish() "
    "on every rank after the last step"
)


class Ending:
    """What warns if the optimizer's end leaves ranks with different parameters.

    Attributes:
        is_open: This rank has taken steps that no round has averaged, and no state holds.
    """

    def __init__(self) -> None:
        self.is_open, self._is_heard = False, is_first_rank()

    def warn(self) -> None:
        if self.is_open and self._is_heard:
            logger.warning("%s", UNFINISHED)


def _of_inner(name: str) -> Any:
    """Return the method ``name``, which calls the other optimizer's."""

    def method(self: WrappedOptimizer, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.optimizer, name)(*arguments, **keywords)

    return method


class WrappedOptimizer(torch.optim.Optimizer):
    """Show another optimizer's parameter groups and state, and take its steps.

    Its attributes are read anew each time, since loading a state replaces them. Hooks of states are
    the other optimizer's. Hooks of steps are this one's.

    ``torch.amp.GradScaler`` calls ``step`` after an overflow, too.
    """

    _step_supports_amp_scaling = True
    _is_made = False
    # Set by GradScaler during a step.
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_made = True
        self._ending = Ending()
        weakref.finalize(self, self._ending.warn)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_made:  # torch.optim.Optimizer's constructor sets it
            self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_made:
            self.optimizer.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer's; the first round averages it in full precision."""
        if not any(group is param_group for group in self.optimizer.param_groups):
            self.optimizer.add_param_group(param_group)

    register_state_dict_pre_hook = _of_inner("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_inner("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_inner("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_inner("register_load_state_dict_post_hook")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since it belongs to a group of "
            "ranks: save its state_dict(), or construct another one on every rank"
        )

    def _step_optimizer(self, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Take a step; return its loss, and whether a GradScaler let it happen."""
        inner = self.optimizer
        if not hasattr(self, "found_inf"):
            return (inner.step() if closure is None else inner.step(closure)), True
        overflow, scale = bool(self.found_inf), self.grad_scale
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.grad_scale, inner.found_inf = scale, self.found_inf  # type: ignore[attr-defined]
            try:
                return inner.step(), not overflow
            finally:
                del inner.grad_scale, inner.found_inf  # type: ignore[attr-defined]
        if overflow:
            return None, False
        if scale is not None:
            self._unscale(scale)
        return inner.step(), True

    def _unscale(self, scale: torch.Tensor) -> None:
        """Divide gradients, as GradScaler.unscale_ does."""
        inverse = scale.double().reciprocal().float()
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))

    def _drop_broken_state(self, rounds: int) -> None:
        """Drop the optimizer's state of parameters in which it is not finite, and warn."""
        for parameter in self._parameters():
            values = [v for v in self.state.get(parameter, {}).values() if torch.is_tensor(v)]
            if not all(bool(value.isfinite().all()) for value in values):
                del self.state[parameter]
        logger.warning(
            "LocalSGD: this rank's parameters were not finite after round %d: it continues from "
            "the others' mean, and its optimizer's state that was not finite begins anew",
            rounds,
        )

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]
