"""The package itself: what it needs, what it promises to type checkers, how it fails, how it blocks."""

import ast
import asyncio
import importlib
import inspect
import os
import pickle
import threading
import time
from pathlib import Path

import pytest

import flashboot
from flashboot import errors


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    import torch

    import flashboot.torch

    model = torch.nn.Linear(1024, 8192)  # 32 MiB: three blocks
    return flashboot.torch.capture(model, tmp_path_factory.mktemp("package") / "image")


def test_the_package_imports_without_torch_and_without_a_gpu(python):
    script = """
import sys
for name in ("torch", "numpy", "safetensors", "transformers"):
    sys.modules[name] = None
import flashboot, flashboot.aio, flashboot.safetensors
libraries = open("/proc/self/maps").read()
assert "libcuda" not in libraries and "libibverbs" not in libraries
print(flashboot.__version__)
"""
    assert python(script).stdout.strip() == flashboot.__version__


def test_every_kind_has_a_class_with_its_parts():
    assert len(errors.BY_KIND) == 15
    for kind, cls in errors.BY_KIND.items():
        e = errors._made(kind, "op: what", "op", "what", None, 3, 12, "do")
        assert type(e) is cls and isinstance(e, flashboot.FlashbootError)
        assert (str(e), e.kind, e.op, e.detail, e.chunk, e.code, e.remedy) == (
            "op: what", kind, "op", "what", 3, 12, "do",
        )
        again = pickle.loads(pickle.dumps(e))
        assert (type(again), str(again), again.remedy) == (cls, "op: what", "do")


def test_an_error_says_the_call_and_what_to_do(tmp_path):
    with pytest.raises(errors.UnavailableError) as caught:
        flashboot.Image(tmp_path / "nowhere")
    assert caught.value.op == "open" and caught.value.remedy
    with pytest.raises(errors.UnavailableError):
        flashboot.load(tmp_path / "nowhere")
    with pytest.raises(errors.InvalidError, match="nothing was named"):
        flashboot.load()
    with pytest.raises(errors.CorruptError):
        (tmp_path / "x.safetensors").write_bytes(b"not a header at all")
        flashboot.load(tmp_path / "x.safetensors")


def test_settings_that_cannot_be_are_refused_by_name(image):
    for refused, said in [
        ({"config": {"load": {"nonsense": 1}}}, "nonsense"),
        ({"device": "moon"}, "moon"),
        ({"transport": "pigeon"}, "pigeon"),
        ({"sources": ["cellar"]}, "cellar"),
        ({"rank": "target-9-9-9-9"}, "target-9-9-9-9"),
        ({"rendezvous": "no address"}, "no address"),
    ]:
        with pytest.raises(errors.InvalidError) as caught:
            flashboot.load(image.path, **refused)
        assert said in str(caught.value), refused


def test_another_image_than_the_one_named_is_a_mismatch(image):
    with pytest.raises(errors.MismatchError):
        flashboot.load(image.path, image_id="0" * 64)
    assert flashboot.load(image.path, image_id=image.id).image_id == image.id


def test_a_gpu_that_is_not_there_is_unavailable(image):
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(errors.UnavailableError) as caught:
        flashboot.load(image.path, device="cuda:0")
    assert caught.value.remedy


def test_doctor_reports_every_transport():
    found = flashboot.doctor()
    assert [t["name"] for t in found["transports"]] == ["imex", "ipc", "rdma", "tcp"]
    assert all(t["ready"] or t["reason"] for t in found["transports"])


