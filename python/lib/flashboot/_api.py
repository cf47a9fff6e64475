"""The calls and classes, with their documentation: thin over the extension module."""

from . import _flashboot


def _named(entries):
    # Imported when it is needed: a fifth of the time that importing the package takes.
    from ._tensor import Tensor

    return [Tensor._make(entry) for entry in entries]


class Image:
    """A packed model on disk. Metadata and tables are checked when it is opened; `verify` reads the payloads."""

    __slots__ = ("_inner",)

    def __init__(self, path):
        self._inner = _flashboot.Image.open(path)

    @classmethod
    def open(cls, path):
        """Opens the image in the directory `path`."""
        return cls(path)

    @classmethod
    def _of(cls, inner):
        image = cls.__new__(cls)
        image._inner = inner
        return image

    @property
    def id(self):
        """64 hexadecimal digits that cover every byte, offset and name."""
        return self._inner.id

    @property
    def path(self):
        """Where it is."""
        return self._inner.path

    @property
    def ranks(self):
        """The names of its rank images."""
        return self._inner.ranks

    @property
    def stage(self):
        """What the bytes are good for: `sliced`, `engine-params` or `kernel-ready`."""
        return self._inner.stage

    @property
    def metadata(self):
        """All of `metadata.json`."""
        return self._inner.metadata

    @property
    def fingerprint(self):
        """What must agree before the bytes may be used in place of others."""
        return self._inner.metadata["fingerprint"]

    def nbytes(self, rank=None):
        """Payload bytes of a rank."""
        return self._inner.nbytes(rank)

    def tensors(self, rank=None):
        """Every name of a rank: tensors in payload order, then aliases, then views."""
        return _named(self._inner._tensors(rank))

    def verify(self, progress=None):
        """Reads every payload and compares every block with its digest; the report. Damage is a `CorruptError`.

        `progress(done, total)` is called from the threads that read.
        """
        return self._inner.verify(progress)

    def __repr__(self):
        return repr(self._inner)


class Arena:
    """One rank's bytes in memory: what `load` and `clone` give.

    `torch.from_dlpack(arena)` is all of it as one tensor of bytes, without a copy, and `flashboot.torch` has it by name.
    In host memory it has the buffer protocol too, read-only. Whatever sees the memory keeps it.
    """

    __slots__ = ("_inner", "_names", "__weakref__")

    def __init__(self, inner):
        self._inner = inner
        self._names = None

    @property
    def nbytes(self):
        """Payload bytes."""
        return self._inner.nbytes

    @property
    def device(self):
        """`cpu`, or `cuda:N` by the GPU's number in this process."""
        return self._inner.device

    @property
    def read_only(self):
        """Whether the memory is another process's, attached where it is: a write to it ends this process."""
        return self._inner.read_only

    @property
    def report(self):
        """The account of the load: where it came from, how long it took, what was passed over and why."""
        return self._inner.report

    @property
    def image_id(self):
        """The id of the image it was loaded from; `None` for a stock checkpoint."""
        return self._inner.report["image"]

    @property
    def fingerprint(self):
        """What the bytes are good for; `None` for a stock checkpoint."""
        return self._inner.fingerprint

    @property
    def stage(self):
        """What the bytes are good for: a stock checkpoint's are `sliced`."""
        fingerprint = self._inner.fingerprint
        return "sliced" if fingerprint is None else fingerprint["stage"]

    def tensors(self):
        """Every name: tensors in payload order, then aliases, then views."""
        return _named(self._entries())

    def _entries(self):
        if self._names is None:
            self._names = self._inner._tensors()
        return self._names

    def verify(self):
        """Compares every block, as it is in memory now, with the image's digests; how many there are."""
        return self._inner.verify()

    def __len__(self):
        return len(self._inner)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self._inner.__dlpack__(
            stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
        )

    def __dlpack_device__(self):
        return self._inner.__dlpack_device__()

    def memoryview(self):
        """The bytes by the buffer protocol, read-only; of host memory only."""
        return memoryview(self._inner)

    def __repr__(self):
        return repr(self._inner)


class Seed:
    """A seed that serves, on a thread of its own, until it is stopped; a context manager that stops it."""

    __slots__ = ("_inner",)

    def __init__(self, inner):
        self._inner = inner

    @property
    def report(self):
        """What is served, and where."""
        return self._inner.report

    @property
    def rendezvous(self):
        """The address that clones dial."""
        return self._inner.report["rendezvous"]

    @property
    def serving(self):
        """Whether it still serves."""
        return self._inner.serving

    def stop(self):
        """Says goodbye, drains readers and ends. Raises what ended it before; a second call does nothing."""
        self._inner.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def __repr__(self):
        return repr(self._inner)


