//! The real thing: `libibverbs.so.1`, opened at run time.
//!
//! Symbols are looked up once; the three calls of the data path are not symbols but stand in a table of the device's
//! context, which the provider fills.

use super::{
    Call, Change, Completion, Event, Gid, GidKind, Handle, Limits, LinkLayer, Port, ReadRequest, Refused,
    Registered, Status, Verbs, VerbsError, sys,
};
use flashboot_core::{Error, Kind, Result};
use libloading::os::unix::Library as Shared;
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fs,
    os::fd::{AsRawFd as _, BorrowedFd, RawFd},
    ptr,
    sync::{Arc, OnceLock},
};

const NAME: &str = "libibverbs.so.1";
/// Completions taken at a time.
const BATCH: usize = 32;
/// Reads posted by one call.
const POSTED: usize = 64;
const EAGAIN: i32 = 11;
const EIO: i32 = 5;
const ENODEV: i32 = 19;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;

macro_rules! symbols {
    (
        required { $($field:ident = $symbol:literal: $signature:ty;)* }
        optional { $($maybe:ident = $name:literal: $kind:ty;)* }
    ) => {
        struct Symbols {
            $($field: $signature,)*
            $($maybe: Option<$kind>,)*
        }

        impl Symbols {
            fn find(library: &Shared) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is the header's for this symbol.
                        let found = unsafe { library.get::<$signature>($symbol.as_bytes()) };
                        *found.map_err(|_| too_old($symbol))?
                    },)*
                    $($maybe: {
                        // SAFETY: as above.
                        let found = unsafe { library.get::<$kind>($name.as_bytes()) };
                        found.ok().map(|symbol| *symbol)
                    },)*
                })
            }
        }
    };
}

type Opaque = *mut c_void;

symbols! {
    required {
    device_list = "ibv_get_device_list": unsafe extern "C" fn(*mut c_int) -> *mut Opaque;
    free_list = "ibv_free_device_list": unsafe extern "C" fn(*mut Opaque);
    device_name = "ibv_get_device_name": unsafe extern "C" fn(Opaque) -> *const c_char;
    open_device = "ibv_open_device": unsafe extern "C" fn(Opaque) -> *mut sys::Context;
    close_device = "ibv_close_device": unsafe extern "C" fn(Opaque) -> c_int;
    query_device = "ibv_query_device": unsafe extern "C" fn(Opaque, *mut sys::DeviceAttr) -> c_int;
    query_port = "ibv_query_port": unsafe extern "C" fn(Opaque, u8, *mut sys::PortAttr) -> c_int;
    query_gid = "ibv_query_gid": unsafe extern "C" fn(Opaque, u8, c_int, *mut [u64; 2]) -> c_int;
    get_async_event = "ibv_get_async_event": unsafe extern "C" fn(Opaque, *mut sys::AsyncEvent) -> c_int;
    ack_async_event = "ibv_ack_async_event": unsafe extern "C" fn(*mut sys::AsyncEvent);
    alloc_pd = "ibv_alloc_pd": unsafe extern "C" fn(Opaque) -> Opaque;
    dealloc_pd = "ibv_dealloc_pd": unsafe extern "C" fn(Opaque) -> c_int;
    reg_mr = "ibv_reg_mr": unsafe extern "C" fn(Opaque, Opaque, usize, c_int) -> *mut sys::Mr;
    dereg_mr = "ibv_dereg_mr": unsafe extern "C" fn(Opaque) -> c_int;
    create_comp_channel = "ibv_create_comp_channel": unsafe extern "C" fn(Opaque) -> *mut sys::CompChannel;
    destroy_comp_channel = "ibv_destroy_comp_channel": unsafe extern "C" fn(Opaque) -> c_int;
    create_cq = "ibv_create_cq": unsafe extern "C" fn(Opaque, c_int, Opaque, Opaque, c_int) -> *mut sys::Cq;
    destroy_cq = "ibv_destroy_cq": unsafe extern "C" fn(Opaque) -> c_int;
    get_cq_event = "ibv_get_cq_event": unsafe extern "C" fn(Opaque, *mut Opaque, *mut Opaque) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": unsafe extern "C" fn(Opaque, c_uint);
    create_qp = "ibv_create_qp": unsafe extern "C" fn(Opaque, *mut sys::QpInitAttr) -> *mut sys::Qp;
    modify_qp = "ibv_modify_qp": unsafe extern "C" fn(Opaque, *mut sys::QpAttr, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": unsafe extern "C" fn(Opaque) -> c_int;
    }
    optional {
    reg_dmabuf_mr = "ibv_reg_dmabuf_mr": unsafe extern "C" fn(Opaque, u64, usize, u64, c_int, c_int) -> *mut sys::Mr;
    query_gid_table = "_ibv_query_gid_table": unsafe extern "C" fn(Opaque, *mut sys::GidEntry, usize, u32, usize) -> isize;
    }
}

/// The library, once it is open. It is never closed: providers leave threads and handlers behind.
pub(crate) struct Library {
    symbols: Symbols,
    _library: Shared,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAME)
    }
}

