"""Memory that Python sees: who keeps it, what proves it, what cannot be done to it."""

import gc
import os

import pytest
import torch

import flashboot
import flashboot.torch
from flashboot import errors
from toys import Toy, bits


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return flashboot.torch.capture(Toy(), tmp_path_factory.mktemp("arena") / "image")


def arenas_mapped():
    with open("/proc/self/maps") as maps:
        return sum("flashboot-arena" in line for line in maps)


def test_views_keep_the_memory_and_the_last_one_lets_it_go(image):
    gc.collect()
    before = arenas_mapped()
    arena = flashboot.load(image.path)
    whole = torch.from_dlpack(arena)
    named = flashboot.torch.state_dict(arena)
    seen = bits(named["embed.weight"]).clone()
    view = arena.memoryview()
    capsule = arena.__dlpack__()
    assert arenas_mapped() == before + 1
    del arena, whole
    gc.collect()
    kept = named.pop("embed.weight")
    named.clear()
    assert torch.equal(bits(kept), seen)
    assert arenas_mapped() == before + 1
    del kept
    gc.collect()
    assert arenas_mapped() == before + 1, "the buffer and the capsule still see it"
    view.release()
    del capsule
    gc.collect()
    assert arenas_mapped() == before, "nobody sees it any more"


def test_all_names_of_one_arena_share_one_import(image):
    arena = flashboot.load(image.path)
    storages = {tensor.untyped_storage().data_ptr() for tensor in flashboot.torch.state_dict(arena).values()}
    assert len(storages) == 1


def test_the_bytes_are_the_image_and_read_only_by_the_buffer_protocol(image):
    arena = flashboot.load(image.path)
    with open(image.path / f"{image.ranks[0]}.img", "rb") as payload:
        assert arena.memoryview() == payload.read()
    assert arena.memoryview().readonly and len(arena) == arena.nbytes == image.nbytes()
    assert arena.verify() == 1
    assert (arena.device, arena.stage, arena.image_id) == ("cpu", "engine-params", image.id)
    with pytest.raises(errors.InvalidError):
        arena.__dlpack__(copy=True)
    with pytest.raises(errors.InvalidError):
        arena.__dlpack__(dl_device=(2, 0))


def test_a_write_through_a_tensor_is_found_by_verify(image):
    arena = flashboot.load(image.path)
    flashboot.torch.state_dict(arena)["saved"][0] += 1
    with pytest.raises(errors.CorruptError) as caught:
        arena.verify()
    assert caught.value.chunk == 0 and "load it again" in caught.value.remedy


def test_a_damaged_image_is_refused_by_load_and_by_verify(image, tmp_path):
    copy = tmp_path / "image"
    copy.mkdir()
    for name in os.listdir(image.path):
        (copy / name).write_bytes((image.path / name).read_bytes())
    payload = copy / f"{image.ranks[0]}.img"
    damaged = bytearray(payload.read_bytes())
    damaged[5] ^= 1
    payload.write_bytes(damaged)
    with pytest.raises(errors.CorruptError):
        flashboot.Image(copy).verify()
    with pytest.raises(errors.CorruptError):
        flashboot.load(copy)
    table = copy / f"{image.ranks[0]}.json"
    table.write_bytes(table.read_bytes().replace(b'"offset":0', b'"offset":1', 1))
    with pytest.raises(errors.CorruptError):
        flashboot.Image(copy)


def test_a_checkpoint_alone_has_nothing_that_proves_it(tmp_path):
    from safetensors.torch import save_file

    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    arena = flashboot.load(tmp_path / "model.safetensors")
    assert arena.stage == "sliced" and arena.fingerprint is None and arena.image_id is None
    for name, tensor in flashboot.torch.state_dict(arena).items():
        assert torch.equal(tensor, tensors[name])
    with pytest.raises(errors.InvalidError, match="pack it first"):
        arena.verify()


def test_a_peer_has_it_when_another_process_seeds(image, python):
    """The seed is another process; what is cloned is proved by the image's id."""
    script = """
import sys, flashboot
with flashboot.seed(sys.argv[1], embed="127.0.0.1:0", model="toy") as seed:
    print(seed.rendezvous, flush=True)
    sys.stdin.read()
"""
    import subprocess
    import sys

    seeding = subprocess.Popen(
        [sys.executable, "-c", script, image.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        address = seeding.stdout.readline().strip()
        arena = flashboot.clone(address, image_id=image.id)
        assert arena.report["source"] == "peer" and arena.verify() == 1
        with open(image.path / f"{image.ranks[0]}.img", "rb") as payload:
            assert arena.memoryview() == payload.read()
        with pytest.raises(flashboot.FlashbootError):
            flashboot.clone(address, image_id="1" * 64, patience=0.5)
    finally:
        seeding.stdin.close()
        assert seeding.wait(60) == 0
    assert arena.verify() == 1, "the clone outlives its source"
