//! One rank's costs, shard by shard.

use super::pinned::{Pinned, Slabs};
use super::{Cost, CostOptions};
use crate::assign::{Part, RankView};
use crate::gather::Gather;
use crate::open::Checkpoint;

/// What a device gives at a time.
const PAGE: u64 = 4096;

/// Rows of one gather are read with what lies between them, unless that is more than this: one long read beats many
/// short ones, and every page would be read anyway.
const GAP: u64 = 64 << 10;

/// A checkpoint's tensors shard by shard.
pub(super) struct Shards {
    /// In the order of their files; where a shard's tensors are in its data, ascending.
    by_place: Vec<Vec<u32>>,
    /// The same by name, as a loader goes over them; `None` where that is the same order.
    by_name: Vec<Option<Vec<u32>>>,
    starts: Vec<u64>,
    begins: Vec<u64>,
}

impl Shards {
    pub(super) fn new(checkpoint: &Checkpoint) -> Self {
        let tensors = checkpoint.tensors();
        let mut by_place = vec![Vec::new(); checkpoint.shards().len()];
        let mut begins = Vec::with_capacity(tensors.len());
        for (number, tensor) in tensors.iter().enumerate() {
            if let (Some(shard), Ok(number)) = (by_place.get_mut(tensor.shard), u32::try_from(number)) {
                shard.push(number);
            }
            begins.push(tensor.begin);
        }
        let begin = |i: &u32| begins.get(*i as usize).copied().unwrap_or(0);
        let name = |i: &u32| tensors.at(*i as usize).map_or("", |t| t.name);
        let mut by_name = Vec::with_capacity(by_place.len());
        for shard in &mut by_place {
            if !shard.is_sorted_by_key(begin) {
                shard.sort_by_key(begin);
            }
            by_name.push((!shard.is_sorted_by_key(name)).then(|| {
                let mut named = shard.clone();
                named.sort_unstable_by_key(name);
                named
            }));
        }
        let starts = checkpoint.shards().iter().map(|s| s.data_start()).collect();
        Self { by_place, by_name, starts, begins }
    }
}

/// Bytes that a rank keeps in all.
pub(super) fn kept(view: &RankView<'_, '_>) -> u64 {
    let entries = view.assignment.entries.iter().filter(|entry| view.owns(entry));
    entries.fold(0, |sum, entry| sum.saturating_add(view.part(entry).map_or(0, |part| part.bytes)))
}

/// What reading a part asks for: bytes, and the one range they are in, if it is one.
#[derive(Debug, Clone, Default)]
struct Read {
    kept: u64,
    bytes: u64,
    ranges: Vec<(u64, u64)>,
}

impl Read {
    fn new(part: &Part) -> Self {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut gathers: Vec<&Gather> = part.gathers.iter().collect();
        gathers.sort_by_key(|g| g.from);
        let mut add = |from: u64, end: u64| match ranges.last_mut() {
            // Interleaved and touching ranges are one.
            Some((_, last)) if from <= *last => *last = (*last).max(end),
            _ => ranges.push((from, end)),
        };
        for g in gathers {
            if g.from_step.saturating_sub(g.run) <= GAP {
                add(g.from, g.from_end().unwrap_or(u64::MAX));
            } else {
                (0..g.count).for_each(|i| add(g.from + i * g.from_step, g.from + i * g.from_step + g.run));
            }
        }
        let bytes = ranges.iter().map(|(from, end)| end - from).sum();
        Self { kept: part.bytes, bytes, ranges }
    }
}

/// Counts everything for one rank.
pub(super) fn cost(view: &RankView<'_, '_>, shards: &Shards, options: &CostOptions) -> Cost {
    let mut cost = Cost::default();
    let entries = &view.assignment.entries;
    let mut reads: Vec<Option<Read>> = vec![None; view.assignment.classes.len()];
    for entry in entries.iter().filter(|entry| view.owns(entry)) {
        if let (Some(slot @ None), Some(part)) = (reads.get_mut(entry.class as usize), view.part(entry)) {
            *slot = Some(Read::new(part));
        }
    }
    let depth = options.window.saturating_add(1);
    let (mut single, mut slabbed) = (Pinned::new(depth), Pinned::new(depth));
    let mut slabs = Slabs::new(options.slab.0);
    let mut shard_kept = Vec::new();
    // Tensors of the shard by class, and the classes it has.
    let mut counts = vec![0u64; reads.len()];
    let mut classes = Vec::new();
    for (number, by_place) in shards.by_place.iter().enumerate() {
        let start = shards.starts.get(number).copied().unwrap_or(0);
        let (mut kept, mut page) = (0u64, 0u64);
        let owned = |i: &u32| {
            let entry = entries.get(*i as usize).filter(|entry| view.owns(entry))?;
            Some((entry.class, reads.get(entry.class as usize)?.as_ref()?))
        };
        let tensors = cost.tensors;
        let named = shards.by_name.get(number).and_then(Option::as_ref);
        for i in by_place {
            let Some((class, read)) = owned(i) else { continue };
            cost.tensors += 1;
            cost.bytes_read = cost.bytes_read.saturating_add(read.bytes);
            kept = kept.saturating_add(read.kept);
            if let Some(count) = counts.get_mut(class as usize) {
                if *count == 0 {
                    classes.push(class as usize);
                }
                *count += 1;
            }
            if named.is_none() {
                slabs.add(read.kept);
            }
            let begin = start.saturating_add(shards.begins.get(*i as usize).copied().unwrap_or(0));
            for (from, end) in &read.ranges {
                let first = ((begin + from) / PAGE).max(page);
                let last = (begin + end).div_ceil(PAGE);
                cost.bytes_device += last.saturating_sub(first) * PAGE;
                page = page.max(last);
            }
        }
        if cost.tensors == tensors {
            // A loader that knows this does not open the shard.
            continue;
        }
        named.into_iter().flatten().filter_map(owned).for_each(|(_, read)| slabs.add(read.kept));
        single.begin_shard();
        for class in classes.drain(..) {
            let count = counts.get_mut(class).map_or(0, std::mem::take);
            single.take(reads.get(class).and_then(Option::as_ref).map_or(0, |read| read.kept), count);
        }
        slabbed.begin_shard();
        for bytes in slabs.end() {
            cost.slabs += 1;
            slabbed.take(bytes, 1);
        }
        shard_kept.push(kept);
    }
    cost.bytes_kept = shard_kept.iter().sum();
    cost.bytes_needed = cost.bytes_kept;
    cost.largest_shard_kept = shard_kept.iter().copied().max().unwrap_or(0);
    let windows = shard_kept.windows(options.window.clamp(1, shard_kept.len().max(1)));
    cost.window_bytes = windows.map(|window| window.iter().sum()).max().unwrap_or(0);
    cost.pinned_requests = cost.tensors;
    (cost.host_allocs_without_slabs, cost.peak_pinned_without_slabs) = (single.new, single.peak);
    (cost.host_allocs_with_slabs, cost.peak_pinned) = (slabbed.new, slabbed.peak);
    cost
}
