//! A verbs provider in this process for the crate's tests: READs are copies, and any call or completion can be made to fail.
//! It reaches GPU memory as a card does, through its dma-buf, which only the stand-in driver's lets it; what it writes there
//! the GPU sees when it was flushed.

mod memory;

use super::{
    Call, Change, Completion, Event, Gid, GidKind, Handle, Limits, LinkLayer, Port, ReadRequest, Refused,
    Registered, Status, Verbs, VerbsError,
};
pub(crate) use memory::Asked;
use memory::Memory;
use rustix::event::{EventfdFlags, eventfd};
use std::{
    collections::{HashMap, VecDeque},
    os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    ptr,
    sync::{Arc, Mutex, MutexGuard},
};

#[derive(Debug, Default)]
struct State {
    next: usize,
    contexts: HashMap<usize, (String, OwnedFd)>,
    /// The queue and device of each pair, what is held back of it, and whether it is in error.
    pairs: HashMap<usize, PairState>,
    /// Completions of each queue.
    queues: HashMap<usize, (Vec<Completion>, usize, bool)>,
    channels: HashMap<usize, OwnedFd>,
    /// The device of each domain or context.
    devices_of: HashMap<usize, String>,
    memory: Memory,
    events: HashMap<String, VecDeque<Event>>,
    // What is asked of it.
    names: Vec<String>,
    down: Vec<String>,
    gids: Vec<Gid>,
    /// The LID of every port, where they are InfiniBand's.
    lid: Option<u16>,
    max_mr_size: u64,
    /// By call: calls that pass before each is refused with this errno.
    refuse: HashMap<&'static str, (usize, i32)>,
    /// By device: READs that pass before the post is refused with this errno.
    refuse_posts: HashMap<String, (usize, i32)>,
    /// By device: READs that pass before one completes with this status.
    statuses: HashMap<String, (usize, Status)>,
    /// Devices whose READs never complete by themselves.
    stuck: Vec<String>,
    /// Devices that tell of no completion any more, not even of a flushed one.
    mute: Vec<String>,
}

