//! `fb_load`, `fb_clone` and `fb_attach`: one rank into memory.

use crate::{
    arena::{Arena, fb_arena},
    edge::{self, Listener, Sized1},
    handle,
    status::{fb_status, guard, invalid},
};
use flashboot::{
    config::{Attach, Config},
    load::{self, AttachRequest, FromObject, Placed, Progress, Wish, choose},
};
use flashboot_core::{Error, Kind, Result};
use std::{
    ffi::{c_char, c_int, c_void},
    path::{Path, PathBuf},
    time::Duration,
};

/// How often it is told how far a load is.
const EVERY: Duration = Duration::from_millis(50);
/// How long others are waited for where nothing is said.
const PATIENCE: Duration = Duration::from_secs(60);

/// Hears how far a load is, in bytes, on the thread that called; what is not 0 gives the load up (`FB_CANCELLED`).
pub type fb_progress = Option<unsafe extern "C" fn(done: u64, total: u64, data: *mut c_void) -> c_int>;

/// What is to be loaded, and from where. Begin with `FB_LOAD_OPTIONS_INIT`; NULL says nothing. At least one of `path`, `object`,
/// `checkpoint` and `rendezvous` is named.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fb_load_options {
    /// `sizeof(fb_load_options)`.
    pub size: usize,
    /// An image's directory, or a stock checkpoint.
    pub path: *const c_char,
    /// A stock checkpoint to go on with where an image fails.
    pub checkpoint: *const c_char,
    /// An image's objects: `s3://…`, `https://…`.
    pub object: *const c_char,
    /// The replication service, asked for `model` and `revision`, or for `image_id`.
    pub rendezvous: *const c_char,
    /// What people call the model.
    pub model: *const c_char,
    /// Which edition of it.
    pub revision: *const c_char,
    /// Which rank image; the only one, unless named.
    pub rank: *const c_char,
    /// The image's id: nothing else is loaded.
    pub image_id: *const c_char,
    /// Kinds of sources in order, separated by commas: `held,staged,peer,image,object,checkpoint`.
    pub sources: *const c_char,
    /// `cpu`, or one GPU: `cuda:0`, a UUID, a PCI address.
    pub device: *const c_char,
    /// A transport by name, or `auto`.
    pub transport: *const c_char,
    /// A JSON object like `flashboot.toml`.
    pub config: *const c_char,
    /// How long the service and further sources are waited for, in milliseconds; 0: a minute.
    pub patience_ms: u64,
    /// Hears how far it is.
    pub progress: fb_progress,
    /// Given to `progress`.
    pub progress_data: *mut c_void,
}

// SAFETY: `repr(C)`, the size first, and zeros are null pointers, no function and the number 0.
unsafe impl Sized1 for fb_load_options {
    const NAME: &'static str = "fb_load_options";
}

/// What of the node agent's is to be attached. Begin with `FB_ATTACH_OPTIONS_INIT`. With neither `path` nor `image_id` it is the only
/// arena that is held on `device`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fb_attach_options {
    /// `sizeof(fb_attach_options)`.
    pub size: usize,
    /// An image's directory, of which no payload is read.
    pub path: *const c_char,
    /// The image's id, where its directory is not at hand.
    pub image_id: *const c_char,
    /// Which rank image; the only one, unless named.
    pub rank: *const c_char,
    /// `cpu`, or one GPU.
    pub device: *const c_char,
    /// The directory of the agent's socket.
    pub agent: *const c_char,
    /// A JSON object like `flashboot.toml`.
    pub config: *const c_char,
    /// Not 0: a verified copy of one's own, which may be written.
    pub private_copy: c_int,
}

// SAFETY: `repr(C)`, the size first, and zeros are null pointers and the number 0.
unsafe impl Sized1 for fb_attach_options {
    const NAME: &'static str = "fb_attach_options";
}

/// Loads one rank into memory, from the first of what is named that has it, and from the next what that leaves. Of an image every
/// block is verified where it lies.
///
/// # Safety
/// `options` points to such a structure whose texts end in zeros, and `arena` to a handle of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_load(options: *const fb_load_options, arena: *mut *mut fb_arena) -> fb_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { loaded(options, arena, None) })
}

/// Reads one rank from processes that have it, as `fb_load` from `peer` alone; `rendezvous` must be named. `image_id` proves what is
/// cloned; by `model` alone the service is believed which image that is.
///
/// # Safety
/// As `fb_load`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_clone(options: *const fb_load_options, arena: *mut *mut fb_arena) -> fb_status {
    // SAFETY: the caller's promise.
    guard(|| unsafe { loaded(options, arena, Some("peer")) })
}

