"""Make methods callable on a compressor, and on the class that is given in place of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar, cast

from hvd_adaptive.connection import host

_Function = TypeVar("_Function", bound=Callable[..., Any])


def callable_on_class(function: _Function) -> _Function:
    """Make a method also work when Horovod calls it on the class."""
    return cast(_Function, _Method(function))


class _Method:
    """Method of compressors; a call on the class goes to the calling optimizer's compressor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(cast(Any, self), function)

    def __get__(self, compressor: Any, scheme: type) -> Callable[..., Any]:
        function = self._function
        if compressor is not None:
            return MethodType(function, compressor)

        @functools.wraps(function)
        def on_class(*arguments: Any) -> Any:
            if arguments and isinstance(arguments[0], scheme):
                return function(*arguments)
            return function(host().compressor_of_caller(scheme), *arguments)

        return on_class
