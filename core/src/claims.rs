//! Which ranges of an arena a pull owns.
//!
//! A pull owns its range from start until it has quiesced. Arenas keep a [`Claims`] so that a second writer
//! is refused ([`crate::Kind::Busy`]) and never races the first.

use crate::{ByteRange, Error, Kind, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// The claimed ranges of one arena. Cloning shares the set.
#[derive(Debug, Clone, Default)]
pub struct Claims(Arc<Mutex<Vec<ByteRange>>>);

impl Claims {
    /// Claims `range` until the returned guard is dropped; [`Kind::Busy`] when any byte of it is claimed.
    /// An empty range is always free.
    pub fn claim(&self, range: ByteRange) -> Result<Claim> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = held.iter().find(|other| other.overlaps(range)) {
            return Err(Error::new(
                Kind::Busy,
                "claim",
                format!("bytes {range} of the arena overlap {other}, which a pull still owns"),
            ));
        }
        held.push(range);
        Ok(Claim { claims: self.clone(), range })
    }

    /// Whether no byte of `range` is claimed.
    pub fn is_free(&self, range: ByteRange) -> bool {
        !self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|other| other.overlaps(range))
    }
}

/// Exclusive ownership of a range; dropping it gives the range back.
#[derive(Debug)]
pub struct Claim {
    claims: Claims,
    range: ByteRange,
}

impl Claim {
    /// The range owned.
    pub fn range(&self) -> ByteRange {
        self.range
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut held = self.claims.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = held.iter().position(|other| *other == self.range) {
            held.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claimed_range_is_busy_until_its_claim_drops() {
        let claims = Claims::default();
        let first = claims.claim(ByteRange::new(0, 100)).unwrap();
        assert_eq!(claims.claim(ByteRange::new(99, 101)).unwrap_err().kind(), Kind::Busy);
        let next = claims.claim(ByteRange::new(100, 200)).unwrap();
        drop(first);
        claims.claim(ByteRange::new(0, 100)).unwrap();
        assert!(!claims.is_free(next.range()));
    }
}
