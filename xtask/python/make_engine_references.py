"""Makes small models and what the engines' own weight loaders make of them, rank by rank.

    python make_engine_references.py OUTPUT

For `checkpoint/tests/engine_reference.rs`. Writes OUTPUT/<model>/ with a checkpoint and
OUTPUT/<model>/<engine>/tp-<N>/rank-<R>.safetensors: parameters on rank R of N, each filled by the engine's own code.

vllm: linear layers by the `load_…` methods of `vllm.model_executor.parameter`, called as vLLM's linear layers call
them; embedding and head by `VocabParallelEmbedding`; experts by `RoutedExperts._load_w13` and `_load_w2`, under the names of
its own mapping. sglang: its linear layers, `VocabParallelEmbedding` and `FusedMoE._load_w13` and `_load_w2`. Nothing is put in
their place but the rank and the number of ranks. The experts' classes are used without their constructors, which want a
running engine's settings.

Needs torch, safetensors, and the packages of engines.lock on PYTHONPATH.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm.model_executor.layers.vocab_parallel_embedding as vllm_vocabulary
import vllm.model_executor.parameter as vllm
from safetensors.torch import save_file
from sglang.srt import runtime_context
from sglang.srt.layers import linear as sglang_linear
from sglang.srt.layers import vocab_parallel_embedding as sglang_vocabulary
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

RANKS = (2, 4)
# A vocabulary that is no multiple of what engines pad it to.
HIDDEN, MLP, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS = 128, 256, 8, 2, 16, 300, 2
EXPERTS, EXPERT_MLP = 4, 64

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
    "qwen3_moe": (plain, None),
    "llama-gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}),
}


def noise(shape, dtype):
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


def linear_of(experts):
    """The linear layers of a model: one with experts has no other MLP."""
    return {name: shape for name, shape in LINEAR.items() if not (experts and name.startswith("mlp."))}


def expert_shapes():
    return {"gate_proj": (EXPERT_MLP, HIDDEN), "up_proj": (EXPERT_MLP, HIDDEN), "down_proj": (HIDDEN, EXPERT_MLP)}


def make_model(directory, forms, quantisation, experts):
    tensors = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        if experts:
            tensors[f"{prefix}.mlp.gate.weight"] = noise((EXPERTS, HIDDEN), torch.bfloat16)
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{norm}.weight"] = noise((HEAD,), torch.bfloat16)
            for expert in range(EXPERTS):
                for name, shape in expert_shapes().items():
                    tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = noise(shape, torch.bfloat16)
        for module, (outputs, inputs) in linear_of(experts).items():
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
        "model_type": "qwen3_moe" if experts else "llama",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    if experts:
        config["num_experts"] = EXPERTS
    if quantisation:
        config["quantization_config"] = quantisation
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def stacked(ranks):
    """Parameters of all experts on one rank, filled with what no weight is."""
    each = EXPERT_MLP // ranks
    w13 = torch.full((EXPERTS, 2 * each, HIDDEN), torch.nan, dtype=torch.bfloat16)
    return w13, torch.full((EXPERTS, HIDDEN, each), torch.nan, dtype=torch.bfloat16)


def load_vllm(tensors, forms, rank, ranks, experts):
    """Every parameter that vLLM cuts, on one rank."""
    for module in (vllm, vllm_vocabulary):
        module.get_tensor_model_parallel_rank = lambda: rank
        module.get_tensor_model_parallel_world_size = lambda: ranks
    loaded = load_vllm_linear(tensors, forms, ranks, experts)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            layer = vllm_vocabulary.VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=torch.bfloat16)
            layer.weight_loader(layer.weight, tensors[name])
            loaded[name] = layer.weight.data
    if not experts:
        return loaded
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(is_act_and_mul=True, moe_parallel_config=SimpleNamespace(tp_size=ranks))
    mapping = RoutedExperts.build_expert_params_mapping("gate_proj", "down_proj", "up_proj", EXPERTS)
    for number in range(LAYERS):
        w13, w2 = stacked(ranks)
        for parameter, weight, expert, shard in mapping:
            source = tensors[f"model.layers.{number}.mlp.{weight}weight"]
            if shard == "w2":
                layer._load_w2(w2[expert], 1, source, rank)
            else:
                layer._load_w13(w13[expert], 0, shard, source, rank)
            loaded[f"model.layers.{number}.mlp.{parameter}weight"] = w2 if shard == "w2" else w13
    return loaded


class Ranks:
    """What SGLang's layers ask of a rank before there is a communicator."""

    def __init__(self, rank, ranks):
        self.tp_rank, self.tp_size, self.attn_tp_rank, self.attn_tp_size = rank, ranks, rank, ranks

    @property
    def tp_group(self):
        raise RuntimeError("there is no communicator")


