"""Real weights: all-MiniLM-L6-v2's embeddings of 100 sentences, bit by bit the same through `safe_open` and through an arena."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import flashboot
import flashboot.torch
from flashboot.safetensors import patch_safetensors
from toys import on_meta

SENTENCES = [
    f"{who} {what} {where}."
    for who in ("A courier", "The night train", "My neighbour's dog", "Nobody", "The second violin")
    for what in ("waits", "forgot the way", "carries a letter", "sings out of tune", "counts to a hundred")
    for where in ("at the harbour", "before the storm", "in an empty library", "on the roof of the world")
]


@pytest.fixture(scope="module")
def tokens(minilm):
    assert len(set(SENTENCES)) == 100
    return AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")


def embedded(model, tokens):
    with torch.no_grad():
        states = model.eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@pytest.fixture(scope="module")
def expected(minilm, tokens):
    return embedded(AutoModel.from_pretrained(minilm), tokens)


def test_embeddings_are_the_same_through_safe_open(minilm, tokens, expected):
    with patch_safetensors():
        model = AutoModel.from_pretrained(minilm)
    assert torch.equal(embedded(model, tokens), expected)


def test_embeddings_are_the_same_through_an_arena(minilm, tokens, expected, tmp_path):
    stock = AutoModel.from_pretrained(minilm)
    image = flashboot.torch.capture(stock, tmp_path / "image")
    model = flashboot.torch.bind(on_meta(lambda: AutoModel.from_config(stock.config)), flashboot.load(image.path))
    assert torch.equal(embedded(model, tokens), expected)
    assert not torch.equal(expected[0], expected[1])
