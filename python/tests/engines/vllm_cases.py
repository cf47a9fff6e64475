"""vLLM's own code with our load format, on the CPU, in one process: `python vllm_cases.py FOLDER`. Prints what became of each claim.

Its plugins are loaded by their entry point, its `get_model_loader` chooses the loader, its model classes are built and its weight
loaders run; one compiled function that packs experts for a CPU is not in the wheel, and has a stand-in that leaves them as they are. What it lacks here is a worker, a scheduler and a forward pass: the wheel has no kernels for a CPU.
"""

import functools
import logging
import os
import sys

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="INFO", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")

import torch
from common import SIZES, Cases, bits, checkpoints, differences, folder_of, raising, shares, sliced

import flashboot
from flashboot import _engine, errors

folder = folder_of(sys.argv)
models = checkpoints(folder)
cases = Cases()

from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype


def leaves_them(weight, isa):
    """In the place of the CPU's packing of experts, which is compiled code that PyPI's wheel lacks: the one stand-in there is."""
    return weight


cpu_moe.cpu_prepack_moe_weight = leaves_them


class Said(logging.Handler):
    """What was logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


said = Said()


def config(name, extra=None, load_format="flashboot", **more):
    model = ModelConfig(model=str(models[name]), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra or {})
    return VllmConfig(model_config=model, load_config=load, device_config=DeviceConfig(device="cpu"), **more)


def load(name, extra=None, load_format="flashboot", **more):
    made = config(name, extra, load_format, **more)
    with set_current_vllm_config(made):
        loader = get_model_loader(made.load_config)
        return loader, loader.load_model(vllm_config=made, model_config=made.model_config)


@functools.cache
def stock(name):
    """A model as vLLM's default loader gives it."""
    return load(name, load_format="auto")[1]


def loaded(name, load_format="auto"):
    """A model as vLLM's default loader leaves it before post-processing."""
    made = config(name, load_format=load_format)
    with set_current_vllm_config(made), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=made, model_config=made.model_config)
        get_model_loader(made.load_config).load_weights(model, made.model_config)
    return model


# Of a model with experts, for which vLLM makes one more group.
with set_current_vllm_config(config("qwen3_moe", load_format="auto")):
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    initialize_model_parallel(1, 1)


@cases("the plugin is found by its entry point and is one more load format")
def _():
    load_general_plugins()
    load_general_plugins()
    loader = get_model_loader(LoadConfig(load_format="flashboot"))
    assert isinstance(loader, BaseModelLoader) and type(loader).__name__ == "FlashbootModelLoader", loader
    assert current_platform.is_cpu()
    log = logging.getLogger("vllm.flashboot")
    log.addHandler(said)


for name in list(models):

    @cases(f"{name}: the checkpoint is loaded by vLLM's own loader, and an image of it is written")
    def _():
        _, model = load(name, {"write_image": str(folder / f"{name}.image")})
        wrong, count = differences(stock(name), model)
        assert not wrong and count > 12, (wrong, count)
        image = flashboot.Image(folder / f"{name}.image")
        import vllm

        assert image.stage == "engine-params" and image.fingerprint["model_type"] == name
        assert image.fingerprint["engine"] == {"name": "vllm", "version": vllm.__version__}

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
        _, model = load(name, extra)
        wrong, _ = differences(stock(name), model)
        assert not wrong, wrong
        assert any(shares(model, _engine._BOUND[-1].arena))
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

    @cases(f"{name}: both models give the same outputs of every linear layer")
    def _():
        from vllm.model_executor.layers.linear import LinearBase

        _, model = load(name, {"image": str(folder / f"{name}.image")})
        linear = [(a, b) for a, b in zip(stock(name).modules(), model.modules()) if isinstance(a, LinearBase)]
        assert linear
        for a, b in linear:
            x = torch.randn(3, a.input_size, dtype=torch.bfloat16)
            ours, theirs = (layer.quant_method.apply(layer, x) for layer in (b, a))
            assert torch.equal(ours, theirs)


@cases("every skipped source is logged with its reason, and the checkpoint is loaded")
def _():
    said.lines.clear()
    nowhere = str(folder / "nowhere")
    _, model = load("llama", {"sources": ["peer", "image", "checkpoint"], "image": nowhere})
    assert not differences(stock("llama"), model)[0]
    assert any("passed over peer: rendezvous does not say where" in line for line in said.lines), said.lines
    assert any("passed over image" in line and nowhere in line for line in said.lines), said.lines


@cases("without the checkpoint among the sources nothing is loaded when none has it")
def _():
    with raising(flashboot.FlashbootError, "nowhere"):
        load("llama", {"sources": ["image"], "image": str(folder / "nowhere")})


