//! What lies where in which slab. Pure.

use flashboot_core::ByteSize;
use std::ops::Range;

/// What tensors in slabs begin at a multiple of.
pub const SLAB_ALIGN: u64 = 4096;

/// How tensors are put into slabs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabConfig {
    /// Bytes of a slab, rounded down to a power of two; zero: every tensor has a buffer of its own.
    pub slab: ByteSize,
}

impl Default for SlabConfig {
    fn default() -> Self {
        Self { slab: ByteSize::mib(256) }
    }
}

impl SlabConfig {
    /// Bytes of a slab; zero without slabs.
    pub fn size(&self) -> u64 {
        match self.slab.0 {
            0 => 0,
            bytes => 1 << bytes.max(SLAB_ALIGN).ilog2(),
        }
    }
}

/// Where one tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// In which slab.
    pub slab: usize,
    /// From which byte of it.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// One slab that is to be filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlabPlan {
    /// Its tensors: those numbered so.
    pub tensors: Range<usize>,
    /// Bytes from its first to the end of its last tensor.
    pub bytes: u64,
    /// Bytes of the buffer that it wants: a power of two up to the slab's size, so that buffers fit one another's tensors.
    pub capacity: u64,
}

/// Tensors in slabs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    /// The slabs, in the order of their tensors.
    pub slabs: Vec<SlabPlan>,
    /// Where each tensor is, in the order given.
    pub places: Vec<Place>,
}

impl Packing {
    /// Packs tensors of these sizes, in this order. One that is larger than a slab has a buffer of its own, and so has every
    /// one without slabs. A slab's tensors are consecutive.
    pub fn of(sizes: impl IntoIterator<Item = u64>, config: SlabConfig) -> Self {
        let size = config.size();
        let mut packing = Self { slabs: Vec::new(), places: Vec::new() };
        // Whether the last slab takes more.
        let mut open = false;
        for (number, bytes) in sizes.into_iter().enumerate() {
            let start = packing.slabs.last().map_or(0, |slab| slab.bytes.next_multiple_of(SLAB_ALIGN));
            let fits = open && start.checked_add(bytes).is_some_and(|end| end <= size);
            if fits {
                let slab = packing.slabs.len() - 1;
                packing.places.push(Place { slab, offset: start, bytes });
                if let Some(last) = packing.slabs.last_mut() {
                    last.tensors.end = number + 1;
                    last.bytes = start + bytes;
                }
                continue;
            }
            packing.places.push(Place { slab: packing.slabs.len(), offset: 0, bytes });
            packing.slabs.push(SlabPlan { tensors: number..number + 1, bytes, capacity: 0 });
            open = bytes <= size;
        }
        for slab in &mut packing.slabs {
            slab.capacity = match slab.bytes {
                bytes if bytes <= size => bytes.max(SLAB_ALIGN).next_power_of_two().min(size),
                bytes => bytes.max(1).checked_next_multiple_of(SLAB_ALIGN).unwrap_or(u64::MAX),
            };
        }
        packing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slabs_fill_in_order_and_what_is_larger_stands_alone() {
        let config = SlabConfig { slab: ByteSize(10_000) };
        assert_eq!(config.size(), 8192);
        let packing = Packing::of([4000, 4000, 1, 9000, 0, 8192], config);
        let slabs: Vec<_> = packing.slabs.iter().map(|s| (s.tensors.clone(), s.bytes, s.capacity)).collect();
        assert_eq!(
            slabs,
            [(0..2, 8096, 8192), (2..3, 1, 4096), (3..4, 9000, 12288), (4..6, 8192, 8192)],
            "after one that stands alone a new slab begins, and nothing takes no room"
        );
        assert_eq!(packing.places[1], Place { slab: 0, offset: 4096, bytes: 4000 });
    }

    proptest! {
        #[test]
        fn tensors_lie_apart_aligned_and_inside(
            sizes in prop::collection::vec(prop_oneof![0u64..9000, 0u64..200_000], 0..60), slab in prop_oneof![Just(0u64), 1u64..100_000],
        ) {
            let config = SlabConfig { slab: ByteSize(slab) };
            let packing = Packing::of(sizes.iter().copied(), config);
            prop_assert_eq!(packing.places.len(), sizes.len());
            let mut next = 0;
            for (number, plan) in packing.slabs.iter().enumerate() {
                prop_assert_eq!(plan.tensors.start, next);
                next = plan.tensors.end;
                let mut end = 0;
                for (place, bytes) in packing.places[plan.tensors.clone()].iter().zip(&sizes[plan.tensors.clone()]) {
                    prop_assert_eq!((place.slab, place.bytes), (number, *bytes));
                    prop_assert!(place.offset >= end && place.offset % SLAB_ALIGN == 0);
                    end = place.offset + place.bytes;
                }
                prop_assert_eq!(end, plan.bytes);
                prop_assert!(plan.capacity >= plan.bytes);
                prop_assert!(plan.bytes <= config.size() || plan.tensors.len() == 1);
                prop_assert!(plan.capacity <= config.size() || plan.tensors.len() == 1);
            }
            prop_assert_eq!(next, sizes.len());
        }
    }
}
