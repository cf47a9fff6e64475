"""Mixtures of experts as transformers makes them: `from_pretrained` → capture → image → arena → bind, on the CPU. The same
logits and the same generated tokens, bit by bit, also from what was cloned from another process."""

import gc
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    Qwen3MoeConfig,
)

import flashboot
import flashboot.torch
from toys import assert_same, on_meta

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=True
    ),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}
DTYPES = {"qwen3_moe": torch.bfloat16, "mixtral": torch.float32, "deepseek_v3": torch.bfloat16}

SEED = """
import sys, flashboot
with flashboot.seed(sys.argv[1], embed="127.0.0.1:0", model="moe") as seed:
    print(seed.rendezvous, flush=True)
    sys.stdin.read()
"""


def empty(family):
    return on_meta(lambda: AutoModelForCausalLM.from_config(CONFIGS[family], dtype=DTYPES[family]))


def outputs(model):
    model.eval()
    ids = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return logits, tokens


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    """The family, its model as `from_pretrained` loads it, and that model's image."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(11)
    made = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=DTYPES[request.param])
    made.save_pretrained(folder / "checkpoint", max_shard_size="200KB")
    stock = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=DTYPES[request.param])
    return request.param, stock, flashboot.torch.capture(stock, folder / "image")


def test_logits_and_generated_tokens_are_the_same_from_an_arena(family):
    name, stock, image = family
    fingerprint = image.fingerprint
    assert (fingerprint["stage"], fingerprint["model_type"]) == ("engine-params", name)
    assert fingerprint["engine"]["name"] == "transformers"
    arena = flashboot.load(image.path)
    bound = flashboot.torch.bind(empty(name), arena)
    assert_same(stock, bound)
    # Only the model keeps the memory now.
    del arena
    gc.collect()
    for expected, found in zip(outputs(stock), outputs(bound)):
        assert torch.equal(expected, found)
    tied = getattr(CONFIGS[name], "tie_word_embeddings", False)
    assert (bound.get_input_embeddings().weight is bound.get_output_embeddings().weight) == tied


def test_logits_and_generated_tokens_are_the_same_after_a_clone(family):
    name, stock, image = family
    command = [sys.executable, "-c", SEED, image.path]
    seeding = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        address = seeding.stdout.readline().strip()
        arena = flashboot.clone(address, image_id=image.id)
    finally:
        seeding.stdin.close()
        assert seeding.wait(60) == 0
    assert arena.report["source"] == "peer" and arena.verify() > 0
    for expected, found in zip(outputs(stock), outputs(flashboot.torch.bind(empty(name), arena))):
        assert torch.equal(expected, found)


def test_another_family_or_another_size_is_refused_by_name(family):
    name, _, image = family
    arena = flashboot.load(image.path)
    other = next(other for other in CONFIGS if other != name)
    with pytest.raises(flashboot.errors.MismatchError, match=f"{name}.*{other}"):
        flashboot.torch.bind(empty(other), arena)
    wider = type(CONFIGS[name])(**{**CONFIGS[name].to_dict(), "vocab_size": 320})
    model = on_meta(lambda: AutoModelForCausalLM.from_config(wider, dtype=DTYPES[name]))
    with pytest.raises(flashboot.errors.MismatchError, match="embed_tokens.weight"):
        flashboot.torch.bind(model, arena)