@cases("another model's image is refused, or the checkpoint is loaded where that was allowed")
def _():
    extra = {"image": str(folder / "qwen3_moe.image"), "sources": ["image", "checkpoint"]}
    with raising(errors.MismatchError, "qwen3_moe", "llama"):
        load("llama", extra)
    said.lines.clear()
    _, model = load("llama", {**extra, "on_mismatch": "checkpoint"})
    assert not differences(stock("llama"), model)[0]
    assert any("on_mismatch=checkpoint" in line for line in said.lines), said.lines


@cases("an image of other sizes fails by name, and leaves nothing behind that a load from the checkpoint would meet")
def _():
    from transformers import LlamaConfig

    wider = folder / "wider"
    LlamaConfig(**{**SIZES, "intermediate_size": 96}, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]).save_pretrained(wider)
    models["wider"] = wider
    extra = {"image": str(folder / "llama.image"), "sources": ["image"]}
    with raising(errors.MismatchError, "gate_up_proj.weight"):
        load("wider", extra)
    made = config("llama", {**extra, "image": str(folder / "other.image"), "on_mismatch": "checkpoint", "sources": ["image", "checkpoint"]})
    # Of the right engine and family, and not the model's shapes.
    flashboot.torch.capture(
        torch.nn.Linear(2, 2), folder / "other.image", engine=("vllm", __import__("vllm").__version__),
        model_config='{"model_type": "llama"}',
    )
    with set_current_vllm_config(made):
        model = get_model_loader(made.load_config).load_model(vllm_config=made, model_config=made.model_config)
    assert not differences(stock("llama"), model)[0]


@cases("another engine's image is refused by name and version")
def _():
    flashboot.torch.capture(torch.nn.Linear(2, 2), folder / "torch.image")
    with raising(errors.MismatchError, "torch", "vllm", "write_image"):
        load("llama", {"image": str(folder / "torch.image"), "sources": ["image"]})


@cases("a published model is a seed that another process boots from")
def _():
    _engine.released()
    _, model = load("llama", {"publish": True, "embed": "127.0.0.1:0", "model": "published"})
    seed = _engine._BOUND[-1].seed
    assert seed is not None and seed.serving
    clone = {"rendezvous": seed.rendezvous, "model": "published", "sources": ["peer"]}
    _, other = load("llama", clone)
    assert not differences(stock("llama"), other)[0]
    assert _engine._BOUND[-1].arena.report["source"] == "peer"
    # And what is bound is served on, as it lies.
    _, third = load("llama", {**clone, "publish": True, "model": "published"})
    again = _engine._BOUND[-1].seed
    assert again is not None and again.serving, said.lines[-3:]


@cases("an update in place retires what is served")
def _():
    made = config("llama", {"publish": True, "embed": "127.0.0.1:0"})
    with set_current_vllm_config(made):
        loader = get_model_loader(made.load_config)
        model = loader.load_model(vllm_config=made, model_config=made.model_config)
        seed = _engine._BOUND[-1].seed
        assert seed.serving
        loader.load_weights(model, made.model_config)
        assert not seed.serving and _engine._BOUND[-1].seed is None
    _engine.released()


@cases("settings under which vLLM writes its weights are named, and refused")
def _():
    made = config("llama", {"publish": True, "embed": "127.0.0.1:0"})
    made.model_config.enable_sleep_mode = True
    with raising(errors.NotPermittedError, "--enable-sleep-mode"), set_current_vllm_config(made):
        get_model_loader(made.load_config).load_model(vllm_config=made, model_config=made.model_config)
    made = config("llama", {"sources": ["held", "image"], "image": str(folder / "llama.image")})
    made.parallel_config.enable_eplb = True
    with raising(errors.NotPermittedError, "--enable-eplb", "attach=private"), set_current_vllm_config(made):
        get_model_loader(made.load_config).load_model(vllm_config=made, model_config=made.model_config)


@cases("a key that is not known is refused by name")
def _():
    with raising(errors.InvalidError, "'sorces'", "sources"):
        get_model_loader(LoadConfig(load_format="flashboot", model_loader_extra_config={"sorces": []}))


@cases("kernel-ready images are refused where a CPU's kernels keep weights without a name")
def _():
    with raising(errors.MismatchError, "kernel-ready", "engine-params"):
        load("llama", {"write_image": str(folder / "ready.image"), "stage": "kernel-ready"})


@cases("no memory is external where nobody holds any")
def _():
    made = config("llama", {"image": str(folder / "llama.image")})
    with set_current_vllm_config(made):
        assert get_model_loader(made.load_config).get_external_weight_memory(made) == 0


_engine.released()
cases.done()
