//! What a payload's blocks have to be, once it is known: a table of many tensors takes as long to read as hundreds of megabytes
//! take to copy, so copying need not wait for it. Nothing is called there before it is.

use flashboot_core::{BLOCK, Digests, Error, Kind, Result};
use std::{
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError},
    time::Duration,
};

/// Reading a table takes milliseconds from memory, seconds from a far disk.
const PATIENCE: Duration = Duration::from_secs(600);

/// The digests of a payload: none, known, or being read by another thread. Cloning shares them.
#[derive(Debug, Clone, Default)]
pub struct Proof(What);

#[derive(Debug, Clone, Default)]
enum What {
    #[default]
    None,
    Known(Arc<Digests>),
    Later(Arc<Later>),
}

#[derive(Debug, Default)]
struct Later {
    payload: u64,
    told: OnceLock<Result<Arc<Digests>>>,
    /// Guards nothing: whoever waits on `changed` must hold a lock.
    lock: Mutex<()>,
    changed: Condvar,
}

/// Says what the digests are. Dropped without a word it says that nobody will.
#[derive(Debug)]
#[must_use = "dropped, nobody will know the digests"]
pub struct Teller(Arc<Later>);

impl Proof {
    /// Of `payload` bytes in blocks of [`BLOCK`], as an image's are; the teller says what they are.
    pub fn later(payload: u64) -> (Self, Teller) {
        let later = Arc::new(Later { payload, ..Later::default() });
        (Self(What::Later(Arc::clone(&later))), Teller(later))
    }

    /// Whether there are, or will be, digests.
    pub fn is_some(&self) -> bool {
        !matches!(self.0, What::None)
    }

    /// Bytes of a block, if it has digests. Does not wait.
    pub fn block(&self) -> Option<u64> {
        match &self.0 {
            What::None => None,
            What::Known(digests) => Some(digests.block()),
            What::Later(_) => Some(BLOCK),
        }
    }

    /// Bytes of the payload, if it has digests. Does not wait.
    pub fn payload(&self) -> Option<u64> {
        match &self.0 {
            What::None => None,
            What::Known(digests) => Some(digests.payload()),
            What::Later(later) => Some(later.payload),
        }
    }

    /// The digests, once they are known; `None` where there are none.
    ///
    /// # Errors
    /// Why they are not known, and [`Kind::Deadline`] where nobody says.
    pub fn get(&self) -> Result<Option<&Arc<Digests>>> {
        match &self.0 {
            What::None => Ok(None),
            What::Known(digests) => Ok(Some(digests)),
            What::Later(later) => later.wait().map(Some),
        }
    }
}

impl Later {
    fn wait(&self) -> Result<&Arc<Digests>> {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(lock, PATIENCE, |()| self.told.get().is_none());
        drop(waited);
        match self.told.get() {
            Some(told) => told.as_ref().map_err(Clone::clone),
            None => {
                let detail = format!("an image's table is not read after {PATIENCE:?}");
                Err(Error::new(Kind::Deadline, "verify", detail))
            }
        }
    }

    fn tell(&self, told: Result<Arc<Digests>>) {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // The first word counts.
        let _ = self.told.set(told);
        drop(lock);
        self.changed.notify_all();
    }
}

impl Teller {
    /// Says it. Digests of another payload, or of other blocks, are [`Kind::Mismatch`] to whoever asks.
    pub fn tell(self, told: Result<Arc<Digests>>) {
        let payload = self.0.payload;
        let fits = |digests: Arc<Digests>| {
            if (digests.payload(), digests.block()) == (payload, BLOCK) {
                return Ok(digests);
            }
            let (found, block) = (digests.payload(), digests.block());
            let detail = format!("digests of {found} bytes in blocks of {block} for a payload of {payload}");
            Err(Error::new(Kind::Mismatch, "verify", detail))
        };
        self.0.tell(told.and_then(fits));
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        let detail = "whoever read the image's table ended without a word: a defect of flashboot's";
        self.0.tell(Err(Error::new(Kind::Io, "verify", detail)));
    }
}

impl From<Option<Arc<Digests>>> for Proof {
    fn from(digests: Option<Arc<Digests>>) -> Self {
        Self(digests.map_or(What::None, What::Known))
    }
}

impl From<Arc<Digests>> for Proof {
    fn from(digests: Arc<Digests>) -> Self {
        Self(What::Known(digests))
    }
}

impl From<Digests> for Proof {
    fn from(digests: Digests) -> Self {
        Arc::new(digests).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::Geometry;
    use std::thread;

    fn digests(payload: u64, block: u64) -> Arc<Digests> {
        let bytes = vec![3; payload as usize];
        Arc::new(Digests::of(&Geometry::new(payload, block, block, 1).unwrap(), &bytes))
    }

    #[test]
    fn who_asks_early_waits_until_it_is_told_and_everybody_hears_the_same() {
        let (proof, teller) = Proof::later(4096);
        assert_eq!((proof.payload(), proof.block(), proof.is_some()), (Some(4096), Some(BLOCK), true));
        let wanted = digests(4096, BLOCK);
        thread::scope(|scope| {
            let asking: Vec<_> = (0..3).map(|_| scope.spawn(|| proof.get().unwrap().cloned())).collect();
            teller.tell(Ok(Arc::clone(&wanted)));
            for asked in asking {
                assert!(Arc::ptr_eq(&asked.join().unwrap().unwrap(), &wanted));
            }
        });
        assert!(Arc::ptr_eq(proof.clone().get().unwrap().unwrap(), &wanted));
    }

    #[test]
    fn what_cannot_be_known_is_an_error_to_whoever_asks_and_never_no_digests() {
        let (proof, teller) = Proof::later(4096);
        teller.tell(Err(Error::new(Kind::Corrupt, "table", "damaged")));
        assert_eq!(proof.get().unwrap_err().kind(), Kind::Corrupt);
        let (proof, teller) = Proof::later(4096);
        drop(teller);
        assert_eq!(proof.get().unwrap_err().kind(), Kind::Io);
        for other in [digests(8192, BLOCK), digests(4096, 4096)] {
            let (proof, teller) = Proof::later(4096);
            teller.tell(Ok(other));
            assert_eq!(proof.get().unwrap_err().kind(), Kind::Mismatch);
        }
        assert!(Proof::default().get().unwrap().is_none() && !Proof::default().is_some());
    }
}
