"""Every rank of a layout in one process, held against what ranks that talked to one another have."""

import os
from pathlib import Path

import pytest
import torch

import flashboot
import flashboot.torch
from flashboot import errors
from toys import bits

SHARDS = os.environ.get("FLASHBOOT_REFERENCE_MODELS_PARALLEL")


@pytest.mark.skipif(not SHARDS, reason="needs the shards of transformers' own ranks")
@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("qwen3_moe", 2), ("qwen3_moe", 4)])
def test_each_rank_has_what_it_has_among_others(family, ranks, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = Path(SHARDS) / family

    def make():
        return AutoModelForCausalLM.from_pretrained(source, tp_plan="auto", dtype=torch.bfloat16)

    images = flashboot.torch.capture_ranks(make, tmp_path / "ranks", ranks)
    assert list(images) == [f"target-0-{rank}-0-0" for rank in range(ranks)]
    assert len({image.id for image in images.values()}) == ranks
    for rank, (name, image) in enumerate(images.items()):
        assert image.ranks == [name] and image.metadata["layout"]["world"]["tp"] == ranks
        expected = load_file(source / f"tp-{ranks}" / f"rank-{rank}.safetensors")
        found = flashboot.torch.state_dict(flashboot.load(image.path))
        for key, tensor in expected.items():
            ours = found[key].to(torch.bfloat16)
            assert ours.shape == tensor.shape, key
            assert torch.equal(bits(ours), bits(tensor)), key


def test_what_is_not_split_and_a_process_that_has_ranks_already_are_refused(tmp_path):
    with pytest.raises(errors.InvalidError, match="no tensor of Linear"):
        flashboot.torch.capture_ranks(lambda: torch.nn.Linear(2, 2), tmp_path / "ranks", 2)
    from flashboot._ranks import as_rank

    with as_rank(1, 2), pytest.raises(errors.InvalidError, match="initialised already"):
        assert torch.distributed.get_rank() == 1
        flashboot.torch.capture_ranks(lambda: torch.nn.Linear(2, 2), tmp_path / "more", 2)
    assert not torch.distributed.is_initialized()
    alone = flashboot.torch.capture_ranks(lambda: torch.nn.Linear(2, 2), tmp_path / "alone", 1)
    assert list(alone) == ["target-0-0-0-0"]
