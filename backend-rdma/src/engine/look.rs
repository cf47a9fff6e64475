//! Reading a peer's words.

use crate::scratch::WORDS;
use flashboot_core::Result;
use tokio::sync::oneshot;

/// Words to read, in this order: each an offset in the peer's allocation and a number of words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Words(Vec<(u64, u32)>);

impl Words {
    /// `None` when they are none, or more than a slot has.
    pub(crate) fn new(reads: &[(u64, u32)]) -> Option<Self> {
        let total: u32 = reads.iter().map(|(_, words)| *words).sum();
        let fits =
            !reads.is_empty() && (total as usize) <= WORDS && reads.len() <= crate::rail::LOOK_ROOM as usize;
        fits.then(|| Self(reads.to_vec()))
    }

    pub(crate) fn reads(&self) -> &[(u64, u32)] {
        &self.0
    }
}

/// A look that waits for its turn, or for its words.
#[derive(Debug)]
pub(crate) struct Look {
    pub(crate) words: Words,
    /// The lane that it must go by; `None`: any.
    pub(crate) lane: Option<usize>,
    pub(crate) tell: oneshot::Sender<Result<[u64; WORDS]>>,
}
