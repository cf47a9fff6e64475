"""What the cases of both engines need: small checkpoints, images of them, and comparing models byte by byte."""

import contextlib
import json
import sys
import traceback
from pathlib import Path

import torch

from flashboot import Image, _flashboot
from flashboot._slots import Slots

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}


def checkpoints(folder):
    """Models of two families as transformers makes and saves them, at random."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    configs = {
        "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
        "qwen3_moe": Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / name, max_shard_size="100KB")
    return {name: folder / name for name in configs}


def sliced(checkpoint, path):
    """An image of a checkpoint's own tensors, as `flashboot pack` makes one for a single rank."""
    from safetensors.torch import load_file

    tensors, keep = [], []
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            bytes_ = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            keep.append(bytes_)
            tensors.append((name, "BF16", list(tensor.shape), bytes_))
    config = (checkpoint / "config.json").read_text()
    return Image._of(_flashboot.capture(path, tensors, [], [], {"stage": "sliced"}, model_config=config))


def bits(tensor):
    tensor = tensor.detach().cpu()
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def differences(one, other):
    """Names of which two models do not have the same dtype, shape and bytes; and how many they have."""
    ones, others = ({slot.name: slot.tensor for slot in Slots(model)} for model in (one, other))
    wrong = sorted(ones.keys() ^ others.keys())
    for name in ones.keys() & others.keys():
        a, b = ones[name], others[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape) or a.is_meta or b.is_meta or not torch.equal(bits(a), bits(b)):
            wrong.append(name)
    return wrong, len(ones)


def shares(model, arena):
    """Whether a model's parameters see the arena's memory."""
    begin = torch.from_dlpack(arena).data_ptr()
    return [begin <= p.data_ptr() < begin + arena.nbytes for p in model.parameters() if p.numel()]


class Cases:
    """Claims and what became of each: `ok`, or what went wrong. Printed as one object at the end."""

    def __init__(self):
        self.found = {}

    def __call__(self, name):
        def run(case):
            try:
                case()
                self.found[name] = "ok"
            except BaseException:
                self.found[name] = traceback.format_exc()
            return case

        return run

    def done(self):
        sys.stdout.flush()
        print("\n" + json.dumps(self.found))


@contextlib.contextmanager
def raising(kind, *said):
    try:
        yield
    except kind as e:
        for text in said:
            assert text in str(e), f"{text!r} is not in {e}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def folder_of(arguments):
    folder = Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    return folder
