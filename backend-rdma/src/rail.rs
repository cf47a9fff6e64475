//! One device of an endpoint, opened once: its port, its GID, its completion queue and its spare queue pairs.
//!
//! A queue pair serves one connection. Used ones are not reset for the next: soft-RoCE keeps the route of a pair's first
//! peer for as long as the pair is there, and packets that a dead peer still sends would find a number that they know. Spare
//! pairs are made ahead instead, by [`Rail::replenish`], so that no connection waits for one to be made.

use crate::{
    config::RdmaConfig,
    counters::Counters,
    error::{failed, place},
    gid,
    near::{self, Place},
    verbs::{Completions, Device, Gid, LinkLayer, Pair, Path, Port, Verbs, mtu_bytes, mtu_code},
    wire::Address,
};
use flashboot_core::{Error, Kind, Result};
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU32, Ordering},
};

/// Completions that may be waiting on one device.
const ENTRIES: u32 = 4096;
/// Room beside the window for READs of words.
pub(crate) const LOOK_ROOM: u32 = 4;

#[derive(Debug)]
pub(crate) struct Rail {
    // Pairs before the queue and the device that they belong to.
    spares: Mutex<Vec<Pair>>,
    /// Used, quiet, and to be destroyed by whoever has time for it.
    spent: Mutex<Vec<Pair>>,
    completions: Arc<Completions>,
    device: Arc<Device>,
    port: u8,
    found: Port,
    gid: Gid,
    /// `ibv_mtu` that we send at most.
    mtu: u32,
    depth: u32,
    keep: usize,
    timeout: u8,
    retries: u8,
    outstanding: u8,
    traffic_class: u8,
    service_level: u8,
    /// Completions that pairs in use may need at once.
    reserved: AtomicU32,
    down: AtomicBool,
    counters: Arc<Counters>,
}

/// The devices to use, opened: those that are configured, or every one with an active port, the nearest first.
///
/// # Errors
/// The first device's own when none can be used; [`Kind::Unavailable`] when there is none.
pub(crate) fn open_all(
    verbs: &Arc<dyn Verbs>,
    config: &RdmaConfig,
    counters: &Arc<Counters>,
) -> Result<Vec<Arc<Rail>>> {
    let found = verbs.devices().map_err(|e| failed(e, "this host", None, "listing the devices"))?;
    let named = !config.devices.is_empty();
    let names = if named {
        config.devices.clone()
    } else {
        let mut placed: Vec<_> =
            found.into_iter().map(|name| (name.clone(), Place::of_device(&name))).collect();
        let near = config.near_pci.as_deref().map(Place::of_pci);
        near::sort(&mut placed, near.as_ref(), config.numa_node);
        placed.into_iter().map(|(name, _)| name).collect()
    };
    let mut rails = Vec::new();
    let mut first = None;
    for name in names {
        if rails.len() >= config.max_rails {
            break;
        }
        match Rail::open(verbs, &name, config, counters) {
            Ok(rail) => rails.push(Arc::new(rail)),
            // Somebody asked for this one.
            Err(e) if named => return Err(e),
            Err(e) => {
                tracing::debug!(error = %e, "a device that cannot be used");
                first = first.or(Some(e));
            }
        }
    }
    if rails.is_empty() {
        return Err(first.unwrap_or_else(|| {
            Error::new(Kind::Unavailable, "ibv_get_device_list", "this host has no RDMA device")
                .with_remedy("load the NIC's driver, or let the container have /dev/infiniband")
        }));
    }
    Ok(rails)
}