def load_sglang(tensors, rank, ranks, experts):
    """Every parameter that SGLang cuts, on one rank, unquantised."""
    runtime_context._PARALLEL = Ranks(rank, ranks)
    options = {"bias": False, "params_dtype": torch.bfloat16}
    loaded = {}
    for number in range(LAYERS):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        qkv = sglang_linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, **options)
        for part in "qkv":
            qkv.weight_loader(qkv.weight, tensors[f"{attention}.{part}_proj.weight"], part)
        output = sglang_linear.RowParallelLinear(HEADS * HEAD, HIDDEN, **options)
        output.weight_loader(output.weight, tensors[f"{attention}.o_proj.weight"])
        loaded |= {f"{attention}.qkv_proj.weight": qkv.weight.data, f"{attention}.o_proj.weight": output.weight.data}
        if experts:
            loaded |= load_sglang_experts(tensors, mlp, rank, ranks)
            continue
        gate_up = sglang_linear.MergedColumnParallelLinear(HIDDEN, [MLP, MLP], **options)
        for part, name in enumerate(("gate", "up")):
            gate_up.weight_loader(gate_up.weight, tensors[f"{mlp}.{name}_proj.weight"], part)
        down = sglang_linear.RowParallelLinear(MLP, HIDDEN, **options)
        down.weight_loader(down.weight, tensors[f"{mlp}.down_proj.weight"])
        loaded |= {f"{mlp}.gate_up_proj.weight": gate_up.weight.data, f"{mlp}.down_proj.weight": down.weight.data}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        layer = sglang_vocabulary.VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=torch.bfloat16)
        layer.weight_loader(layer.weight, tensors[name])
        loaded[name] = layer.weight.data
    return loaded


def load_sglang_experts(tensors, mlp, rank, ranks):
    layer = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    layer.moe_runner_config = SimpleNamespace(is_gated=True)
    layer.moe_tp_rank, layer.moe_tp_size = rank, ranks
    layer.quant_config = layer.quant_method = layer.weight_load_method = None
    layer.use_padded_loading = layer.use_presharded_weights = layer.use_triton_kernels = False
    w13, w2 = stacked(ranks)
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", EXPERTS)
    loaded = {}
    for parameter, weight, expert, shard in mapping:
        source = tensors[f"{mlp}.{weight}weight"]
        if shard == "w2":
            layer._load_w2(w2[expert], 1, shard, source)
        else:
            layer._load_w13(w13[expert], 0, shard, source)
        loaded[f"{mlp}.{parameter}weight"] = w2 if shard == "w2" else w13
    return loaded


def load_vllm_linear(tensors, forms, ranks, experts):
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
            rows = [module for module in linear_of(experts) if module.endswith(("o_proj", "down_proj"))]
            for module in rows:
                outputs, inputs = LINEAR[module]
                row = form.make(outputs, inputs // ranks)
                row.load_row_parallel_weight(tensors[f"{prefix}.{module}.{form.name}"])
                loaded[f"{prefix}.{module}.{form.name}"] = row.data
            if experts:
                continue
            width = MLP // ranks
            gate_up = form.make(2 * width, HIDDEN)
            for number, part in enumerate(("gate", "up")):
                weight = tensors[f"{prefix}.mlp.{part}_proj.{form.name}"]
                gate_up.load_merged_column_weight(
                    weight, shard_id=number, shard_offset=number * width // unit, shard_size=width // unit
                )
            loaded[f"{prefix}.mlp.gate_up_proj.{form.name}"] = gate_up.data
    return loaded


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    for name, (make, quantisation) in MODELS.items():
        directory, experts = Path(sys.argv[1]) / name, name == "qwen3_moe"
        tensors = make_model(directory, make(), quantisation, experts)
        for ranks in RANKS:
            for rank in range(ranks):
                loaded = {"vllm": load_vllm(tensors, make(), rank, ranks, experts)}
                if quantisation is None:
                    loaded["sglang"] = load_sglang(tensors, rank, ranks, experts)
                for engine, parameters in loaded.items():
                    at = directory / engine / f"tp-{ranks}"
                    at.mkdir(parents=True, exist_ok=True)
                    parameters = {key: data.detach().contiguous().clone() for key, data in parameters.items()}
                    save_file(parameters, at / f"rank-{rank}.safetensors")
        print(f"{name}: {len(tensors)} tensors")


if __name__ == "__main__":
    main()
