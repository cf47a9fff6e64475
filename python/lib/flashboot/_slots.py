"""Every place in which a model keeps a tensor, by name.

A model keeps tensors as parameters, as buffers, as plain attributes of modules, in lists, tuples and dictionaries that are
attributes of modules, and as attributes of parameters; and modules in the same places, which `named_modules` does not see.
A name is the path to the place. Other objects are not looked into.
"""

import torch

from .errors import InvalidError

_Parameter = torch.nn.Parameter
_make_subclass = torch.Tensor._make_subclass
#: What `torch.nn.Module` keeps for itself.
_OWN = frozenset(vars(torch.nn.Module()))


def is_meta(tensor):
    return tensor.is_meta


class Slot:
    """One place: its name, what lies there, and the container and key by which another tensor is put there."""

    __slots__ = ("name", "tensor", "_where", "_key")

    def __init__(self, name, tensor, where, key):
        self.name, self.tensor, self._where, self._key = name, tensor, where, key

    def put(self, tensor):
        self._where[self._key] = tensor

    def like(self, data):
        """`data` as what lies here is: a parameter of its class with its attributes, or a plain tensor."""
        old = self.tensor
        kind = type(old)
        # Asking a class that is not exactly it takes longer than all the rest.
        if kind is not _Parameter and not isinstance(old, _Parameter):
            return data
        new = _make_subclass(kind, data, False)
        attributes = old.__dict__
        if attributes:
            new.__dict__.update(attributes)
        return new


class Slots:
    """Every slot of a model, in the order of its modules; the same for a model on the meta device."""

    def __init__(self, model):
        self._slots, self._modules = [], set()
        self._tree("", model)
        #: Every name.
        self.names = {slot.name for slot in self._slots}
        if len(self.names) != len(self._slots):
            self._refuse_twice()

    def __iter__(self):
        return iter(self._slots)

    def __len__(self):
        return len(self._slots)

    def _refuse_twice(self):
        left = set(self.names)
        for slot in self._slots:
            if slot.name not in left:
                raise InvalidError(f"slots: two places of the model are called `{slot.name}`", "slots")
            left.remove(slot.name)

    def _tree(self, name, module):
        tree = [(path, child) for path, child in module.named_modules(prefix=name) if id(child) not in self._modules]
        # All of it is known first: what one of its modules keeps besides may be another one.
        self._modules.update(id(child) for _, child in tree)
        for path, child in tree:
            self._module(f"{path}." if path else "", child)

    def _module(self, prefix, module):
        own = vars(module)
        parameters, buffers, add = own["_parameters"], own["_buffers"], self._slots.append
        for name, parameter in parameters.items():
            if parameter is not None:
                add(Slot(prefix + name, parameter, parameters, name))
                attributes = parameter.__dict__
                if attributes:
                    where = _Attributes(parameters, name)
                    for key, value in attributes.items():
                        self._value(f"{prefix}{name}.{key}", value, where, key)
        for name, buffer in buffers.items():
            if buffer is not None:
                add(Slot(prefix + name, buffer, buffers, name))
        for name, value in own.items():
            if name not in _OWN:
                self._value(prefix + name, value, own, name)

    def _value(self, name, value, where, key, within=()):
        if isinstance(value, torch.Tensor):
            self._slots.append(Slot(name, value, where, key))
        elif isinstance(value, torch.nn.Module):
            # A link back to a module that is known would be walked for every module that has one.
            if id(value) not in self._modules:
                self._tree(name, value)
        elif isinstance(value, (list, tuple, dict)) and id(value) not in within:
            within = (*within, id(value))
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            inside = _Elements(value, where, key) if isinstance(value, tuple) else value
            for item, found in pairs:
                self._value(f"{name}.{item}", found, inside, item, within)


class _Attributes:
    """Attributes of a parameter, which may have been replaced by then."""

    def __init__(self, parameters, name):
        self._parameters, self._name = parameters, name

    def __setitem__(self, key, value):
        setattr(self._parameters[self._name], key, value)


class _Elements:
    """Elements of a tuple, which is replaced whole: every element's turn puts what the ones before it left, and its own."""

    def __init__(self, value, where, key):
        self._state, self._where, self._key = list(value), where, key
        self._make = (lambda state: type(value)(*state)) if hasattr(value, "_fields") else type(value)

    def __setitem__(self, i, new):
        self._state[i] = new
        self._where[self._key] = self._make(self._state)