/// # Safety
/// As `fb_load`.
unsafe fn loaded(
    options: *const fb_load_options,
    arena: *mut *mut fb_arena,
    only: Option<&str>,
) -> Result<()> {
    let out = edge::out("arena", arena)?;
    // SAFETY: the caller's promise.
    let options = unsafe { edge::options(options) }?;
    // SAFETY: the caller's promise.
    let text = |name, at| unsafe { edge::text(name, at) };
    let sources = match only {
        Some(only) => Some(only.to_owned()),
        None => text("sources", options.sources)?,
    };
    // SAFETY: the caller's promise.
    let config = unsafe { configured(options.config, options.device, options.transport) }?;
    let patience = match options.patience_ms {
        0 => PATIENCE,
        ms => Duration::from_millis(ms),
    };
    let wish = Wish {
        // SAFETY: the caller's promise.
        path: unsafe { edge::path(options.path) },
        // SAFETY: the caller's promise.
        checkpoint: unsafe { edge::path(options.checkpoint) },
        object: text("object", options.object)?.map(|url| FromObject { url, options: Vec::new() }),
        rendezvous: text("rendezvous", options.rendezvous)?,
        model: text("model", options.model)?,
        revision: text("revision", options.revision)?,
        rank: text("rank", options.rank)?,
        image_id: text("image_id", options.image_id)?,
        sources: sources.map(|list| list.split(',').map(|name| name.trim().to_owned()).collect()),
        config,
        patience,
        directory: directory(),
    };
    let request = wish.request()?;
    let listener = options.progress.map(|call| Listener { call, data: options.progress_data });
    let now = Progress::default();
    // SAFETY: the caller's promise.
    let placed = unsafe { wait(load::place(request, now.clone()), &now, listener) }?;
    let given = handle::give(Arena::new(placed)?);
    // SAFETY: the caller's promise.
    unsafe { out.put(given) };
    Ok(())
}

/// Attaches to memory that the node agent of this host holds, where it is; nothing else is tried. The memory is read-only: whoever
/// writes to it ends its process, or on a GPU its context.
///
/// # Safety
/// `options` is NULL or points to such a structure whose texts end in zeros, and `arena` points to a handle of the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_attach(
    options: *const fb_attach_options,
    arena: *mut *mut fb_arena,
) -> fb_status {
    guard(|| {
        let out = edge::out("arena", arena)?;
        // SAFETY: the caller's promise.
        let options = unsafe { edge::options(options) }?;
        // SAFETY: the caller's promise.
        let mut config = unsafe { configured(options.config, options.device, std::ptr::null()) }?;
        // SAFETY: the caller's promise.
        if let Some(agent) = unsafe { edge::path(options.agent) } {
            config.agent.directory = Some(agent);
        }
        if options.private_copy != 0 {
            config.load.attach = Attach::Private;
        }
        // SAFETY: the caller's promise.
        let text = |name, at| unsafe { edge::text(name, at) };
        let request = AttachRequest {
            // SAFETY: the caller's promise.
            image: unsafe { edge::path(options.path) },
            id: text("image_id", options.image_id)?,
            rank: text("rank", options.rank)?,
            config,
        };
        let now = Progress::default();
        // SAFETY: nobody listens.
        let placed = unsafe { wait(load::attach(request, now.clone()), &now, None) }?;
        let given = handle::give(Arena::new(placed)?);
        // SAFETY: the caller's promise.
        unsafe { out.put(given) };
        Ok(())
    })
}

/// Waits for a load, and tells how far it is.
///
/// # Safety
/// The listener may be called on this thread.
unsafe fn wait(
    load: impl Future<Output = Result<Placed>>,
    now: &Progress,
    listener: Option<Listener>,
) -> Result<Placed> {
    let made = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = made.map_err(|e| Error::from_io("epoll_create", &e, "a runtime"))?;
    let tell = || {
        let ((done, total), Some(listener)) = (now.now(), listener) else { return Ok(()) };
        // SAFETY: the caller's promise.
        if total == 0 || unsafe { listener.tell(done, total) } {
            return Ok(());
        }
        Err(Error::new(Kind::Cancelled, "load", "given up by the caller's progress function"))
    };
    let done = runtime.block_on(async {
        tokio::pin!(load);
        loop {
            tokio::select! {
                biased;
                done = &mut load => return done.and_then(|placed| tell().map(|()| placed)),
                () = tokio::time::sleep(EVERY) => tell()?,
            }
        }
    });
    // What a call that was given up has left on threads ends there.
    runtime.shutdown_background();
    done
}

/// Settings out of a JSON object, with what has an argument of its own over them.
///
/// # Safety
/// All of them are null or text.
pub(crate) unsafe fn configured(
    config: *const c_char,
    device: *const c_char,
    transport: *const c_char,
) -> Result<Config> {
    // SAFETY: the caller's promise.
    let text = |name, at| unsafe { edge::text(name, at) };
    let mut config: Config = match text("config", config)? {
        None => Config::default(),
        Some(json) => serde_json::from_str(&json).map_err(|e| invalid("config", e.to_string()))?,
    };
    let (device, transport) = (text("device", device)?, text("transport", transport)?);
    choose(&mut config, device.as_deref(), transport.as_deref())?;
    Ok(config)
}

/// Where directories for sockets are made: their names may not be long.
pub(crate) fn directory() -> PathBuf {
    const LONGEST: usize = 60;
    let wanted = std::env::temp_dir();
    if wanted.as_os_str().len() > LONGEST { Path::new("/tmp").to_owned() } else { wanted }
}
