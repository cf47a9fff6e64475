from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ._api import Arena, Image, Progress, StrPath

__all__ = ["PartialTensor", "bind", "capture", "state_dict", "stream"]

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
