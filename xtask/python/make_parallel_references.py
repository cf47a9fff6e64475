"""Makes small models and what transformers' own tensor parallelism makes of them, rank by rank.

    python make_parallel_references.py OUTPUT

For `checkpoint/tests/parallel_reference.rs`. Writes OUTPUT/<family>/ with the checkpoint as `save_pretrained` leaves
it, and OUTPUT/<family>/tp-<N>/rank-<R>.safetensors: every parameter's local shard on rank R of N, on the CPU with
gloo. A family that transformers refuses to shard gets OUTPUT/<family>/tp-<N>/refused.txt with what it said.

Needs: torch, transformers, accelerate, safetensors. Starts itself again under torch's launcher, once for each N.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

RANKS = (2, 4)

SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def configs() -> dict:
    from transformers import (
        DeepseekV3Config,
        GptOssConfig,
        LlamaConfig,
        MixtralConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    deepseek = {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")}
    return {
        # Two key heads: on four ranks there are fewer than ranks.
        "llama": LlamaConfig(**SMALL),
        "qwen3": Qwen3Config(**SMALL),
        "qwen3_moe": Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
        "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
        "deepseek_v3": DeepseekV3Config(
            **deepseek,
            num_key_value_heads=8,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=32,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
        "gpt_oss": GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, layer_types=None),
    }


def make_models(output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    for family, config in configs().items():
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        # Values that differ everywhere: what is initialised to one constant would hide a wrong slice.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        model.save_pretrained(output / family, max_shard_size="300KB")
        print(f"{family}: {sum(1 for _ in model.parameters())} parameters", flush=True)


def shard(output: Path) -> None:
    """Runs on every rank."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for family in configs():
        directory = output / family / f"tp-{ranks}"
        directory.mkdir(exist_ok=True)
        try:
            model = AutoModelForCausalLM.from_pretrained(output / family, tp_plan="auto", dtype=torch.bfloat16)
        except Exception as problem:  # noqa: BLE001: whatever it says is the finding
            (directory / "refused.txt").write_text(f"{type(problem).__name__}: {problem}\n")
            continue
        local, placed = {}, {}
        for name, parameter in model.named_parameters():
            data = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            # Routers are kept in float32; back in bfloat16 they are what the file held, exactly.
            local[name] = data.detach().to(torch.bfloat16).contiguous().clone()
            placed[name] = str(getattr(parameter, "placements", "replicated"))
        save_file(local, directory / f"rank-{rank}.safetensors")
        if rank == 0:
            (directory / "placements.json").write_text(json.dumps(placed, indent=1))
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--rank":
        shard(Path(sys.argv[2]))
        return
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    output = Path(sys.argv[1])
    output.mkdir(parents=True, exist_ok=True)
    make_models(output)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for ranks in RANKS:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        subprocess.run([*launcher, __file__, "--rank", str(output)], check=True, env=environment)


if __name__ == "__main__":
    main()
