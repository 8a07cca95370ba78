"""A stand-in for sgl_kernel, of which no CPU build is published.

Importing any name works; calling one raises, except the few operators of gated-delta-net models
that are implemented here in plain torch (see ``gated_delta_net``). Correctness only: slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

SUBMODULES = (
    "allreduce",
    "elementwise",
    "flash_attn",
    "gemm",
    "kvcacheio",
    "mamba",
    "moe",
    "quantization",
    "sampling",
    "scalar_type",
    "speculative",
    "top_k",
    "utils",
)


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no CPU implementation in the test shims")

    return call


class _Stub(ModuleType):
    """Gives any public name: a function that raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _missing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Tags:
    """Gives any public name as an opaque tag, as scalar types are used."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _install() -> None:
    package: Any = sys.modules[__name__]
    package.__class__ = _Stub
    package.__version__ = "0.4.10"
    for name in SUBMODULES:
        module = _Stub(f"{__name__}.{name}")
        sys.modules[module.__name__] = module
        setattr(package, name, module)
    sys.modules[f"{__name__}.scalar_type"].__dict__.update(scalar_types=_Tags(), ScalarType=object)


_install()

from tests.sglang.shims import gated_delta_net  # noqa: E402  # fills in sgl_kernel.mamba: that must exist

gated_delta_net.register()
