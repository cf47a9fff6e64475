//! A member whose readers found wrong bytes looks at its own memory again: it is damaged, or the way to its readers is.

use super::seat::blocking;
use flashboot_core::{Arena, Digests, Error, Geometry, Kind, Result, digest};
use flashboot_rendezvous::Membership;
use futures_util::FutureExt as _;
use std::sync::Arc;
use tokio::task::JoinHandle;
use tracing::warn;

/// The most bad blocks that are named.
const NAMED: usize = 16;

/// A payload that was verified, and what it is compared with once more when its readers say so.
pub(super) struct Recheck {
    arena: Arc<dyn Arena>,
    digests: Arc<Digests>,
    /// How many readers had found something when it was looked at last.
    readers: u32,
    looking: Option<JoinHandle<Result<Vec<u64>>>>,
}

impl Recheck {
    pub(super) fn new(arena: &Arc<dyn Arena>, digests: &Arc<Digests>) -> Self {
        Self { arena: Arc::clone(arena), digests: Arc::clone(digests), readers: 0, looking: None }
    }

    /// What the last look found, if that is a reason to go; begins another where the service told of more readers since. Does not
    /// wait. Must be called on a runtime with threads that may block.
    pub(super) fn look(&mut self, membership: &Membership) -> Option<Error> {
        if let Some(found) = self.looking.as_mut().and_then(|looking| looking.now_or_never()) {
            self.looking = None;
            match found {
                Ok(Ok(bad)) if bad.is_empty() => warn!(
                    readers = self.readers,
                    "readers found wrong bytes of this member, but its memory is right: look at what is between, and at the readers"
                ),
                Ok(Ok(bad)) => return Some(damaged(&bad, self.readers)),
                Ok(Err(error)) => warn!(%error, "this member's memory cannot be compared again"),
                Err(error) => warn!(%error, "this member's memory was not compared again"),
            }
        }
        let told = membership.blame().readers;
        if self.looking.is_none() && told != self.readers {
            if told > self.readers {
                let (arena, digests) = (Arc::clone(&self.arena), Arc::clone(&self.digests));
                self.looking = Some(tokio::spawn(blocking(move || bad_blocks(&*arena, &digests))));
            }
            self.readers = told;
        }
        None
    }
}

fn damaged(bad: &[u64], readers: u32) -> Error {
    let named: Vec<_> = bad.iter().take(NAMED).collect();
    let detail = format!(
        "{} blocks of this member's memory do not match their digests any more, the first {named:?}; {readers} of its readers found it",
        bad.len()
    );
    Error::new(Kind::Corrupt, "recheck", detail).with_remedy(
        "look for memory errors (dmesg; nvidia-smi -q -d ECC for a GPU), then start it again: it reads and verifies the image anew",
    )
}

/// The blocks of `arena` that are not what `digests` say. Blocks the thread.
fn bad_blocks(arena: &dyn Arena, digests: &Digests) -> Result<Vec<u64>> {
    let (payload, block) = (digests.payload(), digests.block());
    let geometry = Geometry::new(payload, block, block, 1)
        .map_err(|e| Error::new(Kind::Invalid, "recheck", e.to_string()))?;
    let mut bytes = vec![0; usize::try_from(block.min(payload)).unwrap_or(usize::MAX)];
    let mut bad = Vec::new();
    for index in 0..payload.div_ceil(block) {
        let at = index * block;
        let len = usize::try_from((payload - at).min(block)).unwrap_or(usize::MAX);
        let Some(bytes) = bytes.get_mut(..len) else { break };
        arena.copy_out(at, bytes)?;
        bad.extend(digests.mismatches(index, &[digest::block(&geometry, index, bytes)]));
    }
    Ok(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::ArenaSpec;
    use flashboot_memory::{HostArena, HostArenaConfig};

    #[test]
    fn a_flipped_bit_is_found_in_its_block_and_nothing_else_is() {
        const BLOCK: u64 = 4096;
        let payload = 3 * BLOCK + 7;
        let bytes: Vec<u8> = (0..payload).map(|i| (i % 251) as u8).collect();
        let digests = Digests::of(&Geometry::new(payload, BLOCK, BLOCK, 1).unwrap(), &bytes);
        let arena =
            HostArena::create(ArenaSpec { payload, shards: 1 }, &HostArenaConfig::default()).unwrap().0;
        arena.copy_in(0, &bytes).unwrap();
        assert_eq!(bad_blocks(&*arena, &digests), Ok(vec![]));
        arena.copy_in(payload - 1, &[bytes[payload as usize - 1] ^ 1]).unwrap();
        arena.copy_in(BLOCK, &[bytes[BLOCK as usize] ^ 4]).unwrap();
        assert_eq!(bad_blocks(&*arena, &digests), Ok(vec![1, 3]));
        let said = damaged(&[1, 3], 2).to_string();
        assert!(
            said.contains("2 blocks") && said.contains("[1, 3]") && said.contains("2 of its readers"),
            "{said}"
        );
    }
}
