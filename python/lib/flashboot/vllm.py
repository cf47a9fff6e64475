"""`--load-format flashboot` for vLLM, by its own plugin interface; nothing of vLLM is changed.

The entry point `vllm.general_plugins` calls `register` in every process of an engine. The loader asks the sources that
`--model-loader-extra-config` names, and where none of them has the rank, vLLM's own loader reads the checkpoint as ever.

What is loaded is used by its stage: a `kernel-ready` image is bound to a model on the meta device, and vLLM only rebuilds what Python
keeps; an `engine-params` image is bound, and vLLM post-processes it; a `sliced` one is fed to the model's own weight loaders.
"""

import contextlib
import dataclasses

from ._engine import Boot, Options, Rank, before_update
from .errors import MismatchError

__all__ = ["register"]

FORMAT = "flashboot"

#: Arenas that were attached before the engine measured its memory, until their model takes them.
_attached = {}


def register():
    """Registers the load format; the plugin's entry point. Calling it again does nothing."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(FORMAT)(_loader())


def _loader():
    import torch
    import vllm
    from vllm.config import get_current_vllm_config
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.model_executor.utils import weights_already_processed
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from ._bind import graft, put
    from .torch import state_dict

    # Below vLLM's own loggers, so that its settings are this one's too.
    log = init_logger("vllm.flashboot")

    class FlashbootModelLoader(DefaultModelLoader):
        """vLLM's default loader, with other places that the weights may come from before the checkpoint."""

        def __init__(self, load_config):
            self.options = Options.read(load_config.model_loader_extra_config)
            # What is left to the engine's own loader is read as it would be without us.
            super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={}))
            self._arena = self._boot = None

        def get_external_weight_memory(self, vllm_config):
            """Bytes that the node agent holds on this GPU: they were in use before vLLM measured what is free.

            What is held is attached here already, and kept for `load_model`, so that what is measured is what is used.
            """
            boot = self._make_boot(vllm_config, vllm_config.model_config)
            if not self._asks_agent(boot):
                return 0
            arena = _attached.get(self._key(boot))
            if arena is None:
                arena = boot.held()
            if arena is None:
                return 0
            _attached[self._key(boot)] = arena
            return boot.external(arena)

        def _asks_agent(self, boot):
            order = self.options.order()
            named = self.options.image or self.options.object or self.options.rendezvous
            return bool(named) and "held" in order and boot.device != "cpu"

        def _key(self, boot):
            return (repr(self.options), boot.rank, boot.device)

        def download_model(self, model_config):
            """Nothing: what is needed of the checkpoint is fetched when it is its turn."""

        def load_model(self, vllm_config, model_config, prefix=""):
            boot = self._boot = self._make_boot(vllm_config, model_config)
            # Asked already, before memory was measured: the skips were said then.
            arena = _attached.pop(self._key(boot)) if self._key(boot) in _attached else boot.arena()
            model = None
            if arena is not None:
                model = self._of_arena(boot, arena, vllm_config, model_config, prefix)
            if model is None:
                # The checkpoint's turn; an arena that did not fit is let go first.
                self._arena = arena = None
                model = super().load_model(vllm_config, model_config, prefix)
            if self.options.stage == "kernel-ready" and (self.options.write_image or self.options.publish):
                _refuse_unseen(model)
                boot.wrote(model, "kernel-ready", kernel=_kernel(model, vllm_config), model_config=model_config.hf_config)
            self._boot = None
            return model

        def _of_arena(self, boot, arena, vllm_config, model_config, prefix):
            text_config = model_config.hf_config
            fits = boot.fits(
                arena,
                model_type=getattr(text_config, "model_type", None),
                # Compared once there is a model that says which kernels it takes.
                kernel=None if arena.stage != "kernel-ready" else arena.fingerprint["kernel"],
                bindable=not boot.rank.draft,
            )
            if not fits:
                return None
            if arena.stage == "sliced":
                self._arena = arena
                try:
                    # Every tensor is copied out of it.
                    model = super().load_model(vllm_config, model_config, prefix)
                finally:
                    self._arena = None
                boot.fed(arena)
                return model
            with _undone(vllm_config) as undo:
                try:
                    model = self._bound(boot, arena, vllm_config, model_config, prefix)
                except MismatchError as e:
                    undo()
                    boot.mismatch(str(e), cause=e)
                    return None
            boot.stays(arena)
            return model

        def _bound(self, boot, arena, vllm_config, model_config, prefix):
            device = vllm_config.device_config.device if self.load_config.device is None else self.load_config.device
            device, ready = torch.device(device), arena.stage == "kernel-ready"
            with set_default_torch_dtype(model_config.dtype):
                with torch.device("meta"):
                    model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                if _quantises_while_loading(model):
                    raise MismatchError("bind: the model's weights are quantised while they are loaded, and these are parameters", "bind")
                if ready:
                    _refuse_unseen(model)
                    kernel = _kernel(model, vllm_config)
                    if kernel != arena.fingerprint["kernel"]:
                        raise MismatchError(
                            f"bind: the image is for kernels {arena.fingerprint['kernel']}, here are {kernel}", "bind"
                        )
                    graft(model, arena)
                put(model, arena)
                self._written(model, boot, model_config)
                with weights_already_processed() if ready else contextlib.nullcontext():
                    process_weights_after_loading(model, model_config, device)
            return model.eval()

        def _written(self, model, boot, model_config):
            boot.wrote(model, "engine-params", model_config=model_config.hf_config)

        def get_all_weights(self, model_config, model):
            """The arena's tensors under the checkpoint's names; without one, the checkpoint's."""
            if self._arena is None:
                yield from super().get_all_weights(model_config, model)
            else:
                yield from state_dict(self._arena).items()

        def load_weights(self, model, model_config):
            """Loads into a model that is there: a new one, or, asked by the engine, one that serves."""
            if self._boot is None:
                before_update("load_weights")
            super().load_weights(model, model_config)
            if self._boot is not None:
                self._written(model, self._boot, model_config)

        def _make_boot(self, vllm_config, model_config):
            config = get_current_vllm_config() if vllm_config is None else vllm_config
            return Boot(
                self.options,
                engine=("vllm", vllm.__version__),
                model=model_config.model,
                rank=_rank(config, model_config),
                device=_device(current_platform),
                writes=_writes(config),
                log=log,
            )

    return FlashbootModelLoader


