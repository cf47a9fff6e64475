"""Tensors of what was loaded, and images of live models.

`state_dict(arena)` is every tensor by name, `capture(model, path)` an image of everything a model holds, `bind(model, arena)`
puts an arena's tensors in the place of a model's own, which may be on the meta device.

A bound model sees the arena's memory: an update in place changes it for everybody who sees it. Parameters are bound without
`requires_grad` for that reason.
"""

import torch

from ._dtypes import DTYPES, PACKED
from ._slots import Slots, is_meta
from .errors import InvalidError, MismatchError, _listed

__all__ = ["bind", "capture", "state_dict"]

#: How the name of a run of bytes ends that only views see.
STORAGE = "#storage"


def _storage(arena):
    """The arena's memory, by the one DLPack import that all tensors of it share."""
    return torch.from_dlpack(arena).untyped_storage()


def _view(empty, storage, dtype, code, offset, shape, stride):
    """One tensor in the arena's storage. `empty` has a tensor of each dtype, on the arena's device, to begin from."""
    begin = empty.get(dtype)
    if begin is None:
        begin = empty[dtype] = torch.empty(0, dtype=dtype, device=storage.device)
    if code in PACKED:
        shape, stride = _packed(code, shape)
    return begin.new_empty(0).set_(storage, offset // begin.element_size(), shape, stride)


def _packed(code, shape):
    """Shape and stride in torch's elements, each of which holds two."""
    if not shape or shape[-1] % 2:
        raise InvalidError(f"state_dict: a tensor of {code} and shape {tuple(shape)} has no whole bytes per row", "state_dict")
    shape, stride, step = [*shape[:-1], shape[-1] // 2], [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return shape, stride[::-1]


def _dtype(name, code):
    dtype = DTYPES.get(code)
    if dtype is None:
        raise InvalidError(
            f"state_dict: `{name}` is {code}, which this torch ({torch.__version__}) has no dtype for; take its bytes from"
            " torch.from_dlpack(arena)",
            "state_dict",
        )
    return dtype


def state_dict(arena):
    """Every tensor of `arena` by name, aliases and views included, without a copy. They keep the arena's memory."""
    storage, empty, found = _storage(arena), {}, {}
    for name, code, offset, shape, stride, _ in arena._entries():
        if not name.endswith(STORAGE):
            found[name] = _view(empty, storage, _dtype(name, code), code, offset, shape, stride)
    return found


def capture(
    model,
    path,
    *,
    stage="engine-params",
    engine=None,
    kernel=None,
    model_config=None,
    replace=False,
    progress=None,
):
    """Writes everything that `model` holds as an image to the directory `path`; the image.

    Everything: parameters, buffers (those that are not saved too), tensors that are plain attributes or lie in lists, tuples and
    dictionaries, and attributes of parameters. Ties and shared memory stay ties and shared memory, strides stay strides.

    `stage` is `engine-params`, or `kernel-ready` for what an engine has processed; then `kernel` says for which GPU and kernels
    (`compute_capability`, `backends`, `torch`, `kv_dtype`). `engine` is a pair (name, version); by default transformers' where the
    model is one of its own, else torch's. `model_config` is a configuration with `to_json_string`, or the text of a `config.json`;
    by default the model's own.
    """
    from . import _flashboot
    from ._api import Image
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
    inner = _flashboot.capture(
        path,
        tensors,
        aliases,
        views,
        purpose,
        model_config=_config_text(model if model_config is None else model_config),
        replace=replace,
        progress=progress,
    )
    del keep  # what the bytes were copied from
    return Image._of(inner)


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
    slots = list(Slots(model))
    entries = {entry[0]: entry for entry in arena._entries() if not entry[0].endswith(STORAGE)}
    _check_names(slots, entries)
    storage, empty, made, wrong = _storage(arena), {}, {}, []
    new = []
    for slot in slots:
        name, code, offset, shape, stride, _ = entries[slot.name]
        old = slot.tensor
        dtype = _dtype(name, code)
        if old.dtype != dtype:
            wrong.append(f"{name}: {dtype} in the image, {old.dtype} in the model")
            continue
        if tuple(old.shape) != (tuple(shape) if code not in PACKED else tuple(_packed(code, shape)[0])):
            wrong.append(f"{name}: {tuple(shape)} in the image, {tuple(old.shape)} in the model")
            continue
        # Nothing is two things only by lying nowhere.
        key = (type(old), offset, dtype, shape, stride) if 0 not in shape else id(old)
        tensor = made.get(key)
        if tensor is None:
            tensor = made[key] = slot.like(_view(empty, storage, dtype, code, offset, shape, stride))
        new.append((slot, tensor))
    if wrong:
        raise MismatchError(f"bind: {len(wrong)} tensors are not what the model has: {_listed(wrong)}", "bind")
    for slot, tensor in new:
        slot.put(tensor)
    left = [slot.name for slot in Slots(model) if is_meta(slot.tensor)]
    if left:
        raise MismatchError(f"bind: {len(left)} tensors stay on the meta device: {_listed(left)}", "bind")
    return model


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
    names = {slot.name for slot in slots}
    missing = [slot.name for slot in slots if slot.name not in entries]
    extra = [name for name in entries if name not in names]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} tensors of the model are not in the image: {_listed(missing)}")
        if extra:
            parts.append(f"{len(extra)} of the image are not in the model: {_listed(extra)}")
        raise MismatchError(f"bind: {'; '.join(parts)}", "bind")
