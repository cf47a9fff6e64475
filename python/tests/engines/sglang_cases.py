"""SGLang's own code with our load format, on the CPU, in one process: `python sglang_cases.py FOLDER`. Prints what became of each claim.

Nothing of SGLang is replaced: its plugins are loaded by their entry point and hook, its `get_model_loader` chooses the loader, its model
classes are built and its weight loaders run. What it lacks here is a scheduler and a forward pass: its kernels are not there.
"""

import functools
import logging
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1")

import torch
from common import Cases, bits, checkpoints, differences, folder_of, raising, shares, sliced

import flashboot
from flashboot import _engine, errors

folder = folder_of(sys.argv)
models = checkpoints(folder)
cases = Cases()

import sglang
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_loader import get_model_loader
from sglang.srt.model_loader.loader import BaseModelLoader, _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


class Said(logging.Handler):
    """What was logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


said = Said()
logging.getLogger("sglang.flashboot").addHandler(said)
logging.getLogger("sglang.flashboot").setLevel(logging.INFO)

args = ServerArgs(model_path=str(models["llama"]), device="cpu", skip_tokenizer_init=True, load_format="flashboot")
publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
initialize_model_parallel(backend="gloo")


def parts(name, extra=None, load_format="flashboot"):
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra or {})
    return ModelConfig(model_path=str(models[name]), dtype="bfloat16"), load, DeviceConfig("cpu")


def load(name, extra=None, load_format="flashboot"):
    model_config, load_config, device_config = parts(name, extra, load_format)
    loader = get_model_loader(load_config, model_config)
    return loader, loader.load_model(model_config=model_config, device_config=device_config)


@functools.cache
def stock(name):
    """A model as SGLang's default loader gives it."""
    return load(name, load_format="auto")[1]


def loaded(name):
    """A model as SGLang's default loader leaves it before post-processing."""
    model_config, load_config, _ = parts(name, load_format="auto")
    loader = get_model_loader(load_config, model_config)
    with set_default_torch_dtype(model_config.dtype):
        model = _initialize_model(model_config, load_config, _get_quantization_config(model_config, load_config))
        loader.load_weights_only(model, loader._get_all_weights(model_config, model), torch.device("cpu"))
    return model


@cases("the plugin is found by its entry point and is one more load format")
def _():
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES

    assert LOAD_FORMAT_CHOICES.count("flashboot") == 1
    loader = get_model_loader(LoadConfig(load_format="flashboot"))
    assert isinstance(loader, BaseModelLoader) and type(loader).__name__ == "FlashbootModelLoader", loader
    assert loader.preloaded_weights_bytes == 0


for name in models:

    @cases(f"{name}: the checkpoint is loaded by SGLang's own loader, and an image of it is written")
    def _():
        _, model = load(name, {"write_image": str(folder / f"{name}.image")})
        wrong, count = differences(stock(name), model)
        assert not wrong and count > 12, (wrong, count)
        image = flashboot.Image(folder / f"{name}.image")
        assert image.stage == "engine-params" and image.fingerprint["model_type"] == name
        assert image.fingerprint["engine"] == {"name": "sglang", "version": sglang.__version__}

    @cases(f"{name}: an image has every parameter that the default loader has filled, byte for byte")
    def _():
        plain = loaded(name)
        held = flashboot.torch.state_dict(flashboot.load(folder / f"{name}.image"))
        for key, parameter in plain.named_parameters():
            assert torch.equal(bits(held[key]), bits(parameter)), key

    @cases(f"{name}: a bound image has the state of the default loader, byte for byte, and is the arena's memory")
    def _():
        again = folder / f"{name}.again"
        extra = {"image": str(folder / f"{name}.image"), "sources": ["image"], "write_image": str(again)}
        loader, model = load(name, extra)
        wrong, _ = differences(stock(name), model)
        assert not wrong, wrong
        assert any(shares(model, _engine._BOUND[-1].arena))
        assert loader.preloaded_weights_bytes == 0, "it is this process's own memory"
        # Before post-processing, too: what was written then is the same image.
        assert flashboot.Image(again).id == flashboot.Image(folder / f"{name}.image").id

    @cases(f"{name}: a sliced image is fed to the model's own weight loaders, once")
    def _():
        sliced(models[name], folder / f"{name}.sliced")
        bound = len(_engine._BOUND)
        loader, model = load(name, {"image": str(folder / f"{name}.sliced"), "sources": ["image"]})
        wrong, _ = differences(stock(name), model)
        assert not wrong, wrong
        assert loader._arena is None and len(_engine._BOUND) == bound, "the arena was let go"

    @cases(f"{name}: a kernel-ready image is bound and needs no post-processing")
    def _():
        ready = str(folder / f"{name}.ready")
        load(name, {"write_image": ready, "stage": "kernel-ready"})
        assert flashboot.Image(ready).stage == "kernel-ready"
        _, model = load(name, {"image": ready, "sources": ["image"]})
        wrong, _ = differences(stock(name), model)
        assert not wrong, wrong
        assert all(shares(model, _engine._BOUND[-1].arena))


