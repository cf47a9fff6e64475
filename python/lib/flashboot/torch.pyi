from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ._api import Arena, Image, Progress, StrPath

__all__ = ["bind", "capture", "capture_ranks", "compact", "state_dict"]

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
    rank: str | None = None,
    world: tuple[int, int, int, int] | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Image: ...
def capture_ranks(
    make: Callable[[], torch.nn.Module],
    path: StrPath,
    ranks: int,
    *,
    stage: str = "engine-params",
    engine: tuple[str, str] | None = None,
    kernel: Mapping[str, Any] | None = None,
    model_config: Any = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> dict[str, Image]: ...
def compact(
    model: torch.nn.Module,
    *,
    stage: str = "engine-params",
    engine: tuple[str, str] | None = None,
    kernel: Mapping[str, Any] | None = None,
    model_config: Any = None,
    rank: str | None = None,
    world: tuple[int, int, int, int] | None = None,
    device: str = "cpu",
    config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Arena: ...
def bind(
    model: Model,
    arena: Arena,
    *,
    engine: tuple[str, str] | None = None,
    kernel: Mapping[str, Any] | None = None,
) -> Model: ...