#[derive(Debug)]
struct PairState {
    device: String,
    queue: usize,
    held: Vec<ReadRequest>,
    failed: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Fake(Arc<Mutex<State>>);

fn event_fd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn address_of(handle: Handle) -> usize {
    handle.0.addr()
}

impl Fake {
    pub(crate) fn new(names: &[&str]) -> Self {
        let gid = Gid { index: 3, kind: GidKind::RoceV2, bytes: [7; 16] };
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let state = State { names, gids: vec![gid], max_mr_size: 1 << 40, next: 16, ..State::default() };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(crate) fn verbs(&self) -> Arc<dyn Verbs> {
        Arc::new(self.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// The call fails with this errno from now on.
    pub(crate) fn refuse(&self, call: &'static str, errno: i32) {
        self.refuse_after(call, 0, errno);
    }

    /// As [`refuse`](Self::refuse), once it was called `calls` times more.
    pub(crate) fn refuse_after(&self, call: &'static str, calls: usize, errno: i32) {
        self.state().refuse.insert(call, (calls, errno));
    }

    /// After `reads` READs on `device`, posting is refused once.
    pub(crate) fn refuse_posts(&self, device: &str, reads: usize, errno: i32) {
        self.state().refuse_posts.insert(device.into(), (reads, errno));
    }

    /// After `reads` READs on `device`, one completes so.
    pub(crate) fn complete_with(&self, device: &str, reads: usize, status: Status) {
        self.state().statuses.insert(device.into(), (reads, status));
    }

    pub(crate) fn stick(&self, device: &str) {
        self.state().stuck.push(device.into());
    }

    /// As [`stick`](Self::stick), and what its pairs had posted does not come back when they are ended.
    pub(crate) fn kill(&self, device: &str) {
        self.stick(device);
        self.state().mute.push(device.into());
    }

    pub(crate) fn bring_down(&self, device: &str) {
        self.state().down.push(device.into());
    }

    /// Every port is InfiniBand's, with this LID.
    pub(crate) fn on_infiniband(&self, lid: u16) {
        let mut state = self.state();
        state.lid = Some(lid);
        state.gids.iter_mut().for_each(|gid| gid.kind = GidKind::Infiniband);
    }

    pub(crate) fn without_gids(&self) {
        self.state().gids.clear();
    }

    pub(crate) fn register_at_most(&self, bytes: u64) {
        self.state().max_mr_size = bytes;
    }

    pub(crate) fn tell(&self, device: &str, event: Event) {
        let mut state = self.state();
        state.events.entry(device.into()).or_default().push_back(event);
        for (name, fd) in state.contexts.values() {
            if name == device {
                rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
            }
        }
    }

    /// A card's write, of no READ.
    pub(crate) fn write(&self, bytes: &[u8], key: u32, address: u64) {
        let from = bytes.as_ptr().expose_provenance();
        self.state().memory.copy(from, key, address, bytes.len() as u32);
    }

    /// The calls that were to register memory, in order.
    pub(crate) fn registrations(&self) -> Vec<Asked> {
        self.state().memory.asked.clone()
    }

    /// How many regions were made and given back.
    pub(crate) fn deregistered(&self) -> usize {
        self.state().memory.deregistered
    }

    /// Regions, pairs, queues and contexts that are there.
    pub(crate) fn left(&self) -> [usize; 4] {
        let s = self.state();
        [s.memory.count(), s.pairs.len(), s.queues.len(), s.contexts.len()]
    }
}

impl State {
    fn check(&mut self, call: &'static str) -> Call<()> {
        match self.refuse.get_mut(call) {
            None => Ok(()),
            Some((0, errno)) => Err(VerbsError { call, errno: *errno }),
            Some((calls, _)) => {
                *calls -= 1;
                Ok(())
            }
        }
    }

    fn make(&mut self) -> (usize, Handle) {
        self.next += 16;
        (self.next, Handle(ptr::without_provenance_mut(self.next)))
    }

    fn complete(&mut self, queue: usize, id: u64, status: Status) {
        let Some((found, channel, armed)) = self.queues.get_mut(&queue) else { return };
        found.push(Completion { id, status, vendor: 0x55 });
        if std::mem::take(armed) {
            let fd = &self.channels[channel];
            rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// One READ, now.
    fn run(&mut self, pair: usize, read: &ReadRequest) {
        let (device, queue, failed) = {
            let p = &self.pairs[&pair];
            (p.device.clone(), p.queue, p.failed)
        };
        if failed {
            return self.complete(queue, read.id, Status::FLUSHED);
        }
        if self.stuck.contains(&device) {
            self.pairs.get_mut(&pair).unwrap().held.push(*read);
            return;
        }
        let from = self.memory.find(read.remote_key, read.from, read.len);
        let to = self.memory.find(read.local_key, read.to, read.len);
        let mut status = match (to, from) {
            (None, _) => Status::LOCAL_PROTECTION,
            (_, None) => Status::REMOTE_ACCESS,
            _ => Status::SUCCESS,
        };
        if let Some((left, wanted)) = self.statuses.get_mut(&device) {
            if *left == 0 {
                status = *wanted;
            }
            *left = left.saturating_sub(1);
        }
        if let (Status::SUCCESS, Some(from)) = (status, from) {
            self.memory.copy(from, read.local_key, read.to, read.len);
        } else {
            self.pairs.get_mut(&pair).unwrap().failed = true;
        }
        if read.signalled || status != Status::SUCCESS {
            self.complete(queue, read.id, status);
        }
    }

    /// Notes the call, and refuses it where it is to be refused.
    fn registering(&mut self, asked: Asked) -> Call<(usize, Handle)> {
        self.memory.asked.push(asked);
        self.check(asked.call)?;
        if asked.len > self.max_mr_size {
            return Err(VerbsError { call: asked.call, errno: 12 });
        }
        Ok(self.make())
    }
}

impl Verbs for Fake {
    fn devices(&self) -> Call<Vec<String>> {
        let mut s = self.state();
        s.check("ibv_get_device_list")?;
        Ok(s.names.clone())
    }
    fn open(&self, device: &str) -> Call<Handle> {
        let mut s = self.state();
        s.check("ibv_open_device")?;
        if !s.names.iter().any(|name| name == device) {
            return Err(VerbsError { call: "ibv_open_device", errno: 19 });
        }
        let (number, handle) = s.make();
        s.contexts.insert(number, (device.into(), event_fd()));
        s.devices_of.insert(number, device.into());
        Ok(handle)
    }
    fn close(&self, context: Handle) -> Call<()> {
        self.state().contexts.remove(&address_of(context));
        Ok(())
    }
    fn limits(&self, _: Handle) -> Call<Limits> {
        let mut s = self.state();
        s.check("ibv_query_device")?;
        let max_mr_size = s.max_mr_size;
        Ok(Limits { max_mr_size, max_qp_wr: 1024, max_cqe: 4096, reads_in: 16, reads_out: 16, ports: 1 })
    }
    fn port(&self, context: Handle, _: u8) -> Call<Port> {
        let mut s = self.state();
        s.check("ibv_query_port")?;
        let down = s.down.contains(&s.devices_of[&address_of(context)]);
        let state = if down { 1 } else { Port::ACTIVE };
        let link = if s.lid.is_some() { LinkLayer::Infiniband } else { LinkLayer::Ethernet };
        Ok(Port { state, mtu: 5, gids: 16, max_msg: 1 << 31, lid: s.lid.unwrap_or(0), link })
    }
    fn gids(&self, _: Handle, _: &str, _: u8, _: u32) -> Call<Vec<Gid>> {
        Ok(self.state().gids.clone())
    }
    fn event_fd(&self, context: Handle) -> RawFd {
        self.state().contexts[&address_of(context)].1.as_raw_fd()
    }
    fn event(&self, context: Handle) -> Call<Option<Event>> {
        let mut s = self.state();
        let device = s.devices_of[&address_of(context)].clone();
        let event = s.events.get_mut(&device).and_then(VecDeque::pop_front);
        if event.is_none() {
            let _ = rustix::io::read(&s.contexts[&address_of(context)].1, &mut [0; 8]);
        }
        Ok(event)
    }
    fn domain(&self, context: Handle) -> Call<Handle> {
        let mut s = self.state();
        s.check("ibv_alloc_pd")?;
        let device = s.devices_of[&address_of(context)].clone();
        let (number, handle) = s.make();
        s.devices_of.insert(number, device);
        Ok(handle)
    }
    fn drop_domain(&self, _: Handle) -> Call<()> {
        Ok(())
    }
    unsafe fn register(&self, _: Handle, address: u64, len: u64) -> Call<Registered> {
        let mut s = self.state();
        let asked = Asked { call: "ibv_reg_mr", offset: 0, address, len };
        let made = s.registering(asked)?;
        Ok(s.memory.by_address(made, asked))
    }
    unsafe fn register_dma_buf(
        &self,
        _: Handle,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
    ) -> Call<Registered> {
        let mut s = self.state();
        let asked = Asked { call: "ibv_reg_dmabuf_mr", offset, address, len };
        let made = s.registering(asked)?;
        s.memory.by_dma_buf(made, fd, asked)
    }
    fn deregister(&self, region: Handle) -> Call<()> {
        self.state().memory.deregister(address_of(region));
        Ok(())
    }
    fn channel(&self, _: Handle) -> Call<(Handle, RawFd)> {
        let mut s = self.state();
        s.check("ibv_create_comp_channel")?;
        let (number, handle) = s.make();
        let fd = event_fd();
        let raw = fd.as_raw_fd();
        s.channels.insert(number, fd);
        Ok((handle, raw))
    }
    fn drop_channel(&self, channel: Handle) -> Call<()> {
        self.state().channels.remove(&address_of(channel));
        Ok(())
    }
    fn queue(&self, _: Handle, _: u32, channel: Handle) -> Call<Handle> {
        let mut s = self.state();
        s.check("ibv_create_cq")?;
        let (number, handle) = s.make();
        s.queues.insert(number, (Vec::new(), address_of(channel), false));
        Ok(handle)
    }
    fn drop_queue(&self, queue: Handle) -> Call<()> {
        self.state().queues.remove(&address_of(queue));
        Ok(())
    }
    fn arm(&self, queue: Handle) -> Call<()> {
        self.state().queues.get_mut(&address_of(queue)).unwrap().2 = true;
        Ok(())
    }
    fn disarm(&self, channel: Handle) -> Call<()> {
        let _ = rustix::io::read(&self.state().channels[&address_of(channel)], &mut [0; 8]);
        Ok(())
    }
    fn poll(&self, queue: Handle, into: &mut Vec<Completion>) -> Call<bool> {
        let mut s = self.state();
        s.check("ibv_poll_cq")?;
        let found = std::mem::take(&mut s.queues.get_mut(&address_of(queue)).unwrap().0);
        let any = !found.is_empty();
        into.extend(found);
        Ok(any)
    }
    fn pair(&self, domain: Handle, queue: Handle, _: u32) -> Call<(Handle, u32)> {
        let mut s = self.state();
        s.check("ibv_create_qp")?;
        let device = s.devices_of[&address_of(domain)].clone();
        let (number, handle) = s.make();
        let queue = address_of(queue);
        s.pairs.insert(number, PairState { device, queue, held: Vec::new(), failed: false });
        Ok((handle, number as u32))
    }
    fn drop_pair(&self, pair: Handle) -> Call<()> {
        self.state().check("ibv_destroy_qp")?;
        self.state().pairs.remove(&address_of(pair));
        Ok(())
    }
    fn change(&self, pair: Handle, change: Change) -> Call<()> {
        let mut s = self.state();
        s.check("ibv_modify_qp")?;
        let pair = address_of(pair);
        let state = s.pairs.get_mut(&pair).unwrap();
        state.failed = matches!(change, Change::Fail) || state.failed && !matches!(change, Change::Reset);
        let (queue, device) = (state.queue, state.device.clone());
        let flushes = state.failed && !s.mute.contains(&device);
        let state = s.pairs.get_mut(&pair).unwrap();
        let flushed = if flushes { std::mem::take(&mut state.held) } else { Vec::new() };
        for read in flushed {
            s.complete(queue, read.id, Status::FLUSHED);
        }
        Ok(())
    }
    unsafe fn read(&self, pair: Handle, requests: &[ReadRequest]) -> Result<(), Refused> {
        let mut s = self.state();
        let pair = address_of(pair);
        let device = s.pairs[&pair].device.clone();
        for (accepted, read) in requests.iter().enumerate() {
            if let Some((left, errno)) = s.refuse_posts.get_mut(&device) {
                if *left == 0 {
                    let error = VerbsError { call: "ibv_post_send", errno: *errno };
                    s.refuse_posts.remove(&device);
                    return Err(Refused { accepted, error });
                }
                *left -= 1;
            }
            s.run(pair, read);
        }
        Ok(())
    }
}
