//! The one error of the boundary: what kind, which call, which peer, which chunk, which code, what to do.

use std::fmt;

/// The result of every fallible call at the boundary.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for code that decides what to do next. The text in [`Error`] is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The caller's arguments cannot work (a span past the payload, an arena of the wrong kind).
    Invalid,
    /// What is asked for does not exist on this machine (no driver, no device, no huge pages).
    Unavailable,
    /// The peer's image, size, fingerprint or protocol is not the one asked for. Nothing was moved.
    Mismatch,
    /// Bytes do not match their digest, or a structure does not parse.
    Corrupt,
    /// The source's arena holds another filling than the locator named, or is being refilled.
    StaleGeneration,
    /// The source died or its connection broke.
    SourceLost,
    /// The source is there but its progress word stood still past the deadline.
    Stalled,
    /// The call's own deadline passed.
    Deadline,
    /// Cancelled by the caller. Memory is quiet: nothing will land any more.
    Cancelled,
    /// The range is owned by a pull that has not quiesced.
    Busy,
    /// Not permitted: a uid, a mode, a seal, a kernel policy.
    Permission,
    /// Out of memory, descriptors, disk space or a configured budget.
    Exhausted,
    /// An operating-system call failed.
    Io,
    /// The peer spoke, but not our protocol.
    Protocol,
    /// This process's own context of a GPU is beyond use: no call of it works again, for no source.
    ContextLost,
}

/// Whether trying again can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Retry {
    /// No: the same call will fail the same way.
    Never,
    /// Yes, at the same source.
    SameSource,
    /// Yes, at another source.
    OtherSource,
    /// Yes, but not in this process: it must end, and a new one join in its place.
    NewProcess,
}

impl Kind {
    /// Whether trying again can help, and where.
    pub fn retry(self) -> Retry {
        match self {
            Self::Corrupt | Self::Deadline | Self::Busy => Retry::SameSource,
            Self::StaleGeneration | Self::SourceLost | Self::Stalled | Self::Protocol => Retry::OtherSource,
            Self::ContextLost => Retry::NewProcess,
            _ => Retry::Never,
        }
    }

    /// Whether the failure is a refusal (a mismatch, corruption, lack of permission): exit code 3.
    pub fn is_refusal(self) -> bool {
        matches!(self, Self::Mismatch | Self::Corrupt | Self::StaleGeneration | Self::Permission)
    }
}

/// The number a lower layer gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// `errno` of a system call.
    Errno(i32),
    /// `CUresult` of the CUDA driver API.
    Cuda(u32),
    /// `ibv_wc_status` of a work completion.
    Verbs(u32),
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Errno(n) => fmt::Display::fmt(&std::io::Error::from_raw_os_error(*n), f),
            Self::Cuda(n) => write!(f, "CUDA error {n}"),
            Self::Verbs(n) => write!(f, "work completion status {n}"),
        }
    }
}

/// The boundary's error: cheap to clone, comparable in tests, and complete enough to act on.
///
/// Reads as `KIND-free sentence: op OP, peer PEER, chunk N, CODE; remedy`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(Box<Fields>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Fields {
    kind: Kind,
    op: &'static str,
    detail: String,
    peer: Option<String>,
    chunk: Option<u64>,
    code: Option<Code>,
    remedy: Option<String>,
}

impl Error {
    /// `op` is the call that failed, as a person would look it up (`cuMemCreate`, `mmap`, `import`);
    /// `detail` one sentence with the numbers, without a full stop.
    pub fn new(kind: Kind, op: &'static str, detail: impl Into<String>) -> Self {
        Self(Box::new(Fields {
            kind,
            op,
            detail: detail.into(),
            peer: None,
            chunk: None,
            code: None,
            remedy: None,
        }))
    }

    /// From a failed system call. ENOSPC, ENOMEM, EMFILE and ENFILE are [`Kind::Exhausted`], EACCES and
    /// EPERM [`Kind::Permission`], everything else [`Kind::Io`]. Where nobody listens (ECONNREFUSED) and where somebody does
    /// already (EADDRINUSE) the remedy is known.
    pub fn from_errno(op: &'static str, errno: i32, detail: impl Into<String>) -> Self {
        // Linux numbers, the same on x86_64 and aarch64.
        let kind = match errno {
            1 | 13 => Kind::Permission,
            12 | 23 | 24 | 28 => Kind::Exhausted,
            _ => Kind::Io,
        };
        let error = Self::new(kind, op, detail).with_code(Code::Errno(errno));
        match errno {
            98 => error
                .with_remedy("end what listens there (ss -lnp shows it), or choose another address or port"),
            111 => error
                .with_remedy("see that the other end runs and listens there, and that the address is right"),
            _ => error,
        }
    }

