//! The real thing: `libibverbs.so.1`, opened at run time.
//!
//! Symbols are looked up once; the three calls of the data path are not symbols but stand in a table of the device's
//! context, which the provider fills.

mod gids;
mod pairs;
mod symbols;

use super::{
    Call, Change, Completion, Event, Gid, Handle, Limits, LinkLayer, Port, ReadRequest, Refused, Registered,
    Status, Verbs, VerbsError, sys,
};
use flashboot_core::{Error, Kind, Result};
use libloading::os::unix::Library as Shared;
use pairs::{attributes, post};
use std::{
    ffi::{CStr, c_int},
    os::fd::{AsRawFd as _, BorrowedFd, RawFd},
    ptr,
    sync::{Arc, OnceLock},
};
use symbols::Symbols;

const NAME: &str = "libibverbs.so.1";
/// Completions taken at a time.
const BATCH: usize = 32;
const EAGAIN: i32 = 11;
const EIO: i32 = 5;
const ENODEV: i32 = 19;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;

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

fn registered(region: *mut sys::Mr) -> Call<Registered> {
    // SAFETY: just made; its visible part is never written again.
    let sys::Mr { lkey: local_key, rkey: remote_key, .. } = *unsafe { &*region };
    Ok(Registered { handle: Handle(region.cast()), local_key, remote_key })
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
        unsafe { (*context.0.cast::<sys::Context>()).async_fd }
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
