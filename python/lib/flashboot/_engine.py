"""What the plugins of inference engines share: their settings, where a rank's weights come from, and what is done with them after.

Owns: reading `model_loader_extra_config`, asking the sources in order and saying why one was passed over, whether an image is the
engine's, writing one, becoming a seed, and refusing what would write to memory that others see.

Must never import an engine, nor decide anything that an engine's own loader decides.
"""

import logging
from dataclasses import dataclass, field, fields
from pathlib import Path

from . import _api
from .errors import FlashbootError, InvalidError, MismatchError, NotPermittedError, UnavailableError, _listed

#: Kinds of sources, in the order in which they are asked unless told otherwise.
KINDS = ("held", "peer", "staged", "image", "object", "checkpoint")
#: What the agent has: memory of another process.
_SHARED = "shared"
_PRIVATE = "private"


@dataclass
class Options:
    """`model_loader_extra_config`, checked. A place that is not named is not asked."""

    sources: list | None = None
    image: str | None = None
    object: str | None = None
    object_options: dict = field(default_factory=dict)
    rendezvous: str | None = None
    embed: str | None = None
    model: str | None = None
    revision: str | None = None
    image_id: str | None = None
    publish: bool = False
    write_image: str | None = None
    stage: str = "engine-params"
    on_mismatch: str = "fail"
    attach: str = _SHARED
    transport: str | None = None
    patience: float = 5.0
    config: dict = field(default_factory=dict)

    @classmethod
    def read(cls, given):
        """Of what a person wrote; a key that is not known is refused by name, and so is a value of another type."""
        if given is None:
            given = {}
        if not isinstance(given, dict):
            raise _invalid(f"model_loader_extra_config is a {type(given).__name__}, not a dictionary")
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(str(key) for key in given if key not in known)
        if unknown:
            raise _invalid(
                f"model_loader_extra_config has {_listed(repr(key) for key in unknown)}, which load format flashboot does not know;"
                f" it knows {', '.join(known)}"
            )
        made = cls(**given)
        made._check()
        return made

    def _check(self):
        wanted = {
            "sources": (list, tuple), "object_options": dict, "publish": bool, "config": dict, "patience": (int, float),
        }
        for f in fields(self):
            value, kind = getattr(self, f.name), wanted.get(f.name, str)
            # A truth value is a number to Python and not to a person.
            if value is None and f.default is None or isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
                continue
            names = kind if isinstance(kind, tuple) else (kind,)
            # Not the value of what may hold a secret.
            shown = f"a {type(value).__name__}" if f.name in ("object_options", "config") else repr(value)
            raise _invalid(f"{f.name}={shown}: a {' or '.join(k.__name__ for k in names)} is wanted")
        for name, choices in (
            ("on_mismatch", ("fail", "checkpoint")),
            ("attach", (_SHARED, _PRIVATE)),
            ("stage", ("engine-params", "kernel-ready")),
        ):
            if getattr(self, name) not in choices:
                raise _invalid(f"{name}={getattr(self, name)!r}: it is one of {', '.join(choices)}")
        for kind in self.sources or ():
            if kind not in KINDS:
                raise _invalid(f"sources has {kind!r}, which is none of {', '.join(KINDS)}")
        if self.sources is not None and len(set(self.sources)) != len(self.sources):
            raise _invalid(f"sources names one twice: {', '.join(self.sources)}")
        if self.sources is not None and not self.sources:
            raise _invalid("sources is empty: leave it out, or name one")
        if self.publish and self.rendezvous is None and self.embed is None:
            raise _invalid("publish=true wants a service to register at: rendezvous, or embed to serve one here")
        if self.patience <= 0:
            raise _invalid(f"patience={self.patience}: seconds above zero are wanted")

    def order(self):
        """Kinds to be asked, in order."""
        return list(KINDS if self.sources is None else self.sources)


def _invalid(detail):
    return InvalidError(f"options: {detail}", "options", detail)