    /// From a failed call of the standard library: as [`from_errno`](Self::from_errno) where the system gave a
    /// number, else [`Kind::Io`] (or [`Kind::Invalid`] for an argument that never reached the system) with the
    /// library's own words.
    pub fn from_io(op: &'static str, e: &std::io::Error, detail: impl Into<String>) -> Self {
        if let Some(errno) = e.raw_os_error() {
            return Self::from_errno(op, errno, detail);
        }
        let kind = if e.kind() == std::io::ErrorKind::InvalidInput { Kind::Invalid } else { Kind::Io };
        Self::new(kind, op, format!("{}: {e}", detail.into()))
    }

    /// Names the peer.
    pub fn with_peer(mut self, peer: impl fmt::Display) -> Self {
        self.0.peer = Some(peer.to_string());
        self
    }

    /// Names the chunk.
    pub fn with_chunk(mut self, chunk: u64) -> Self {
        self.0.chunk = Some(chunk);
        self
    }

    /// Adds the lower layer's number.
    pub fn with_code(mut self, code: Code) -> Self {
        self.0.code = Some(code);
        self
    }

    /// Says what a person can do about it, as an imperative sentence without a full stop.
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// The same without what to do, and that: for an error that has this one in its sentence, and says it itself.
    pub fn split_remedy(mut self) -> (Self, Option<String>) {
        let remedy = self.0.remedy.take();
        (self, remedy)
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// Whether, and where, trying again can help.
    pub fn retry(&self) -> Retry {
        self.0.kind.retry()
    }

    /// The call that failed.
    pub fn op(&self) -> &'static str {
        self.0.op
    }

    /// The sentence with the numbers.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// The peer, where one is involved.
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// The chunk, where one is involved.
    pub fn chunk(&self) -> Option<u64> {
        self.0.chunk
    }

    /// The lower layer's number.
    pub fn code(&self) -> Option<Code> {
        self.0.code
    }

    /// What to do next.
    pub fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fields { op, detail, peer, chunk, code, remedy, .. } = &*self.0;
        write!(f, "{op}: {detail}")?;
        if let Some(code) = code {
            write!(f, ": {code}")?;
        }
        match (peer, chunk) {
            (Some(peer), Some(chunk)) => write!(f, " (peer {peer}, chunk {chunk})")?,
            (Some(peer), None) => write!(f, " (peer {peer})")?,
            (None, Some(chunk)) => write!(f, " (chunk {chunk})")?,
            (None, None) => {}
        }
        if let Some(remedy) = remedy {
            write!(f, "; {remedy}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_call_numbers_place_and_remedy() {
        let e = Error::from_errno("mmap", 12, "mapping 8GiB of the arena")
            .with_peer("seed 3")
            .with_chunk(7)
            .with_remedy("free memory or choose a smaller image");
        assert_eq!(e.kind(), Kind::Exhausted);
        assert_eq!(
            e.to_string(),
            "mmap: mapping 8GiB of the arena: Cannot allocate memory (os error 12) (peer seed 3, chunk 7); \
             free memory or choose a smaller image"
        );
    }

    #[test]
    fn an_error_without_a_number_keeps_its_words() {
        let short = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "failed to fill whole buffer");
        let e = Error::from_io("pread", &short, "x.img");
        assert_eq!((e.kind(), e.code()), (Kind::Io, None));
        assert_eq!(e.to_string(), "pread: x.img: failed to fill whole buffer");
        let denied = std::io::Error::from_raw_os_error(13);
        assert_eq!(Error::from_io("open", &denied, "x"), Error::from_errno("open", 13, "x"));
    }

    #[test]
    fn who_finds_nobody_listening_or_somebody_already_is_told_what_to_do() {
        let remedy = |errno| Error::from_errno("x", errno, "y").remedy().unwrap_or_default().to_owned();
        assert!(remedy(111).contains("see that the other end runs"));
        assert!(remedy(98).contains("ss -lnp"));
        assert_eq!(remedy(5), "");
    }

    #[test]
    fn a_lost_context_is_tried_again_in_no_process_but_a_new_one() {
        assert_eq!(Kind::ContextLost.retry(), Retry::NewProcess);
        assert_eq!(Kind::SourceLost.retry(), Retry::OtherSource);
        assert!(!Kind::ContextLost.is_refusal());
    }

    #[test]
    fn eacces_is_a_permission_and_not_a_missing_file() {
        assert_eq!(Error::from_errno("open", 13, "x").kind(), Kind::Permission);
        assert_eq!(Error::from_errno("open", 2, "x").kind(), Kind::Io);
    }
}
