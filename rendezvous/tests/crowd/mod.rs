//! Many members of one service, each with a connection of its own, and what they cost the process that serves.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "every user has a part of it")]

#[path = "../sim/mod.rs"]
mod sim;

use flashboot_channel::{Endpoint, Security};
use flashboot_core::{Error, Kind, Result};
use flashboot_rendezvous::{
    Client, Membership, fetch_manifest, find,
    protocol::{Content, Place, Registration, Role, Wanted},
};
use std::{
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::task::JoinSet;

/// How many join at a time: fewer than the handshakes that a listener has under way.
const AT_ONCE: u64 = 32;
/// On each host.
const GPUS: u64 = 8;
/// How long one member may take for one thing, on whatever machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Milliseconds of a tick of `/proc/PID/stat`: the kernel counts 100 a second for programs, whatever its own clock.
const TICK: u64 = 10;
/// Bytes of the image's manifest.
pub(crate) const MANIFEST: u32 = 4096;

/// Who came, as the product's own members: each renews as often as its lease wants, until it is dropped.
pub(crate) struct Crowd(Vec<Membership>);

impl Crowd {
    /// A seed and `clones`, each of which dials, finds the image, fetches its manifest and registers.
    pub(crate) async fn join(endpoint: &Endpoint, security: &Security, clones: u64) -> Result<Self> {
        let manifest: Arc<Vec<u8>> = Arc::new((0..MANIFEST).map(|i| (i % 251) as u8).collect());
        let hash = blake3::hash(&manifest).to_hex().to_string();
        let content = Content { manifest: hash, manifest_bytes: MANIFEST.into(), ..sim::content(0) };
        let client = || Arc::new(Client::new(endpoint.clone(), security.clone()));
        let seed = said(1, Role::Seed, content.clone());
        let mut members = vec![Membership::join(client(), seed, manifest, PATIENCE).await?];
        let next = Arc::new(AtomicU64::new(2));
        let mut joining = JoinSet::new();
        for _ in 0..AT_ONCE {
            let (next, endpoint, security) = (Arc::clone(&next), endpoint.clone(), security.clone());
            joining.spawn(async move {
                let mut joined = Vec::new();
                loop {
                    let word = next.fetch_add(1, Ordering::Relaxed);
                    if word > clones + 1 {
                        return Ok::<_, Error>(joined);
                    }
                    joined.push(one(Client::new(endpoint.clone(), security.clone()), word).await?);
                }
            });
        }
        while let Some(joined) = joining.join_next().await {
            let joined = joined.map_err(|e| Error::new(Kind::Cancelled, "join", e.to_string()))?;
            members.extend(joined?);
        }
        Ok(Self(members))
    }

    /// The first that the service has not heard of for as long as `lease`, or will not have; the number of it, and why.
    pub(crate) fn astray(&self, lease: Duration) -> Option<String> {
        self.0.iter().map(Membership::pulse).enumerate().find_map(|(at, pulse)| {
            let silent = pulse.silence().is_none_or(|silence| silence > lease);
            let why = pulse.evicted().or_else(|| pulse.trouble());
            (silent || why.is_some())
                .then(|| format!("member {at}, unheard of for {:?}: {why:?}", pulse.silence()))
        })
    }
}

async fn one(client: Client, word: u64) -> Result<Membership> {
    let client = Arc::new(client);
    let wanted = Wanted { image: None, model: Some("model-0".into()), revision: None, rank: None };
    let content = find(&client, &wanted, PATIENCE).await?;
    let manifest = fetch_manifest(&client, &content, PATIENCE).await?;
    Membership::join(client, said(word, Role::Clone, content), Arc::new(manifest), PATIENCE).await
}

fn said(word: u64, role: Role, content: Content) -> Registration {
    let host = word / GPUS;
    let place = Place {
        host: format!("host-{host}"),
        gpu: Some(format!("gpu-{word}")),
        rack: Some(format!("rack-{}", host / 16)),
        ..Place::default()
    };
    Registration { place, ..sim::registration(word, role, content, host) }
}

/// What a process has used.
pub(crate) struct Used {
    /// Bytes that were resident at once, at most.
    pub(crate) peak: u64,
    /// Processor time, in and for it.
    pub(crate) processor: Duration,
}

impl Used {
    /// So far, by the process `pid`.
    pub(crate) fn by(pid: u32) -> io::Result<Self> {
        let odd = |what: &str| io::Error::other(format!("/proc/{pid}: no {what}"));
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // Behind the name, which may hold anything: the state is the third field, these two are the 14th and 15th.
        let (_, behind) = stat.rsplit_once(')').ok_or_else(|| odd("name"))?;
        let ticks = behind.split_whitespace().skip(11).take(2).map(str::parse::<u64>);
        let ticks = ticks.sum::<std::result::Result<u64, _>>().map_err(|_| odd("times"))?;
        let processor = Duration::from_millis(ticks * TICK);
        Ok(Self { peak: peak.ok_or_else(|| odd("VmHWM"))? << 10, processor })
    }
}
