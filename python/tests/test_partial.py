"""A part of a tensor: the checkpoint's shape, the rank's slice, and a refusal by name of everything else."""

import copy
import pickle

import pytest
import torch

from flashboot import errors
from flashboot.torch import PartialTensor, stream

NAME = "layers.0.w2.weight"


@pytest.fixture
def whole():
    return torch.arange(6 * 8, dtype=torch.float32).reshape(6, 8)


@pytest.fixture
def part(whole):
    """Columns 2..4 and 6..8 of 8."""
    resident = torch.cat([whole[:, 2:4], whole[:, 6:8]], dim=1)
    return PartialTensor(NAME, whole.shape, 1, [(2, 4), (6, 8)], resident)


def test_it_answers_as_the_whole(part, whole):
    assert isinstance(part, torch.Tensor)
    for ask in (
        lambda t: t.shape, lambda t: t.size(), lambda t: t.size(1), lambda t: t.dim(), lambda t: t.ndim, lambda t: t.numel(),
        lambda t: t.dtype, lambda t: t.device, lambda t: t.element_size(), lambda t: t.itemsize, lambda t: len(t),
        lambda t: t.is_floating_point(), lambda t: t.layout, lambda t: t.requires_grad, lambda t: t.is_cuda,
    ):
        assert ask(part) == ask(whole)
    assert part.slice == (1, ((2, 4), (6, 8))) and part.resident.shape == (6, 4)
    assert NAME in repr(part) and "2..4 and 6..8 of dimension 1" in f"{part}"


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.narrow(1, 2, 2), lambda t: t.narrow(1, 6, 2), lambda t: t.narrow(-1, 7, 1), lambda t: torch.narrow(t, 1, 3, 1),
        lambda t: t[:, 2:4], lambda t: t[..., 6:8], lambda t: t[:, 3], lambda t: t[:, -1], lambda t: t.select(1, 6),
        lambda t: t[1:3, 6:8], lambda t: t[4, 2:4], lambda t: t[0, 7], lambda t: t[:, 2:2],
    ],
)
def test_what_lies_within_the_slice_is_given(part, whole, ask):
    given = ask(part)
    assert not isinstance(given, PartialTensor) and torch.equal(given, ask(whole))


OUTSIDE = [
    lambda t: t.narrow(1, 1, 2), lambda t: t.narrow(1, 3, 2), lambda t: t.narrow(1, 2, 6), lambda t: t.narrow(1, 0, 8),
    lambda t: t.narrow(0, 0, 2), lambda t: t.narrow(0, 0, 6), lambda t: t[0], lambda t: t[1:3], lambda t: t[:, 2:4:2],
    lambda t: t[:], lambda t: t[:, 4], lambda t: t.select(0, 0), lambda t: t[2, 4:6],
]

#: Every kind of access that asks for more than the slice, by the word that the refusal has for it.
KINDS = {
    "index": lambda t: t[[0, 1]],
    "chunk": lambda t: t.chunk(2, 1),
    "split": lambda t: torch.split(t, 2, 1),
    "reshape": lambda t: t.reshape(-1),
    "transpose": lambda t: t.t(),
    "transpose (an attribute)": lambda t: t.T,
    "squeeze": lambda t: t.unsqueeze(0),
    "view": lambda t: t.view(torch.uint8),
    "to another type": lambda t: t.to(torch.float16),
    "to another device": lambda t: t.cpu(),
    "clone": lambda t: t.clone(),
    "clone (detached)": lambda t: t.detach(),
    "clone (its data)": lambda t: t.data,
    "clone (deep)": lambda t: copy.deepcopy(t),
    "copy from it": lambda t: torch.empty(6, 8).copy_(t),
    "copy into it": lambda t: t.copy_(torch.zeros(6, 8)),
    "copy into it (an index)": lambda t: t.__setitem__(0, 1.0),
    "contiguous": lambda t: t.contiguous(),
    "item": lambda t: t.tolist(),
    "iterate": lambda t: list(t),
    "compute with it": lambda t: t + 1,
    "compare": lambda t: torch.equal(torch.zeros(6, 8), t),
    "compare (by an operator)": lambda t: t == 1,
    "concatenate": lambda t: torch.cat([torch.zeros(6, 8), t]),
    "its address": lambda t: t.data_ptr(),
    "its address (as storage)": lambda t: t.untyped_storage(),
    "export": lambda t: t.numpy(),
    "export (to a file)": lambda t: pickle.dumps(t),
    "export (by DLPack)": lambda t: t.__dlpack__(),
}


