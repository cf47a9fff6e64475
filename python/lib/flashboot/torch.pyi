from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ._api import Arena, Image, Progress, StrPath

__all__ = ["PartialTensor", "bind", "capture", "capture_ranks", "compact", "state_dict", "stream"]

Model = TypeVar("Model", bound=torch.nn.Module)

STORAGE: str

class PartialTensor(torch.Tensor):
    def __new__(
        cls, name: str, shape: Sequence[int], dim: int, runs: Sequence[tuple[int, int]], resident: torch.Tensor
    ) -> PartialTensor: ...
    @property
    def resident(self) -> torch.Tensor: ...
    @property
    def slice(self) -> tuple[int, tuple[tuple[int, int], ...]]: ...

def stream(
    checkpoint: StrPath,
    *,
    rank: str | None = None,
    layout: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    patience: float = 60.0,
) -> Iterator[tuple[str, torch.Tensor]]: ...
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
