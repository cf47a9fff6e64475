"""On a GPU: an arena in its memory, seen by torch where it lies."""

import gc

import pytest
import torch

import flashboot
import flashboot.torch
from toys import Toy, assert_same, bits, on_meta

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    torch.manual_seed(1)
    return flashboot.torch.capture(Toy(), tmp_path_factory.mktemp("gpu") / "image")


def test_torch_sees_a_gpu_arena_where_it_lies(image):
    arena = flashboot.load(image.path, device="cuda:0")
    assert arena.device == "cuda:0" and arena.__dlpack_device__() == (2, 0)
    whole = torch.from_dlpack(arena)
    assert whole.device == torch.device("cuda:0") and whole.numel() == arena.nbytes
    host = flashboot.torch.state_dict(flashboot.load(image.path))
    for name, tensor in flashboot.torch.state_dict(arena).items():
        assert torch.equal(bits(tensor).cpu(), bits(host[name])), name
    assert arena.verify() == 1
    with pytest.raises(BufferError):
        arena.memoryview()


def test_a_bound_models_bytes_are_the_captured_ones(image):
    bound = flashboot.torch.bind(on_meta(Toy), flashboot.load(image.path, device="cuda:0"))
    gc.collect()
    assert all(p.is_cuda for p in bound.parameters())
    assert_same(flashboot.torch.bind(on_meta(Toy), flashboot.load(image.path)), bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_the_same_as_of_the_model_moved_there(tmp_path, dtype):
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )
    torch.manual_seed(2)
    stock = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    image = flashboot.torch.capture(stock, tmp_path / "image")
    empty = on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    bound = flashboot.torch.bind(empty, flashboot.load(image.path, device="cuda:0")).eval()
    ids = torch.arange(32, device="cuda:0").reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(bound(input_ids=ids).logits, stock.to("cuda:0")(input_ids=ids).logits)


def test_the_gpus_memory_comes_back_with_the_last_tensor(tmp_path):
    model = torch.nn.Linear(8192, 8192)  # 256 MiB
    image = flashboot.torch.capture(model, tmp_path / "image")
    torch.cuda.synchronize()
    flashboot.load(image.path, device="cuda:0")
    gc.collect()
    before = torch.cuda.mem_get_info()[0]
    arena = flashboot.load(image.path, device="cuda:0")
    tensors = flashboot.torch.state_dict(arena)
    del arena
    assert torch.equal(tensors["weight"].cpu(), model.weight.data)
    assert torch.cuda.mem_get_info()[0] <= before - image.nbytes()
    tensors.clear()
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= before - (8 << 20)
