"""A tensor of which a rank has its slice, and a stock checkpoint as a rank reads it.

A part answers with the checkpoint's own shape, so that an engine's loader finds what it expects; it gives what lies within its
slice where the loader narrows to it, and refuses everything else by the tensor's name, so that an engine whose layout is another
one stops and never loads bytes that were not read.
"""

import math

import torch

from . import _flashboot
from ._dtypes import DTYPES, PACKED
from .errors import InvalidError, MismatchError

#: What is said of the whole tensor and needs none of its bytes.
_KNOWN = frozenset(
    "shape size dim ndim ndimension numel nelement dtype device element_size itemsize layout is_floating_point is_complex"
    " is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_signed requires_grad is_leaf grad grad_fn names has_names"
    " stride storage_offset is_inference is_conj is_neg output_nr retains_grad is_mkldnn is_mps is_xpu is_xla"
    " __len__ __hash__ __repr__ __str__ __format__ is_pinned get_device _version".split()
)
#: Every other thing that can be asked, by what it is: the rest are computations.
_KINDS = {
    kind: names.split()
    for kind, names in {
        "index": "__getitem__ index_select gather take masked_select take_along_dim diagonal argwhere nonzero",
        "chunk": "chunk tensor_split hsplit vsplit dsplit unsafe_chunk",
        "split": "split split_with_sizes unsafe_split unsafe_split_with_sizes unbind",
        "reshape": "reshape reshape_as flatten unflatten resize resize_ expand expand_as repeat unfold ravel view_as",
        "transpose": "t transpose permute swapaxes swapdims movedim moveaxis T mT H mH adjoint transpose_ t_",
        "squeeze": "squeeze unsqueeze squeeze_ unsqueeze_",
        "view": "view view_as_real view_as_complex",
        "to another type": "to type type_as float double half bfloat16 int long short char byte bool",
        "to another device": "cuda cpu pin_memory xpu",
        "clone": "data clone detach detach_ __deepcopy__ __copy__ alias",
        "copy into it": "copy_ fill_ zero_ set_ __setitem__ normal_ uniform_ index_copy_ masked_fill_ scatter_ apply_",
        "contiguous": "contiguous is_contiguous",
        "item": "item __bool__ __int__ __float__ __index__ tolist __contains__",
        "iterate": "__iter__",
        "compare": "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge equal allclose isclose is_same_size",
        "concatenate": "cat concat concatenate stack hstack vstack dstack block_diag",
        "its address": "data_ptr untyped_storage storage __cuda_array_interface__ is_set_to",
        "export": "numpy __array__ __dlpack__ __dlpack_device__ __reduce__ __reduce_ex__ share_memory_ is_shared",
    }.items()
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


class PartialTensor(torch.Tensor):
    """A checkpoint's tensor `name` of `shape`, of which `resident` has `runs` (pairs of indices) of dimension `dim`."""

    __slots__ = ("_name", "_dim", "_runs", "_resident")

    @staticmethod
    def __new__(cls, name, shape, dim, runs, resident):
        # Neither memory nor strides of its own: whatever gets past Python is refused below.
        part = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=resident.dtype, device=resident.device, requires_grad=False
        )
        part._name, part._dim, part._runs = name, dim, tuple((a, b) for a, b in runs)
        part._resident = resident
        return part

    @property
    def resident(self):
        """The bytes that are there: runs of the sliced dimension one after the other."""
        return self._resident

    @property
    def slice(self):
        """The dimension that is sliced, and which indices of it are there."""
        return self._dim, self._runs

    def __repr__(self, **_):
        return f"<flashboot.torch.PartialTensor {self._name} {list(self.shape)}: {_there(self)}>"

    __str__ = __repr__

    def __format__(self, _):
        return repr(self)

    def __reduce_ex__(self, _):
        raise _refused(self, "export")

    def __deepcopy__(self, _):
        raise _refused(self, "clone")

    def __iter__(self):
        raise _refused(self, "iterate")

    def __array__(self, *_, **__):
        raise _refused(self, "export")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _name_of(function)
        if name in _KNOWN and args and isinstance(args[0], PartialTensor):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        grant = _GRANTS.get(name)
        if grant is not None and args and isinstance(args[0], PartialTensor):
            return grant(*args, **kwargs)
        part, first = _part_in(args, kwargs)
        kind = _KIND_OF.get(name, f"compute with it ({name})")
        if name == "copy_" and not first:
            kind = "copy from it"
        raise _refused(part, kind)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        # Whatever came here by another way than Python's.
        part, _ = _part_in(args, kwargs or {})
        raise _refused(part, f"compute with it ({function})")


def _name_of(function):
    name = getattr(function, "__name__", str(function))
    if name in ("__set__", "__delete__"):
        return "__setitem__"
    if name == "__get__":
        # An attribute, whose getter this is.
        return getattr(function.__self__, "__name__", name)
    return name


def _part_in(args, kwargs):
    """The first part that a call was given, and whether it is the first argument."""
    if args and isinstance(args[0], PartialTensor):
        return args[0], True
    left = [*args, *kwargs.values()]
    while left:
        found = left.pop(0)
        if isinstance(found, PartialTensor):
            return found, False
        if isinstance(found, (list, tuple)):
            left.extend(found)
        elif isinstance(found, dict):
            left.extend(found.values())
    raise InvalidError("tensor: a part of a tensor was asked for something, and is not there", "tensor")


