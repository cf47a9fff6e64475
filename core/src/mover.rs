//! The primitive a transport implements: pull one range of a peer's arena into one's own.

use crate::{BlockDigest, ByteRange, Generation, Observed, Result, ShardId};
use async_trait::async_trait;
use std::{any::Any, fmt, time::Duration};

/// A participant, as schedules and errors name it. What it stands for is the caller's: a rank, which is a small number and reads
/// `#3`, or a member's generation, which is random and reads as every other place has it, in 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct PeerId(pub u64);

/// What is not larger is a rank's number: one generation in four thousand million would be taken for one.
const RANKS: u64 = u32::MAX as u64;

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 <= RANKS { write!(f, "#{}", self.0) } else { write!(f, "{:016x}", self.0) }
    }
}

/// One range to pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pull {
    /// Payload bytes, the same offsets at both ends. Begins and ends at a block boundary or the payload's end.
    pub range: ByteRange,
    /// `Some(block)`: also hash the landed bytes in blocks of that many bytes, on the memory's own device,
    /// from the *destination*. `None`: move only.
    pub hash: Option<u64>,
}

/// A pull that quiesced with all its bytes in place.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Landed {
    /// The values of the blocks of the range, in order; empty when none were asked for. They are found, not
    /// checked: the caller compares them with the expected ones.
    pub digests: Vec<BlockDigest>,
    /// The filling that the source's control block showed after the last byte had been read, where the transport
    /// looked on the way; `None`: it did not, or the arena was retired, and the caller is to look.
    pub generation: Option<Generation>,
}

/// One hop: pulls ranges of one peer's arena into one arena of ours.
///
/// A bench that knows its transport recognises the mover by upcasting to `Any`.
///
/// Dropping it ends the import once every pull has quiesced (an import pins the exporter's memory, so do not
/// keep one longer than the last chunk).
#[async_trait]
pub trait Mover: Any + Send + Sync + fmt::Debug {
    /// The filling the locator named, the only one that may be read through this hop.
    fn generation(&self) -> Generation;

    /// Looks at the source's control block: returns as soon as `shard` has at least `at_least` verified bytes,
    /// or the generation is not the locator's any more, or `wait` has passed, with what was seen last.
    /// `wait` zero is one look. Before anything was pulled, the first one may tell what was so when the import ended.
    ///
    /// The look is ordered after every pull that has quiesced: if it shows the locator's generation, no byte
    /// pulled before it belongs to a later filling.
    ///
    /// # Errors
    /// [`crate::Kind::SourceLost`] when the source is known to be gone *and* its word is below `at_least`.
    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed>;

    /// Begins to pull and returns at once. Several pulls may be in flight; their ranges must not overlap
    /// ([`crate::Kind::Busy`]). The mover does not look at the progress word: asking for bytes that the
    /// source has not published is the caller's defect, and moves whatever is there.
    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>>;

    /// What a person should know of the hop, although it works, a line each. A mover that wraps another passes its on.
    fn remarks(&self) -> Vec<String> {
        Vec::new()
    }
}

/// A pull that owns its range at both ends until it has quiesced.
///
/// Dropping it cancels it and leaves the range owned until the hardware is done with it.
#[async_trait]
pub trait InFlight: Send {
    /// Asks the transport to stop. It may finish all the same; only [`quiesced`](Self::quiesced) tells.
    fn cancel(&self);

    /// Waits until nothing of this pull will touch memory any more. `Ok` means that every byte is in place.
    /// Calling it again after it returned gives the same answer; dropping the future and calling again is
    /// the same as having waited on.
    ///
    /// # Errors
    /// [`crate::Kind::Cancelled`] after a cancel that took, [`crate::Kind::SourceLost`] and the transport's
    /// own. Whatever the error, the memory is quiet and the range free.
    async fn quiesced(&mut self) -> Result<Landed>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_reads_as_a_number_and_a_member_as_its_generation() {
        assert_eq!(PeerId(3).to_string(), "#3");
        let generation = Generation::from_random(0x00ab_cdef_0123_4567);
        assert_eq!(PeerId(generation.word()).to_string(), generation.to_string());
    }
}
