"""Every place in which a model keeps a tensor, by name.

A model keeps tensors as parameters, as buffers, as plain attributes of modules, in lists, tuples and dictionaries that are
attributes of modules, and as attributes of parameters; and modules in the same places, which `named_modules` does not see.
A name is the path to the place. Other objects are not looked into.
"""

import torch

from .errors import InvalidError

#: What `torch.nn.Module` keeps for itself.
_OWN = frozenset(vars(torch.nn.Module()))


def is_meta(tensor):
    return tensor.is_meta


class Slot:
    """One place: its name, what lies there, and how to put another tensor there."""

    __slots__ = ("name", "tensor", "_put")

    def __init__(self, name, tensor, put):
        self.name, self.tensor, self._put = name, tensor, put

    def put(self, tensor):
        self._put(tensor)

    def like(self, data):
        """`data` as what lies here is: a parameter of its class with its attributes, or a plain tensor."""
        old = self.tensor
        if not isinstance(old, torch.nn.Parameter):
            return data
        new = torch.Tensor._make_subclass(type(old), data, False)
        for key, value in vars(old).items():
            setattr(new, key, value)
        return new


class Slots:
    """Every slot of a model, in the order of its modules; the same for a model on the meta device."""

    def __init__(self, model):
        self._slots, self._seen, self._modules = [], set(), set()
        self._tree("", model)

    def __iter__(self):
        return iter(self._slots)

    def _add(self, name, tensor, put):
        if name in self._seen:
            raise InvalidError(f"slots: two places of the model are called `{name}`", "slots")
        self._seen.add(name)
        self._slots.append(Slot(name, tensor, put))

    def _tree(self, name, module):
        tree = [(path, child) for path, child in module.named_modules(prefix=name) if id(child) not in self._modules]
        # All of it is known first: what one of its modules keeps besides may be another one.
        self._modules.update(id(child) for _, child in tree)
        for path, child in tree:
            self._module(f"{path}." if path else "", child)

    def _module(self, prefix, module):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._add(prefix + name, parameter, _entry(module._parameters, name))
                self._attributes(f"{prefix}{name}.", module._parameters, name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self._add(prefix + name, buffer, _entry(module._buffers, name))
        for name, value in vars(module).items():
            if name not in _OWN:
                self._value(prefix + name, value, _entry(vars(module), name))

    def _attributes(self, prefix, where, key, parameter):
        # The parameter may have been replaced by then.
        for name, value in vars(parameter).items():
            self._value(prefix + name, value, lambda new, name=name: setattr(where[key], name, new))

    def _value(self, name, value, put, within=()):
        if isinstance(value, torch.Tensor):
            self._add(name, value, put)
        elif isinstance(value, torch.nn.Module):
            # A link back to a module that is known would be walked for every module that has one.
            if id(value) not in self._modules:
                self._tree(name, value)
        elif isinstance(value, (list, tuple, dict)) and id(value) not in within:
            within = (*within, id(value))
            if isinstance(value, tuple):
                state, make = list(value), _maker(value)
                for i, item in enumerate(value):
                    self._value(f"{name}.{i}", item, _element(state, i, make, put), within)
            else:
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in list(pairs):
                    self._value(f"{name}.{key}", item, _entry(value, key), within)


def _entry(container, key):
    return lambda new: container.__setitem__(key, new)


def _element(state, i, make, put):
    # A tuple is replaced whole: every element's turn puts what the ones before it left, and its own.
    def replace(new):
        state[i] = new
        put(make(state))

    return replace


def _maker(value):
    kind = type(value)
    return (lambda state: kind(*state)) if hasattr(value, "_fields") else kind
