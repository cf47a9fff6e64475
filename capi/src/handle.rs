//! Handles: numbers in the clothes of pointers, never looked behind, never given twice.
//!
//! So a handle that was released, released twice, or never was one is an error and nothing worse; and one that another thread is
//! using while it is released stays alive until that call ends.

use crate::{arena::fb_arena, image::fb_image, seed::fb_seed, status::invalid};
use flashboot_core::Result;
use std::{
    any::Any,
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

type Thing = Arc<dyn Any + Send + Sync>;

/// Everything that C has a handle of.
static HANDLES: Mutex<Handles> = Mutex::new(Handles { things: BTreeMap::new(), last: 0 });

struct Handles {
    things: BTreeMap<usize, Thing>,
    last: usize,
}

/// What a handle is of; its C type is the pointer that stands for it.
pub(crate) trait Handled: Any + Send + Sync + Sized {
    /// For errors.
    const NAME: &'static str;
    /// The type that C sees a pointer to.
    type Of;
}

impl Handled for crate::image::Image {
    const NAME: &'static str = "fb_image";
    type Of = fb_image;
}

impl Handled for crate::arena::Arena {
    const NAME: &'static str = "fb_arena";
    type Of = fb_arena;
}

impl Handled for crate::seed::Seed {
    const NAME: &'static str = "fb_seed";
    type Of = fb_seed;
}

fn handles() -> MutexGuard<'static, Handles> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle of `thing`.
pub(crate) fn give<T: Handled>(thing: T) -> *mut T::Of {
    let mut handles = handles();
    // One a call: they last longer than any process.
    handles.last = handles.last.wrapping_add(1);
    let number = handles.last;
    handles.things.insert(number, Arc::new(thing));
    std::ptr::without_provenance_mut(number)
}

/// What `handle` is of.
pub(crate) fn find<T: Handled>(op: &'static str, handle: *const T::Of) -> Result<Arc<T>> {
    let found = handles().things.get(&handle.addr()).map(Arc::clone);
    known(op, handle, found)
}

/// The same, and it is a handle no longer.
pub(crate) fn take<T: Handled>(op: &'static str, handle: *const T::Of) -> Result<Arc<T>> {
    let mut handles = handles();
    let is = handles.things.get(&handle.addr()).is_some_and(|thing| thing.is::<T>());
    let found = if is { handles.things.remove(&handle.addr()) } else { None };
    drop(handles);
    known(op, handle, found)
}

fn known<T: Handled>(op: &'static str, handle: *const T::Of, found: Option<Thing>) -> Result<Arc<T>> {
    let name = T::NAME;
    if handle.is_null() {
        return Err(invalid(op, format!("the {name} is null")));
    }
    found
        .and_then(|thing| thing.downcast().ok())
        .ok_or_else(|| invalid(op, format!("no such {name}: it was released, or is something else's")))
}
