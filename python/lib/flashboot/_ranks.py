"""Every rank of a layout, one after another in one process, on one device: each believes that it is its rank, and talks to nobody.

A process group of torch's own that communicates with nobody says who one is. What a rank's parameters are must follow from that
and the checkpoint alone, which is so where ranks cut what they read; a value that ranks agree on by a collective would be wrong.
"""

import contextlib
import os
from pathlib import Path

import torch

from ._slots import Slots
from .errors import InvalidError


@contextlib.contextmanager
def as_rank(rank, ranks):
    """Inside, this process is `rank` of `ranks`, to `torch.distributed` and by the variables that launchers set."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InvalidError("ranks: torch.distributed is initialised already; do this in a process of its own", "ranks")
    # As a launcher tells them; every rank is on the device that this process has.
    told = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def localise(model):
    """Puts this rank's part in the place of every tensor that is spread over ranks; how many there were."""
    from torch.distributed.tensor import DTensor

    spread, made = 0, {}
    for slot in Slots(model):
        old = slot.tensor
        data = old.data if isinstance(old, torch.nn.Parameter) else old
        if isinstance(data, DTensor):
            spread += 1
            if id(old) not in made:
                local = data.to_local()
                is_parameter = isinstance(old, torch.nn.Parameter)
                made[id(old)] = torch.nn.Parameter(local, requires_grad=False) if is_parameter else local
            slot.put(made[id(old)])
    return spread


def capture_ranks(
    make, path, ranks, *, stage="engine-params", engine=None, kernel=None, model_config=None, replace=False, progress=None
):
    """Writes an image of each of `ranks` tensor-parallel ranks to a directory of `path`, called as the rank is; the images, by name.

    `make()` makes the model of the rank that the process is at that moment, as `from_pretrained(…, tp_plan="auto")` does; one rank's
    model is in memory at a time. The rest is as for `flashboot.torch.capture`.
    """
    from .torch import capture

    if ranks < 1:
        raise InvalidError(f"ranks: {ranks} ranks, at least one is wanted", "ranks")
    path, images = Path(path), {}
    path.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        name = f"target-0-{rank}-0-0"
        with as_rank(rank, ranks):
            model = make()
            if ranks > 1 and localise(model) == 0:
                raise InvalidError(f"ranks: no tensor of {type(model).__name__} is spread over {ranks} ranks; `make` is to split it", "ranks")
            images[name] = capture(
                model, path / name, rank=name, world=(1, ranks, 1, 1), stage=stage, engine=engine, kernel=kernel,
                model_config=model_config, replace=replace, progress=progress,
            )
            del model
    return images
