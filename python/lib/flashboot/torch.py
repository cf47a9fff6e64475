"""Tensors of what was loaded, and images of live models.

`state_dict(arena)` is every tensor by name, `capture(model, path)` an image of everything a model holds, `bind(model, arena)`
puts an arena's tensors in the place of a model's own, which may be on the meta device. `compact(model)` is an arena that has what a
live model holds.

A bound model sees the arena's memory: an update in place changes it for everybody who sees it. Parameters are bound without
`requires_grad` for that reason.
"""

import gc

import torch

from ._dtypes import DTYPES, PACKED
from ._partial import PartialTensor, stream
from ._ranks import capture_ranks
from ._slots import Slots, is_meta
from .errors import InvalidError, MismatchError, _listed

__all__ = ["PartialTensor", "bind", "capture", "capture_ranks", "compact", "state_dict", "stream"]

#: How the name of a run of bytes ends that only views see.
STORAGE = "#storage"


def _storage(arena):
    """The arena's memory, by the one DLPack import that all tensors of it share."""
    return torch.from_dlpack(arena).untyped_storage()


class _Begins(dict):
    """By code: the dtype, a tensor of it to begin from, and its elements' size; made at the first need."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __missing__(self, code):
        dtype = DTYPES.get(code)
        if dtype is None:
            raise InvalidError(
                f"state_dict: this torch ({torch.__version__}) has no dtype for {code}, of which the image has tensors; take their"
                " bytes from torch.from_dlpack(arena)",
                "state_dict",
            )
        begin = torch.empty(0, dtype=dtype, device=self._device)
        found = self[code] = (dtype, begin, begin.element_size())
        return found


def _packed(code, shape):
    """Shape and stride in torch's elements, each of which holds two."""
    if not shape or shape[-1] % 2:
        raise InvalidError(f"state_dict: a tensor of {code} and shape {tuple(shape)} has no whole bytes per row", "state_dict")
    shape, stride, step = (*shape[:-1], shape[-1] // 2), [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return shape, tuple(stride[::-1])


def state_dict(arena):
    """Every tensor of `arena` by name, aliases and views included, without a copy. They keep the arena's memory."""
    storage, found = _storage(arena), {}
    begins = _Begins(storage.device)
    for name, code, offset, shape, stride, _ in arena._entries():
        if not name.endswith(STORAGE):
            _, begin, size = begins[code]
            if code in PACKED:
                shape, stride = _packed(code, shape)
            found[name] = begin.new_empty(0).set_(storage, offset // size, shape, stride)
    return found


def capture(
    model,
    path,
    *,
    stage="engine-params",
    engine=None,
    kernel=None,
    model_config=None,
    rank=None,
    world=None,
    replace=False,
    progress=None,
):
    """Writes everything that `model` holds as an image to the directory `path`; the image.

    Everything: parameters, buffers (those that are not saved too), tensors that are plain attributes or lie in lists, tuples and
    dictionaries, and attributes of parameters. Ties and shared memory stay ties and shared memory, strides stay strides.

    `stage` is `engine-params`, or `kernel-ready` for what an engine has processed; then `kernel` says for which GPU and kernels
    (`compute_capability`, `backends`, `torch`, `kv_dtype`). `engine` is a pair (name, version); by default transformers' where the
    model is one of its own, else torch's. `model_config` is a configuration with `to_json_string`, or the text of a `config.json`;
    by default the model's own. `rank` is the name of the rank whose part the model is (`target-0-1-0-0`) and `world` how many there are:
    pipeline stages, tensor-, expert- and data-parallel ranks.
    """
    from . import _flashboot
    from ._api import Image

    given, keep = _captured(model, stage, engine, kernel, model_config, rank, world)
    named = {"replace": replace, "progress": progress}
    inner = _flashboot.capture(path, *given[:-1], model_config=given[-1], **named)
    del keep  # what the bytes were copied from
    return Image._of(inner)


def compact(
    model,
    *,
    stage="engine-params",
    engine=None,
    kernel=None,
    model_config=None,
    rank=None,
    world=None,
    device="cpu",
    config=None,
    progress=None,
):
    """Copies everything that a live `model` holds into an arena, an image that never was on a disk; the arena.

    `flashboot.seed(arena, …)` serves it, so that a running model becomes a seed without being written anywhere. It is a copy: what
    is done to the model afterwards does not change what is served. `device` is where the arena is; the rest is as for `capture`.
    """
    from . import _flashboot
    from ._api import Arena

    given, keep = _captured(model, stage, engine, kernel, model_config, rank, world)
    named = {"device": device, "config": config, "progress": progress}
    inner = _flashboot.compact(*given[:-1], model_config=given[-1], **named)
    del keep
    return Arena(inner)


def _captured(model, stage, engine, kernel, model_config, rank, world):
    """What the extension module takes, the text of the configuration last; and what the bytes lie in."""
    from ._runs import runs

    slots = Slots(model)
    on_meta = [slot.name for slot in slots if is_meta(slot.tensor)]
    if on_meta:
        raise InvalidError(
            f"capture: {len(on_meta)} tensors are on the meta device and have no bytes: {_listed(on_meta)}; load the model first",
            "capture",
        )
    tensors, aliases, views, keep = runs(slots)
    name, version = engine or _engine_of(model)
    purpose = {"stage": stage, "engine": {"name": name, "version": version}}
    if kernel is not None:
        purpose["kernel"] = kernel
    if rank is not None:
        purpose["rank"] = rank
    if world is not None:
        purpose["world"] = dict(zip(("pp", "tp", "ep", "dp"), world, strict=True))
    config = _config_text(model if model_config is None else model_config)
    return (tensors, aliases, views, purpose, config), keep


def _engine_of(model):
    if type(model).__module__.split(".")[0] == "transformers":
        import transformers

        return "transformers", transformers.__version__
    return "torch", torch.__version__


def _config_text(config):
    if config is None or isinstance(config, str):
        return config
    config = getattr(config, "config", config)
    text = getattr(config, "to_json_string", None)
    if text is None:
        return None
    try:
        # All of it, and not only what differs from the defaults.
        return text(use_diff=False)
    except TypeError:
        return text()


def bind(model, arena, *, engine=None, kernel=None):
    """Puts `arena`'s tensors in the place of everything that `model` holds; the model. Nothing is copied.

    The model may be on the meta device. Names, shapes and dtypes must agree exactly, and do so before anything is changed: a
    name that only one of them has, or another shape or dtype, is a `MismatchError` that lists them. Where the image has one run
    of bytes under several names, the model has one parameter. `engine` is the pair (name, version) that the image must be of; by
    default as for `capture`. A `kernel-ready` image wants `kernel`, which must be what it was captured with.
    """
    fingerprint = arena.fingerprint
    if fingerprint is None or fingerprint["stage"] == "sliced":
        raise MismatchError(
            "bind: these are a checkpoint's tensors, whose names and shapes are not yet the model's; load them through the model"
            " (flashboot.safetensors.patch_safetensors), capture it, and bind that image",
            "bind",
        )
    _check_engine(model, fingerprint, engine)
    if fingerprint.get("kernel") != kernel:
        raise MismatchError(
            f"bind: the image is for kernels {fingerprint.get('kernel')}, {kernel} is needed; capture it again on this GPU", "bind"
        )
    # Tens of thousands of objects are made and none of them is garbage: a collector that looks for some takes most of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        _put(model, arena)
    finally:
        if collecting:
            gc.enable()
    return model


def like_entry(entry):
    """A tensor of an entry's dtype and shape that has no memory."""
    _, code, _, shape, stride, _ = entry
    dtype, _, _ = _Begins(torch.device("meta"))[code]
    if code in PACKED:
        shape, stride = _packed(code, shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _put(model, arena, stay=False):
    """`stay`: what lies on another device than the arena stays there, as a copy; unless it is on the meta device."""
    slots = Slots(model)
    entries = {entry[0]: entry for entry in arena._entries()}
    _check_names(slots, entries)
    storage, made, wrong, new = _storage(arena), {}, [], []
    begins = _Begins(storage.device)
    # Where bytes have several names.
    shared = {entry[2] for entry in entries.values() if entry[5] != "tensor"}
    for slot in slots:
        name, code, offset, shape, stride, _ = entries[slot.name]
        old = slot.tensor
        dtype, begin, size = begins[code]
        if code in PACKED:
            shape, stride = _packed(code, shape)
        if old.dtype != dtype:
            wrong.append(f"{name}: {dtype} in the image, {old.dtype} in the model")
            continue
        if old.shape != shape:
            wrong.append(f"{name}: {shape} in the image, {tuple(old.shape)} in the model")
            continue
        tensor = key = None
        if offset in shared:
            # What holds nothing is the same as another only where it is one object.
            key = id(old) if 0 in shape else (offset, dtype, shape, stride, type(old))
            tensor = made.get(key)
        if tensor is None:
            view = begin.new_empty(0).set_(storage, offset // size, shape, stride)
            if stay and not old.is_meta and old.device != view.device:
                view = view.to(old.device)
            tensor = slot.like(view)
            if key is not None:
                made[key] = tensor
        new.append((slot, tensor))
    if wrong:
        raise MismatchError(f"bind: {len(wrong)} tensors are not what the model has: {_listed(wrong)}", "bind")
    for slot, tensor in new:
        slot.put(tensor)
    left = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for kept in (module._parameters, module._buffers)
        for name, tensor in kept.items()
        if tensor is not None and tensor.is_meta
    ]
    if left:
        raise MismatchError(f"bind: {len(left)} tensors stay on the meta device: {_listed(left)}", "bind")


def _check_engine(model, fingerprint, engine):
    name, version = engine or _engine_of(model)
    found = fingerprint["engine"]
    if (found["name"], found["version"]) != (name, version):
        raise MismatchError(
            f"bind: the image has parameters of {found['name']} {found['version']}, the model is {name} {version}'s; capture it"
            " again with this engine",
            "bind",
        )
    of_model = getattr(getattr(model, "config", None), "model_type", None)
    of_image = fingerprint["model_type"]
    if None not in (of_model, of_image) and of_model != of_image:
        raise MismatchError(f"bind: the image is of a {of_image}, the model is a {of_model}", "bind")


def _check_names(slots, entries):
    if entries.keys() == slots.names:
        return
    missing = [slot.name for slot in slots if slot.name not in entries]
    extra = [name for name in entries if name not in slots.names and not name.endswith(STORAGE)]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} tensors of the model are not in the image: {_listed(missing)}")
        if extra:
            parts.append(f"{len(extra)} of the image are not in the model: {_listed(extra)}")
        raise MismatchError(f"bind: {'; '.join(parts)}", "bind")
