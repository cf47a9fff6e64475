//! Which READs a pull is made of: pure.

use crate::extent::Extent;
use flashboot_core::ByteRange;

/// One READ: the same offsets at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) start: u64,
    pub(crate) len: u32,
}

impl Message {
    pub(crate) fn end(self) -> u64 {
        self.start.saturating_add(u64::from(self.len))
    }
}

/// Cuts a range at every multiple of a message and wherever a region ends at either side, lazily.
#[derive(Debug, Clone)]
pub(crate) struct Cutter {
    next: u64,
    end: u64,
    message: u64,
    ours: Extent,
    theirs: Extent,
}

impl Cutter {
    /// `message` is a power of two; `range` lies within both extents.
    pub(crate) fn new(range: ByteRange, message: u64, ours: Extent, theirs: Extent) -> Self {
        Self { next: range.start, end: range.end, message: message.clamp(1, 1 << 30), ours, theirs }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.next >= self.end
    }
}

impl Iterator for Cutter {
    type Item = Message;

    fn next(&mut self) -> Option<Message> {
        if self.is_done() {
            return None;
        }
        let start = self.next;
        let multiple = (start / self.message).saturating_add(1).saturating_mul(self.message);
        let end = multiple.min(self.end).min(self.ours.border(start)).min(self.theirs.border(start));
        // Borders lie past what they are asked for, inside an extent; outside one there is nothing to cut.
        if end <= start {
            self.next = self.end;
            return None;
        }
        self.next = end;
        Some(Message { start, len: u32::try_from(end - start).unwrap_or(0) })
    }
}

/// How many READs may be in flight on one queue pair, and how seldom one is told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) reads: u32,
    pub(crate) signal_every: u32,
}

impl Window {
    /// The smallest of what is wanted, what our device sends and what the peer's takes; at least 1.
    pub(crate) fn new(wanted: u8, ours: u32, theirs: u32) -> Self {
        let reads = u32::from(wanted).min(ours).min(theirs).max(1);
        // A quarter: the NIC keeps three quarters to work on while we hear of one.
        Self { reads, signal_every: (reads / 4).max(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_cover_the_range_once_and_cross_no_border(
            start in 0u64..5_000_000,
            len in 0u64..5_000_000,
            power in 12u32..21,
            ours in 1u64..20_000_000,
            theirs in 4096u64..20_000_000,
        ) {
            let whole = 10_000_000;
            let extent = |split| Extent { address: 0, len: whole, split };
            let ours = Extent::new(0, whole, ours.max(1 << 14)).unwrap();
            let theirs = extent(theirs);
            let message = 1u64 << power;
            let mut at = start;
            for cut in Cutter::new(ByteRange::new(start, start + len), message, ours, theirs) {
                prop_assert_eq!(cut.start, at);
                prop_assert!(cut.len > 0 && u64::from(cut.len) <= message);
                for extent in [ours, theirs] {
                    prop_assert_eq!(extent.region(cut.start), extent.region(cut.end() - 1));
                }
                prop_assert_eq!(cut.start / message, (cut.end() - 1) / message);
                at = cut.end();
            }
            prop_assert_eq!(at, start + len);
        }
    }

    #[test]
    fn a_window_is_what_both_devices_allow() {
        assert_eq!(Window::new(16, 128, 128), Window { reads: 16, signal_every: 4 });
        assert_eq!(Window::new(16, 128, 4), Window { reads: 4, signal_every: 1 });
        assert_eq!(Window::new(16, 0, 4), Window { reads: 1, signal_every: 1 });
    }
}