@cases("every skipped source is logged with its reason, and the checkpoint is loaded")
def _():
    said.lines.clear()
    nowhere = str(folder / "nowhere")
    _, model = load("llama", {"sources": ["peer", "image", "checkpoint"], "image": nowhere})
    assert not differences(stock("llama"), model)[0]
    assert any("passed over peer: rendezvous does not say where" in line for line in said.lines), said.lines
    assert any("passed over image" in line and nowhere in line for line in said.lines), said.lines


@cases("another model's image is refused, or the checkpoint is loaded where that was allowed")
def _():
    extra = {"image": str(folder / "qwen3_moe.image"), "sources": ["image", "checkpoint"]}
    with raising(errors.MismatchError, "qwen3_moe", "llama"):
        load("llama", extra)
    _, model = load("llama", {**extra, "on_mismatch": "checkpoint"})
    assert not differences(stock("llama"), model)[0]


@cases("what fails on the meta device leaves nothing behind that a load from the checkpoint would meet")
def _():
    flashboot.torch.capture(
        torch.nn.Linear(2, 2), folder / "other.image", engine=("sglang", sglang.__version__),
        model_config='{"model_type": "llama"}',
    )
    extra = {"image": str(folder / "other.image"), "sources": ["image", "checkpoint"], "on_mismatch": "checkpoint"}
    _, model = load("llama", extra)
    assert not differences(stock("llama"), model)[0]


@cases("a published model is a seed that another process boots from, until an update in place retires it")
def _():
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    _engine.released()
    load("llama", {"publish": True, "embed": "127.0.0.1:0", "model": "published"})
    seed = _engine._BOUND[-1].seed
    assert seed is not None and seed.serving
    _, other = load("llama", {"rendezvous": seed.rendezvous, "model": "published", "sources": ["peer"]})
    assert not differences(stock("llama"), other)[0]
    assert _engine._BOUND[-1].arena.report["source"] == "peer"
    # Every update of SGLang's asks this first.
    WeightUpdater._assert_weight_cache_inactive(None, "update_weights_from_disk")
    assert not seed.serving
    _engine.released()


@cases("an update in place of memory that the agent holds is refused")
def _():
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    _engine._BOUND.append(_engine._Bound(None, True, logging.getLogger()))
    with raising(errors.NotPermittedError, "update_weights_from_tensor", "attach=private"):
        WeightUpdater._assert_weight_cache_inactive(None, "update_weights_from_tensor")
    _engine.released()


@cases("settings under which SGLang writes its weights are named, and refused")
def _():
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(enable_eplb=True), raising(errors.NotPermittedError, "--enable-eplb", "attach=private"):
        load("llama", {"sources": ["held", "image"], "image": str(folder / "llama.image")})


@cases("a key that is not known is refused by name")
def _():
    with raising(errors.InvalidError, "'sorces'", "sources"):
        get_model_loader(LoadConfig(load_format="flashboot", model_loader_extra_config={"sorces": []}))


_engine.released()
cases.done()
