"""A small model that keeps tensors in every way a model can, and comparing models bit by bit."""

import torch

from flashboot._slots import Slots


class Toy(torch.nn.Module):
    """Ties, shared memory, strides, buffers that are not saved, plain attributes, nothing at all."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 30)
        self.head = torch.nn.Linear(30, 40)
        self.head.weight = self.embed.weight
        self.head.bias.scale = torch.tensor(2.5)
        self.turned = self.embed.weight.data.t()
        self.register_buffer("saved", torch.arange(5))
        self.register_buffer("unsaved", torch.arange(7).float(), persistent=False)
        self.plain = torch.ones(3) * 5
        self.listed = [torch.zeros(2), (torch.ones(2), torch.ones(0, 4)), {"k": torch.full((), 3.0)}]
        fused = torch.randn(10, 10)
        self.first = torch.nn.Parameter(fused[:5])
        self.second = torch.nn.Parameter(fused[3:])
        self.columns = fused[:, ::2]
        self.spread = torch.ones(1).expand(6)
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.f8 = torch.nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.e5 = torch.randn(3).to(torch.float8_e5m2)
        self.e8 = torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        self.f4 = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4)
        self.hidden = [torch.nn.Linear(3, 2), self.head]  # not registered, and registered
        self.flags = torch.tensor([True, False])


def on_meta(make):
    with torch.device("meta"):
        return make()


def bits(tensor):
    """Every byte that the tensor's elements have."""
    tensor = tensor.detach()
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def assert_same(one, other):
    """Names, classes, dtypes, shapes, strides, bytes, and which tensors share memory."""
    ones, others = list(Slots(one)), list(Slots(other))
    assert [slot.name for slot in ones] == [slot.name for slot in others]
    for a, b in zip(ones, others):
        assert type(a.tensor) is type(b.tensor), a.name
        assert (a.tensor.dtype, a.tensor.shape) == (b.tensor.dtype, b.tensor.shape), a.name
        assert a.tensor.stride() == b.tensor.stride(), a.name
        assert torch.equal(bits(a.tensor).cpu(), bits(b.tensor).cpu()), a.name
    assert ties(ones) == ties(others)


def ties(slots):
    """For every pair of names that share a byte, how far apart they begin."""
    spans = []
    for slot in slots:
        t = slot.tensor
        if t.numel():
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
            spans.append((slot.name, t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    return {
        (a, b): y - x for a, x, x_end in spans for b, y, y_end in spans if a < b and x < y_end and y < x_end
    }
