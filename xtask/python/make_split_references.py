"""Makes small models and each rank's part of them, and proves the parts by running transformers' modules on them.

    python make_split_references.py OUTPUT

For `checkpoint/tests/split_reference.rs`. Writes OUTPUT/<model>/ with a checkpoint, and for every layout
OUTPUT/<model>/<layout>/rank-<R>/ with rank R's part of it. A part is a checkpoint too: of a model with fewer heads, a
narrower MLP, fewer experts, a part of the vocabulary, and transformers loads it as that. Then the whole model is run
in float64 once as it is and once with every attention, MLP, expert and vocabulary replaced by those of all ranks, their
outputs summed (for the head: joined). The logits must be the same, and must not be once two ranks' parts are swapped.

Biases that are added after a sum are on every rank and count once, as row-parallel layers of engines do it.

Needs: torch, transformers, safetensors.
"""

import copy
import json
import re
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

HEADS, KV_HEADS, EXPERTS, VOCAB, HIDDEN = 8, 2, 8, 512, 64
# Name: (tp, ep). Two key heads: on four ranks each is on two.
LAYOUTS = {"tp2": (2, 1), "tp4": (4, 1), "tp4-ep2": (4, 2)}
SHARED, BLOCK = 2, 8
ROUTER = r"\.(gate|router)\.(weight|bias|e_score_correction_bias)$"

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def deepseek(q_lora_rank):
    from transformers import DeepseekV3Config

    small = {key: value for key, value in SMALL.items() if key != "head_dim"}
    return DeepseekV3Config(
        **{**small, "num_key_value_heads": HEADS},
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=64,
        n_shared_experts=SHARED,
        first_k_dense_replace=1,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )


def gpt_oss():
    from transformers import GptOssConfig

    # A window shorter than the text, so that both kinds of layers differ.
    return GptOssConfig(
        **SMALL, num_local_experts=EXPERTS, num_experts_per_tok=3, sliding_window=5, layer_types=None
    )


def configs() -> dict:
    from transformers import LlamaConfig, MixtralConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig

    headless = {key: value for key, value in SMALL.items() if key != "head_dim"}
    return {
        "llama": LlamaConfig(**SMALL),
        "qwen3": Qwen3Config(**SMALL),
        "qwen3_moe": Qwen3MoeConfig(**SMALL, num_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=64),
        "mixtral": MixtralConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=3),
        "phi3": Phi3Config(**headless),
        "deepseek_v3": deepseek(32),
        "deepseek_v3-no-q-lora": deepseek(None),
        "deepseek_v3-fp8": deepseek(32),
        "gpt_oss": gpt_oss(),
        "gpt_oss-mxfp4": gpt_oss(),
    }


# Models ------------------------------------------------------------------------------------------------------------


def make_model(directory: Path, name: str, config) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in key:
                # Norms around one, everything else small: no softmax is so steep that it hides a wrong head.
                tensor.copy_(torch.randn(tensor.shape) * 0.15 + (1.0 if "norm" in key else 0.0))
    model.save_pretrained(directory)
    if name == "gpt_oss-mxfp4":
        quantise(directory, mxfp4, {"quant_method": "mxfp4"})
    if name == "deepseek_v3-fp8":
        method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
        quantise(directory, fp8, method)


def quantise(directory: Path, how, method: dict) -> None:
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        tensors.update(how(name, tensor))
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = method
    (directory / "config.json").write_text(json.dumps(config))