def _there(part):
    if not part._runs:
        return "this rank read a part that is cut along several dimensions, or padded"
    runs = " and ".join(f"{a}..{b}" for a, b in part._runs)
    return f"this rank read {runs} of dimension {part._dim}"


def _refused(part, what):
    said = f"tensor: {part._name} {list(part.shape)}: {what} is refused: {_there(part)}"
    remedy = "narrow it to the rank's own slice, or read it without slicing (layout={'slice': 'off'})"
    return MismatchError(f"{said}; {remedy}", "tensor", said, remedy=remedy)


def _narrow(part, dim, start, length):
    # torch takes a tensor of one number for the start.
    dim, start, length = int(dim), int(start), int(length)
    shape = part.shape
    asked = f"narrow({dim}, {start}, {length})"
    if not -len(shape) <= dim < len(shape):
        raise InvalidError(f"tensor: {part._name}: {asked} of a tensor of {list(shape)}", "tensor")
    dim %= len(shape)
    if start < 0:
        start += shape[dim]
    if length < 0 or start < 0 or start + length > shape[dim]:
        raise InvalidError(f"tensor: {part._name}: {asked} of a tensor of {list(shape)}", "tensor")
    if dim == part._dim:
        at = 0
        for begin, end in part._runs:
            if begin <= start and start + length <= end:
                return part._resident.narrow(dim, at + start - begin, length)
            at += end - begin
    raise _refused(part, asked)


def _select(part, dim, index):
    dim, index = int(dim), int(index)
    size = part.shape[dim]
    if not -size <= index < size:
        raise InvalidError(f"tensor: {part._name}: index {index} of {size}", "tensor")
    return _narrow(part, dim, index % size, 1).squeeze(dim)


def _getitem(part, index):
    """One run of one dimension, and all of the others: as `narrow`. Anything else is refused."""
    shape = part.shape
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if i is Ellipsis]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        missing = len(shape) - len(index) + 1
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    cut = []
    for dim, one in enumerate(index):
        if isinstance(one, bool) or not isinstance(one, (int, slice)) or dim >= len(shape):
            raise _refused(part, "index")
        if isinstance(one, int):
            cut.append((dim, one, None))
        else:
            start, stop, step = one.indices(shape[dim])
            if step != 1:
                raise _refused(part, f"slice({dim}, {start}..{stop} by {step})")
            if (start, stop) != (0, shape[dim]):
                cut.append((dim, start, max(stop - start, 0)))
    own = [one for one in cut if one[0] == part._dim]
    if len(own) != 1:
        if len(cut) == 1:
            dim, start, length = cut[0]
            return _select(part, dim, start) if length is None else _narrow(part, dim, start, length)
        raise _refused(part, "index")
    dim, start, length = own[0]
    size = shape[dim]
    if length is None and not -size <= start < size:
        raise InvalidError(f"tensor: {part._name}: index {start} of {size}", "tensor")
    kept = _narrow(part, dim, start % size if length is None else start, 1 if length is None else length)
    # The rest of the index is of what is there, all of it.
    rest = tuple(
        (0 if length is None else slice(None)) if n == dim else one for n, one in enumerate(index)
    )
    return kept[rest]


_GRANTS = {"narrow": _narrow, "select": _select, "__getitem__": _getitem}


def stream(checkpoint, *, rank=None, layout=None, config=None, patience=60.0):
    """What one rank needs of a stock checkpoint, as pairs of name and tensor: shard by shard in the order of their names, read
    ahead as far as the budget allows (`config={"load": {"budget": "2GB"}}`), for an engine's own loader.

    `layout` says how the model is cut, in the words of `flashboot pack`: `{"tp": 4, "ep": 2}`, and `slice` (`off`, `experts`,
    `all`), `moe_tp`, `dp`, `pp`, `target`, `exclude`, `draft`, `experimental`, `allow_unclaimed`. `rank` is the rank image's name,
    such as `target-0-1-0-0`. A tensor of which the rank has its slice is a `PartialTensor`. A tensor that is kept keeps its slab:
    who keeps more than the budget waits for himself, and is told so after `patience` seconds.
    """
    inner = _flashboot.stream(checkpoint, rank=rank, layout=layout, config=config, patience=patience)
    return _tensors(inner)


def _tensors(inner):
    for name, code, shape, sliced, block in inner:
        dtype = DTYPES.get(code)
        if dtype is None:
            raise InvalidError(f"stream: this torch ({torch.__version__}) has no dtype for {code}, which `{name}` is of", "stream")
        whole = torch.from_dlpack(block)
        resident = shape
        if sliced is not None:
            dim, runs = sliced
            resident = list(shape)
            resident[dim] = sum(end - begin for begin, end in runs)
        if code in PACKED and shape:
            # One of torch's elements holds two of a row.
            shape, resident = [*shape[:-1], shape[-1] // 2], [*resident[:-1], resident[-1] // 2]
            if sliced is not None and sliced[0] == len(shape) - 1:
                sliced = sliced[0], [(begin // 2, end // 2) for begin, end in sliced[1]]
        if sliced is None or sliced[1]:
            resident = whole.view(dtype).reshape(resident) if math.prod(resident) else torch.empty(resident, dtype=dtype)
        else:
            # Nothing of it is granted.
            resident = whole.view(dtype)
        yield name, resident if sliced is None else PartialTensor(name, shape, *sliced, resident)
