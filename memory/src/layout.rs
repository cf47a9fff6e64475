//! Where payload and control block lie in one allocation.

use flashboot_core::{ArenaSpec, Error, Kind, MAX_SHARDS, Result, control};

/// Offsets and sizes of one allocation, every sum checked.
///
/// The payload begins at 0, the control block where core's rule puts it ([`control::offset`]), whatever pages the
/// allocation has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Payload bytes.
    pub payload: u64,
    /// First byte of the control block.
    pub control: u64,
    /// Bytes of the control block's words.
    pub control_len: u64,
    /// Bytes of the allocation, a multiple of its own page.
    pub capacity: u64,
}

impl Layout {
    /// Lays `spec` out for pages of `page` bytes.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for zero or too many shards, [`Kind::Exhausted`] when the sum does not fit a file
    /// offset.
    pub fn new(spec: ArenaSpec, page: u64) -> Result<Self> {
        if spec.shards == 0 || spec.shards > MAX_SHARDS {
            return Err(Error::new(
                Kind::Invalid,
                "arena",
                format!("{} shards: between 1 and {MAX_SHARDS} are possible", spec.shards),
            ));
        }
        let control_len = control::size(spec.shards);
        let sums = || {
            let control = control::offset(spec.payload)?;
            let capacity = control.checked_add(control_len)?.checked_next_multiple_of(page)?;
            // File offsets are signed, and the mapping must fit the address space.
            i64::try_from(capacity).ok()?;
            isize::try_from(capacity).ok()?;
            Some(Self { payload: spec.payload, control, control_len, capacity })
        };
        sums().ok_or_else(|| {
            Error::new(
                Kind::Exhausted,
                "arena",
                format!(
                    "a payload of {} bytes and its control block are more than a file can hold",
                    spec.payload
                ),
            )
            .with_remedy("split the image over more ranks")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_and_control_never_overlap() {
        for payload in [0, 1, 511, 512, 4095, 4096, 4097, 65536, (2 << 20) - 1, 2 << 20] {
            for page in [4096, 65536, 2 << 20] {
                for shards in [1, 2, 4096] {
                    let l = Layout::new(ArenaSpec { payload, shards }, page).unwrap();
                    assert!(l.control >= payload && l.control.is_multiple_of(control::ALIGN));
                    assert!(l.capacity >= l.control + control::size(shards));
                    assert!(l.capacity.is_multiple_of(page));
                }
            }
        }
    }

    #[test]
    fn sums_that_overflow_are_refused() {
        for payload in [u64::MAX, u64::MAX - 4096, i64::MAX as u64, i64::MAX as u64 - 4096] {
            let e = Layout::new(ArenaSpec { payload, shards: 1 }, 4096).unwrap_err();
            assert_eq!(e.kind(), Kind::Exhausted, "{payload}");
        }
        for shards in [0, MAX_SHARDS + 1] {
            let e = Layout::new(ArenaSpec { payload: 1, shards }, 4096).unwrap_err();
            assert_eq!(e.kind(), Kind::Invalid);
        }
    }
}