fn too_old(symbol: &str) -> Error {
    Error::new(Kind::Unavailable, "dlsym", format!("this machine's {NAME} has no {symbol}"))
        .with_remedy("install rdma-core 28 or later")
}

impl Library {
    /// The library, opened at the first call.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where there is none or one that is too old.
    pub(crate) fn shared() -> Result<Arc<Self>> {
        static LIBRARY: OnceLock<Result<Arc<Library>>> = OnceLock::new();
        LIBRARY.get_or_init(|| Self::load().map(Arc::new)).clone()
    }

    fn load() -> Result<Self> {
        // SAFETY: opening a library runs its initialisers; this one's are meant to be run so.
        let library = unsafe { Shared::new(NAME) }.map_err(|_| {
            Error::new(Kind::Unavailable, "dlopen", format!("no {NAME} on this machine's library path"))
                .with_remedy("install libibverbs1 and ibverbs-providers (Debian), or rdma-core (RHEL)")
        })?;
        Ok(Self { symbols: Symbols::find(&library)?, _library: library })
    }
}

/// The number that the failed call left.
fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(EIO)
}

/// Of a call that gives 0, or an errno, or -1 and sets it.
fn zero(call: &'static str, code: c_int) -> Call<()> {
    match code {
        0 => Ok(()),
        negative if negative < 0 => Err(VerbsError { call, errno: errno() }),
        errno => Err(VerbsError { call, errno }),
    }
}

/// Of a call that gives a pointer, or null and sets errno.
fn made<T>(call: &'static str, pointer: *mut T) -> Call<*mut T> {
    if pointer.is_null() { Err(VerbsError { call, errno: errno() }) } else { Ok(pointer) }
}

fn small(n: c_int) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

fn event_of(event: &sys::AsyncEvent) -> Event {
    // The port's number is an int in a union of pointers.
    let port = event.element as u8;
    match event.event_type {
        0 => Event::QueueLost,
        1..=3 => Event::PairLost,
        8 => Event::DeviceFatal,
        9 => Event::PortUp(port),
        10 => Event::PortDown(port),
        other => Event::Other(other),
    }
}

fn kind_of(code: u32) -> Option<GidKind> {
    match code {
        0 => Some(GidKind::Infiniband),
        1 => Some(GidKind::RoceV1),
        2 => Some(GidKind::RoceV2),
        _ => None,
    }
}

fn gid_bytes(words: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    let (front, back) = bytes.split_at_mut(8);
    front.copy_from_slice(&words[0].to_ne_bytes());
    back.copy_from_slice(&words[1].to_ne_bytes());
    bytes
}

pub(super) fn gid_words(bytes: [u8; 16]) -> [u64; 2] {
    let word =
        |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes);
    [word(0), word(8)]
}

impl Library {
    /// By the one call that newer libraries have.
    fn gid_table(&self, context: Handle, port: u8, len: u32) -> Option<Vec<Gid>> {
        let query = self.symbols.query_gid_table?;
        // Every port's entries come in one table; a device has few ports.
        let mut entries = vec![sys::GidEntry::default(); (len as usize).saturating_mul(4).min(1 << 14)];
        let size = size_of::<sys::GidEntry>();
        // SAFETY: the table has room for as many entries as are said, of the size that is said.
        let found = unsafe { query(context.0, entries.as_mut_ptr(), entries.len(), 0, size) };
        let found = usize::try_from(found).ok()?;
        let of_port = |entry: &&sys::GidEntry| entry.port_num == u32::from(port);
        let gids = entries.iter().take(found).filter(of_port).filter_map(|entry| {
            Some(Gid { index: entry.gid_index, kind: kind_of(entry.gid_type)?, bytes: gid_bytes(entry.gid) })
        });
        Some(gids.collect())
    }

