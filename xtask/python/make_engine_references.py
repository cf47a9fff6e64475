"""Makes small models and what vLLM's own parameter classes load of them, rank by rank.

    python make_engine_references.py OUTPUT

For `checkpoint/tests/engine_reference.rs`. Writes OUTPUT/<model>/ with a checkpoint and
OUTPUT/<model>/tp-<N>/rank-<R>.safetensors: the linear layers' parameters on rank R of N, each filled by the `load_…`
methods of `vllm.model_executor.parameter`, called as vLLM's linear layers call them. Needs torch, safetensors, and the
packages of engines.lock on PYTHONPATH. Nothing of vLLM that needs a GPU or its kernels is imported: embeddings and
fused experts, whose loaders live in such modules, are not here.
"""

import json
import sys
from pathlib import Path

import torch
import vllm.model_executor.parameter as vllm
from safetensors.torch import save_file

RANKS = (2, 4)
HIDDEN, MLP, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS = 128, 256, 8, 2, 16, 128, 2

# Outputs and inputs of every linear layer, by the name of its module.
LINEAR = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}


class Form:
    """One parameter of a linear layer: its shape for so many outputs and inputs, and vLLM's class for it."""

    def __init__(self, name, dtype, shape, kind, **more):
        self.name, self.dtype, self.shape, self.kind, self.more = name, dtype, shape, kind, more

    def make(self, outputs, inputs):
        more = dict(self.more)
        data = torch.zeros(self.shape(outputs, inputs), dtype=self.dtype)
        return self.kind(data=data, weight_loader=lambda *_: None, **more)

    def unit(self):
        """Outputs to an index of the output dimension, for classes that do not know it themselves."""
        return BLOCK if self.kind is vllm.BlockQuantScaleParameter else 1


BLOCK = 8
BOTH = {"input_dim": 1, "output_dim": 0}
TURNED = {"input_dim": 0, "output_dim": 1}


def plain():
    return [Form("weight", torch.bfloat16, lambda o, i: (o, i), vllm.ModelWeightParameter, **BOTH)]


def fp8_block():
    scale = Form("weight_scale_inv", torch.float32, lambda o, i: (o // BLOCK, i // BLOCK), vllm.BlockQuantScaleParameter, **BOTH)
    return [Form("weight", torch.float8_e4m3fn, lambda o, i: (o, i), vllm.ModelWeightParameter, **BOTH), scale]


def awq():
    packed = {**TURNED, "packed_dim": 1, "packed_factor": 8}
    return [
        Form("qweight", torch.int32, lambda o, i: (i, o // 8), vllm.PackedvLLMParameter, **packed),
        Form("qzeros", torch.int32, lambda o, i: (i // 16, o // 8), vllm.PackedvLLMParameter, **packed),
        Form("scales", torch.float16, lambda o, i: (i // 16, o), vllm.GroupQuantScaleParameter, **TURNED),
    ]


def gptq():
    return [
        Form("qweight", torch.int32, lambda o, i: (i // 8, o), vllm.PackedvLLMParameter, **TURNED, packed_dim=0, packed_factor=8),
        Form("qzeros", torch.int32, lambda o, i: (i // 16, o // 8), vllm.PackedvLLMParameter, **TURNED, packed_dim=1, packed_factor=8),
        Form("scales", torch.float16, lambda o, i: (i // 16, o), vllm.GroupQuantScaleParameter, **TURNED),
    ]


MODELS = {
    "llama": (plain, None),
    "llama-fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "llama-awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16}),
    "llama-gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}),
}


def noise(shape, dtype):
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


def make_model(directory, forms, quantisation):
    tensors = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for module, (outputs, inputs) in LINEAR.items():
            for form in forms:
                tensors[f"{prefix}.{module}.{form.name}"] = noise(form.shape(outputs, inputs), form.dtype)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = noise((HIDDEN,), torch.bfloat16)
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = noise((VOCAB, HIDDEN), torch.bfloat16)
    tensors["model.norm.weight"] = noise((HIDDEN,), torch.bfloat16)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    if quantisation:
        config["quantization_config"] = quantisation
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def load(tensors, forms, rank, ranks):
    """Every linear layer's parameters on one rank."""
    vllm.get_tensor_model_parallel_rank = lambda: rank
    vllm.get_tensor_model_parallel_world_size = lambda: ranks
    # What QKVParallelLinear works out: heads of a rank, and how many ranks share a key head.
    kv_heads, replicas = (KV_HEADS // ranks, 1) if KV_HEADS >= ranks else (1, ranks // KV_HEADS)
    widths = {"q": HEADS // ranks * HEAD, "k": kv_heads * HEAD, "v": kv_heads * HEAD}
    loaded = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for form in forms:
            unit = form.unit()
            qkv, at = form.make(sum(widths.values()), HIDDEN), 0
            for part, width in widths.items():
                weight = tensors[f"{prefix}.self_attn.{part}_proj.{form.name}"]
                qkv.load_qkv_weight(
                    weight, shard_id=part, shard_offset=at // unit, shard_size=width // unit, num_heads=replicas
                )
                at += width
            loaded[f"{prefix}.self_attn.qkv_proj.{form.name}"] = qkv.data
            width = MLP // ranks
            gate_up = form.make(2 * width, HIDDEN)
            for number, part in enumerate(("gate", "up")):
                weight = tensors[f"{prefix}.mlp.{part}_proj.{form.name}"]
                gate_up.load_merged_column_weight(
                    weight, shard_id=number, shard_offset=number * width // unit, shard_size=width // unit
                )
            loaded[f"{prefix}.mlp.gate_up_proj.{form.name}"] = gate_up.data
            for module in ("self_attn.o_proj", "mlp.down_proj"):
                outputs, inputs = LINEAR[module]
                row = form.make(outputs, inputs // ranks)
                row.load_row_parallel_weight(tensors[f"{prefix}.{module}.{form.name}"])
                loaded[f"{prefix}.{module}.{form.name}"] = row.data
    return {name: data.contiguous() for name, data in loaded.items()}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    for name, (make, quantisation) in MODELS.items():
        directory = Path(sys.argv[1]) / name
        tensors = make_model(directory, make(), quantisation)
        for ranks in RANKS:
            (directory / f"tp-{ranks}").mkdir()
            for rank in range(ranks):
                save_file(load(tensors, make(), rank, ranks), directory / f"tp-{ranks}" / f"rank-{rank}.safetensors")
        print(f"{name}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
