//! Which bytes of which file fill which bytes of a payload.

use crate::error::Result;
use crate::experts::place;
use crate::open::Checkpoint;
use crate::source::Source;
use flashboot_core::layout::Spec;
use flashboot_core::{ByteRange, Layout};

/// One read: `len` bytes of file `source` from `from`, to `at` in the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) source: usize,
    pub(crate) from: u64,
}

impl Extent {
    /// Takes `next` in, if the two are one run in both places.
    fn join(&mut self, next: Self) -> bool {
        let joins = self.source == next.source
            && self.at.checked_add(self.len) == Some(next.at)
            && self.from.checked_add(self.len) == Some(next.from);
        if joins {
            self.len = self.len.saturating_add(next.len);
        }
        joins
    }

    /// The part inside `range`; empty if there is none.
    fn within(self, range: ByteRange) -> Self {
        let at = self.at.max(range.start);
        let end = self.at.saturating_add(self.len).min(range.end);
        let skipped = at.saturating_sub(self.at);
        Self { at, len: end.saturating_sub(at), source: self.source, from: self.from.saturating_add(skipped) }
    }
}

/// A checkpoint laid out.
pub(crate) struct PackPlan<'c> {
    checkpoint: &'c Checkpoint,
    layout: Layout,
}

impl<'c> PackPlan<'c> {
    pub(crate) fn new(checkpoint: &'c Checkpoint) -> Result<Self> {
        let tensors = checkpoint.tensors();
        let places: Vec<_> = tensors.iter().map(|t| place(t.name)).collect();
        let layout = Layout::new(tensors.len(), |i| match (tensors.at(i), places.get(i)) {
            (Some(t), Some(&place)) => Spec { name: t.name, bytes: t.bytes, place },
            _ => Spec { name: "", bytes: 0, place: flashboot_core::layout::Place::NonExpert },
        })?;
        Ok(Self { checkpoint, layout })
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The reads that fill `range`, in payload order, neighbours in both places joined.
    pub(crate) fn extents(&self, range: ByteRange) -> Vec<Extent> {
        let count = self.layout.order().len();
        // The first that ends past the range's start.
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low + (high - low) / 2;
            match self.extent(middle) {
                Some(e) if e.at.saturating_add(e.len) <= range.start => low = middle + 1,
                _ => high = middle,
            }
        }
        let mut found: Vec<Extent> = Vec::new();
        for extent in (low..count).map_while(|position| self.extent(position)) {
            if extent.at >= range.end {
                break;
            }
            let part = extent.within(range);
            if part.len > 0 && !found.last_mut().is_some_and(|last| last.join(part)) {
                found.push(part);
            }
        }
        found
    }

    /// The read of the tensor at `position` of the payload's order.
    fn extent(&self, position: usize) -> Option<Extent> {
        let number = self.layout.at(position)?;
        let tensor = self.checkpoint.tensors().at(number)?;
        let shard = self.checkpoint.shards().get(tensor.shard)?;
        let from = shard.data_start().saturating_add(tensor.begin);
        Some(Extent { at: self.layout.offset(number)?, len: tensor.bytes, source: tensor.shard, from })
    }

    /// Fills `bytes`, which are `range` of the payload; what no tensor owns is zero.
    pub(crate) fn fill(&self, range: ByteRange, bytes: &mut [u8], sources: &[Source]) -> Result<()> {
        let index = |at: u64| usize::try_from(at.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let mut filled = range.start;
        for extent in self.extents(range) {
            bytes.get_mut(index(filled)..index(extent.at)).unwrap_or_default().fill(0);
            filled = extent.at.saturating_add(extent.len);
            let part = bytes.get_mut(index(extent.at)..index(filled)).unwrap_or_default();
            if let Some(source) = sources.get(extent.source) {
                source.read_at(extent.from, part)?;
            }
        }
        bytes.get_mut(index(filled)..).unwrap_or_default().fill(0);
        Ok(())
    }
}
