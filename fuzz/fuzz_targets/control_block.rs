//! A peer's control block that is accepted can be read for every shard without leaving the bytes it may use;
//! nothing panics.
//!
//! The first eight bytes are how many bytes the reader says are there, the rest the block itself.
#![no_main]

use flashboot_core::{
    MAX_SHARDS, ShardId,
    control::{ControlBlock, Words, size},
};
use libfuzzer_sys::fuzz_target;

/// The peer's memory: zero past the bytes given, and a panic past `available`.
struct Peer<'a> {
    bytes: &'a [u8],
    available: u64,
}

impl Words for Peer<'_> {
    fn load(&self, offset: u64) -> u64 {
        assert!(
            offset % 8 == 0 && offset + 8 <= self.available,
            "word at {offset} of {} bytes",
            self.available
        );
        let at = usize::try_from(offset).unwrap();
        let word = self.bytes.get(at..at + 8).map_or([0; 8], |w| w.try_into().unwrap());
        u64::from_le_bytes(word)
    }
    fn store(&self, offset: u64, _: u64) {
        panic!("a reader stored at {offset}");
    }
    fn fence(&self) {}
}

fuzz_target!(|data: &[u8]| {
    let Some((available, bytes)) = data.split_first_chunk() else { return };
    let available = u64::from_le_bytes(*available);
    if let Ok((block, header)) = ControlBlock::open(Peer { bytes, available }, available) {
        assert!((1..=MAX_SHARDS).contains(&header.shards));
        assert!(size(header.shards) <= available);
        for shard in [0, 1, header.shards - 1, header.shards, u32::MAX] {
            let seen = block.observe(ShardId(shard));
            assert!(shard < header.shards || seen.progress == 0);
        }
    }
});
