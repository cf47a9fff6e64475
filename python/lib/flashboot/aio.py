"""The calls that block, for asyncio: each on a thread of its own. `progress` is called on the loop's thread.

A task that is cancelled gives its load up as soon as the call next looks; the memory is freed then.
"""

import asyncio
import functools

from . import _api
from .errors import CancelledError

__all__ = ["attach", "clone", "doctor", "load", "seed"]


async def _with_progress(call, *args, progress=None, **kwargs):
    loop, given_up = asyncio.get_running_loop(), []

    def told(done, total):
        if given_up:
            raise CancelledError("load: given up by its task", "load")
        if progress is not None:
            loop.call_soon_threadsafe(progress, done, total)

    try:
        return await asyncio.to_thread(call, *args, progress=told, **kwargs)
    except asyncio.CancelledError:
        given_up.append(True)
        raise


@functools.wraps(_api.load)
async def load(*args, **kwargs):
    return await _with_progress(_api.load, *args, **kwargs)


@functools.wraps(_api.attach)
async def attach(*args, **kwargs):
    return await _with_progress(_api.attach, *args, **kwargs)


@functools.wraps(_api.clone)
async def clone(*args, **kwargs):
    return await _with_progress(_api.clone, *args, **kwargs)


@functools.wraps(_api.seed)
async def seed(*args, **kwargs):
    return await asyncio.to_thread(_api.seed, *args, **kwargs)


@functools.wraps(_api.doctor)
async def doctor(*args, **kwargs):
    return await asyncio.to_thread(_api.doctor, *args, **kwargs)