def test_progress_grows_to_the_whole_and_what_it_raises_ends_the_call(image):
    seen = []
    arena = flashboot.load(image.path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (arena.nbytes, arena.nbytes)
    assert seen == sorted(seen)

    class Enough(Exception):
        pass

    def stop(done, total):
        raise Enough

    with pytest.raises(Enough):
        flashboot.load(image.path, progress=stop)
    with pytest.raises(Enough):
        image.verify(progress=stop)
    seen.clear()
    assert image.verify(progress=lambda done, total: seen.append((done, total)))["ok"]
    assert seen[-1] == (image.nbytes(), image.nbytes())


def test_other_threads_run_while_a_call_blocks(image):
    """A call that kept the interpreter's lock could not see another thread end."""
    waiting, entered = threading.Event(), threading.Event()

    def progress(done, total):
        # Called in the middle of the call, on its own thread: only another thread can set this.
        waiting.set()
        assert entered.wait(60)

    def other():
        waiting.wait(60)
        entered.set()

    thread = threading.Thread(target=other)
    thread.start()
    image.verify(progress=progress)
    thread.join()
    # And while it waits for a peer that never comes.
    ended = []
    thread = threading.Thread(target=lambda: ended.append(_fails_to_find_anybody()))
    thread.start()
    for _ in range(3):
        time.sleep(0.01)
    thread.join()
    assert isinstance(ended[0], flashboot.FlashbootError)


def _fails_to_find_anybody():
    try:
        flashboot.clone("127.0.0.1:1", model="nobody", patience=0.3)
    except flashboot.FlashbootError as e:
        return e


def test_asyncio_has_the_same_calls(image):
    async def main():
        seen = []
        arena = await flashboot.aio.load(image.path, progress=lambda done, total: seen.append(done))
        await asyncio.sleep(0)
        assert seen[-1] == arena.nbytes
        served = await flashboot.aio.seed(image, embed="127.0.0.1:0", model="m")
        with served:
            cloned = await flashboot.aio.clone(served.rendezvous, model="m")
            assert cloned.memoryview() == arena.memoryview()
        with pytest.raises(errors.UnavailableError):
            await flashboot.aio.load("/nowhere/at/all")
        assert "checks" in await flashboot.aio.doctor()

    asyncio.run(main())


def test_a_process_may_fork_between_calls_and_a_seed_stays_with_its_parent(image):
    with flashboot.seed(image, embed="127.0.0.1:0") as seed:
        child = os.fork()
        if child == 0:
            # Only the exit code tells: pytest's own clean-up is the parent's.
            code = 1
            try:
                flashboot.load(image.path).verify()
                if not seed.serving:
                    try:
                        seed.stop()
                    except errors.InvalidError:
                        code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert seed.serving
    assert not seed.serving
    seed.stop()


def test_a_seed_without_a_service_is_refused(image):
    with pytest.raises(errors.InvalidError, match="neither a service"):
        flashboot.seed(image)
    with pytest.raises(errors.InvalidError, match="lease"):
        flashboot.seed(image, embed="127.0.0.1:0", lease=0.1)


def test_an_interrupt_ends_a_call_that_waits(python):
    script = """
import _thread, threading, time, flashboot
threading.Timer(0.5, _thread.interrupt_main).start()
began = time.monotonic()
try:
    flashboot.clone("127.0.0.1:1", model="nobody", patience=200.0)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - began < 100)
"""
    assert python(script).stdout.strip() == "interrupted True"


MODULES = ["_api", "aio", "torch", "safetensors", "_flashboot"]


@pytest.mark.parametrize("module", MODULES)
def test_stubs_say_what_is_there(module):
    """Every public name of a stub exists with the same parameters, and none is missing."""
    package = Path(flashboot.__file__).parent
    assert (package / "py.typed").exists()
    stub = ast.parse((package / f"{module}.pyi").read_text())
    there = importlib.import_module(f"flashboot.{module}")
    typed = {}
    for node in stub.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            typed[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            assert hasattr(there, node.target.id), node.target.id
            typed[node.target.id] = None
        elif isinstance(node, ast.ClassDef):
            typed[node.name] = node
            methods = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
            for method in methods:
                assert hasattr(getattr(there, node.name), method.name), f"{node.name}.{method.name}"
                typed[f"{node.name}.{method.name}"] = method
    public = getattr(there, "__all__", None) or [
        name for name, value in vars(there).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("flashboot")
        and (inspect.isclass(value) or callable(value))
    ]
    for name in public:
        assert name in typed or name in {"SafetensorError", "Tensor"}, f"{module}.pyi lacks {name}"
    for name, node in typed.items():
        value = there
        for part in name.split("."):
            value = inspect.getattr_static(value, part) if inspect.isclass(value) else getattr(value, part)
        if module == "_flashboot" or node is None or isinstance(node, ast.ClassDef) or not inspect.isfunction(value):
            continue
        arguments = node.args
        vararg = [arguments.vararg] if arguments.vararg else []
        stubbed = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *vararg, *arguments.kwonlyargs)]
        assert stubbed == list(inspect.signature(value).parameters), name
