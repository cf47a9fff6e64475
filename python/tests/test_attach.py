"""What the node agent holds, attached: where it is, for as long as a tensor sees it, and whatever becomes of an engine."""

import asyncio
import gc
import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import flashboot
import flashboot.torch
from flashboot import errors
from toys import Toy, assert_same, on_meta


class Node:
    """An agent of its own, by the command that the package brings."""

    def __init__(self, folder):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flashboot", "agent", "--agent", str(folder), "--limit", "1GiB", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.listens = json.loads(self.process.stdout.readline())

    def ask(self, verb, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", "flashboot", verb, *map(str, arguments), "--agent", str(self.folder), "--json"],
            capture_output=True, text=True, timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def attached(self):
        return [entry["attached"] for entry in self.ask("ls")["entries"]]

    def until_attached(self, wanted):
        until = time.monotonic() + 120
        while self.attached() != wanted:
            assert time.monotonic() < until, self.attached()
            time.sleep(0.05)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(120) in (0, 1)
        self.process.stdout.close()


@pytest.fixture
def node(tmp_path_factory):
    # Sockets have at most 107 bytes of path.
    folder = tmp_path_factory.mktemp("a")
    node = Node(folder)
    yield node
    if node.process.poll() is None:
        node.stop()


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    torch.manual_seed(5)
    return flashboot.torch.capture(Toy(), tmp_path_factory.mktemp("attach") / "image")


def payload(image):
    return (image.path / f"{image.ranks[0]}.img").read_bytes()


def test_a_held_arena_is_attached_where_it_is_and_views_keep_it(node, image):
    node.ask("hold", image.path)
    arena = flashboot.attach(image, agent=node.folder)
    assert arena.report["source"] == "held" and arena.report["bytes_copied"] == 0
    assert arena.read_only and arena.device == "cpu" and arena.image_id == image.id
    assert arena.memoryview() == payload(image) and arena.verify() == 1
    bound = flashboot.torch.bind(on_meta(Toy), arena)
    del arena
    gc.collect()
    assert node.attached() == [1], "the model sees it"
    assert_same(flashboot.torch.bind(on_meta(Toy), flashboot.load(image.path)), bound)
    del bound
    gc.collect()
    node.until_attached([0])


def test_load_takes_what_is_held_too(node, image):
    node.ask("hold", image.path)
    arena = flashboot.load(image.path, config={"agent": {"directory": str(node.folder)}})
    assert arena.report["source"] == "held" and arena.read_only
    assert arena.memoryview() == payload(image)


def test_an_id_is_enough_and_the_directory_may_be_gone(node, image, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(image.path, copy)
    node.ask("hold", copy)
    shutil.rmtree(copy)
    arena = flashboot.attach(image_id=image.id, agent=node.folder)
    assert [tuple(t) for t in arena.tensors()] == [tuple(t) for t in image.tensors()]
    assert (arena.stage, arena.fingerprint) == (image.stage, image.fingerprint)
    assert arena.memoryview() == payload(image) and arena.verify() == 1
    assert flashboot.attach(agent=node.folder).image_id == image.id, "it is the only one that is held"


def test_what_is_not_held_is_refused_with_what_to_do(node, image, tmp_path):
    with pytest.raises(errors.UnavailableError) as caught:
        flashboot.attach(image, agent=node.folder)
    assert "flashboot hold" in caught.value.remedy
    with pytest.raises(errors.UnavailableError) as caught:
        flashboot.attach(image_id="1" * 64, agent=node.folder)
    assert "flashboot hold" in caught.value.remedy
    node.ask("stage", image.path)
    with pytest.raises(errors.UnavailableError):
        flashboot.attach(image, agent=node.folder)
    with pytest.raises(errors.UnavailableError) as caught:
        flashboot.attach(image, agent=tmp_path)
    assert "flashboot agent" in caught.value.remedy
    with pytest.raises(errors.MismatchError):
        flashboot.attach(image, image_id="1" * 64, agent=node.folder)
    other = flashboot.torch.capture(torch.nn.Linear(3, 3), tmp_path / "other")
    node.ask("hold", image.path)
    node.ask("hold", other.path)
    with pytest.raises(errors.InvalidError) as caught:
        flashboot.attach(agent=node.folder)
    assert image.id in str(caught.value) and other.id in str(caught.value)
    with pytest.raises(errors.MismatchError):
        flashboot.torch.bind(on_meta(Toy), flashboot.attach(other, agent=node.folder))


def test_a_private_copy_may_be_written_and_the_held_bytes_stay(node, image):
    node.ask("hold", image.path)
    own = flashboot.attach(image, private=True, agent=node.folder)
    assert not own.read_only and own.report["bytes_copied"] == image.nbytes()
    flashboot.torch.state_dict(own)["saved"][0] += 1
    with pytest.raises(errors.CorruptError):
        own.verify()
    assert flashboot.attach(image, agent=node.folder).verify() == 1


def test_a_write_to_what_is_attached_ends_the_writer_alone(node, image, python):
    node.ask("hold", image.path)
    script = """
import sys, flashboot, flashboot.torch
arena = flashboot.attach(sys.argv[1], agent=sys.argv[2])
flashboot.torch.state_dict(arena)["saved"][0] += 1
"""
    assert python(script, image.path, node.folder, ok=False).returncode == -signal.SIGSEGV
    assert flashboot.attach(image, agent=node.folder).verify() == 1


ENGINE = """
import sys, time
began = time.monotonic()
import torch, flashboot, flashboot.torch
torch.manual_seed(0)
def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
with torch.device("meta"):
    model = make()
arena = flashboot.attach(sys.argv[1], agent=sys.argv[2])
flashboot.torch.bind(model, arena)
x = torch.arange(64.0).reshape(1, 64) / 64
ready = arena.report["engine_visible_ms"]
with torch.no_grad():
    while True:
        print(model(x).numpy().tobytes().hex(), ready, flush=True)
"""


def test_an_engine_killed_in_its_forward_loop_comes_back_to_the_same_logits(node, tmp_path):
    torch.manual_seed(0)
    stock = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    image = flashboot.torch.capture(stock, tmp_path / "image")
    with torch.no_grad():
        expected = stock(torch.arange(64.0).reshape(1, 64) / 64).numpy().tobytes().hex()
    node.ask("hold", image.path)
    seen = []
    for _ in range(2):
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, image.path, node.folder], stdout=subprocess.PIPE, text=True
        )
        logits = {engine.stdout.readline().split()[0] for _ in range(5)}
        assert node.attached() == [1]
        engine.send_signal(signal.SIGKILL)
        assert engine.wait(120) == -signal.SIGKILL
        engine.stdout.close()
        node.until_attached([0])
        seen.append(logits)
    assert seen == [{expected}, {expected}]
    assert flashboot.attach(image, agent=node.folder).verify() == 1


def test_what_is_attached_outlives_its_agent(node, image):
    node.ask("hold", image.path)
    arena = flashboot.attach(image, agent=node.folder)
    node.process.kill()
    node.process.wait(120)
    node.process.stdout.close()
    assert arena.memoryview() == payload(image) and arena.verify() == 1
    with pytest.raises(errors.UnavailableError):
        flashboot.attach(image, agent=node.folder)


def test_asyncio_attaches_too(node, image):
    node.ask("hold", image.path)

    async def main():
        seen = []
        arena = await flashboot.aio.attach(image, agent=node.folder, progress=lambda *at: seen.append(at))
        await asyncio.sleep(0)
        assert arena.memoryview() == payload(image)
        assert seen[-1] == (arena.nbytes, arena.nbytes)

    asyncio.run(main())