def load(
    path=None,
    *,
    checkpoint=None,
    object=None,
    object_options=None,
    rendezvous=None,
    model=None,
    revision=None,
    rank=None,
    image_id=None,
    sources=None,
    device=None,
    transport=None,
    config=None,
    patience=60.0,
    progress=None,
):
    """Loads one rank into memory, from the first of what is named that has it, and from the next what that leaves.

    `path` is an image's directory or a stock checkpoint; `checkpoint` one to go on with where an image fails; `object` a URL
    (`s3://…`, `https://…`) with `object_options` as pairs; `rendezvous` the replication service, asked for `model` and `revision`
    or `image_id`. `device` is `cpu` or one GPU (`cuda:0`, a UUID, a PCI address). `config` is a dictionary like
    `flashboot.toml`. `progress(done, total)` is called in bytes, on the calling thread; what it raises gives the load up.

    Of an image every block is verified where it lies; a stock checkpoint alone has nothing that proves it.
    """
    return Arena(
        _flashboot.load(
            path,
            checkpoint=checkpoint,
            object=object,
            object_options=None if object_options is None else list(dict(object_options).items()),
            rendezvous=rendezvous,
            model=model,
            revision=revision,
            rank=rank,
            image_id=image_id,
            sources=sources,
            device=device,
            transport=transport,
            config=config,
            patience=patience,
            progress=progress,
        )
    )


def attach(
    image=None,
    *,
    image_id=None,
    rank=None,
    device=None,
    private=False,
    agent=None,
    config=None,
    progress=None,
):
    """Attaches to memory that the node agent of this host holds (`flashboot hold`), where it is; nothing else is tried.

    `image` is an `Image` or its directory, of which no payload is read; without it `image_id` says which, and what lies where comes
    from the agent, proved by the id; without either it is the only arena that is held on `device`. `agent` is the directory of the
    agent's socket. It is waited for what is still being filled.

    The memory is read-only: whoever writes through a tensor of it ends its process. `private` is a verified copy of one's own, for
    engines that write their weights. The agent keeps the memory for as long as any tensor sees it, and this process keeps it should
    the agent go.
    """
    image = image.path if isinstance(image, Image) else image
    return Arena(
        _flashboot.attach(
            image,
            image_id=image_id,
            rank=rank,
            device=device,
            private=private,
            agent=agent,
            config=config,
            progress=progress,
        )
    )


def clone(
    rendezvous,
    *,
    model=None,
    revision=None,
    image_id=None,
    rank=None,
    device=None,
    transport=None,
    config=None,
    patience=60.0,
    progress=None,
):
    """Reads one rank from processes that have it; the replication service at `rendezvous` says who.

    `image_id` proves what is cloned; by `model` alone the service is believed which image that is. Others may read from what is
    there already while it is being cloned; when the call returns nobody does any more.
    """
    return load(
        rendezvous=rendezvous,
        model=model,
        revision=revision,
        image_id=image_id,
        rank=rank,
        sources=["peer"],
        device=device,
        transport=transport,
        config=config,
        patience=patience,
        progress=progress,
    )


def seed(
    image,
    *,
    rank=None,
    model=None,
    revision="",
    rendezvous=None,
    embed=None,
    name=None,
    device=None,
    transport=None,
    config=None,
    lease=10.0,
    patience=60.0,
    drain=30.0,
):
    """Fills memory from an image, verifies it, and serves it until it is stopped. Returns once clones can come.

    `image` is an `Image` or its directory; or an `Arena`, which is served as it lies, if every block of it is what its digest says:
    nothing may change it until the seed is stopped. `rendezvous` is the replication service to register at; `embed` (`127.0.0.1:0`) has it
    served here. Times are in seconds.
    """
    image = image if isinstance(image, (Arena, Image)) else Image(image)
    return Seed(
        _flashboot.seed(
            image._inner,
            rank=rank,
            model=model,
            revision=revision,
            rendezvous=rendezvous,
            embed=embed,
            name=name,
            device=device,
            transport=transport,
            config=config,
            lease=lease,
            patience=patience,
            drain=drain,
        )
    )


def doctor(*, device=None, config=None, timeout=30.0):
    """What works on this machine: every transport with its reason, every GPU's checks, what the host gives."""
    return _flashboot.doctor(device=device, config=config, timeout=timeout)
