from collections.abc import Mapping, Sequence
from typing import Any

from ._api import Arena, Image, Progress, Seed, StrPath

__all__ = ["attach", "clone", "doctor", "load", "seed"]

async def load(
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
async def attach(
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
async def clone(
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
async def seed(
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
async def doctor(
    *, device: str | None = None, config: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> dict[str, Any]: ...
