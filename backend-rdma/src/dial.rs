//! The reader's side of the one round trip.

use crate::{
    endpoint::{Parts, purpose},
    engine::{Handle, Hop, Lane, Words, plan::Window},
    extent::Extent,
    held::Held,
    regions::Registration,
    wire::{Attached, MAX_FRAME, Reply, Request},
};
use flashboot_channel::{Channel, Dial, Endpoint};
use flashboot_core::{Error, Kind, Locator, Result, control};
use std::{
    fmt,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{io::AsyncReadExt as _, sync::oneshot, task::spawn_blocking};

/// A connection that its source keeps our queue pairs for; dropping it lets the source have them back.
#[derive(Debug)]
pub(crate) struct Link {
    /// Ends the task that watches the connection.
    _end: oneshot::Sender<()>,
}

/// Whether the source has closed its end.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gone(Arc<AtomicBool>);

impl Gone {
    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A hop that the engine has, checked from end to end. Dropping it closes the hop.
pub(crate) struct Attachment {
    pub(crate) engine: Handle,
    pub(crate) hop: u32,
    pub(crate) source: Extent,
    pub(crate) gone: Gone,
    pub(crate) peer: String,
    /// What a person should know of it, although it works.
    pub(crate) remarks: Vec<String>,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.engine.close(self.hop);
    }
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachment").field("hop", &self.hop).field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Dials the source that `locator` names, exchanges queue pairs, and reads its control block's header over each.
/// `registration` is of our arena; `None` only looks. Must run on the endpoint's own runtime.
pub(crate) async fn attach(
    parts: Arc<Parts>,
    locator: Locator,
    registration: Option<Arc<Registration>>,
    timeout: Duration,
) -> Result<Attachment> {
    let until = Instant::now() + timeout.min(Duration::from_secs(86_400));
    let peer = locator.endpoint.clone();
    let endpoint: Endpoint = peer
        .parse()
        .map_err(|e| Error::new(Kind::Mismatch, "import", format!("the locator's endpoint: {e}")))?;
    let config = &parts.config;
    let how = Dial { purpose: purpose()?, timeout, liveness: config.liveness };
    let mut channel = flashboot_channel::dial(&endpoint, &parts.security, how).await?;

    let own = Arc::clone(&parts);
    let held = blocking(move || pairs(&own)).await.map_err(|e| e.with_peer(&peer))?;
    let ours = held.iter().filter_map(Held::address).collect();
    let request = Request::new(locator.generation.word(), ours);
    let left = || until.saturating_duration_since(Instant::now());
    channel.send(&request.encode(), MAX_FRAME, left()).await?;
    let frame = channel.receive(MAX_FRAME, left()).await?.ok_or_else(|| {
        Error::new(Kind::SourceLost, "import", "the exporter closed the connection without an answer")
            .with_peer(&peer)
    })?;
    parts.counters.control_round_trips.add(1);
    let attached = Reply::decode(&frame, held.len())
        .and_then(|attached| check(attached, &locator))
        .map_err(|e| e.with_peer(&peer))?;

    let (source, own) = (attached.extent, Arc::clone(&parts));
    let extent = registration.as_ref().map(|registration| registration.extent);
    let lanes = blocking(move || connect(held, &attached, registration.as_deref(), &own)).await;
    let Lanes { lanes, remarks } = lanes.map_err(|e| e.with_peer(&peer))?;
    for remark in &remarks {
        let mut remarked = parts.remarked.lock().unwrap_or_else(PoisonError::into_inner);
        if remarked.insert((peer.clone(), remark.clone())) {
            tracing::warn!(peer, "{remark}");
        }
    }
    let count = lanes.len();
    let engine = parts.engine.handle().clone();
    let (gone, link) = watch(channel);
    let hop = engine.number();
    engine.attach(Hop::new(hop, peer.clone(), source, extent, lanes, Some(link)));
    let attachment = Attachment { engine, hop, source, gone, peer, remarks };
    check_headers(&attachment, &locator, count).await?;
    Ok(attachment)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    spawn_blocking(work).await.map_err(|_| Error::new(Kind::Cancelled, "import", "the endpoint is closed"))?
}

/// A queue pair on every device whose port is up.
fn pairs(parts: &Parts) -> Result<Vec<Held>> {
    let up = parts.rails.iter().enumerate().filter(|(_, rail)| !rail.is_down());
    let held: Vec<Held> = up.map(|(number, rail)| Held::new(rail, number)).collect::<Result<_>>()?;
    if held.is_empty() {
        let names: Vec<_> = parts.rails.iter().map(|rail| rail.name()).collect();
        let detail = format!("the port is down: {}", names.join(", "));
        return Err(Error::new(Kind::Unavailable, "ibv_query_port", detail).with_remedy("bring the link up"));
    }
    Ok(held)
}

fn check(attached: Attached, locator: &Locator) -> Result<Attached> {
    if attached.generation != locator.generation.word() {
        let detail = format!("the exporter answered for generation {:016x}", attached.generation);
        return Err(Error::new(Kind::StaleGeneration, "import", detail));
    }
    let found = (attached.payload, attached.capacity, attached.shards);
    let named = (locator.payload, locator.capacity, locator.shards);
    if found != named {
        let detail =
            format!("the exporter has {found:?} (payload, capacity, shards), the locator says {named:?}");
        return Err(Error::new(Kind::Mismatch, "import", detail));
    }
    if attached.memory != locator.location.memory() {
        let (found, named) = (attached.memory, locator.location.memory());
        let detail = format!("the exporter hands out {found} memory, the locator names {named} memory");
        return Err(Error::new(Kind::Mismatch, "import", detail));
    }
    Ok(attached)
}

/// The queue pairs of a hop.
struct Lanes {
    lanes: Vec<Lane>,
    remarks: Vec<String>,
}

/// Connects each pair to the source's; one that cannot be is left out, as long as another can.
fn connect(
    held: Vec<Held>,
    attached: &Attached,
    registration: Option<&Registration>,
    parts: &Parts,
) -> Result<Lanes> {
    let (mut lanes, mut remarks) = (Vec::new(), Vec::new());
    let mut last = None;
    for (held, theirs) in held.into_iter().zip(&attached.pairs) {
        if let Err(error) = held.connect(&theirs.address) {
            tracing::warn!(%error, "a device that does not reach the peer; the others go on without it");
            parts.counters.rails_lost.add(1);
            last = Some(error);
            continue;
        }
        let (number, rail) = (held.number, held.rail());
        remarks.extend(rail.remark(&theirs.address));
        let window = Window::new(rail.outstanding(), rail.reads_out(), u32::from(theirs.address.reads_in));
        let local = registration.map_or_else(Vec::new, |registration| registration.local_keys(number));
        lanes.push(Lane::new(held, window, theirs.keys.clone(), local));
    }
    if lanes.is_empty() {
        return Err(
            last.unwrap_or_else(|| Error::new(Kind::Protocol, "import", "the exporter named no queue pair"))
        );
    }
    Ok(Lanes { lanes, remarks })
}

/// Keeps the connection until the hop lets go of it, and notes when the source closes it.
fn watch(mut channel: Channel) -> (Gone, Link) {
    let (end, ended) = oneshot::channel();
    let gone = Gone::default();
    let told = gone.clone();
    tokio::spawn(async move {
        let mut byte = [0; 1];
        tokio::select! {
            // The source has nothing to say: it went, or it broke the protocol.
            _ = channel.read(&mut byte) => told.0.store(true, Ordering::Release),
            _ = ended => {}
        }
    });
    (gone, Link { _end: end })
}

/// Reads the header over every lane at once; lanes that fail are dropped by the engine, as long as one works.
async fn check_headers(attachment: &Attachment, locator: &Locator, lanes: usize) -> Result<()> {
    let Attachment { engine, hop, peer, .. } = attachment;
    let at = control::offset(locator.payload)
        .filter(|at| at.checked_add(control::size(1)).is_some_and(|end| end <= locator.capacity));
    let Some(at) = at else {
        let detail =
            format!("{} bytes of payload and a control block in {} bytes", locator.payload, locator.capacity);
        return Err(Error::new(Kind::Corrupt, "import", detail).with_peer(peer));
    };
    let mut looks = Vec::new();
    for lane in 0..lanes {
        let words = Words::new(&[(at, 4), (at + control::generation_offset(), 1)]);
        let Some(words) = words else { continue };
        let (engine, hop) = (engine.clone(), *hop);
        looks.push(tokio::spawn(async move { engine.look(hop, words, Some(lane)).await }));
    }
    let mut outcome =
        Err(Error::new(Kind::SourceLost, "import", "no queue pair reads the peer").with_peer(peer));
    for look in looks {
        let Ok(looked) = look.await else { continue };
        match looked {
            Ok([magic, version, shards, payload, generation, ..]) => {
                let available = locator.capacity.saturating_sub(at);
                let header = control::parse_header(available, magic, version, shards, payload);
                let header = header.map_err(|e| e.with_peer(peer))?;
                if (header.payload, header.shards) != (locator.payload, locator.shards) {
                    let detail = format!("the control block says {header:?}, the locator otherwise");
                    return Err(Error::new(Kind::Mismatch, "import", detail).with_peer(peer));
                }
                if generation != locator.generation.word() {
                    let detail = format!(
                        "the arena holds generation {generation:016x}, the locator names {}",
                        locator.generation
                    );
                    return Err(Error::new(Kind::StaleGeneration, "import", detail)
                        .with_peer(peer)
                        .with_remedy("fetch a fresh locator from the exporter"));
                }
                outcome = Ok(());
            }
            Err(error) => {
                tracing::warn!(%error, "a device that does not read the peer");
                if outcome.is_err() {
                    outcome = Err(error);
                }
            }
        }
    }
    outcome
}
