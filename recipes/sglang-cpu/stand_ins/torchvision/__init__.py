"""Import-only stand-in for `torchvision`.

SGLang 0.5.23 imports it at module scope for image models, and transformers then believes it installed and imports names
from it that change with its version. Hence every public name exists, and raises when it is used; language models use
none. (The published torchvision needs the CUDA build of torch.)
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

__version__ = "0.0.0+hybridasync.standin"

_SUBMODULES = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class InterpolationMode:
    """Read as attributes while SGLang's and transformers' modules are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _absent(name: str) -> Callable[..., Any]:
    def use(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} isn't available: this is a stand-in for torchvision, for language models on a CPU")

    return use


class _StandIn(types.ModuleType):
    """A module that has every public name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


def _submodule(name: str) -> None:
    module = _StandIn(f"{__name__}.{name}")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
    module.__dict__["__path__"] = []
    module.__dict__["InterpolationMode"] = InterpolationMode
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


for _name in _SUBMODULES:
    _submodule(_name)
