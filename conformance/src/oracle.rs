//! What bytes should be where.

use flashboot_core::{Arena, BLOCK, ByteRange, Digests, Geometry};

/// What an arena is filled with where nothing has landed.
pub(crate) const CANARY: u8 = 0xC5;
/// The block of most cases: small, so that edges are cheap.
pub(crate) const SMALL_BLOCK: u64 = 64 << 10;
/// Two small blocks.
pub(crate) const SMALL_CHUNK: u64 = 2 * SMALL_BLOCK;

const STEP: u64 = 1 << 20;

/// Byte `at` of the payload that `salt` stands for. Never the canary.
fn byte(salt: u64, at: u64) -> u8 {
    let mut z = (at >> 3).wrapping_add(salt.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_add(1);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let byte = ((z ^ (z >> 31)) >> (8 * (at & 7))) as u8;
    if byte == CANARY { !CANARY } else { byte }
}

/// The bytes of `range` of the payload that `salt` stands for.
pub(crate) fn pattern(salt: u64, range: ByteRange) -> Vec<u8> {
    (range.start..range.end).map(|at| byte(salt, at)).collect()
}

fn steps(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    (range.start..range.end)
        .step_by(STEP as usize)
        .map(move |at| ByteRange::new(at, (at + STEP).min(range.end)))
}

/// Writes `range` of the payload `salt` into `arena`.
pub(crate) fn write(arena: &dyn Arena, salt: u64, range: ByteRange) {
    for step in steps(range) {
        arena.copy_in(step.start, &pattern(salt, step)).expect("the owner can write its arena");
    }
}

/// The digests of the payload `salt`.
pub(crate) fn digests(salt: u64, geometry: &Geometry) -> Digests {
    let values = (0..geometry.blocks()).map(|index| {
        flashboot_core::digest::block(geometry, index, &pattern(salt, geometry.block_range(index)))
    });
    Digests::new(geometry.payload(), geometry.block(), values.collect()).expect("one value a block")
}

/// Compares every byte of `range` with the payload `salt`.
///
/// # Panics
/// At the first byte that differs, naming it.
#[track_caller]
pub(crate) fn expect_payload(arena: &dyn Arena, salt: u64, range: ByteRange) {
    expect(arena, range, |at| byte(salt, at), "the payload");
}

/// Checks that nothing landed in `range`.
///
/// # Panics
/// At the first byte that is not the canary.
#[track_caller]
pub(crate) fn expect_canary(arena: &dyn Arena, range: ByteRange) {
    expect(arena, range, |_| CANARY, "untouched");
}

#[track_caller]
fn expect(arena: &dyn Arena, range: ByteRange, want: impl Fn(u64) -> u8, what: &str) {
    for step in steps(range) {
        let mut found = vec![0; step.len() as usize];
        arena.copy_out(step.start, &mut found).expect("no pull owns the range any more");
        for (at, byte) in (step.start..).zip(&found) {
            assert_eq!(*byte, want(at), "byte {at} of {range} is not {what}");
        }
    }
}

/// The geometry of most cases.
pub(crate) fn small(payload: u64, shards: u32) -> Geometry {
    Geometry::new(payload, SMALL_BLOCK, SMALL_CHUNK, shards).expect("whole blocks")
}

/// The geometry of images.
pub(crate) fn real(payload: u64) -> Geometry {
    Geometry::new(payload, BLOCK, BLOCK, 1).expect("whole blocks")
}
