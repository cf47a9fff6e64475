//! Registered memory as requests name it: one address range, cut into regions of one size.

/// An allocation of `len` bytes from `address` on, in regions of `split` bytes; the last may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Extent {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) split: u64,
}

/// The most regions of one allocation.
const MAX_REGIONS: u64 = 4096;

impl Extent {
    /// Cuts `len` bytes into as few regions as a device allows that registers `max` bytes at once. `None` when that is too
    /// many, or nothing.
    pub(crate) fn new(address: u64, len: u64, max: u64) -> Option<Self> {
        // A power of two, so that no message of one crosses a border.
        let largest = 1u64.checked_shl(63 - max.max(1).leading_zeros())?;
        let split = if len <= max { len.max(1) } else { largest };
        let extent = Self { address, len, split };
        extent.is_sound().then_some(extent)
    }

    /// Whether a peer's numbers can be worked with.
    pub(crate) fn is_sound(&self) -> bool {
        self.len > 0
            && self.split > 0
            && self.address.checked_add(self.len).is_some()
            && self.len.div_ceil(self.split) <= MAX_REGIONS
    }

    pub(crate) fn regions(&self) -> u64 {
        self.len.div_ceil(self.split.max(1))
    }

    /// Offset and length of each region.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let Self { len, split, .. } = *self;
        (0..self.regions()).map(move |n| {
            let start = n.saturating_mul(split);
            (start, split.min(len.saturating_sub(start)))
        })
    }

    /// The region that holds the byte at `offset`.
    pub(crate) fn region(&self, offset: u64) -> usize {
        usize::try_from(offset / self.split.max(1)).unwrap_or(usize::MAX)
    }

    /// The first border after `offset`.
    pub(crate) fn border(&self, offset: u64) -> u64 {
        let split = self.split.max(1);
        (offset / split).saturating_add(1).saturating_mul(split).min(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn regions_cover_the_allocation_once(len in 1u64..1 << 40, max in 1u64..1 << 42) {
            let Some(extent) = Extent::new(4096, len, max) else {
                prop_assert!(len / max > MAX_REGIONS / 4);
                return Ok(());
            };
            let mut at = 0;
            for (number, (start, size)) in extent.parts().enumerate() {
                prop_assert_eq!(start, at);
                prop_assert!(size > 0 && size <= max);
                prop_assert_eq!(extent.region(start), number);
                prop_assert_eq!(extent.region(start + size - 1), number);
                prop_assert_eq!(extent.border(start), start + size);
                at += size;
            }
            prop_assert_eq!(at, len);
        }
    }

    #[test]
    fn numbers_of_a_peer_that_cannot_be_are_refused() {
        let sound = |address, len, split| Extent { address, len, split }.is_sound();
        assert!(sound(1, 10, 10));
        assert!(!sound(1, 0, 10));
        assert!(!sound(1, 10, 0));
        assert!(!sound(u64::MAX, 2, 2));
        assert!(!sound(0, 1 << 40, 1));
    }
}
