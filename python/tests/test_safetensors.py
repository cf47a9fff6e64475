"""The stand-in for the safetensors package, held against that package call by call, and in transformers' own loader."""

import numpy
import pytest
import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors import safe_open as theirs

import flashboot.safetensors
from flashboot.safetensors import load_file, patch_safetensors, safe_open
from toys import assert_same, bits


def tensors():
    torch.manual_seed(3)
    found = {
        "matrix": torch.randn(6, 5),
        "cube": torch.randn(4, 3, 7).to(torch.bfloat16),
        "vector": torch.arange(11),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "flags": torch.tensor([[True, False], [False, True]]),
        "f8": torch.randn(8, 4).to(torch.float8_e4m3fn),
        "f5": torch.randn(8).to(torch.float8_e5m2),
        "e8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "f4": torch.arange(12, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 4),
        "half": torch.randn(2, 2).half(),
        "big": torch.arange(40_000, dtype=torch.int32).reshape(400, 100),
    }
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    safetensors.torch.save_file(tensors(), path, metadata={"format": "pt", "by": "a test"})
    return path


def same(ours, other):
    assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
    assert torch.equal(bits(ours), bits(other))
    assert ours.is_contiguous()


@pytest.mark.parametrize("backend", [None, "mmap", "pread"])
def test_names_metadata_and_tensors_are_theirs(file, backend):
    with safe_open(file, framework="pt", backend=backend) as ours, theirs(file, framework="pt") as other:
        assert ours.keys() == other.keys() and ours.offset_keys() == other.offset_keys()
        assert ours.metadata() == other.metadata()
        for name in other.keys():
            same(ours.get_tensor(name), other.get_tensor(name))


INDICES = {
    "matrix": [
        slice(None), slice(1, 4), slice(-2, None), slice(0, 0), slice(4, 2), slice(0, 100), slice(0, 6, 2), slice(1, None, 3),
        2, -1, ..., (2, 3), (slice(2, 4), slice(1, 3)), (..., slice(1, 3)), (slice(None), 4), (..., 2), (slice(None, None, 2), ...),
        (slice(None), slice(None, None, 2)), (3, ...), (slice(3), -1),
    ],
    "cube": [
        slice(1, 3), (slice(None), 1), (..., 0), (1, ..., 2), (slice(1, 2), slice(None), slice(2, 5)), (3, 2, 6), (..., slice(3)),
    ],
    "vector": [slice(3, 9), slice(None, None, 4), 5, ..., slice(20, 30)],
    "scalar": [...],
    "nothing": [slice(None), slice(0, 1), ..., (slice(None), slice(1, 2))],
    "flags": [0, (slice(None), 1)],
    "f8": [slice(2, 5), (slice(2, 5), slice(1, 3))],
    "big": [slice(100, 300), (slice(7, 399, 3), slice(5, 50)), (..., 99)],
}


@pytest.mark.parametrize("name", INDICES)
def test_every_slice_is_theirs(file, name):
    # Without `with`, as transformers does.
    ours = safe_open(file, framework="pt").get_slice(name)
    other = theirs(file, framework="pt").get_slice(name)
    assert ours.get_shape() == other.get_shape() and ours.get_dtype() == other.get_dtype()
    whole = tensors()[name]
    for index in INDICES[name]:
        found = ours[index]
        same(found, whole[index].contiguous())
        try:
            expected = other[index]
        except Exception:
            # What their release does not serve (a step, on some) is torch's own answer.
            continue
        same(found, expected)


def test_dtypes_are_codes_in_words(file):
    opened = safe_open(file, framework="pt")
    codes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}
    assert codes["cube"] == "BF16" and codes["f4"] == "F4" and codes["e8"] == "F8_E8M0" and codes["vector"] == "I64"


def test_a_slice_reads_no_more_rows_than_it_needs(file):
    opened = safe_open(file, framework="pt")
    reads = []

    class Counting:
        def __init__(self, inner):
            self._inner = inner

        def read(self, begin, size):
            reads.append(size)
            return self._inner.read(begin, size)

    opened._file = Counting(opened._file)
    piece = opened.get_slice("big")
    assert reads == []
    piece[100:110]
    piece[7]
    piece[390:, :10]
    assert reads == [10 * 400, 400, 10 * 400]


def test_numpy_is_served_too(file):
    with safe_open(file, framework="np") as ours, theirs(file, framework="np") as other:
        for name in ("matrix", "vector", "scalar", "nothing", "flags", "half", "big"):
            found, expected = ours.get_tensor(name), other.get_tensor(name)
            assert found.dtype == expected.dtype and numpy.array_equal(found, expected)
            assert found.flags.writeable


def test_what_is_wrong_is_a_safetensor_error(file, tmp_path):
    assert flashboot.safetensors.SafetensorError is SafetensorError
    opened = safe_open(file, framework="pt")
    for missing in (lambda: opened.get_tensor("x"), lambda: opened.get_slice("x")):
        with pytest.raises(SafetensorError, match="does not contain tensor x"):
            missing()
    with pytest.raises(FileNotFoundError):
        safe_open(tmp_path / "none.safetensors", framework="pt")
    with pytest.raises(SafetensorError, match="framework"):
        safe_open(file, framework="abacus")
    with pytest.raises(SafetensorError, match="backend"):
        safe_open(file, framework="pt", backend="abacus")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SafetensorError):
        safe_open(cut, framework="pt")
    with pytest.raises(SafetensorError):
        load_file(cut)
    with safe_open(file, framework="pt") as closed:
        pass
    with pytest.raises(SafetensorError, match="closed"):
        closed.get_tensor("matrix")
    for index in [(0, 0, 0), 6, (..., ...), slice(None, None, -1)]:
        with pytest.raises(SafetensorError):
            opened.get_slice("matrix")[index]


def test_a_file_that_changes_while_it_is_open_is_an_error(file, tmp_path):
    path = tmp_path / "changing.safetensors"
    path.write_bytes(file.read_bytes())
    opened = safe_open(path, framework="pt")
    with open(path, "r+b") as writer:
        writer.truncate(path.stat().st_size - 40_000)
    with pytest.raises(SafetensorError):
        for name in opened.keys():
            opened.get_tensor(name)


def test_load_file_is_theirs_in_one_memory(file):
    ours, other = load_file(file), safetensors.torch.load_file(file)
    assert ours.keys() == other.keys()
    for name, tensor in other.items():
        same(ours[name], tensor)
    assert len({tensor.untyped_storage().data_ptr() for tensor in ours.values()}) == 1


def test_patching_reaches_names_that_were_imported_and_is_undone():
    import transformers.modeling_utils

    original = safetensors.safe_open
    with patch_safetensors():
        assert safetensors.safe_open is safe_open and transformers.modeling_utils.safe_open is safe_open
        assert safetensors.torch.load_file is load_file and safetensors.torch.safe_open is safe_open
        assert theirs is original, "names in a function's own module that are called otherwise stay"
        with pytest.raises(flashboot.FlashbootError, match="already"):
            patch_safetensors()
    assert safetensors.safe_open is original and transformers.modeling_utils.safe_open is original
    undo = patch_safetensors()
    undo()
    undo()
    assert safetensors.safe_open is original


@pytest.mark.parametrize("shards", ["1GB", "100KB"])
def test_from_pretrained_runs_on_it_unchanged(tmp_path, shards):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    )
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size=shards)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    opened = []

    class Watched(safe_open):
        def __init__(self, *args, **kwargs):
            opened.append(args or kwargs)
            super().__init__(*args, **kwargs)

    with patch_safetensors(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_open", Watched)
        ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened, "transformers read through it"
    assert_same(stock, ours)
