"""Lets torchvision be imported beside a torch without CUDA.

Its compiled operators cannot be loaded there, and SGLang does not call them; but its Python code
registers shape functions for two of them, which fails unless their schemas exist. This module
defines the schemas just before torchvision is first imported.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")
_library: list[Any] = []  # a torch library takes its schemas with it when it is collected


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _library.append(library)
        return None


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
