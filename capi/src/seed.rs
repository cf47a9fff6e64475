//! `fb_seed`: a holder that serves, on a thread of its own, until it is stopped.

use crate::{
    edge::{self, Sized1},
    handle,
    image::{Image, fb_image},
    load::{configured, directory},
    status::{c_text, fb_status, guard, guarded},
};
use flashboot::{
    load::word,
    service::{Labels, Running, Seat, SeedFrom, SeedRequest, Starting, Waited},
};
use flashboot_core::Error;
use flashboot_rendezvous::store::Address;
use std::{
    ffi::{CString, c_char},
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// How long members of an embedded service may be silent.
const LEASE: Duration = Duration::from_secs(10);
/// How long one look at whether it serves may take.
const EVERY: Duration = Duration::from_secs(1);

/// A seed that serves. A handle: nothing may be read through it.
pub struct fb_seed {
    _private: [u8; 0],
}

/// What the handle is of.
pub(crate) struct Seed {
    running: Mutex<Option<Running>>,
    rendezvous: CString,
}

/// How an image is served. Begin with `FB_SEED_OPTIONS_INIT`; NULL says nothing. `rendezvous` or `embed` is named.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fb_seed_options {
    /// `sizeof(fb_seed_options)`.
    pub size: usize,
    /// Which rank image; the only one, unless named.
    pub rank: *const c_char,
    /// What people call the model; the image's directory, unless named.
    pub model: *const c_char,
    /// Which edition of it.
    pub revision: *const c_char,
    /// The replication service to register at.
    pub rendezvous: *const c_char,
    /// Where to serve the service here: `127.0.0.1:0`.
    pub embed: *const c_char,
    /// A name that stays through restarts.
    pub name: *const c_char,
    /// `cpu`, or one GPU.
    pub device: *const c_char,
    /// A transport by name, or `auto`.
    pub transport: *const c_char,
    /// A JSON object like `flashboot.toml`.
    pub config: *const c_char,
}

// SAFETY: `repr(C)`, the size first, and zeros are null pointers.
unsafe impl Sized1 for fb_seed_options {
    const NAME: &'static str = "fb_seed_options";
}

/// Fills memory from an image, verifies it, and serves it until it is stopped. Returns once clones can come.
///
/// # Safety
/// `options` points to such a structure whose texts end in zeros, and `seed` to a handle of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_seed_start(
    image: *const fb_image,
    options: *const fb_seed_options,
    seed: *mut *mut fb_seed,
) -> fb_status {
    guard(|| {
        let out = edge::out("seed", seed)?;
        let image = handle::find::<Image>("seed", image)?;
        // SAFETY: the caller's promise.
        let options = unsafe { edge::options(options) }?;
        // SAFETY: the caller's promise.
        let text = |name, at| unsafe { edge::text(name, at) };
        // SAFETY: the caller's promise.
        let config = unsafe { configured(options.config, options.device, options.transport) }?;
        let folder = image.inner.dir().file_name().map(|name| name.to_string_lossy().into_owned());
        let address = text("rendezvous", options.rendezvous)?;
        let embed = text("embed", options.embed)?;
        let labels = Labels { name: text("name", options.name)?, ..Labels::default() };
        let request = SeedRequest {
            from: SeedFrom::Image(Box::new((
                image.inner.clone(),
                image.rank("seed", text("rank", options.rank)?.as_deref())?.clone(),
            ))),
            model: text("model", options.model)?.or(folder).unwrap_or_else(|| "model".into()),
            revision: text("revision", options.revision)?.unwrap_or_default(),
            rendezvous: address.map(|text| word::<Address>("rendezvous", &text)).transpose()?,
            embed: embed.map(|text| word::<SocketAddr>("embed", &text)).transpose()?,
            lease: LEASE,
            seat: Seat { labels, ..Seat::new(config, directory()) },
        };
        let mut starting = Starting::begin(request)?;
        let (serving, running) = loop {
            match starting.wait(EVERY)? {
                Waited::Serving(serving, running) => break (serving, running),
                Waited::Starting(still) => starting = still,
            }
        };
        let rendezvous = c_text(&serving.rendezvous);
        let given = handle::give(Seed { running: Mutex::new(Some(running)), rendezvous });
        // SAFETY: the caller's promise.
        unsafe { out.put(given) };
        Ok(())
    })
}

/// The address that clones dial; NULL for no seed. It stays until the seed is stopped.
#[unsafe(no_mangle)]
pub extern "C" fn fb_seed_rendezvous(seed: *const fb_seed) -> *const c_char {
    guarded(std::ptr::null(), || Ok(handle::find::<Seed>("rendezvous", seed)?.rendezvous.as_ptr()))
}

/// Whether it still serves.
#[unsafe(no_mangle)]
pub extern "C" fn fb_seed_serving(seed: *const fb_seed) -> bool {
    guarded(false, || {
        let seed = handle::find::<Seed>("serving", seed)?;
        let running = seed.running.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(running.as_ref().is_some_and(Running::is_serving))
    })
}

/// Says goodbye, drains readers, ends, and releases the seed; what ended it before is the status.
#[unsafe(no_mangle)]
pub extern "C" fn fb_seed_stop(seed: *mut fb_seed) -> fb_status {
    guard(|| {
        let seed = handle::take::<Seed>("stop", seed)?;
        let running = seed.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        running.map_or(Ok::<_, Error>(()), Running::stop)
    })
}
