"""`safe_open` and `load_file` as the safetensors package has them, over our reads.

`patch_safetensors()` puts them in that package's place, so that what uses it (transformers' `from_pretrained`) runs on them
unchanged. Files are read, not mapped: a bad disk, or somebody who writes the file meanwhile, is an error and no signal; of a
slice only the rows that are asked for are read.
"""

import os
import sys
import threading

from . import _flashboot
from .errors import FlashbootError

try:
    from safetensors import SafetensorError
except ImportError:

    class SafetensorError(Exception):
        """What is wrong with a file, or a name that it does not have."""


__all__ = ["SafetensorError", "load_file", "patch_safetensors", "safe_open"]

_TORCH = ("pt", "torch", "pytorch")
_NUMPY = ("np", "numpy")


class safe_open:
    """Opens a safetensors file lazily: tensors, and slices of them, are read when they are asked for.

    As the package's own: with or without `with`; `framework` is `pt` or `numpy`; `device` as torch knows it, or a number for
    that GPU. `backend` is accepted and does nothing: there is one way to read.
    """

    def __init__(self, filename, framework, device="cpu", *, backend=None):
        self._device = f"cuda:{device}" if isinstance(device, int) else device
        if framework in _TORCH:
            self._make = self._of_torch
        elif framework in _NUMPY:
            self._make = self._of_numpy
        else:
            raise SafetensorError(f"framework {framework!r} is not served: use pt or numpy")
        if backend not in (None, "mmap", "pread"):
            raise SafetensorError(f"backend {backend!r} is not known: use mmap or pread")
        self._name = os.fspath(filename)
        if not os.path.exists(self._name):
            raise FileNotFoundError(f"No such file or directory: {self._name}")
        try:
            self._file = _flashboot.File.open(self._name)
        except FlashbootError as e:
            raise SafetensorError(str(e)) from e
        self._entries = {entry[0]: entry for entry in self._file.tensors()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file = None

    def _open(self):
        if self._file is None:
            raise SafetensorError(f"{self._name}: the file was closed")
        return self._file

    def _entry(self, name):
        try:
            return self._entries[name]
        except KeyError:
            raise SafetensorError(f"File does not contain tensor {name}") from None

    def keys(self):
        """The names, sorted."""
        return sorted(self._entries)

    def offset_keys(self):
        """The names in the order of their bytes."""
        # One of no bytes begins where the next one does, and ends there.
        return sorted(self._entries, key=lambda name: (self._entries[name][3], sum(self._entries[name][3:5])))

    def metadata(self):
        """`__metadata__` of the header; `None` if there is none."""
        return self._open().metadata() or None

    def get_tensor(self, name):
        """The tensor called `name`."""
        _, code, shape, begin, size = self._entry(name)
        return self._placed(self._make(self._read(begin, size), code, shape))

    def get_slice(self, name):
        """The tensor called `name`, to be sliced: what is asked for is read, and nothing else of its first dimension."""
        return _Slice(self, self._entry(name))

    def _read(self, begin, size):
        try:
            return self._open().read(begin, size)
        except FlashbootError as e:
            raise SafetensorError(str(e)) from e

    def _placed(self, tensor):
        return tensor if self._device == "cpu" or self._make == self._of_numpy else tensor.to(self._device)

    @staticmethod
    def _of_torch(block, code, shape):
        import torch

        from ._dtypes import DTYPES, PACKED

        dtype = DTYPES.get(code)
        if dtype is None:
            raise SafetensorError(f"torch {torch.__version__} has no dtype for {code}")
        if code in PACKED:
            shape = (*shape[:-1], shape[-1] // 2)
        return torch.from_dlpack(block).view(dtype).reshape(shape)

    @staticmethod
    def _of_numpy(block, code, shape):
        import numpy

        kinds = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4"}
        kinds |= {"U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8"}
        if code not in kinds:
            raise SafetensorError(f"numpy has no dtype for {code}")
        return numpy.frombuffer(block, dtype=kinds[code]).reshape(shape).copy()


class _Slice:
    """A tensor of a file that has not been read."""

    def __init__(self, file, entry):
        self._file, self._entry = file, entry

    def get_shape(self):
        """Its dimensions."""
        return list(self._entry[2])

    def get_dtype(self):
        """Its dtype, as safetensors spells it."""
        return self._entry[1]

    def __getitem__(self, index):
        name, code, shape, begin, size = self._entry
        index = index if isinstance(index, tuple) else (index,)
        index = _expanded(index, len(shape), name)
        if not shape or not index or shape[0] == 0 or code == "F4" and len(shape) == 1:
            whole = self._file._make(self._file._read(begin, size), code, shape)
            return self._file._placed(_owned(whole[index] if index else whole, whole))
        first, rest = index[0], index[1:]
        low, high, inner, keep = _rows(first, shape[0], name)
        row = size // shape[0]
        rows = self._file._make(
            self._file._read(begin + low * row, (high - low) * row), code, (high - low, *shape[1:])
        )
        part = rows[(inner, *rest)] if keep else rows[(0, *rest)]
        return self._file._placed(_owned(part, rows))


def _expanded(index, dimensions, name):
    """The index with its Ellipsis written out."""
    if sum(item is Ellipsis for item in index) > 1:
        raise SafetensorError(f"{name}: an index can only have a single ellipsis")
    given = len(index) - any(item is Ellipsis for item in index)
    if given > dimensions:
        raise SafetensorError(f"{name}: too many indices: {given} for {dimensions} dimensions")
    full = []
    for item in index:
        full.extend([slice(None)] * (dimensions - given) if item is Ellipsis else [item])
    return tuple(full)


def _rows(item, size, name):
    """Which rows are read (low to high), how they are sliced then, and whether the dimension stays."""
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step < 1:
            raise SafetensorError(f"{name}: a step of {step} is not served: steps are positive")
        stop = max(start, stop)
        return start, stop, slice(None, None, step), True
    if hasattr(item, "__index__"):
        at = item.__index__()
        at = at + size if at < 0 else at
        if not 0 <= at < size:
            raise SafetensorError(f"{name}: index {item} is out of bounds for {size} rows")
        return at, at + 1, 0, False
    # A list or a tensor of rows: all of them are read.
    return 0, size, item, True


def _owned(part, whole):
    """What was asked for, contiguous, without what was read besides."""
    if part is whole or part.shape == whole.shape:
        return part
    contiguous = getattr(part, "contiguous", None)
    return part.copy() if contiguous is None else contiguous()


def load_file(filename, device="cpu"):
    """Every tensor of a file by name, in one arena of host memory; elsewhere than on the host, a copy of each there."""
    from ._api import load
    from .torch import state_dict

    name = os.fspath(filename)
    if not os.path.exists(name):
        raise FileNotFoundError(f"No such file or directory: {name}")
    try:
        arena = load(checkpoint=name)
    except FlashbootError as e:
        raise SafetensorError(str(e)) from e
    own = {entry[0] for entry in arena._entries() if entry[5] == "tensor"}
    found = {name: tensor for name, tensor in state_dict(arena).items() if name in own}
    device = f"cuda:{device}" if isinstance(device, int) else device
    return found if str(device) == "cpu" else {name: tensor.to(device) for name, tensor in found.items()}


_patching = threading.Lock()
_patched = []


def patch_safetensors():
    """Puts `safe_open` and `load_file` in the safetensors package's place, also where a module has imported them by name already.

    Returns what undoes it: to be called, or used as a context manager. Modules that import the names later get ours as well.
    """
    import safetensors
    import safetensors.torch

    with _patching:
        if _patched:
            raise FlashbootError("patch_safetensors: it is patched already; undo the first one before", "patch_safetensors")
        ours = {id(safetensors.safe_open): safe_open, id(safetensors.torch.load_file): load_file}
        undo = _Undo()
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or names.get("__name__") == __name__:
                continue
            for name in ("safe_open", "load_file", "safe_load_file"):
                theirs = names.get(name)
                if theirs is not None and id(theirs) in ours:
                    undo._changed.append((names, name, theirs))
                    names[name] = ours[id(theirs)]
        _patched.append(undo)
        return undo


class _Undo:
    """Puts everything back."""

    def __init__(self):
        self._changed = []

    def __call__(self):
        with _patching:
            for names, name, theirs in self._changed:
                names[name] = theirs
            self._changed.clear()
            if self in _patched:
                _patched.remove(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self()
