"""An arena's tensors in an engine's model, which is on the meta device but for what the engine keeps on the host."""

import torch

from ._slots import Slots
from .errors import MismatchError, _listed
from .torch import STORAGE, _put


def put(model, arena):
    """Puts `arena`'s tensors in the place of everything that `model` holds.

    As `flashboot.torch.bind` does it, whose checks of stage and engine are the caller's here. Tensors that the engine made on another
    device by name (scales that the host reads) stay there, as copies.
    """
    _put(model, arena, stay=True)


def graft(model, arena):
    """Makes room for what post-processing has added to a model, and drops what it has consumed.

    Afterwards the model's names are the image's. A name below a module that the model does not have is a `MismatchError`.
    """
    slots = Slots(model)
    wanted = {entry[0]: entry for entry in arena._entries() if not entry[0].endswith(STORAGE)}
    modules = dict(model.named_modules(remove_duplicate=False))
    added, lost = [name for name in wanted if name not in slots.names], []
    for slot in list(slots):
        if slot.name not in wanted:
            module, _, leaf = slot.name.rpartition(".")
            owner = modules.get(module)
            if owner is None or leaf not in owner._parameters and leaf not in owner._buffers:
                lost.append(slot.name)
            else:
                owner._parameters.pop(leaf, None)
                owner._buffers.pop(leaf, None)
    for name in added:
        module, _, leaf = name.rpartition(".")
        owner = modules.get(module)
        if owner is None or hasattr(owner, leaf):
            lost.append(name)
        else:
            # Shape and dtype are the image's: there is nothing to compare them with.
            from .torch import like_entry

            owner.register_parameter(leaf, torch.nn.Parameter(like_entry(wanted[name]), requires_grad=False))
    if lost:
        raise MismatchError(f"bind: {len(lost)} names of image and model do not meet: {_listed(lost)}", "bind")
