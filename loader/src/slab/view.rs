//! A filled slab, and the tensors in it.

use super::pool::Lease;
use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// One filled buffer. Nobody writes it any more; it goes back to its pool with its last view.
pub struct Slab {
    lease: Lease,
    tensors: Vec<Tensor>,
}

struct Tensor {
    name: String,
    range: Range<usize>,
    views: AtomicUsize,
}

impl Slab {
    pub(super) fn new(lease: Lease, tensors: Vec<(String, Range<usize>)>) -> Self {
        let tensor = |(name, range)| Tensor { name, range, views: AtomicUsize::new(0) };
        Self { lease, tensors: tensors.into_iter().map(tensor).collect() }
    }

    /// The tensors, each as a view. Called once, before anyone has one.
    pub(super) fn views(self: &Arc<Self>) -> Vec<View> {
        (0..self.tensors.len()).map(|tensor| View::new(self, tensor)).collect()
    }

    /// Its number: no other buffer of this process has it.
    pub(super) fn number(&self) -> u64 {
        self.lease.number
    }

    /// Bytes of the buffer.
    pub fn capacity(&self) -> u64 {
        self.lease.memory().len() as u64
    }

    /// Names of the tensors that somebody has.
    pub(super) fn held(&self) -> Vec<String> {
        let held = self.tensors.iter().filter(|tensor| tensor.views.load(Ordering::Acquire) > 0);
        held.map(|tensor| tensor.name.clone()).collect()
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab({} tensors in {} bytes)", self.tensors.len(), self.capacity())
    }
}

/// One tensor's bytes in a slab, which it keeps. Cloning makes another view of the same bytes.
pub struct View {
    slab: Arc<Slab>,
    tensor: usize,
}

impl View {
    fn new(slab: &Arc<Slab>, tensor: usize) -> Self {
        if let Some(tensor) = slab.tensors.get(tensor) {
            tensor.views.fetch_add(1, Ordering::AcqRel);
        }
        Self { slab: Arc::clone(slab), tensor }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        let range = self.slab.tensors.get(self.tensor).map(|tensor| tensor.range.clone());
        range.and_then(|range| self.slab.lease.memory().as_slice().get(range)).unwrap_or_default()
    }

    /// The tensor's name.
    pub fn name(&self) -> &str {
        self.slab.tensors.get(self.tensor).map_or("", |tensor| &tensor.name)
    }

    /// The number of the buffer it is in, for a [`Pacer`](crate::budget::Pacer).
    pub fn buffer(&self) -> u64 {
        self.slab.number()
    }

    /// Bytes of that buffer: what it keeps alive.
    pub fn buffer_bytes(&self) -> u64 {
        self.slab.capacity()
    }
}

impl Clone for View {
    fn clone(&self) -> Self {
        Self::new(&self.slab, self.tensor)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some(tensor) = self.slab.tensors.get(self.tensor) {
            tensor.views.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({}, {} bytes)", self.name(), self.as_slice().len())
    }
}
