from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from ._api import Arena, Image, Progress, StrPath

__all__ = ["bind", "capture", "state_dict"]

Model = TypeVar("Model", bound=torch.nn.Module)

STORAGE: str

def state_dict(arena: Arena) -> dict[str, torch.Tensor]: ...
def capture(
    model: torch.nn.Module,
    path: StrPath,
    *,
    stage: str = "engine-params",
    engine: tuple[str, str] | None = None,
    kernel: Mapping[str, Any] | None = None,
    model_config: Any = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Image: ...
def bind(
    model: Model,
    arena: Arena,
    *,
    engine: tuple[str, str] | None = None,
    kernel: Mapping[str, Any] | None = None,
) -> Model: ...
