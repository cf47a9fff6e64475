//! The control block: how a source says which filling its arena holds and how much of it is verified.
//!
//! It lies past the payload in the same allocation and is read by other processes, copy engines and NICs, so
//! its layout is a wire format between releases: `docs/control-block.md`. All words are little-endian u64.
//!
//! | offset | word |
//! |---|---|
//! | 0 | magic |
//! | 8 | version (low 32 bits), byte-order mark (high 32 bits) |
//! | 16 | number of shards (low 32 bits), stride of the progress words in bytes (high 32 bits) |
//! | 24 | payload bytes |
//! | 64 | generation; 0 = retired |
//! | 128 + 64 · s | verified bytes of shard s, from its start, growing only |
//!
//! **The protocol.** A writer that fills the arena again first stores generation 0, then (release fence)
//! touches payload and words, and last stores the new generation. A reader that copied bytes issues an
//! acquire fence and loads the generation again: had any byte come from the new filling, the fence would
//! make it see 0 or the new id. A progress word is stored (release) only after the bytes below it are
//! verified, and loaded (acquire) before they are read. [`tests`](self) model both under loom.

use crate::{Error, Generation, Kind, MAX_SHARDS, Result, ShardId};

/// `FLASHCTL` as it reads in memory.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FLASHCTL");
/// The layout above.
pub const VERSION: u32 = 1;
/// Reads 0x01020304 on a host of the writer's byte order.
pub const BYTE_ORDER: u32 = 0x0102_0304;
/// Every word that changes has a line of its own.
pub const LINE: u64 = 64;
/// A control block begins at a multiple of the largest base page of the hosts we know (aarch64's 64 KiB).
pub const ALIGN: u64 = 64 << 10;

const OFFSET_MAGIC: u64 = 0;
const OFFSET_VERSION: u64 = 8;
const OFFSET_SHARDS: u64 = 16;
const OFFSET_PAYLOAD: u64 = 24;
const OFFSET_GENERATION: u64 = 64;
const OFFSET_PROGRESS: u64 = 128;

/// Bytes of a control block with `shards` progress words.
pub const fn size(shards: u32) -> u64 {
    OFFSET_PROGRESS + LINE * shards as u64
}

/// Where the control block of a payload of `payload` bytes begins in its allocation: at the payload's end
/// rounded up to [`ALIGN`]. `None` when that is past 2^64.
///
/// The rule depends on the payload alone, so that a reader on a host with other pages finds the block too.
pub const fn offset(payload: u64) -> Option<u64> {
    payload.checked_next_multiple_of(ALIGN)
}

/// Byte offset of the generation word.
pub const fn generation_offset() -> u64 {
    OFFSET_GENERATION
}

/// Byte offset of the progress word of `shard`.
pub const fn progress_offset(shard: ShardId) -> u64 {
    OFFSET_PROGRESS + LINE * shard.0 as u64
}

/// What a reader learns from one look at a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observed {
    /// The filling the arena holds; `None` while it is retired.
    pub generation: Option<Generation>,
    /// Verified bytes of the shard asked about, from its start.
    pub progress: u64,
}

/// Access to the words of one control block, each load and store atomic.
///
/// Implementors map it to `AtomicU64` (host memory), stream-ordered writes (GPU memory) or a snapshot.
pub trait Words {
    /// Loads the word at byte `offset`, acquire.
    fn load(&self, offset: u64) -> u64;
    /// Stores the word at byte `offset`, release.
    fn store(&self, offset: u64, value: u64);
    /// A fence that orders earlier loads and stores before later ones (acquire and release).
    fn fence(&self);
}

/// What a header says, once it was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number of progress words.
    pub shards: u32,
    /// Payload bytes.
    pub payload: u64,
}

/// The protocol over some [`Words`]; `available` is the number of bytes the block may use.
#[derive(Debug)]
pub struct ControlBlock<W> {
    words: W,
    shards: u32,
}