def mxfp4(name, tensor):
    """Stacked experts as random blocks: what they mean is for transformers to say."""
    if not name.endswith((".gate_up_proj", ".down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def fp8(name, tensor):
    if "_proj" not in name:
        return {name: tensor}
    rows, columns = (-(-size // BLOCK) for size in tensor.shape)
    scales = torch.rand(rows, columns) + 0.5
    return {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


# Parts -------------------------------------------------------------------------------------------------------------


class Rank:
    """Which part of a model a rank has: `tp` of `ranks`, and of every expert of its group part `share` of `shares`."""

    def __init__(self, rank, ranks, groups):
        self.tp, self.ranks, self.groups = rank, ranks, groups
        self.shares = ranks // groups
        self.group, self.share = divmod(rank, self.shares)

    def even(self, tensor, dim, expert=False):
        k, n = (self.share, self.shares) if expert else (self.tp, self.ranks)
        return tensor.chunk(n, dim)[k]

    def experts(self):
        each = EXPERTS // self.groups
        return range(self.group * each, self.group * each + each)

    def heads(self, tensor, heads):
        """Whole heads along the first dimension, each on several ranks where there are fewer."""
        if heads >= self.ranks:
            return self.even(tensor, 0)
        return tensor.chunk(heads)[self.tp * heads // self.ranks]

    def part(self, name, tensor):
        """The rank's part of a tensor of the checkpoint; `None` of another group's expert."""
        module = next((m for m in reversed(name.split(".")) if m not in ("weight", "bias", "weight_scale_inv")), "")
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            if int(expert[1]) not in self.experts():
                return None
            return self.even(tensor, 1 if module in ("down_proj", "w2") else 0, expert=True)
        if ".experts." in name:
            return self.stacked(module, tensor[self.experts().start : self.experts().stop])
        if module in ("embed_tokens", "lm_head"):
            return self.even(tensor, 0)
        if module == "qkv_proj":
            q, kv = HEADS * 8, KV_HEADS * 8
            parts = tensor.split([q, kv, kv])
            return torch.cat([self.heads(part, n) for part, n in zip(parts, (HEADS, KV_HEADS, KV_HEADS))])
        if module in ("q_proj", "q_b_proj", "kv_b_proj", "sinks"):
            return self.heads(tensor, HEADS)
        if module in ("k_proj", "v_proj"):
            return self.heads(tensor, KV_HEADS)
        if module == "gate_up_proj":
            return torch.cat([self.even(half, 0) for half in tensor.chunk(2)])
        if module in ("gate_proj", "up_proj"):
            return self.even(tensor, 0)
        if module in ("o_proj", "down_proj"):
            return tensor if name.endswith(".bias") else self.even(tensor, 1)
        return tensor

    def stacked(self, module, tensor):
        """gpt-oss: `[experts, inputs, outputs]`, or MXFP4's `[experts, outputs, inputs / 32, …]`."""
        dims = {
            "gate_up_proj": 2,
            "gate_up_proj_bias": 1,
            "gate_up_proj_blocks": 1,
            "gate_up_proj_scales": 1,
            "down_proj": 1,
            "down_proj_blocks": 2,
            "down_proj_scales": 2,
        }
        return self.even(tensor, dims[module], expert=True) if module in dims else tensor

    def config(self, whole: dict) -> dict:
        """The model that the rank's part is by itself."""
        config = copy.deepcopy(whole)
        config["head_dim"] = config.get("head_dim") or HIDDEN // HEADS
        if config["model_type"] == "deepseek_v3":
            config.pop("head_dim")
        config["num_attention_heads"] //= self.ranks
        config["num_key_value_heads"] = max(1, config["num_key_value_heads"] // self.ranks)
        config["vocab_size"] //= self.ranks
        # Where all MLPs are experts that is their width.
        only_experts = config["model_type"] in ("mixtral", "gpt_oss")
        config["intermediate_size"] //= self.shares if only_experts else self.ranks
        if "moe_intermediate_size" in config:
            config["moe_intermediate_size"] //= self.shares
        if config["model_type"] == "deepseek_v3":
            # Shared experts, one MLP of their width together, are cut over all ranks, whatever the routed ones are.
            config["n_shared_experts"] = SHARED * self.shares // self.ranks
        for key in ("num_local_experts", "num_experts", "n_routed_experts"):
            if config.get(key):
                config[key] //= self.groups
        return config


def write_parts(directory: Path, layout: str) -> list:
    ranks, groups = LAYOUTS[layout]
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    parts = []
    for number in range(ranks):
        rank = Rank(number, ranks, groups)
        part = {}
        for name, tensor in tensors.items():
            own = rank.part(name, tensor)
            if own is not None:
                part[name] = own.contiguous().clone()
        at = directory / layout / f"rank-{number}"
        at.mkdir(parents=True)
        save_file(part, at / "model.safetensors", metadata={"format": "pt"})
        (at / "config.json").write_text(json.dumps(rank.config(config)))
        parts.append((rank, load(at, groups > 1)))
    return parts


# Proof -------------------------------------------------------------------------------------------------------------


def load(directory: Path, fewer_experts=False):
    """The model in a directory, every tensor of it loaded, in float64."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        # A router chooses among all experts, whichever of them are here.
        ignore_mismatched_sizes=fewer_experts,
    )
    wrong = [key for kind in ("missing_keys", "unexpected_keys", "error_msgs") for key in said[kind]]
    wrong += [key for key, *_ in said["mismatched_keys"] if not re.search(ROUTER, key)]
    if wrong:
        raise SystemExit(f"{directory}: transformers does not load {wrong}")
    return model.double().eval()


class Summed(torch.nn.Module):
    """What every rank's module makes of the same input, summed; of attention, its output alone."""

    def __init__(self, modules):
        super().__init__()
        self.ranks = torch.nn.ModuleList(modules)

    def forward(self, *args, **kwargs):
        made = [module(*args, **kwargs) for module in self.ranks]
        if isinstance(made[0], tuple):
            return sum(output for output, *_ in made), None
        return sum(made)


class Owned(torch.nn.Module):
    """One group's experts: a token's choice of another group's counts for nothing here."""

    def __init__(self, module, experts):
        super().__init__()
        self.module, self.experts = module, experts

    def forward(self, hidden, chosen, weights):
        here = (chosen >= self.experts.start) & (chosen < self.experts.stop)
        local = torch.where(here, chosen - self.experts.start, 0)
        return self.module(hidden, local, torch.where(here, weights, 0))


class Looked(torch.nn.Module):
    """One rank's rows of a vocabulary: another's tokens are zeros here."""

    def __init__(self, module, first):
        super().__init__()
        self.module, self.first = module, first

    def forward(self, tokens):
        rows = self.module.num_embeddings
        here = (tokens >= self.first) & (tokens < self.first + rows)
        return self.module(torch.where(here, tokens - self.first, 0)) * here.unsqueeze(-1)


class Joined(torch.nn.Module):
    """The logits of every rank's part of the vocabulary, one after the other."""

    def __init__(self, modules):
        super().__init__()
        self.ranks = torch.nn.ModuleList(modules)

    def forward(self, hidden):
        return torch.cat([module(hidden) for module in self.ranks], -1)


def count_once(model, bias) -> None:
    """Zeros biases that another rank adds."""
    for name, parameter in model.named_parameters():
        if re.search(bias, name):
            parameter.data.zero_()


def put_together(whole, parts):
    """The whole model with its split modules replaced by all ranks' parts of them."""
    models = [model for _, model in parts]
    for rank, model in parts:
        if rank.tp > 0:
            count_once(model, r"o_proj\.bias$")
        if rank.share > 0:
            count_once(model, r"experts\.down_proj_bias$")
    for number, layer in enumerate(whole.model.layers):
        layers = [model.model.layers[number] for model in models]
        layer.self_attn = Summed([other.self_attn for other in layers])
        if not hasattr(layer.mlp, "experts"):
            layer.mlp = Summed([other.mlp for other in layers])
            continue
        experts = [Owned(other.mlp.experts, rank.experts()) for other, (rank, _) in zip(layers, parts)]
        layer.mlp.experts = Summed(experts)
        if hasattr(layer.mlp, "shared_experts"):
            layer.mlp.shared_experts = Summed([other.mlp.shared_experts for other in layers])
    rows = VOCAB // len(parts)
    embeddings = [Looked(model.model.embed_tokens, rank.tp * rows) for rank, model in parts]
    whole.model.embed_tokens = Summed(embeddings)
    whole.lm_head = Joined([model.lm_head for model in models])
    return whole


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def off(ours, theirs) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def prove(directory: Path, layout: str) -> str:
    tokens = torch.randint(0, VOCAB, (4, 24))
    expected = logits(load(directory), tokens)
    parts = write_parts(directory, layout)
    together = put_together(load(directory), parts)
    right = off(logits(together, tokens), expected)
    # Routers and some softmaxes work in float32, whatever they are given.
    if not right < 1e-6:
        raise SystemExit(f"{directory.name} {layout}: the parts' sum is off by {right}")
    least = 1.0
    first, last = (dict(model.named_parameters()) for _, model in (parts[0], parts[-1]))
    # Biases that count once are everyone's, and routers of fewer experts are not run.
    others = re.compile(rf"o_proj\.bias$|down_proj_bias$|{ROUTER}")
    names = [name for name in first if not others.search(name) and not torch.equal(first[name], last[name])]
    for name in names:
        kept = first[name].data
        first[name].data = last[name].data
        wrong = off(logits(together, tokens), expected)
        first[name].data = kept
        if not wrong > 1e-4:
            raise SystemExit(f"{directory.name} {layout}: another rank's {name} goes unnoticed, off by {wrong}")
        least = min(least, wrong)
    return f"off by {right:.0e}; by {least:.0e} or more with another rank's part of any of {len(names)} parameters"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name, config in configs().items():
        directory = Path(sys.argv[1]) / name
        make_model(directory, name, config)
        for layout in LAYOUTS:
            has_experts = any(getattr(config, key, None) for key in ("num_local_experts", "n_routed_experts"))
            if layout.endswith("ep2") and not has_experts:
                continue
            print(f"{name} {layout}: {prove(directory, layout)}", flush=True)


if __name__ == "__main__":
    main()
