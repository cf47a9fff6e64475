"""From a model's tensors to runs of bytes: what shares memory is one run, seen under several names.

Tensors whose bytes overlap belong together. If one of them is contiguous and holds all of their bytes, it is the run, and the
others are other names of it (same place, shape and dtype) or views. Otherwise the run is bytes that only views see.
"""

import ctypes

import torch

from ._dtypes import CODES, PACKED
from .errors import InvalidError

_STORAGE = "#storage"


def runs(slots):
    """(tensors, aliases, views, keep) as the extension module takes them; `keep` has what the bytes lie in."""
    tensors, aliases, views, keep = [], [], [], []
    for group in _groups(slots):
        base, start, end = _base(group)
        name = group[0].name + _STORAGE if base is None else base.name
        source, buffer = _bytes(group[0].tensor, start, end)
        keep.append(source)
        if base is None:
            tensors.append((name, "U8", [end - start], buffer))
        else:
            tensors.append((name, base.code, base.logical, buffer))
        for member in group:
            if member is base:
                continue
            if base is not None and member.same(base):
                aliases.append((member.name, name))
            elif member.code in PACKED:
                raise InvalidError(
                    f"capture: `{member.name}` sees a part of other bytes, or is not contiguous, which {member.code} cannot;"
                    " make it contiguous",
                    "capture",
                )
            else:
                shape, stride = list(member.tensor.shape), list(member.tensor.stride())
                views.append((member.name, name, member.start - start, member.code, shape, stride))
    return tensors, aliases, views, keep


class _Member:
    """One tensor, and which bytes of its storage it sees."""

    __slots__ = ("name", "tensor", "code", "start", "end", "logical")

    def __init__(self, slot):
        tensor = self.tensor = slot.tensor.detach()
        self.name = slot.name
        if tensor.layout is not torch.strided or type(slot.tensor).__torch_dispatch__ is not _PLAIN_DISPATCH:
            raise InvalidError(
                f"capture: `{slot.name}` is a {type(slot.tensor).__name__} of layout {tensor.layout}, whose bytes are not its own;"
                " give its parts as plain tensors",
                "capture",
            )
        code = CODES.get(tensor.dtype)
        if code is None or tensor.is_conj() or tensor.is_neg():
            raise InvalidError(f"capture: `{slot.name}` is {tensor.dtype}, which images have no name for", "capture")
        self.code, size = code, tensor.element_size()
        self.start = tensor.storage_offset() * size
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
        self.end = self.start + (0 if tensor.numel() == 0 else (last + 1) * size)
        self.logical = list(tensor.shape)
        if code in PACKED and self.logical:
            self.logical[-1] *= 2

    def same(self, other):
        a, b = self.tensor, other.tensor
        return (self.start, a.dtype, a.shape) == (other.start, b.dtype, b.shape) and a.is_contiguous()


_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def _groups(slots):
    """Members that overlap, together; in the order of their first."""
    found, storages = [], {}
    for order, slot in enumerate(slots):
        member = _Member(slot)
        if member.start == member.end:
            # One object under two names is one, also where it holds nothing.
            key = ("empty", id(slot.tensor))
        else:
            storage = member.tensor.untyped_storage()
            key = (storage.device, storage.data_ptr())
        storages.setdefault(key, []).append((order, member))
    for key, members in storages.items():
        if key[0] == "empty":
            found.append(members)
            continue
        members.sort(key=lambda entry: entry[1].start)
        group, reach = [], None
        for entry in members:
            if group and entry[1].start >= reach:
                found.append(group)
                group = []
            reach = entry[1].end if not group else max(reach, entry[1].end)
            group.append(entry)
        found.append(group)
    for group in found:
        group.sort(key=lambda entry: entry[0])
    found.sort(key=lambda group: group[0][0])
    return [[member for _, member in group] for group in found]


def _base(group):
    """The member that is the run, if one is; and the run's first byte and its end in the storage."""
    start, end = min(m.start for m in group), max(m.end for m in group)
    for member in group:
        if (member.start, member.end) == (start, end) and member.tensor.is_contiguous():
            # Views begin at multiples of their own element, counted from the run's first byte.
            if all((m.start - start) % m.tensor.element_size() == 0 for m in group):
                return member, start, end
    # No element is larger: every member begins at a multiple of its own.
    return None, start - start % 16, end


def _bytes(tensor, start, end):
    """What the run's bytes lie in, and the same as an object with the buffer protocol."""
    run = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    run = run.set_(tensor.untyped_storage(), start, (end - start,), (1,)).cpu()
    if end == start:
        return run, b""
    # A memoryview says the strides, which an array of ctypes leaves out.
    return run, memoryview((ctypes.c_uint8 * (end - start)).from_address(run.data_ptr()))
