//! Who touches which payload bytes inside this process: one writer or any number of readers a byte.
//!
//! Writers (pulls, `copy_in`, `fill`) are core's exclusive [`Claims`]. `copy_out` must not make a pull fail,
//! nor may a writer change bytes under it, so reads are counted beside the claims and a new writer waits the
//! few milliseconds until the reads of its range have ended.

use flashboot_core::{
    ByteRange, Error, Kind, Result,
    claims::{Claim, Claims},
};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct Access {
    claims: Claims,
    reads: Mutex<Vec<ByteRange>>,
    /// Reads that last as long as somebody likes: nobody waits for their end.
    shared: Mutex<Vec<ByteRange>>,
    ended: Condvar,
}

impl Access {
    fn reads(&self) -> MutexGuard<'_, Vec<ByteRange>> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared(&self) -> MutexGuard<'_, Vec<ByteRange>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Owns `range` for writing; [`Kind::Busy`] when another writer has any byte of it, or it is shared.
    pub(crate) fn write(&self, range: ByteRange) -> Result<Claim> {
        let mut reads = self.reads();
        if let Some(shared) = self.shared().iter().find(|shared| shared.overlaps(range)) {
            let detail = format!("bytes {shared} of the arena are in use where they lie");
            return Err(Error::new(Kind::Busy, "write", detail)
                .with_remedy("let go of the tensors and buffers that see them, or fill another arena"));
        }
        // Claimed before waiting, so that no new read can begin.
        let claim = self.claims.claim(range)?;
        while reads.iter().any(|read| read.overlaps(range)) {
            reads = self.ended.wait(reads).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(claim)
    }

    /// Keeps writers out of `range`; [`Kind::Busy`] when one is in it.
    pub(crate) fn read(&self, range: ByteRange) -> Result<Read<'_>> {
        let mut reads = self.reads();
        if !self.claims.is_free(range) {
            return Err(Error::new(
                Kind::Busy,
                "copy_out",
                format!("bytes {range} of the arena are being written"),
            ));
        }
        reads.push(range);
        Ok(Read { access: self, range })
    }

    /// Keeps writers out of `range` until [`unshare`](Self::unshare); [`Kind::Busy`] when one is in it.
    pub(crate) fn share(&self, range: ByteRange) -> Result<()> {
        let _read = self.read(range)?;
        self.shared().push(range);
        Ok(())
    }

    pub(crate) fn unshare(&self, range: ByteRange) {
        let mut shared = self.shared();
        if let Some(at) = shared.iter().position(|other| *other == range) {
            shared.swap_remove(at);
        }
    }

    /// Whether no writer has a byte of `range`.
    pub(crate) fn is_free(&self, range: ByteRange) -> bool {
        self.claims.is_free(range)
    }
}

/// A read in progress.
pub(crate) struct Read<'a> {
    access: &'a Access,
    range: ByteRange,
}

impl Drop for Read<'_> {
    fn drop(&mut self) {
        let mut reads = self.access.reads();
        if let Some(at) = reads.iter().position(|read| *read == self.range) {
            reads.swap_remove(at);
        }
        drop(reads);
        self.access.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, time::Duration};

    #[test]
    fn a_writer_of_what_is_shared_is_refused_at_once() {
        let (access, all) = (Access::default(), ByteRange::new(0, 10));
        access.share(all).unwrap();
        access.share(all).unwrap();
        access.read(ByteRange::new(3, 4)).unwrap();
        let busy = |range| access.write(range).err().map(|e| e.kind());
        assert_eq!(busy(ByteRange::new(9, 20)), Some(Kind::Busy));
        assert_eq!(busy(ByteRange::new(10, 20)), None);
        access.unshare(all);
        assert_eq!(busy(all), Some(Kind::Busy), "the other still has it");
        access.unshare(all);
        let writer = access.write(all).unwrap();
        assert_eq!(access.share(all).err().map(|e| e.kind()), Some(Kind::Busy));
        drop(writer);
        access.share(all).unwrap();
    }

    #[test]
    fn a_writer_waits_for_readers_and_refuses_new_ones() {
        let access = Arc::new(Access::default());
        let first = access.read(ByteRange::new(0, 10)).unwrap();
        let second = access.read(ByteRange::new(5, 10)).unwrap();
        let writer = {
            let access = Arc::clone(&access);
            std::thread::spawn(move || drop(access.write(ByteRange::new(9, 20)).unwrap()))
        };
        while access.is_free(ByteRange::new(9, 20)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(access.read(ByteRange::new(9, 10)).err().map(|e| e.kind()), Some(Kind::Busy));
        drop(first);
        assert!(!writer.is_finished());
        drop(second);
        writer.join().unwrap();
        access.read(ByteRange::new(9, 10)).unwrap();
    }
}
