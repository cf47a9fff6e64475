//! The identity of one filling of one arena.

use std::{fmt, num::NonZeroU64};

/// A random id of one filling of one arena. Never zero: zero in a control block means *retired*.
///
/// Readers compare it before the first chunk and after every chunk, so that an arena that was filled again
/// is never taken for what it held before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(NonZeroU64);

impl Generation {
    /// From the 64-bit word of a control block or locator; `None` for zero, the retired mark.
    pub fn from_word(word: u64) -> Option<Self> {
        NonZeroU64::new(word).map(Self)
    }

    /// From 64 random bits of the caller's (core has no source of randomness); the all-zero draw becomes 1.
    pub fn from_random(bits: u64) -> Self {
        Self(NonZeroU64::new(bits).unwrap_or(NonZeroU64::MIN))
    }

    /// The word as it stands in a control block.
    pub fn word(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Generation({self})")
    }
}
