//! A plain copy that writes around the caches.
//!
//! Bytes that are only moved should not evict what the cores are working on, nor be read into the cache
//! before they are overwritten: that read costs a third of the bandwidth. libc's memcpy does the same, but
//! only above a size it derives from the cache (288 MiB on some hosts), which a piece that can be cancelled
//! does not reach.

/// Copies `len` bytes. Later stores of this thread come after the copy, whatever stores it used.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes, and the two must not overlap. Nobody else may
/// write the destination meanwhile.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    const LANE: usize = size_of::<__m128i>();

    // Streaming stores want aligned addresses and whole lines.
    let head = to.align_offset(LINE).min(len);
    // SAFETY: the first `head` <= len bytes of what the caller promised.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    let lines = (len - head) / LINE;
    for line in 0..lines {
        let at = head + line * LINE;
        let (source, target) =
            (from.wrapping_add(at).cast::<__m128i>(), to.wrapping_add(at).cast::<__m128i>());
        let mut lanes = [std::mem::MaybeUninit::<__m128i>::uninit(); LINE / LANE];
        for (i, lane) in lanes.iter_mut().enumerate() {
            // SAFETY: at + LINE <= len, so the lane is within the source; the load needs no alignment.
            lane.write(unsafe { _mm_loadu_si128(source.wrapping_add(i)) });
        }
        for (i, lane) in lanes.iter().enumerate() {
            // SAFETY: the loop above wrote every lane.
            let lane = unsafe { lane.assume_init() };
            // SAFETY: within the destination as above, and aligned by `head`.
            unsafe { _mm_stream_si128(target.wrapping_add(i), lane) };
        }
    }
    // Streaming stores are weakly ordered: nothing may be published before they are.
    // SAFETY: every x86_64 has SSE2; a fence touches no memory.
    unsafe { _mm_sfence() };
    let done = head + lines * LINE;
    // SAFETY: the last len - done bytes of what the caller promised.
    unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(done), to.wrapping_add(done), len - done) };
}

/// Copies `len` bytes by libc's memcpy, which on this architecture needs no help.
///
/// # Safety
/// As the other architecture's: readable, writable, not overlapping, no other writer.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: what the caller promised.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_lands_and_no_other(len in 0usize..700, from_at in 0usize..70, to_at in 0usize..70) {
            let from: Vec<u8> = (0..900).map(|i| (i * 31 % 251) as u8).collect();
            let mut to = vec![0xee; 900];
            // SAFETY: 70 + 700 is within both vectors, which are two allocations.
            unsafe { super::copy(from.as_ptr().wrapping_add(from_at), to.as_mut_ptr().wrapping_add(to_at), len) };
            prop_assert_eq!(&to[to_at..to_at + len], &from[from_at..from_at + len]);
            prop_assert!(to[..to_at].iter().chain(&to[to_at + len..]).all(|b| *b == 0xee));
        }
    }
}