@pytest.mark.parametrize("ask", OUTSIDE)
def test_what_lies_outside_is_refused_by_name(part, ask):
    with pytest.raises(errors.MismatchError) as caught:
        ask(part)
    assert NAME in str(caught.value) and "2..4 and 6..8 of dimension 1" in str(caught.value)
    assert "without slicing" in caught.value.remedy


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_access_to_all_of_it_is_refused_by_name(part, kind):
    with pytest.raises(errors.MismatchError) as caught:
        KINDS[kind](part)
    assert NAME in str(caught.value)
    if "DLPack" not in kind:
        assert kind.split(" (")[0] in str(caught.value)


def test_indices_that_the_tensor_does_not_have_are_said_as_such(part):
    for ask in (lambda t: t.narrow(1, 7, 2), lambda t: t.narrow(2, 0, 1), lambda t: t.select(1, 8), lambda t: t[:, 9]):
        with pytest.raises(errors.InvalidError, match=NAME):
            ask(part)


def test_a_parameter_takes_what_is_granted(part, whole):
    parameter = torch.nn.Parameter(torch.zeros(6, 2))
    parameter.data.copy_(part.narrow(1, 6, 2))
    assert torch.equal(parameter.data, whole[:, 6:8])
    with pytest.raises(errors.MismatchError):
        parameter.data.copy_(part)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    )
    torch.manual_seed(3)
    at = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(at, max_shard_size="40KB")
    return at


def stock(folder):
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def test_a_checkpoint_as_a_rank_reads_it(llama):
    whole, parts, seen = stock(llama), 0, set()
    for name, tensor in stream(llama, rank="target-0-1-0-0", layout={"tp": 2}):
        seen.add(name)
        assert tensor.shape == whole[name].shape and tensor.dtype == whole[name].dtype
        if isinstance(tensor, PartialTensor):
            parts += 1
            dim, runs = tensor.slice
            for begin, end in runs:
                given = tensor.narrow(dim, begin, end - begin)
                assert torch.equal(given, whole[name].narrow(dim, begin, end - begin)), name
            with pytest.raises(errors.MismatchError, match=name):
                tensor.narrow(dim, 0, tensor.shape[dim])
        else:
            assert torch.equal(tensor, whole[name]), name
    assert seen == whole.keys() and parts >= 14, "projections of two layers"


def test_without_slicing_every_tensor_is_whole_and_what_is_kept_stays(llama):
    kept = dict(stream(llama, rank="target-0-0-0-0", layout={"tp": 2, "slice": "off"}))
    for name, tensor in stock(llama).items():
        assert type(kept[name]) is torch.Tensor and torch.equal(kept[name], tensor), name


def test_a_layout_that_cannot_be_is_refused(llama):
    for refused, said in [
        ({"layout": {"tp": 2}}, "one of several ranks"),
        ({"layout": {"width": 2}}, "width"),
        ({"layout": {"slice": "some"}}, "some"),
        ({"layout": {"target": "moon"}}, "moon"),
        ({"layout": {"tp": 2}, "rank": "target-0-7-0-0"}, "target-0-7-0-0"),
    ]:
        with pytest.raises(errors.FlashbootError, match=said):
            stream(llama, **refused)
