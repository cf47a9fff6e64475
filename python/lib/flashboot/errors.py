"""What goes wrong, by kind. Every exception says the call, the numbers, and what to do next."""


class FlashbootError(Exception):
    """The base of all. `str()` is the whole sentence; the attributes are its parts."""

    #: The kind's name, as the command line and the logs have it.
    kind = "unknown"

    def __init__(self, message, op="", detail=None, peer=None, chunk=None, code=None, remedy=None):
        super().__init__(message)
        #: The call that failed, as one would look it up.
        self.op = op
        #: The sentence with the numbers.
        self.detail = message if detail is None else detail
        #: The peer, where one is involved.
        self.peer = peer
        #: The chunk or block, where one is involved.
        self.chunk = chunk
        #: The number that a lower layer gave: an errno, a CUresult.
        self.code = code
        #: What to do next, where that is known.
        self.remedy = remedy

    def __reduce__(self):
        return type(self), (*self.args, self.op, self.detail, self.peer, self.chunk, self.code, self.remedy)


class InvalidError(FlashbootError, ValueError):
    """Arguments that cannot work."""

    kind = "invalid"


class UnavailableError(FlashbootError):
    """What is asked for does not exist on this machine."""

    kind = "unavailable"


class MismatchError(FlashbootError):
    """Another image, model, rank, stage or protocol than the one asked for. Nothing was moved."""

    kind = "mismatch"


class CorruptError(FlashbootError):
    """Bytes do not match their digest, or a structure does not parse."""

    kind = "corrupt"


class StaleGenerationError(FlashbootError):
    """The source holds another filling than the one that was named."""

    kind = "stale-generation"


class SourceLostError(FlashbootError, ConnectionError):
    """The source died, or its connection broke."""

    kind = "source-lost"


class StalledError(FlashbootError, TimeoutError):
    """The source is there, but its progress stood still."""

    kind = "stalled"


class DeadlineError(FlashbootError, TimeoutError):
    """The call's own deadline passed."""

    kind = "deadline"


class CancelledError(FlashbootError):
    """Stopped on request."""

    kind = "cancelled"


class BusyError(FlashbootError):
    """The bytes are in use."""

    kind = "busy"


class NotPermittedError(FlashbootError, PermissionError):
    """Not permitted: a user, a mode, a seal, a policy of the kernel's."""

    kind = "permission"


class ExhaustedError(FlashbootError):
    """Out of memory, descriptors, disk space or a configured budget."""

    kind = "exhausted"


class IoError(FlashbootError, OSError):
    """A call of the operating system failed."""

    kind = "io"


class ProtocolError(FlashbootError):
    """The peer spoke, but not our protocol."""

    kind = "protocol"


class ContextLostError(FlashbootError):
    """This process's context of a GPU is beyond use: only a new process helps."""

    kind = "context-lost"


#: Every kind by name.
BY_KIND = {
    cls.kind: cls
    for cls in (
        InvalidError,
        UnavailableError,
        MismatchError,
        CorruptError,
        StaleGenerationError,
        SourceLostError,
        StalledError,
        DeadlineError,
        CancelledError,
        BusyError,
        NotPermittedError,
        ExhaustedError,
        IoError,
        ProtocolError,
        ContextLostError,
    )
}


def _made(kind, message, op, detail, peer, chunk, code, remedy):
    """The exception of a kind; called by the extension module."""
    return BY_KIND.get(kind, FlashbootError)(message, op, detail, peer, chunk, code, remedy)


def _listed(names, limit=20):
    """Names for a sentence: the first ones, and how many more there are."""
    names = list(names)
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
