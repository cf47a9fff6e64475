"""`--load-format flashboot` for SGLang, by its own plugin interface; nothing of SGLang is changed.

The entry point `sglang.srt.plugins` calls `register` in every process of an engine. The load format is one more choice, and SGLang is
given the loader's class for it, which it takes as it is. The loader asks the sources that `--model-loader-extra-config` names, and
where none of them has the rank, SGLang's own loader reads the checkpoint as ever.

What is loaded is used by its stage: a `kernel-ready` image is bound to a model on the meta device and is ready; an `engine-params`
image is bound, and SGLang post-processes it; a `sliced` one is fed to the model's own weight loaders.
"""

import dataclasses

from ._engine import Boot, Options, Rank, before_update
from .errors import MismatchError

__all__ = ["register"]

FORMAT = "flashboot"
_VERIFY = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
#: Every update of weights in place, and memory that is released, asks these first.
_UPDATES = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater._assert_weight_cache_inactive",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._assert_weight_cache_inactive",
)


def register():
    """Registers the load format; the plugin's entry point. Calling it again does nothing."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if FORMAT in LOAD_FORMAT_CHOICES:
        return
    add_load_format_choices([FORMAT])
    HookRegistry.register(_VERIFY, _verify, HookType.AROUND)


def _verify(verify, config):
    """SGLang knows load formats by an enumeration; a class it takes as the loader."""
    if isinstance(config.load_format, str) and config.load_format.lower() == FORMAT:
        config.load_format = loader()
    return verify(config)


def _before_update(updater, op, *_, **__):
    before_update(op)


_made = []


def loader():
    """The loader's class, made when SGLang is there."""
    if not _made:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        _made.append(_loader())
        # Only where weights are loaded: what these are in is much to import.
        for target in _UPDATES:
            HookRegistry.register(target, _before_update, HookType.BEFORE)
        HookRegistry.apply_hooks()
    return _made[0]


