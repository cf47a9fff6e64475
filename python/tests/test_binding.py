"""A live model → image → arena → the same model, bit by bit; and what does not fit is named."""

import pytest
import torch

import flashboot
import flashboot.torch
from flashboot import errors
from toys import Toy, assert_same, on_meta


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return Toy()


@pytest.fixture(scope="module")
def image(model, tmp_path_factory):
    return flashboot.torch.capture(model, tmp_path_factory.mktemp("binding") / "image")


def test_everything_a_model_keeps_comes_back(model, image):
    arena = flashboot.load(image.path)
    bound = flashboot.torch.bind(on_meta(Toy), arena)
    assert_same(model, bound)
    assert bound.head.weight is bound.embed.weight
    assert bound.head.bias.scale == 2.5 and isinstance(bound.listed[1], tuple)
    assert not any(p.requires_grad for p in bound.parameters())
    pointers = {t.untyped_storage().data_ptr() for t in flashboot.torch.state_dict(arena).values()}
    assert {p.untyped_storage().data_ptr() for p in bound.parameters()} == pointers


def test_a_bound_model_is_captured_as_the_same_image(image, tmp_path):
    bound = flashboot.torch.bind(on_meta(Toy), flashboot.load(image.path))
    again = flashboot.torch.capture(bound, tmp_path / "again")
    assert again.id == image.id


def test_a_model_that_is_not_on_meta_is_bound_as_well(model, image):
    torch.manual_seed(2)
    assert_same(model, flashboot.torch.bind(Toy(), flashboot.load(image.path)))


def test_state_dict_has_every_name_and_the_models_own_values(model, image):
    found = flashboot.torch.state_dict(flashboot.load(image.path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name
    assert not any(name.endswith("#storage") for name in found)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(image):
    arena = flashboot.load(image.path)

    def refused(change, *said):
        other = on_meta(Toy)
        change(other)
        with pytest.raises(errors.MismatchError) as caught:
            flashboot.torch.bind(other, arena)
        for text in said:
            assert text in str(caught.value), caught.value
        assert all(p.is_meta for p in other.parameters()), "nothing was changed"

    meta = torch.device("meta")
    refused(lambda m: setattr(m, "more", torch.nn.Linear(2, 2, device=meta)), "not in the image: more.weight, more.bias")
    refused(lambda m: delattr(m, "plain"), "not in the model: plain")
    refused(lambda m: setattr(m, "plain", torch.ones(4, device=meta)), "plain: (3,) in the image, (4,) in the model")
    refused(lambda m: setattr(m, "saved", torch.ones(5, device=meta)), "saved: torch.int64", "torch.float32")


def test_a_stage_or_an_engine_that_is_not_the_models_is_refused(image, tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    with pytest.raises(errors.MismatchError, match="patch_safetensors"):
        flashboot.torch.bind(on_meta(Toy), flashboot.load(tmp_path / "m.safetensors"))
    with pytest.raises(errors.MismatchError, match="vllm 1"):
        flashboot.torch.bind(on_meta(Toy), flashboot.load(image.path), engine=("vllm", "1"))
    kernel = {"compute_capability": "9.0", "backends": ["x"], "torch": "1", "kv_dtype": "auto"}
    ready = flashboot.torch.capture(Toy(), tmp_path / "ready", stage="kernel-ready", kernel=kernel)
    assert ready.stage == "kernel-ready"
    arena = flashboot.load(ready.path)
    with pytest.raises(errors.MismatchError, match="9.0"):
        flashboot.torch.bind(on_meta(Toy), arena)
    flashboot.torch.bind(on_meta(Toy), arena, kernel=kernel)


def test_what_cannot_be_captured_is_refused_by_name(tmp_path):
    def refused(model, said, **options):
        with pytest.raises(flashboot.FlashbootError) as caught:
            flashboot.torch.capture(model, tmp_path / "image", **options)
        assert said in str(caught.value)
        assert not list(tmp_path.iterdir()), "nothing is left behind"

    refused(on_meta(Toy), "meta device")
    sparse = torch.nn.Module()
    sparse.weight = torch.eye(3).to_sparse()
    refused(sparse, "`weight`")
    narrow = torch.nn.Module()
    narrow.weight = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 4).t()
    refused(narrow, "make it contiguous")
    refused(Toy(), "kernel-ready", stage="kernel-ready")
    twice = torch.nn.Module()
    twice.a = {"b.c": torch.ones(1), "b": {"c": torch.ones(1)}}
    refused(twice, "`a.b.c`")


def test_an_image_that_is_there_is_replaced_only_when_asked(image, model):
    with pytest.raises(errors.InvalidError):
        flashboot.torch.capture(model, image.path)
    assert flashboot.torch.capture(model, image.path, replace=True).id == image.id


def test_attributes_and_class_of_a_parameter_stay(tmp_path):
    class Own(torch.nn.Parameter):
        pass

    def make():
        module = torch.nn.Module()
        module.weight = Own(torch.ones(2), requires_grad=False)
        module.weight.loader = "how it is loaded"
        return module

    image = flashboot.torch.capture(make(), tmp_path / "image")
    bound = flashboot.torch.bind(on_meta(make), flashboot.load(image.path))
    assert type(bound.weight) is Own and bound.weight.loader == "how it is loaded"
    assert bound.weight.tolist() == [1, 1]