    /// Index by index, the kinds from sysfs.
    fn gids_one_by_one(&self, context: Handle, device: &str, port: u8, len: u32) -> Vec<Gid> {
        let mut gids = Vec::new();
        for index in 0..len.min(1 << 12) {
            let mut words = [0; 2];
            // SAFETY: room for one GID; the index is the table's.
            let code = unsafe { (self.symbols.query_gid)(context.0, port, index as c_int, &raw mut words) };
            if code != 0 || words == [0; 2] {
                continue;
            }
            let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
            let kind = match fs::read_to_string(path).unwrap_or_default().trim() {
                "RoCE v2" => GidKind::RoceV2,
                "IB/RoCE v1"
                    if fs::metadata(format!("/sys/class/infiniband/{device}/device/net")).is_ok() =>
                {
                    GidKind::RoceV1
                }
                _ => GidKind::Infiniband,
            };
            gids.push(Gid { index, kind, bytes: gid_bytes(words) });
        }
        gids
    }

    fn context(context: Handle) -> *mut sys::Context {
        context.0.cast()
    }
}

/// The table of the context that a queue or a pair belongs to.
///
/// # Safety
/// `context` is open.
unsafe fn ops<'a>(context: *mut sys::Context) -> &'a sys::ContextOps {
    // SAFETY: an open context stays where it is; nobody writes the table once a device is open.
    unsafe { &(*context).ops }
}

impl Verbs for Library {
    fn devices(&self) -> Call<Vec<String>> {
        let mut count = 0;
        // SAFETY: gives a list that ends with null, or null.
        let list = made("ibv_get_device_list", unsafe { (self.symbols.device_list)(&raw mut count) })?;
        let mut names = Vec::new();
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries.
            let device = unsafe { list.wrapping_add(index).read() };
            // SAFETY: a device of the list; its name lives as long as the list.
            let name = unsafe { (self.symbols.device_name)(device) };
            // SAFETY: a C string, as the header says.
            names.push(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
        }
        // SAFETY: the list of above, which nobody uses any more.
        unsafe { (self.symbols.free_list)(list) };
        Ok(names)
    }

