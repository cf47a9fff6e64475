from . import aio as aio
from . import errors as errors
from . import safetensors as safetensors
from . import torch as torch
from ._api import Arena as Arena
from ._api import Image as Image
from ._api import Seed as Seed
from ._api import attach as attach
from ._api import clone as clone
from ._api import doctor as doctor
from ._api import load as load
from ._api import seed as seed
from ._tensor import Tensor as Tensor
from .errors import FlashbootError as FlashbootError

__version__: str
__all__: list[str]