def _loader():
    import logging

    import sglang
    import torch
    from sglang.srt.model_loader import loader as theirs
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    from ._bind import graft, put
    from .torch import state_dict

    log = logging.getLogger("sglang.flashboot")

    class FlashbootModelLoader(theirs.DefaultModelLoader):
        """SGLang's default loader, with other places that the weights may come from before the checkpoint."""

        def __init__(self, load_config):
            self.options = Options.read(load_config.model_loader_extra_config)
            # What is left to the engine's own loader is read as it would be without us.
            super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={}))
            #: Bytes that the node agent holds: they were in use before SGLang measured what is free.
            self.preloaded_weights_bytes = 0
            self._arena = self._boot = None

        def download_model(self, model_config):
            """Nothing: what is needed of the checkpoint is fetched when it is its turn."""

        def load_model(self, *, model_config, device_config):
            self.preloaded_weights_bytes = 0
            boot = self._boot = Boot(
                self.options,
                engine=("sglang", sglang.__version__),
                model=model_config.model_path,
                rank=_rank(model_config),
                device=_device(device_config),
                writes=_writes(),
                log=log,
            )
            arena, model = boot.arena(), None
            if arena is not None:
                model = self._of_arena(boot, arena, model_config, device_config)
            if model is None:
                # The checkpoint's turn; an arena that did not fit is let go first.
                arena = None
                model = super().load_model(model_config=model_config, device_config=device_config)
            if self.options.stage == "kernel-ready" and (self.options.write_image or self.options.publish):
                _refuse_unseen(model, model_config)
                boot.wrote(model, "kernel-ready", kernel=_kernel(model, device_config), model_config=model_config.hf_config)
            self._boot = None
            return model

        def _of_arena(self, boot, arena, model_config, device_config):
            fits = boot.fits(
                arena,
                model_type=getattr(model_config.hf_config, "model_type", None),
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
                    model = super().load_model(model_config=model_config, device_config=device_config)
                finally:
                    self._arena = None
                boot.fed(arena)
                return model
            try:
                model = self._bound(boot, arena, model_config, device_config)
            except MismatchError as e:
                _forget_tables()
                boot.mismatch(str(e), cause=e)
                return None
            self.preloaded_weights_bytes = boot.external(arena)
            boot.stays(arena)
            return model

        def _bound(self, boot, arena, model_config, device_config):
            quant_config = theirs._get_quantization_config(model_config, self.load_config)
            with set_default_torch_dtype(model_config.dtype):
                with torch.device("meta"):
                    model = theirs._initialize_model(model_config, self.load_config, quant_config)
                if arena.stage == "kernel-ready":
                    _refuse_unseen(model, model_config)
                    kernel = _kernel(model, device_config)
                    if kernel != arena.fingerprint["kernel"]:
                        raise MismatchError(
                            f"bind: the image is for kernels {arena.fingerprint['kernel']}, here are {kernel}", "bind"
                        )
                    graft(model, arena)
                    put(model, arena)
                else:
                    put(model, arena)
                    self._written(model, boot, model_config)
                    self.postprocess_weights(model, torch.device(device_config.device))
            return model.eval()

        def _written(self, model, boot, model_config):
            boot.wrote(model, "engine-params", model_config=model_config.hf_config)

        def _get_all_weights(self, model_config, model):
            """The arena's tensors under the checkpoint's names; without one, the checkpoint's."""
            self._model_config = model_config
            if self._arena is None:
                yield from super()._get_all_weights(model_config, model)
            else:
                yield from state_dict(self._arena).items()

        def load_weights_and_postprocess(self, model, weights, target_device):
            """Loads into a model that is there: a new one, or, asked by the engine, one that serves."""
            if self._boot is None:
                before_update("load_weights")
            self.load_weights_only(model, weights, target_device)
            if self._boot is not None:
                self._written(model, self._boot, self._model_config)
            self.postprocess_weights(model, target_device)

    return FlashbootModelLoader


def _device(device_config):
    """Where arenas are made."""
    if device_config.device_type != "cuda":
        return "cpu"
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def _rank(model_config):
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return Rank(
        pp=parallel.pp_rank,
        tp=parallel.tp_rank,
        ep=parallel.moe_ep_rank,
        world=(parallel.pp_size, parallel.tp_size, parallel.moe_ep_size, 1),
        draft=bool(getattr(model_config, "is_draft_model", False)),
    )


def _writes():
    """Settings under which SGLang changes its weights, or moves them, after they are loaded: as a person gives them."""
    from sglang.srt.runtime_context import get_exec, get_model

    run, model = get_exec(), get_model()
    settings = {
        "--enable-eplb": run.moe.enable_eplb,
        "--enable-memory-saver": run.features.enable_memory_saver,
        "--enable-weights-cpu-backup": run.features.enable_weights_cpu_backup,
        "--cpu-offload-gb": run.offload.cpu_offload_gb,
        "--rl-quant-profile": model.rl_quant_profile,
    }
    return [flag for flag, value in settings.items() if value]


def _refuse_unseen(model, model_config):
    """Kernels that keep weights where no name finds them, by SGLang's own list of those that do not."""
    from sglang.srt.weight_cache.protocol import check_ipc_quant_support, get_quant_method_name

    quant_config = getattr(model_config.hf_config, "quantization_config", None)
    method = get_quant_method_name(model_config.quantization)
    if not method and quant_config is not None:
        method = get_quant_method_name(quant_config)
    try:
        check_ipc_quant_support(method, quant_config, where="flashboot")
    except Exception as e:
        raise MismatchError(f"kernel-ready: {e}; use stage engine-params", "bind") from e


def _kernel(model, device_config):
    """What processed weights are good for: the device, and the classes that processed them."""
    import torch
    from sglang.srt.runtime_context import get_model

    capability = device_config.device_type
    if capability == "cuda":
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
    chosen = {type(m.quant_method).__name__ for m in model.modules() if getattr(m, "quant_method", None) is not None}
    return {
        "compute_capability": capability,
        "backends": sorted(chosen),
        "torch": torch.__version__,
        "kv_dtype": str(get_model().kv_cache_dtype),
    }


def _forget_tables():
    """Rotary tables on the meta device: a later model would be given them."""
    from sglang.srt.layers.rotary_embedding import factory

    tables = getattr(factory, "_ROPE_DICT", {})
    for key in [key for key, module in tables.items() if any(b.is_meta for b in module.buffers())]:
        del tables[key]
