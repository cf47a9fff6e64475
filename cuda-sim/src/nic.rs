//! What a card has written to memory that it reaches by a dma-buf, and that no GPU sees before the flush.
//!
//! **No driver has this function.** A stand-in for a card calls it in the place of its writes, so that a program that leaves
//! the flush out, or flushes before the last write, reads old bytes: always here, on hardware now and then.

use crate::{
    abi::code,
    world::{State, answer},
};
use std::{
    ffi::c_int,
    fs::File,
    os::{fd::BorrowedFd, unix::fs::FileExt as _},
    slice,
};

/// Writes in the order in which they were made.
#[derive(Debug, Default)]
pub(crate) struct NicWrites(Vec<Write>);

#[derive(Debug)]
struct Write {
    to: File,
    offset: u64,
    bytes: Vec<u8>,
}

impl State {
    /// Makes them seen.
    pub(crate) fn flush_nic_writes(&mut self) -> Result<(), u32> {
        let seen = |write: Write| write.to.write_all_at(&write.bytes, write.offset);
        std::mem::take(&mut self.nic_writes.0)
            .into_iter()
            .try_for_each(seen)
            .map_err(|_| code::OPERATING_SYSTEM)
    }
}

/// Notes `size` bytes that a card writes to a dma-buf.
///
/// # Safety
/// `fd` is an open dma-buf, `from` the start of as many bytes.
// SAFETY: the name is the stand-in's own; no driver has it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn flashboot_cuda_sim_nic_write(
    fd: c_int,
    offset: u64,
    from: *const u8,
    size: usize,
) -> u32 {
    answer("flashboot_cuda_sim_nic_write", |world| {
        // SAFETY: the caller's.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let to = fd.try_clone_to_owned().map_err(|_| code::UNKNOWN)?.into();
        // SAFETY: the caller's.
        let bytes = unsafe { slice::from_raw_parts(from, size) }.to_vec();
        world.state().nic_writes.0.push(Write { to, offset, bytes });
        Ok(())
    })
}
