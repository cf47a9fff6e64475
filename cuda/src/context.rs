//! The primary context of a GPU: retained once per process and GPU, made current on whatever thread calls.
//!
//! Every driver call of this crate goes through [`Context::call`] or [`Context::end`], so no caller needs to know
//! about current contexts, and none is left current on a thread of somebody else's. A sticky error is remembered
//! here: after one nothing of this context works any more.

use crate::{
    Device,
    error::CudaError,
    hash::{Kernel, Scratch},
    ops::{Call, Object, Ops},
};
use flashboot_core::{Error, Result};
use std::{
    collections::BTreeMap,
    fmt,
    marker::PhantomData,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};
use tracing::{debug, warn};

/// A GPU made ready for use. Cheap to clone; the last clone releases it.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    device: Device,
    object: Object,
    sticky: OnceLock<CudaError>,
    kernel: OnceLock<Result<Kernel>>,
    /// Of the arenas that hash in this context; as long as one of them is there.
    scratch: Mutex<Weak<Scratch>>,
}

impl Context {
    /// The context of `device`: the process's own if there is one, else a new one (0.1 to 1 s: the driver sets the
    /// GPU up). Frameworks use the same primary context.
    ///
    /// # Errors
    /// For a MIG instance, and the driver's own.
    pub fn open(device: &Device) -> Result<Self> {
        static SHARED: Mutex<BTreeMap<String, Weak<Inner>>> = Mutex::new(BTreeMap::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inner) = shared.get(device.uuid()).and_then(Weak::upgrade) {
            return Ok(Self(inner));
        }
        let context = Self::unshared(device)?;
        shared.insert(device.uuid().to_owned(), Arc::downgrade(&context.0));
        Ok(context)
    }

    pub(crate) fn unshared(device: &Device) -> Result<Self> {
        device.refuse_mig()?;
        let object = device.ops.primary_retain(device.ordinal)?;
        let device = device.clone();
        Ok(Self(Arc::new(Inner {
            device,
            object,
            sticky: OnceLock::new(),
            kernel: OnceLock::new(),
            scratch: Mutex::new(Weak::new()),
        })))
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Free and total bytes of the GPU's memory.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.call(|ops| ops.mem_get_info())
    }

    /// Waits for all work that anybody in this process has queued in it, frameworks included: what frees memory that they may
    /// still be using waits first. No deadline: the driver has none.
    pub fn synchronize(&self) -> Result<()> {
        self.call(|ops| ops.ctx_synchronize())
    }

    /// The sticky error that ended this context, if one did: only a new process helps.
    pub fn lost(&self) -> Option<Error> {
        self.0.sticky.get().map(|e| (*e).into())
    }

    /// Runs driver calls with this context current.
    pub(crate) fn call<T>(&self, calls: impl FnOnce(&dyn Ops) -> Call<T>) -> Result<T> {
        Ok(self.raw_call(calls)?)
    }

    pub(crate) fn raw_call<T>(&self, calls: impl FnOnce(&dyn Ops) -> Call<T>) -> Call<T> {
        let result = Current::enter(&self.0).and_then(|current| calls(current.ops()));
        if let Err(e) = &result {
            self.0.note(*e);
        }
        result
    }

    /// One step of a teardown: tried whatever happened before, and logged when it fails.
    pub(crate) fn end(&self, step: impl FnOnce(&dyn Ops) -> Call<()>) {
        self.0.end(step);
    }

    /// The hash kernel, loaded at the first call.
    pub(crate) fn kernel(&self) -> Result<Kernel> {
        self.0.kernel.get_or_init(|| self.call(Kernel::load)).clone()
    }

    /// The scratch memory that all hashers of this context share, which `make` makes where there is none.
    pub(crate) fn scratch(&self, make: impl FnOnce() -> Result<Arc<Scratch>>) -> Result<Arc<Scratch>> {
        let mut shared = self.0.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(scratch) = shared.upgrade() {
            return Ok(scratch);
        }
        let scratch = make()?;
        *shared = Arc::downgrade(&scratch);
        Ok(scratch)
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.0.device).finish()
    }
}

impl Inner {
    fn note(&self, error: CudaError) {
        if error.is_sticky() && self.sticky.set(error).is_ok() {
            warn!(gpu = self.device.uuid(), %error, "the GPU's context is beyond use; restart this process");
        }
    }

    fn end(&self, step: impl FnOnce(&dyn Ops) -> Call<()>) {
        let ops = &*self.device.ops;
        let current = Current::enter(self);
        // Without the context the step may fail too; not trying would leak for certain.
        let result = step(ops);
        // Of a context that is lost nothing else is to be expected, and the loss itself was told.
        let was_lost = self.sticky.get().is_some();
        for error in [current.as_ref().err(), result.as_ref().err()].into_iter().flatten() {
            self.note(*error);
            if was_lost || error.code == crate::error::code::DEINITIALIZED {
                debug!(%error, "a step of teardown after the context's or the driver's own");
            } else {
                warn!(gpu = self.device.uuid(), %error, "a step of teardown failed");
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(Ok(kernel)) = self.kernel.take() {
            self.end(|ops| kernel.unload(ops));
        }
        if let Err(error) = self.device.ops.primary_release(self.device.ordinal) {
            warn!(gpu = self.device.uuid(), %error, "a step of teardown failed");
        }
    }
}

/// The context is this thread's current one while it lives. Stays on its thread.
struct Current<'a> {
    inner: &'a Inner,
    of_this_thread: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    fn enter(inner: &'a Inner) -> Call<Self> {
        inner.device.ops.ctx_push(inner.object)?;
        Ok(Self { inner, of_this_thread: PhantomData })
    }

    fn ops(&self) -> &'a dyn Ops {
        &*self.inner.device.ops
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.inner.device.ops.ctx_pop() {
            warn!(%error, "cannot restore the thread's context");
        }
    }
}