impl<W: Words> ControlBlock<W> {
    /// Writes a fresh block: retired, no progress. The caller owns the memory alone.
    pub fn initialise(words: W, header: Header) -> Self {
        words.store(OFFSET_GENERATION, 0);
        words.store(OFFSET_VERSION, u64::from(VERSION) | u64::from(BYTE_ORDER) << 32);
        words.store(OFFSET_SHARDS, u64::from(header.shards) | LINE << 32);
        words.store(OFFSET_PAYLOAD, header.payload);
        for shard in 0..header.shards {
            words.store(progress_offset(ShardId(shard)), 0);
        }
        words.store(OFFSET_MAGIC, MAGIC);
        Self { words, shards: header.shards }
    }

    /// Opens a peer's block of `available` bytes: magic, version, byte order, stride and size are checked.
    pub fn open(words: W, available: u64) -> Result<(Self, Header)> {
        if available < size(1) {
            let detail = format!("the arena has {available} bytes past its payload, {} are needed", size(1));
            return Err(Error::new(Kind::Corrupt, "control block", detail));
        }
        let header = parse_header(
            available,
            words.load(OFFSET_MAGIC),
            words.load(OFFSET_VERSION),
            words.load(OFFSET_SHARDS),
            words.load(OFFSET_PAYLOAD),
        )?;
        Ok((Self { words, shards: header.shards }, header))
    }

    /// Marks the arena as holding nothing. After it returns the owner may touch payload bytes: any reader
    /// that sees one of them will see the retirement too.
    pub fn retire(&self) {
        self.words.store(OFFSET_GENERATION, 0);
        self.words.fence();
    }

    /// Retires what was there and begins the filling `generation`, with no progress.
    pub fn begin(&self, generation: Generation) {
        self.retire();
        for shard in 0..self.shards {
            self.words.store(progress_offset(ShardId(shard)), 0);
        }
        self.words.fence();
        self.words.store(OFFSET_GENERATION, generation.word());
    }

    /// Says that the first `bytes` of `shard` are verified. A word only grows: a smaller value and a shard
    /// past the last are refused.
    pub fn publish(&self, shard: ShardId, bytes: u64) -> Result<()> {
        if shard.0 >= self.shards {
            return Err(Error::new(
                Kind::Invalid,
                "publish",
                format!("shard {} of an arena with {} shards", shard.0, self.shards),
            ));
        }
        let before = self.words.load(progress_offset(shard));
        if bytes < before {
            return Err(Error::new(
                Kind::Invalid,
                "publish",
                format!("progress of shard {} cannot go back from {before} to {bytes} bytes", shard.0),
            ));
        }
        self.words.store(progress_offset(shard), bytes);
        Ok(())
    }

    /// One look: everything read from the payload before this call belongs to the generation returned, and
    /// `progress` bytes of `shard` may be read after it. A shard past the last has no progress.
    pub fn observe(&self, shard: ShardId) -> Observed {
        let before = self.words.load(OFFSET_GENERATION);
        let progress = if shard.0 < self.shards { self.words.load(progress_offset(shard)) } else { 0 };
        // Orders what was read before, payload bytes and the word, before the second look at the generation: a
        // word read between two different generations belongs to neither.
        self.words.fence();
        let after = self.words.load(OFFSET_GENERATION);
        if before == after {
            Observed { generation: Generation::from_word(after), progress }
        } else {
            Observed { generation: None, progress: 0 }
        }
    }
}

