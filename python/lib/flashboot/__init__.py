"""Model weights into memory at wire speed, provably byte-exact.

`load` puts one rank into memory, from an image, a checkpoint, an object store or other processes that have it;
`attach` uses what the node agent holds, where it is; `seed` serves an image to others; `clone` reads it from them. `flashboot.torch` makes tensors of what was loaded
and images of live models; `flashboot.safetensors` stands in for the package of that name; `flashboot.aio` has the
same calls for asyncio. Nothing here needs torch, a GPU, libcuda or libibverbs to be imported.
"""

from . import errors
from ._api import Arena, Image, Seed, attach, clone, doctor, load, seed
from ._flashboot import __version__
from .errors import FlashbootError

__all__ = [
    "Arena",
    "FlashbootError",
    "Image",
    "Seed",
    "Tensor",
    "__version__",
    "attach",
    "clone",
    "doctor",
    "errors",
    "load",
    "seed",
]

_LAZY = ("aio", "safetensors", "torch")


def __getattr__(name):
    # What needs asyncio or torch is imported when it is asked for.
    if name in _LAZY:
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    if name == "Tensor":
        from ._tensor import Tensor

        return Tensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_LAZY])