@dataclass(frozen=True)
class Rank:
    """Which part of a model this process has, and of how many."""

    pp: int = 0
    tp: int = 0
    ep: int = 0
    dp: int = 0
    #: Pipeline stages, tensor-, expert- and data-parallel ranks.
    world: tuple = (1, 1, 1, 1)
    draft: bool = False

    @property
    def alone(self):
        """Whether the model is not split."""
        return self.world == (1, 1, 1, 1)

    @property
    def name(self):
        """As images name their ranks."""
        return f"{'draft' if self.draft else 'target'}-{self.pp}-{self.tp}-{self.ep}-{self.dp}"


class Boot:
    """One rank's weights for one model: asks the sources, and remembers what came of it.

    `engine` is the pair (name, version) that images are of; `writes` are the engine's settings under which it changes its weights,
    as a person gives them.
    """

    def __init__(self, options, *, engine, rank, model=None, device="cpu", writes=(), log=None):
        self.options, self.engine, self.rank, self.device = options, engine, rank, device
        #: What the replication service calls it.
        self.model = options.model or Path(model or "model").name
        self.writes = list(writes)
        self.log = log or logging.getLogger("flashboot")
        #: What was passed over: kind, name, reason.
        self.skipped = []
        #: Whether the model is made of an arena, which is served then as it is.
        self.of_arena = False
        if self.writes and options.publish:
            raise NotPermittedError(
                f"publish: {_listed(self.writes)} lets the engine change its weights, which others would read from it; leave out"
                " publish or that setting",
                "publish",
            )
        if self.writes and options.attach == _SHARED and "held" in (options.sources or ()):
            raise self._would_write("attach")

    def _would_write(self, op):
        return NotPermittedError(
            f"{op}: {_listed(self.writes)} lets the engine change its weights, and what the node agent holds is others' too; set"
            " attach=private for a copy, or leave that setting out",
            op,
        )

    def skip(self, kind, name, reason):
        """Notes a source that was passed over."""
        self.skipped.append((kind, name, reason))
        self.log.warning("flashboot: passed over %s%s: %s", kind, f" ({name})" if name else "", reason)

    def arena(self):
        """The rank's bytes from the first source that has them; `None` where it is the checkpoint's turn.

        Where every source was passed over and the checkpoint is none of them, an `UnavailableError` says why each was.
        """
        options, order = self.options, self.options.order()
        end = order.index("checkpoint") if "checkpoint" in order else len(order)
        before, last = order[:end], end < len(order)
        if last and order[end + 1 :]:
            for kind in order[end + 1 :]:
                self.skip(kind, "", "it comes after the checkpoint, which is always there")
        kinds = self._askable(before)
        arena = self._load(kinds, last) if kinds else None
        if arena is None and not last:
            reasons = "; ".join(f"{kind}: {reason}" for kind, _, reason in self.skipped) or "none was named"
            raise UnavailableError(
                f"load: no source has {self.rank.name}: {reasons}; name another one in sources, or checkpoint", "load"
            )
        if arena is None:
            self.log.info("flashboot: %s is loaded from the checkpoint, by the engine's own loader", self.rank.name)
        return arena

    def held(self):
        """What the node agent holds, attached where it is, if that is where the bytes come from; `None` where it has to be asked
        for elsewhere, or is to be a copy."""
        if self.options.order()[:1] != ["held"] or self.options.attach == _PRIVATE:
            return None
        kinds = self._askable(["held"])
        return self._load(kinds, True) if kinds else None

    def _askable(self, order):
        """Kinds whose place is known; the others are passed over."""
        options, kinds = self.options, []
        places = {"peer": options.rendezvous, "image": options.image, "object": options.object}
        # The agent is asked for an image, which somebody has to name first.
        named = any(places.values())
        for kind in order:
            if kind in places and not places[kind]:
                if options.sources is not None:
                    self.skip(kind, "", f"{'rendezvous' if kind == 'peer' else kind} does not say where")
            elif kind in ("held", "staged") and not named:
                if options.sources is not None:
                    self.skip(kind, "", "no image, object or rendezvous says what")
            elif kind == "held" and self.writes and options.attach == _SHARED:
                self.skip(kind, "", f"{_listed(self.writes)} lets the engine change its weights: set attach=private")
            else:
                kinds.append(kind)
        return kinds

    def _load(self, kinds, last):
        options = self.options
        config = dict(options.config)
        if options.attach == _PRIVATE:
            config["load"] = {**config.get("load", {}), "attach": _PRIVATE}
        try:
            image, rank = self._image(kinds)
            arena = _api.load(
                image,
                object=options.object if "object" in kinds or {"held", "staged"} & set(kinds) else None,
                object_options=options.object_options,
                rendezvous=options.rendezvous if "peer" in kinds else None,
                # An image that is named says what is wanted; else the name does.
                model=options.model if options.image or options.object else self.model,
                revision=options.revision,
                rank=rank,
                image_id=options.image_id,
                sources=kinds,
                device=self.device,
                transport=options.transport,
                config=config,
                patience=float(options.patience),
            )
        except InvalidError:
            # What a person wrote cannot work, wherever the weights are.
            raise
        except MismatchError as e:
            self.mismatch(str(e), cause=e)
            return None
        except FlashbootError as e:
            self.skip(", ".join(kinds), options.image or options.object or options.rendezvous or "", str(e))
            if not last:
                raise
            return None
        report = arena.report
        for skip in report["skips"]:
            self.skip(skip["kind"], skip["name"], skip["reason"])
        self.log.info(
            "flashboot: %s, %d bytes of stage %s from %s in %.0f ms",
            self.rank.name, arena.nbytes, arena.stage, report["source"], report["engine_visible_ms"],
        )
        return arena

    def _image(self, kinds):
        """The image's directory and the rank's name in it: one image of every rank, or a directory of an image for each."""
        options = self.options
        if options.image is None or not {"image", "held", "staged"} & set(kinds):
            return None, None if self.rank.alone and not self.rank.draft else self.rank.name
        path = Path(options.image)
        if not (path / "metadata.json").exists() and (path / self.rank.name).is_dir():
            return path / self.rank.name, self.rank.name
        if path.is_dir() and not (path / "metadata.json").exists():
            raise UnavailableError(f"load: {path} is no image, and has none of {self.rank.name}", "load")
        return path, None if self.rank.alone and not self.rank.draft else self.rank.name

    def mismatch(self, reason, cause=None):
        """Bytes that are not this engine's: an error, or the checkpoint instead."""
        if self.options.on_mismatch == "fail":
            if cause is not None:
                raise cause
            raise MismatchError(f"load: {reason}", "load", reason)
        self.of_arena = False
        self.skip("image", self.options.image or "", f"{reason} (on_mismatch=checkpoint)")

    def fits(self, arena, *, model_type=None, kernel=None, bindable=True):
        """Whether the engine can use these bytes; else it is a mismatch, and so where it was allowed `False`."""
        why = self._unfit(arena, model_type, kernel, bindable)
        if why is not None:
            self.mismatch(why)
        self.of_arena = why is None
        return self.of_arena

    def _unfit(self, arena, model_type, kernel, bindable):
        fingerprint, shared = arena.fingerprint, self.is_shared(arena)
        stage = arena.stage
        if fingerprint is not None and None not in (model_type, fingerprint["model_type"]):
            if model_type != fingerprint["model_type"]:
                return f"the image is of a {fingerprint['model_type']}, the model is a {model_type}"
        if stage == "sliced":
            if not self.rank.alone:
                return "the image's tensors are cut for the rank already, and the engine's loaders would cut them again"
            return None
        found = (fingerprint["engine"]["name"], fingerprint["engine"]["version"])
        if found != tuple(self.engine):
            return f"the image has parameters of {' '.join(found)}, this is {' '.join(self.engine)}: write it again with write_image"
        if not bindable:
            return f"a draft's attributes are set by its own loader, which an image of stage {stage} leaves out"
        if stage == "engine-params":
            if shared:
                return "the engine post-processes its parameters in place, and what the node agent holds is others' too: hold an" \
                    " image of stage kernel-ready, or set attach=private"
            return None
        if fingerprint["kernel"] != kernel:
            return f"the image is for kernels {fingerprint['kernel']}, here are {kernel}"
        return None

    def is_shared(self, arena):
        """Whether it is memory that the node agent holds, for others too."""
        return arena.report["source"] == "held" and self.options.attach == _SHARED

    def external(self, arena):
        """Bytes of it that were in use before this process came: what an engine must not count as its own."""
        return arena.nbytes if self.is_shared(arena) else 0

    def stays(self, arena):
        """Notes that the model sees `arena` from now on, and serves it if that is wanted."""
        bound = _Bound(arena, self.is_shared(arena), self.log)
        _BOUND.append(bound)
        if self.options.publish:
            bound.seed = self._serve(arena)

    def fed(self, arena):
        """Notes that a model has copied what it needs out of `arena`, which is served on if that is wanted, and else let go."""
        if self.options.publish and not self.is_shared(arena):
            _BOUND.append(_Bound(arena, False, self.log, self._serve(arena)))

    def wrote(self, model, stage, *, kernel=None, model_config=None):
        """Writes and serves the model, which was loaded from elsewhere than an arena that is served, as far as that is wanted at this
        stage."""
        if stage != self.options.stage:
            return
        about = {"stage": stage, "engine": self.engine, "kernel": kernel, "model_config": model_config}
        if self.rank.draft or not self.rank.alone:
            about |= {"rank": self.rank.name, "world": self.rank.world}
        if self.options.write_image is not None:
            self._write(model, about)
        if self.options.publish and not self.of_arena:
            from .torch import compact

            # A copy in the host's memory: the model's own may change in post-processing.
            arena = compact(model, **about)
            _BOUND.append(_Bound(arena, False, self.log, self._serve(arena)))

    def _write(self, model, about):
        from .torch import capture

        path = Path(self.options.write_image)
        folder = path
        if "rank" in about:
            path = path / self.rank.name
        written = path / "metadata.json"
        if written.exists():
            self.log.info("flashboot: %s is there already, and stays", path)
            return
        # An engine that has its weights does not fail for an image, which another of its kind may be writing too.
        try:
            if folder != path:
                folder.mkdir(parents=True, exist_ok=True)
            image = capture(model, path, **about)
        except (FlashbootError, OSError) as e:
            if written.exists():
                self.log.info("flashboot: %s is there already, and stays", path)
            else:
                self.log.warning("flashboot: %s is not written: %s", path, e)
            return
        self.log.info("flashboot: wrote %s, an image of stage %s, id %s", path, image.stage, image.id)

    def _serve(self, arena):
        """Serves an arena; an engine that has its weights does not fail for what keeps others from them."""
        options = self.options
        try:
            seed = _api.seed(
                arena,
                model=self.model,
                revision=options.revision or "",
                rendezvous=options.rendezvous,
                embed=options.embed,
                device=arena.device,
                transport=options.transport,
                config=dict(options.config),
            )
        except FlashbootError as e:
            self.log.warning("flashboot: %s is not served to others: %s", self.rank.name, e)
            return None
        self.log.info("flashboot: serves %s at %s", self.rank.name, seed.rendezvous)
        return seed


class _Bound:
    """A model's memory for as long as this process lives."""

    def __init__(self, arena, shared, log, seed=None):
        self.arena, self.shared, self.log, self.seed = arena, shared, log, seed


#: What models of this process see. Seeds among it serve until they are retired.
_BOUND = []


def before_update(op):
    """To be called before weights are changed in place: refuses it where others see them, and retires what is served.

    The seed says goodbye and its readers are drained first: nobody reads a generation that changes.
    """
    for bound in _BOUND:
        if bound.shared:
            raise NotPermittedError(
                f"{op}: these weights are memory that the node agent holds, for others too; set attach=private to change them", op
            )
    for bound in _BOUND:
        seed, bound.seed = bound.seed, None
        if seed is not None:
            seed.stop()
            bound.log.warning("flashboot: %s changes the weights: they are not served any more", op)


def released():
    """Forgets what models of this process see; for tests, and for who has dropped a model."""
    for bound in _BOUND:
        if bound.seed is not None:
            bound.seed.stop()
    _BOUND.clear()