/// Checks the four header words of a control block of which `available` bytes can be read.
pub fn parse_header(
    available: u64,
    magic: u64,
    version_and_order: u64,
    shards_and_stride: u64,
    payload: u64,
) -> Result<Header> {
    let refuse = |kind, detail: String| Err(Error::new(kind, "control block", detail));
    if magic != MAGIC {
        return refuse(Kind::Corrupt, format!("magic is {magic:016x}, not {MAGIC:016x}"));
    }
    let order = (version_and_order >> 32) as u32;
    if order != BYTE_ORDER {
        return refuse(
            Kind::Mismatch,
            format!("byte-order mark is {order:08x}: the peer's byte order differs"),
        );
    }
    let version = version_and_order as u32;
    if version != VERSION {
        return refuse(Kind::Mismatch, format!("version is {version}; this release reads version {VERSION}"));
    }
    let (shards, stride) = (shards_and_stride as u32, shards_and_stride >> 32);
    if stride != LINE {
        return refuse(Kind::Corrupt, format!("stride is {stride} bytes, not {LINE}"));
    }
    if shards == 0 || shards > MAX_SHARDS {
        return refuse(Kind::Corrupt, format!("{shards} shards; between 1 and {MAX_SHARDS} are possible"));
    }
    if size(shards) > available {
        return refuse(
            Kind::Corrupt,
            format!(
                "{shards} shards need {} bytes, the arena has {available} past its payload",
                size(shards)
            ),
        );
    }
    Ok(Header { shards, payload })
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering, fence};

    struct Host(Vec<AtomicU64>);

    impl Words for &Host {
        fn load(&self, offset: u64) -> u64 {
            self.0[offset as usize / 8].load(Ordering::Acquire)
        }
        fn store(&self, offset: u64, value: u64) {
            self.0[offset as usize / 8].store(value, Ordering::Release);
        }
        fn fence(&self) {
            fence(Ordering::AcqRel);
        }
    }

    fn host(shards: u32) -> Host {
        Host((0..size(shards) / 8).map(|_| AtomicU64::new(0)).collect())
    }

    #[test]
    fn a_block_reads_back_as_it_was_written() {
        let memory = host(3);
        let header = Header { shards: 3, payload: 12345 };
        let writer = ControlBlock::initialise(&memory, header);
        let (reader, found) = ControlBlock::open(&memory, size(3)).unwrap();
        assert_eq!(found, header);
        assert_eq!(reader.observe(ShardId(1)), Observed { generation: None, progress: 0 });
        let generation = Generation::from_random(9);
        writer.begin(generation);
        writer.publish(ShardId(1), 4096).unwrap();
        assert_eq!(reader.observe(ShardId(1)), Observed { generation: Some(generation), progress: 4096 });
        assert_eq!(reader.observe(ShardId(0)).progress, 0);
        assert_eq!(reader.observe(ShardId(3)).progress, 0, "past the last");
    }

    #[test]
    fn too_little_memory_is_refused_before_it_is_read() {
        #[derive(Debug)]
        struct Untouchable;
        impl Words for Untouchable {
            fn load(&self, offset: u64) -> u64 {
                panic!("read word {offset}")
            }
            fn store(&self, offset: u64, _: u64) {
                panic!("wrote word {offset}")
            }
            fn fence(&self) {}
        }
        let e = ControlBlock::open(Untouchable, size(1) - 1).unwrap_err();
        assert_eq!(e.kind(), Kind::Corrupt);
    }

    #[test]
    fn a_block_begins_past_the_payload_on_every_page_size() {
        for (payload, at) in [(0, 0), (1, ALIGN), (ALIGN - 1, ALIGN), (ALIGN, ALIGN), (ALIGN + 1, 2 * ALIGN)]
        {
            assert_eq!(offset(payload), Some(at));
        }
        assert_eq!(offset(u64::MAX), None);
    }

    #[test]
    fn progress_never_goes_back() {
        let memory = host(1);
        let block = ControlBlock::initialise(&memory, Header { shards: 1, payload: 10 });
        block.publish(ShardId(0), 10).unwrap();
        assert_eq!(block.publish(ShardId(0), 9).unwrap_err().kind(), Kind::Invalid);
        assert_eq!(block.publish(ShardId(1), 9).unwrap_err().kind(), Kind::Invalid);
        block.begin(Generation::from_random(2));
        assert_eq!(block.observe(ShardId(0)).progress, 0, "a new filling begins at nothing");
    }

    #[test]
    fn every_wrong_header_word_is_refused_by_name() {
        let good = [MAGIC, u64::from(VERSION) | u64::from(BYTE_ORDER) << 32, 1 | LINE << 32, 5];
        let parse = |w: [u64; 4], available| parse_header(available, w[0], w[1], w[2], w[3]);
        assert_eq!(parse(good, size(1)), Ok(Header { shards: 1, payload: 5 }));
        let cases: [(usize, u64, Kind, &str); 6] = [
            (0, 1, Kind::Corrupt, "magic"),
            (1, u64::from(VERSION), Kind::Mismatch, "byte-order"),
            (1, 2 | u64::from(BYTE_ORDER) << 32, Kind::Mismatch, "version is 2"),
            (2, 1 | 8 << 32, Kind::Corrupt, "stride"),
            (2, LINE << 32, Kind::Corrupt, "0 shards"),
            (2, 2 | LINE << 32, Kind::Corrupt, "need 256 bytes"),
        ];
        for (at, word, kind, says) in cases {
            let mut words = good;
            words[at] = word;
            let e = parse(words, size(1)).unwrap_err();
            assert_eq!(e.kind(), kind);
            assert!(e.to_string().contains(says), "{e} does not say {says}");
        }
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p flashboot-core --release control`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    };

    /// A block of one shard, one word a line, and one payload word.
    struct Shared {
        words: [AtomicU64; 6],
        payload: AtomicU64,
    }

    fn index(offset: u64) -> usize {
        match offset {
            OFFSET_MAGIC => 0,
            OFFSET_VERSION => 1,
            OFFSET_SHARDS => 2,
            OFFSET_PAYLOAD => 3,
            OFFSET_GENERATION => 4,
            _ => 5,
        }
    }

    impl Words for Arc<Shared> {
        fn load(&self, offset: u64) -> u64 {
            self.words[index(offset)].load(Ordering::Acquire)
        }
        fn store(&self, offset: u64, value: u64) {
            self.words[index(offset)].store(value, Ordering::Release);
        }
        fn fence(&self) {
            fence(Ordering::AcqRel);
        }
    }

    fn shared() -> (Arc<Shared>, ControlBlock<Arc<Shared>>) {
        let shared = Arc::new(Shared {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            payload: AtomicU64::new(0),
        });
        let block = ControlBlock { words: Arc::clone(&shared), shards: 1 };
        (shared, block)
    }

    #[test]
    fn bytes_below_the_word_are_there() {
        loom::model(|| {
            let (memory, writer) = shared();
            let generation = Generation::from_random(7);
            writer.begin(generation);
            let (reader_memory, reader) =
                (Arc::clone(&memory), ControlBlock { words: Arc::clone(&memory), shards: 1 });
            let thread = loom::thread::spawn(move || {
                let seen = reader.observe(ShardId(0));
                if seen.progress == 1 {
                    assert_eq!(reader_memory.payload.load(Ordering::Relaxed), 11);
                }
            });
            memory.payload.store(11, Ordering::Relaxed);
            writer.publish(ShardId(0), 1).unwrap();
            thread.join().unwrap();
        });
    }

    #[test]
    fn a_refilled_arena_is_never_read_as_the_old_one() {
        loom::model(|| {
            let (memory, writer) = shared();
            let old = Generation::from_random(7);
            memory.payload.store(11, Ordering::Relaxed);
            writer.begin(old);
            writer.publish(ShardId(0), 1).unwrap();
            let (reader_memory, reader) =
                (Arc::clone(&memory), ControlBlock { words: Arc::clone(&memory), shards: 1 });
            let thread = loom::thread::spawn(move || {
                let before = reader.observe(ShardId(0));
                if before == (Observed { generation: Some(old), progress: 1 }) {
                    let byte = reader_memory.payload.load(Ordering::Relaxed);
                    let after = reader.observe(ShardId(0));
                    if after.generation == Some(old) {
                        assert_eq!(byte, 11, "a byte of the new filling passed as the old one's");
                    }
                }
            });
            writer.retire();
            memory.payload.store(22, Ordering::Relaxed);
            writer.begin(Generation::from_random(8));
            thread.join().unwrap();
        });
    }
}