def _device(platform):
    """Where arenas are made."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if platform.is_cuda() else "cpu"


def _rank(vllm_config, model_config):
    from vllm.distributed import get_dp_group, get_pp_group, get_tensor_model_parallel_rank

    parallel, spec = vllm_config.parallel_config, vllm_config.speculative_config
    pp, tp = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    rank = {"pp": get_pp_group().rank_in_group, "tp": get_tensor_model_parallel_rank()}
    world = (pp, tp, 1, 1)
    if parallel.enable_expert_parallel:
        # Experts are spread over the tensor- and the data-parallel ranks; without them the data-parallel ones are alike.
        dp = get_dp_group().rank_in_group
        rank |= {"ep": dp * tp + rank["tp"], "dp": dp}
        world = (pp, tp, parallel.data_parallel_size * tp, parallel.data_parallel_size)
    return Rank(**rank, world=world, draft=spec is not None and model_config is spec.draft_model_config)


def _writes(vllm_config):
    """Settings under which vLLM changes its weights after they are loaded."""
    found = []
    if vllm_config.parallel_config.enable_eplb:
        found.append("--enable-eplb")
    if vllm_config.weight_transfer_config is not None:
        found.append("--weight-transfer-config")
    model_config = vllm_config.model_config
    if model_config is not None and model_config.enable_sleep_mode:
        found.append("--enable-sleep-mode")
    offload = getattr(vllm_config, "offload_config", None)
    if getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0):
        found.append("--cpu-offload-gb")
    if _quantises_online(vllm_config.quant_config):
        found.append("--quantization (online)")
    return found


def _quantises_online(quant_config):
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    return isinstance(quant_config, OnlineQuantizationConfig) or isinstance(
        getattr(quant_config, "online_quantization_config", None), OnlineQuantizationConfig
    )


def _quantises_while_loading(model):
    return any(getattr(getattr(m, "quant_method", None), "uses_meta_device", False) for m in model.modules())


def _methods(model):
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            yield name, method


def _refuse_unseen(model):
    """Kernels that keep weights where no name finds them: an image of what they processed would lack those."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        raise MismatchError("kernel-ready: the CPU's kernels keep packed weights that have no name; use stage engine-params", "bind")
    wrong = sorted({type(method).__name__ for _, method in _methods(model) if not method.supports_pre_processed_weights})
    if wrong:
        raise MismatchError(
            f"kernel-ready: {', '.join(wrong)} cannot take weights that were processed before; use stage engine-params", "bind"
        )


def _kernel(model, vllm_config):
    """What processed weights are good for: the device, the classes that processed them and what they chose."""
    import torch
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    chosen = set()
    for _, method in _methods(model):
        backend = getattr(method, "unquantized_backend", None) or getattr(method, "fp8_backend", None)
        kernel = getattr(method, "kernel", None)
        parts = [type(method).__name__, str(getattr(backend, "value", backend) or ""), type(kernel).__name__ if kernel else ""]
        chosen.add(":".join(part for part in parts if part))
    return {
        "compute_capability": current_platform.device_type if capability is None else f"{capability.major}.{capability.minor}",
        "backends": sorted(chosen),
        "torch": torch.__version__,
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
    }


@contextlib.contextmanager
def _undone(vllm_config):
    """Gives what forgets a model that was begun: vLLM keeps its layers by name, and its rotary tables for the next one."""
    compilation = vllm_config.compilation_config
    kept = [
        (name, value, value.copy())
        for name in ("static_forward_context", "static_all_moe_layers")
        if isinstance(value := getattr(compilation, name, None), (dict, list, set))
    ]

    def undo():
        for _, value, before in kept:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        _forget_tables()

    yield undo


def _forget_tables():
    """Rotary tables on the meta device: a later model would be given them."""
    from vllm.model_executor.layers import rotary_embedding

    tables = getattr(rotary_embedding, "_ROPE_DICT", {})
    for key in [key for key, module in tables.items() if any(b.is_meta for b in module.buffers())]:
        del tables[key]