    fn open(&self, device: &str) -> Call<Handle> {
        let mut count = 0;
        // SAFETY: as in `devices`.
        let list = made("ibv_get_device_list", unsafe { (self.symbols.device_list)(&raw mut count) })?;
        let mut opened = Err(VerbsError { call: "ibv_open_device", errno: ENODEV });
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries.
            let found = unsafe { list.wrapping_add(index).read() };
            // SAFETY: a device of the list.
            let name = unsafe { (self.symbols.device_name)(found) };
            // SAFETY: a C string, as the header says.
            if unsafe { CStr::from_ptr(name) }.to_bytes() == device.as_bytes() {
                // SAFETY: a device of the list, which may be freed while a context of it is open.
                opened = made("ibv_open_device", unsafe { (self.symbols.open_device)(found) });
                break;
            }
        }
        // SAFETY: the list of above, which nobody uses any more.
        unsafe { (self.symbols.free_list)(list) };
        let context = opened?;
        // SAFETY: the context was just opened.
        let fd = unsafe { (*context).async_fd };
        // SAFETY: the context's descriptor, which lives as long as it.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        // Events are looked for, never waited for.
        let flags = rustix::fs::fcntl_getfl(fd)
            .and_then(|f| rustix::fs::fcntl_setfl(fd, f | rustix::fs::OFlags::NONBLOCK));
        if let Err(e) = flags {
            let _ = self.close(Handle(context.cast()));
            return Err(VerbsError { call: "fcntl", errno: e.raw_os_error() });
        }
        Ok(Handle(context.cast()))
    }

    fn close(&self, context: Handle) -> Call<()> {
        // SAFETY: an open context; its owner has dropped what was made of it.
        zero("ibv_close_device", unsafe { (self.symbols.close_device)(context.0) })
    }

    fn limits(&self, context: Handle) -> Call<Limits> {
        // SAFETY: numbers; all zero is a value.
        let mut attr: sys::DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: an open context and room for its answer.
        zero("ibv_query_device", unsafe { (self.symbols.query_device)(context.0, &raw mut attr) })?;
        Ok(Limits {
            max_mr_size: attr.max_mr_size,
            max_qp_wr: small(attr.max_qp_wr),
            max_cqe: small(attr.max_cqe),
            reads_in: small(attr.max_qp_rd_atom),
            reads_out: small(attr.max_qp_init_rd_atom),
            ports: attr.phys_port_cnt,
        })
    }

    fn port(&self, context: Handle, port: u8) -> Call<Port> {
        let mut attr = sys::PortAttr::default();
        // SAFETY: an open context and room for its answer; the symbol fills the older front of the structure.
        zero("ibv_query_port", unsafe { (self.symbols.query_port)(context.0, port, &raw mut attr) })?;
        Ok(Port {
            state: attr.state,
            mtu: attr.active_mtu,
            gids: small(attr.gid_tbl_len),
            max_msg: attr.max_msg_sz,
            lid: attr.lid,
            link: if attr.link_layer == 2 { LinkLayer::Ethernet } else { LinkLayer::Infiniband },
        })
    }

    fn gids(&self, context: Handle, device: &str, port: u8, len: u32) -> Call<Vec<Gid>> {
        Ok(self
            .gid_table(context, port, len)
            .unwrap_or_else(|| self.gids_one_by_one(context, device, port, len)))
    }

    fn event_fd(&self, context: Handle) -> RawFd {
        // SAFETY: an open context.
        unsafe { (*Self::context(context)).async_fd }
    }

    fn event(&self, context: Handle) -> Call<Option<Event>> {
        let mut event = sys::AsyncEvent::default();
        // SAFETY: an open context and room for its answer; its descriptor does not block.
        match zero("ibv_get_async_event", unsafe {
            (self.symbols.get_async_event)(context.0, &raw mut event)
        }) {
            Ok(()) => {}
            Err(VerbsError { errno: EAGAIN, .. }) => return Ok(None),
            Err(e) => return Err(e),
        }
        let told = event_of(&event);
        // SAFETY: an event that was just taken, acknowledged once; what it names cannot go before that.
        unsafe { (self.symbols.ack_async_event)(&raw mut event) };
        Ok(Some(told))
    }

    fn domain(&self, context: Handle) -> Call<Handle> {
        // SAFETY: an open context.
        made("ibv_alloc_pd", unsafe { (self.symbols.alloc_pd)(context.0) }).map(Handle)
    }

    fn drop_domain(&self, domain: Handle) -> Call<()> {
        // SAFETY: a domain that nothing made of it is left of.
        zero("ibv_dealloc_pd", unsafe { (self.symbols.dealloc_pd)(domain.0) })
    }

    unsafe fn register(&self, domain: Handle, address: u64, len: u64) -> Call<Registered> {
        let call = "ibv_reg_mr";
        let len = usize::try_from(len).map_err(|_| VerbsError { call, errno: EINVAL })?;
        let at = ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        let access = sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_READ;
        // SAFETY: the caller's promise about the range.
        registered(made(call, unsafe { (self.symbols.reg_mr)(domain.0, at, len, access) })?)
    }

    unsafe fn register_dma_buf(
        &self,
        domain: Handle,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
    ) -> Call<Registered> {
        let call = "ibv_reg_dmabuf_mr";
        let Some(register) = self.symbols.reg_dmabuf_mr else {
            return Err(VerbsError { call, errno: ENOSYS });
        };
        let len = usize::try_from(len).map_err(|_| VerbsError { call, errno: EINVAL })?;
        let access = sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_READ;
        // SAFETY: the caller's promise about what the descriptor is of; the library takes what it needs of it.
        registered(made(call, unsafe { register(domain.0, offset, len, address, fd.as_raw_fd(), access) })?)
    }

    fn deregister(&self, region: Handle) -> Call<()> {
        // SAFETY: a region whose requests have completed.
        zero("ibv_dereg_mr", unsafe { (self.symbols.dereg_mr)(region.0) })
    }

    fn channel(&self, context: Handle) -> Call<(Handle, RawFd)> {
        // SAFETY: an open context.
        let channel =
            made("ibv_create_comp_channel", unsafe { (self.symbols.create_comp_channel)(context.0) })?;
        // SAFETY: just made.
        let fd = unsafe { (*channel).fd };
        Ok((Handle(channel.cast()), fd))
    }

    fn drop_channel(&self, channel: Handle) -> Call<()> {
        // SAFETY: a channel whose queues are gone.
        zero("ibv_destroy_comp_channel", unsafe { (self.symbols.destroy_comp_channel)(channel.0) })
    }

    fn queue(&self, context: Handle, entries: u32, channel: Handle) -> Call<Handle> {
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: an open context and a channel of it.
        let queue = unsafe { (self.symbols.create_cq)(context.0, entries, ptr::null_mut(), channel.0, 0) };
        made("ibv_create_cq", queue).map(|queue| Handle(queue.cast()))
    }

    fn drop_queue(&self, queue: Handle) -> Call<()> {
        // SAFETY: a queue whose pairs are gone and whose events were acknowledged.
        zero("ibv_destroy_cq", unsafe { (self.symbols.destroy_cq)(queue.0) })
    }

    fn arm(&self, queue: Handle) -> Call<()> {
        let call = "ibv_req_notify_cq";
        let queue: *mut sys::Cq = queue.0.cast();
        // SAFETY: a live queue.
        let context = unsafe { (*queue).context };
        // SAFETY: the context of a live queue is open.
        let notify = unsafe { ops(context) }.req_notify_cq.ok_or(VerbsError { call, errno: ENOSYS })?;
        // SAFETY: a live queue.
        zero(call, unsafe { notify(queue, 0) })
    }

    fn disarm(&self, channel: Handle) -> Call<()> {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live channel that is readable, so this does not wait.
        let got = unsafe { (self.symbols.get_cq_event)(channel.0, &raw mut queue, &raw mut context) };
        zero("ibv_get_cq_event", got)?;
        // SAFETY: the queue whose event was just taken, acknowledged once.
        unsafe { (self.symbols.ack_cq_events)(queue, 1) };
        Ok(())
    }

    fn poll(&self, queue: Handle, into: &mut Vec<Completion>) -> Call<bool> {
        let call = "ibv_poll_cq";
        let queue: *mut sys::Cq = queue.0.cast();
        // SAFETY: a live queue.
        let context = unsafe { (*queue).context };
        // SAFETY: the context of a live queue is open.
        let poll = unsafe { ops(context) }.poll_cq.ok_or(VerbsError { call, errno: ENOSYS })?;
        let mut found = [sys::Wc::default(); BATCH];
        // SAFETY: a live queue and room for as many as are said.
        let count = unsafe { poll(queue, BATCH as c_int, found.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| VerbsError { call, errno: EIO })?;
        into.extend(found.iter().take(count).map(|wc| Completion {
            id: wc.wr_id,
            status: Status(wc.status),
            vendor: wc.vendor_err,
        }));
        Ok(count > 0)
    }

    fn pair(&self, domain: Handle, queue: Handle, depth: u32) -> Call<(Handle, u32)> {
        let mut attr = sys::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: queue.0,
            recv_cq: queue.0,
            srq: ptr::null_mut(),
            // Nothing is ever received, but some providers refuse a queue of none.
            cap: sys::QpCap {
                max_send_wr: depth,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a live domain and queue of one device.
        let pair = made("ibv_create_qp", unsafe { (self.symbols.create_qp)(domain.0, &raw mut attr) })?;
        // SAFETY: just made.
        let number = unsafe { (*pair).qp_num };
        Ok((Handle(pair.cast()), number))
    }

    fn drop_pair(&self, pair: Handle) -> Call<()> {
        // SAFETY: a live pair, whose owner uses it no more.
        zero("ibv_destroy_qp", unsafe { (self.symbols.destroy_qp)(pair.0) })
    }

    fn change(&self, pair: Handle, change: Change) -> Call<()> {
        let (mut attr, mask) = attributes(change);
        // SAFETY: a live pair; the structure holds what the mask says.
        zero("ibv_modify_qp", unsafe { (self.symbols.modify_qp)(pair.0, &raw mut attr, mask) })
    }

    unsafe fn read(&self, pair: Handle, requests: &[ReadRequest]) -> Result<(), Refused> {
        // SAFETY: the caller's promise.
        unsafe { post(pair, requests, sys::WR_RDMA_READ) }
    }
}

/// Posts requests of one kind in order.
///
/// # Safety
/// The pair is live; the memory that each request names stays mapped, and nobody else touches it, until its completion.
unsafe fn post(pair: Handle, requests: &[ReadRequest], opcode: c_uint) -> Result<(), Refused> {
    let call = "ibv_post_send";
    let refused = |accepted, errno| Refused { accepted, error: VerbsError { call, errno } };
    let pair: *mut sys::Qp = pair.0.cast();
    // SAFETY: a live pair.
    let context = unsafe { (*pair).context };
    // SAFETY: the context of a live pair is open.
    let post = unsafe { ops(context) }.post_send.ok_or(refused(0, ENOSYS))?;
    let mut before = 0;
    for part in requests.chunks(POSTED) {
        let mut entries: Vec<sys::Sge> =
            part.iter().map(|r| sys::Sge { addr: r.to, length: r.len, lkey: r.local_key }).collect();
        let mut posted: Vec<sys::SendWr> = part.iter().map(|r| request(r, opcode)).collect();
        chain(&mut posted, &mut entries);
        let mut bad = ptr::null_mut();
        // SAFETY: a live pair; a list that ends with null, each with its one entry, all of which the call reads
        // before it returns. The caller's promise about the memory.
        let code = unsafe { post(pair, posted.as_mut_ptr(), &raw mut bad) };
        if code != 0 {
            let accepted = posted.iter().position(|wr| ptr::eq(wr, bad)).unwrap_or(0);
            let errno = if code < 0 { errno() } else { code };
            return Err(refused(before + accepted, errno));
        }
        before += part.len();
    }
    Ok(())
}

fn registered(region: *mut sys::Mr) -> Call<Registered> {
    // SAFETY: just made; its visible part is never written again.
    let sys::Mr { lkey: local_key, rkey: remote_key, .. } = *unsafe { &*region };
    Ok(Registered { handle: Handle(region.cast()), local_key, remote_key })
}

fn request(read: &ReadRequest, opcode: c_uint) -> sys::SendWr {
    sys::SendWr {
        wr_id: read.id,
        next: ptr::null_mut(),
        sg_list: ptr::null_mut(),
        num_sge: 1,
        opcode,
        send_flags: if read.signalled { sys::SEND_SIGNALED } else { 0 },
        imm_data: 0,
        remote_addr: read.from,
        rkey: read.remote_key,
        rest: [0; 9],
    }
}

/// Links each request to the next and to its own entry.
fn chain(posted: &mut [sys::SendWr], entries: &mut [sys::Sge]) {
    let mut next = ptr::null_mut();
    for (request, entry) in posted.iter_mut().zip(entries).rev() {
        request.sg_list = entry;
        request.next = next;
        next = request;
    }
}

fn attributes(change: Change) -> (sys::QpAttr, c_int) {
    use sys::mask;
    let state = |qp_state| sys::QpAttr { qp_state, ..sys::QpAttr::default() };
    match change {
        Change::Reset => (state(sys::state::RESET), mask::STATE),
        Change::Fail => (state(sys::state::ERR), mask::STATE),
        Change::Init { port } => {
            let access = sys::ACCESS_REMOTE_READ as c_uint;
            let attr = sys::QpAttr { port_num: port, qp_access_flags: access, ..state(sys::state::INIT) };
            (attr, mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS)
        }
        Change::Receive(path) => {
            let attr = sys::QpAttr {
                path_mtu: path.mtu,
                dest_qp_num: path.number,
                rq_psn: path.psn,
                max_dest_rd_atomic: path.reads_in,
                min_rnr_timer: 12,
                ah_attr: sys::AhAttr {
                    dgid: gid_words(path.gid),
                    flow_label: 0,
                    sgid_index: path.own_gid,
                    hop_limit: 64,
                    traffic_class: path.traffic_class,
                    dlid: path.lid,
                    sl: path.service_level,
                    src_path_bits: 0,
                    static_rate: 0,
                    is_global: u8::from(path.global),
                    port_num: path.port,
                },
                ..state(sys::state::RTR)
            };
            let mask = mask::STATE
                | mask::AV
                | mask::PATH_MTU
                | mask::DEST_QPN
                | mask::RQ_PSN
                | mask::MAX_DEST_RD_ATOMIC
                | mask::MIN_RNR_TIMER;
            (attr, mask)
        }
        Change::Send { psn, reads, timeout, retries } => {
            let attr = sys::QpAttr {
                sq_psn: psn,
                max_rd_atomic: reads,
                timeout,
                retry_cnt: retries,
                // Nobody sends to us: a peer is never "not ready".
                rnr_retry: 0,
                ..state(sys::state::RTS)
            };
            let mask = mask::STATE
                | mask::TIMEOUT
                | mask::RETRY_CNT
                | mask::RNR_RETRY
                | mask::SQ_PSN
                | mask::MAX_QP_RD_ATOMIC;
            (attr, mask)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Completions, Device, Pair, Path, Region};

    #[test]
    fn requests_are_linked_in_order_each_to_its_entry() {
        let read =
            |id| ReadRequest { id, from: 1, remote_key: 2, to: 3, len: 4, local_key: 5, signalled: id == 2 };
        let mut posted: Vec<_> = [0, 1, 2].map(|id| request(&read(id), sys::WR_RDMA_READ)).into();
        let mut entries = vec![sys::Sge { addr: 3, length: 4, lkey: 5 }; 3];
        chain(&mut posted, &mut entries);
        let at: Vec<_> = posted.iter().map(ptr::from_ref).collect();
        assert_eq!(posted[0].next.cast_const(), at[1]);
        assert_eq!(posted[1].next.cast_const(), at[2]);
        assert!(posted[2].next.is_null());
        assert_eq!(posted[1].sg_list.cast_const(), &raw const entries[1]);
        assert_eq!(posted.iter().map(|wr| wr.send_flags).collect::<Vec<_>>(), [0, 0, sys::SEND_SIGNALED]);
    }

    /// What a reader could try that does not keep to READs: its key lets the NIC read, and nothing else.
    #[test]
    #[ignore = "needs a verbs provider: cargo xtask rdma-vm runs it"]
    fn a_reader_s_key_does_not_write() {
        const WRITE: c_uint = 0;
        let verbs: Arc<dyn Verbs> = Library::shared().unwrap();
        let device = Device::open(&verbs, "rxe0").unwrap();
        let port = device.port(1).unwrap();
        let gid = device.gids(1, port.gids).unwrap().into_iter().find(|gid| gid.index == 1).unwrap();
        let completions = Completions::new(&device, 16).unwrap();
        let [source, reader] = [(); 2].map(|()| Pair::new(&completions, 4).unwrap());
        for (own, other) in [(&source, &reader), (&reader, &source)] {
            let path = Path {
                port: 1,
                own_gid: 1,
                gid: gid.bytes,
                global: true,
                lid: 0,
                number: other.number(),
                psn: 1,
                mtu: port.mtu,
                traffic_class: 0,
                service_level: 0,
                reads_in: 1,
            };
            own.init(1).unwrap();
            own.receive(path).unwrap();
            own.send(1, 1, 14, 6).unwrap();
        }
        let (theirs, mine) = (vec![7u8; 4096], vec![1u8; 4096]);
        let at = |bytes: &Vec<u8>| bytes.as_ptr().expose_provenance() as u64;
        // SAFETY: both vectors outlive their regions and requests, and are not touched while one is under way.
        let [exported, own] =
            [&theirs, &mine].map(|v| unsafe { Region::of_address(&device, at(v), 4096) }.unwrap());
        let request = ReadRequest {
            id: 1,
            from: at(&theirs),
            remote_key: exported.remote_key(),
            to: at(&mine),
            len: 4096,
            local_key: own.local_key(),
            signalled: true,
        };
        let run = |opcode| {
            // SAFETY: as above.
            unsafe { post(reader.handle, &[request], opcode) }.unwrap();
            let (mut found, began) = (Vec::new(), std::time::Instant::now());
            while found.is_empty() && began.elapsed().as_secs() < 5 {
                completions.poll(&mut found).unwrap();
            }
            found[0].status
        };
        assert_eq!(run(sys::WR_RDMA_READ), Status::SUCCESS);
        assert!(mine.iter().all(|byte| *byte == 7), "the READ came");
        // By the queue pair (soft-RoCE) or by the key: neither allows it.
        assert!(matches!(run(WRITE), Status::REMOTE_INVALID | Status::REMOTE_ACCESS));
        assert!(theirs.iter().all(|byte| *byte == 7), "the source is as it was");
    }

    #[test]
    fn a_gid_reads_back() {
        let bytes = std::array::from_fn(|i| i as u8);
        assert_eq!(gid_bytes(gid_words(bytes)), bytes);
    }
}