impl Rail {
    fn open(
        verbs: &Arc<dyn Verbs>,
        name: &str,
        config: &RdmaConfig,
        counters: &Arc<Counters>,
    ) -> Result<Self> {
        let device = Device::open(verbs, name).map_err(|e| failed(e, name, None, "opening it"))?;
        counters.devices_opened.add(1);
        let limits = device.limits();
        let (port, found) = pick_port(&device, config)?;
        let table = device
            .gids(port, found.gids)
            .map_err(|e| failed(e, name, Some(port), "reading the GID table"))?;
        let gid = gid::choose(&table, found.link, config.gid_index).map_err(|why| {
            Error::new(Kind::Unavailable, "ibv_query_gid", format!("{}: {why}", place(name, Some(port))))
                .with_remedy("give the network device an address, or set rdma.gid_index to one that is there")
        })?;
        let wanted = config.mtu.and_then(mtu_code).unwrap_or(found.mtu);
        if wanted > found.mtu {
            let has = mtu_bytes(found.mtu).unwrap_or(0);
            let detail = format!("{} has a path MTU of {has} bytes", place(name, Some(port)));
            return Err(Error::new(Kind::Invalid, "rdma.mtu", detail)
                .with_remedy(format!("set rdma.mtu to {has} or less, or raise the network device's MTU")));
        }
        let depth = (u32::from(config.outstanding) + LOOK_ROOM).min(limits.max_qp_wr.max(1));
        let completions = Completions::new(&device, ENTRIES)
            .map_err(|e| failed(e, name, Some(port), "making a completion queue"))?;
        let rail = Self {
            spares: Mutex::default(),
            spent: Mutex::default(),
            completions,
            device,
            port,
            found,
            gid,
            mtu: wanted,
            depth,
            keep: config.spares,
            timeout: config.timeout_exponent(),
            retries: config.retries,
            outstanding: config.outstanding,
            traffic_class: config.traffic_class,
            service_level: config.service_level,
            reserved: AtomicU32::new(0),
            down: AtomicBool::new(false),
            counters: Arc::clone(counters),
        };
        rail.replenish()?;
        Ok(rail)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    pub(crate) fn port(&self) -> u8 {
        self.port
    }

    pub(crate) fn completions(&self) -> &Completions {
        &self.completions
    }

    /// READs that we may have going out of one queue pair.
    pub(crate) fn reads_out(&self) -> u32 {
        self.device.limits().reads_out.min(self.depth.saturating_sub(LOOK_ROOM).max(1))
    }

    pub(crate) fn outstanding(&self) -> u8 {
        self.outstanding
    }

    /// Bytes of one message at most.
    pub(crate) fn max_message(&self) -> u64 {
        u64::from(self.found.max_msg.max(1))
    }

    pub(crate) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::Relaxed);
    }

    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }

    /// What a person wants to know of it.
    pub(crate) fn describe(&self) -> String {
        format!(
            "{} ({}, MTU {}, GID {} {}, traffic class {}, service level {})",
            place(self.name(), Some(self.port)),
            self.found.state_name(),
            mtu_bytes(self.mtu).unwrap_or(0),
            self.gid.index,
            gid::text(self.gid.bytes),
            self.traffic_class,
            self.service_level,
        )
    }

    /// How a peer's queue pair reaches the pair `number` here.
    pub(crate) fn address(&self, pair: &Pair, psn: u32) -> Address {
        Address {
            number: pair.number(),
            psn,
            gid: self.gid.bytes,
            lid: self.found.lid,
            link: self.found.link,
            mtu: self.mtu,
            reads_in: self.device.limits().reads_in.min(255) as u8,
            traffic_class: self.traffic_class,
        }
    }

    /// What a person should know of a connection to the peer at `to`, although it works.
    pub(crate) fn remark(&self, to: &Address) -> Option<String> {
        (is_global(to) && to.traffic_class != self.traffic_class).then(|| {
            format!(
                "{} asks with traffic class {}, the peer's {} answers with {}: what comes is queued, marked and paused by \
                 other rules than what was meant for it; set rdma.traffic_class alike at both ends",
                place(self.name(), Some(self.port)),
                self.traffic_class,
                gid::text(to.gid),
                to.traffic_class,
            )
        })
    }

    fn error(&self, doing: &str) -> impl FnOnce(crate::verbs::VerbsError) -> Error + use<'_> {
        let doing = doing.to_owned();
        move |e| failed(e, self.name(), Some(self.port), &doing)
    }

    /// A queue pair that knows its port and was never used: a spare one, or a new one.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] when as many are in use as the completion queue has room for.
    pub(crate) fn pair(&self) -> Result<Pair> {
        let before = self.reserved.fetch_add(self.depth, Ordering::AcqRel);
        if before.saturating_add(self.depth) > self.completions.entries() {
            self.reserved.fetch_sub(self.depth, Ordering::AcqRel);
            let detail = format!(
                "{} readers at once on {}, and its completion queue has {} entries",
                before / self.depth.max(1),
                self.name(),
                self.completions.entries()
            );
            return Err(Error::new(Kind::Exhausted, "ibv_create_qp", detail)
                .with_remedy("lower rdma.outstanding, or use more devices"));
        }
        let spare = self.spares.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let made = match spare {
            Some(pair) => {
                self.counters.spares_used.add(1);
                Ok(pair)
            }
            None => self.make().inspect(|_| self.counters.pairs_made_late.add(1)),
        };
        let ready = made.and_then(|pair| {
            pair.init(self.port).map_err(self.error("readying a queue pair"))?;
            Ok(pair)
        });
        if ready.is_err() {
            self.reserved.fetch_sub(self.depth, Ordering::AcqRel);
        }
        ready
    }

    fn make(&self) -> Result<Pair> {
        let pair = Pair::new(&self.completions, self.depth).map_err(self.error("making a queue pair"))?;
        self.counters.pairs_made.add(1);
        Ok(pair)
    }

    /// Takes back a used pair with nothing posted: it answers nobody from here on, and goes with the next
    /// [`replenish`](Self::replenish).
    pub(crate) fn give_back(&self, pair: Pair) {
        self.let_go();
        // One that cannot be reset is destroyed at once.
        if pair.reset().is_ok() {
            self.spent.lock().unwrap_or_else(PoisonError::into_inner).push(pair);
        }
    }

    /// A pair in use is one no more.
    pub(crate) fn let_go(&self) {
        self.reserved.fetch_sub(self.depth, Ordering::AcqRel);
    }

    /// Destroys used pairs and makes spare ones until there are as many as configured. Blocks for as long as the driver
    /// needs, so that neither the engine's thread nor a connection should call it.
    pub(crate) fn replenish(&self) -> Result<()> {
        drop(std::mem::take(&mut *self.spent.lock().unwrap_or_else(PoisonError::into_inner)));
        while self.spares.lock().unwrap_or_else(PoisonError::into_inner).len() < self.keep {
            let pair = self.make()?;
            self.spares.lock().unwrap_or_else(PoisonError::into_inner).push(pair);
        }
        Ok(())
    }

    /// Connects `pair` to the peer at `to`; afterwards it answers the peer's READs and may send its own. Both ends use the
    /// smaller MTU.
    pub(crate) fn connect(&self, pair: &Pair, psn: u32, to: &Address) -> Result<()> {
        if to.link != self.found.link {
            let detail = format!(
                "{} is on {:?}, the peer's port on {:?}",
                place(self.name(), Some(self.port)),
                self.found.link,
                to.link
            );
            return Err(Error::new(Kind::Unavailable, "ibv_modify_qp", detail)
                .with_remedy("use devices of one kind of link at both ends (rdma.devices)"));
        }
        let path = Path {
            port: self.port,
            own_gid: self.gid.index as u8,
            gid: to.gid,
            global: is_global(to),
            lid: to.lid,
            number: to.number,
            psn: to.psn,
            mtu: self.mtu.min(to.mtu),
            traffic_class: self.traffic_class,
            service_level: self.service_level,
            reads_in: self.device.limits().reads_in.min(255) as u8,
        };
        let doing = format!("connecting to queue pair {:#x} at {}", to.number, gid::text(to.gid));
        pair.receive(path).map_err(self.error(&doing))?;
        let reads = self.reads_out().min(u32::from(to.reads_in)).clamp(1, 255) as u8;
        pair.send(psn, reads, self.timeout, self.retries).map_err(self.error(&doing))
    }
}

/// Whether packets to the peer at `to` carry a global header: the traffic class is in it, and sent with it only. Within an
/// InfiniBand subnet the LID is enough.
fn is_global(to: &Address) -> bool {
    to.link == LinkLayer::Ethernet || to.lid == 0
}

/// The configured port, which must be active, or the first that is.
fn pick_port(device: &Device, config: &RdmaConfig) -> Result<(u8, Port)> {
    let name = device.name();
    let query = |port| device.port(port).map_err(|e| failed(e, name, Some(port), "looking at it"));
    let ports = match config.port {
        Some(port) => port..=port,
        None => 1..=device.limits().ports.max(1),
    };
    let mut state = String::new();
    for port in ports {
        let found = query(port)?;
        if found.is_active() {
            return Ok((port, found));
        }
        state = format!("{} is {}", place(name, Some(port)), found.state_name());
    }
    Err(Error::new(Kind::Unavailable, "ibv_query_port", state)
        .with_remedy("bring the link up, or name another device (rdma.devices)"))
}
