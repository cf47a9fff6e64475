import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ._tensor import Tensor

StrPath = str | os.PathLike[str]
Progress = Callable[[int, int], object]

class Image:
    def __init__(self, path: StrPath) -> None: ...
    @classmethod
    def open(cls, path: StrPath) -> Image: ...
    @property
    def id(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def ranks(self) -> list[str]: ...
    @property
    def stage(self) -> str: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def fingerprint(self) -> dict[str, Any]: ...
    def nbytes(self, rank: str | None = None) -> int: ...
    def tensors(self, rank: str | None = None) -> list[Tensor]: ...
    def verify(self, progress: Progress | None = None) -> dict[str, Any]: ...

class Arena:
    def __init__(self, inner: Any) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def report(self) -> dict[str, Any]: ...
    @property
    def image_id(self) -> str | None: ...
    @property
    def fingerprint(self) -> dict[str, Any] | None: ...
    @property
    def stage(self) -> str: ...
    def tensors(self) -> list[Tensor]: ...
    def verify(self) -> int: ...
    def memoryview(self) -> memoryview: ...
    def __len__(self) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Seed:
    def __init__(self, inner: Any) -> None: ...
    @property
    def report(self) -> dict[str, Any]: ...
    @property
    def rendezvous(self) -> str: ...
    @property
    def serving(self) -> bool: ...
    def stop(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None: ...

def load(
    path: StrPath | None = None,
    *,
    checkpoint: StrPath | None = None,
    object: str | None = None,
    object_options: Mapping[str, str] | None = None,
    rendezvous: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    rank: str | None = None,
    image_id: str | None = None,
    sources: Sequence[str] | None = None,
    device: str | None = None,
    transport: str | None = None,
    config: Mapping[str, Any] | None = None,
    patience: float = 60.0,
    progress: Progress | None = None,
) -> Arena: ...
def attach(
    image: Image | StrPath | None = None,
    *,
    image_id: str | None = None,
    rank: str | None = None,
    device: str | None = None,
    private: bool = False,
    agent: StrPath | None = None,
    config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Arena: ...
def clone(
    rendezvous: str,
    *,
    model: str | None = None,
    revision: str | None = None,
    image_id: str | None = None,
    rank: str | None = None,
    device: str | None = None,
    transport: str | None = None,
    config: Mapping[str, Any] | None = None,
    patience: float = 60.0,
    progress: Progress | None = None,
) -> Arena: ...
def seed(
    image: Image | Arena | StrPath,
    *,
    rank: str | None = None,
    model: str | None = None,
    revision: str = "",
    rendezvous: str | None = None,
    embed: str | None = None,
    name: str | None = None,
    device: str | None = None,
    transport: str | None = None,
    config: Mapping[str, Any] | None = None,
    lease: float = 10.0,
    patience: float = 60.0,
    drain: float = 30.0,
) -> Seed: ...
def doctor(
    *, device: str | None = None, config: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> dict[str, Any]: ...
