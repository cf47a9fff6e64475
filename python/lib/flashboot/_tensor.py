"""One name of a rank."""

from collections import namedtuple

Tensor = namedtuple("Tensor", "name dtype offset shape stride what")
Tensor.__doc__ = """One name of a rank: dtype as safetensors spells it, offset in bytes from the payload's first, shape and
stride in elements; `what` is "tensor", "alias" (another name of a tensor) or "view" (its bytes seen otherwise)."""
