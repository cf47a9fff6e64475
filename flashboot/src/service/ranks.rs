//! All of a node's ranks: each a clone in its own chain, and one commit for all of them.
//!
//! Nothing is told, and no payload has its name, before the last block of the last rank is verified; one rank that fails takes
//! the others along. What is verified is served to others meanwhile, as by any clone.

use super::{
    CloneRequest, Cloned, client,
    clone::{Kept, read, serve_on},
    payload,
    seat::{blocking, new_trace},
    wanted::resolved,
};
use crate::{config::Devices, observe::Watched, replicate::resolve_devices};
use flashboot_checkpoint::Manifest;
use flashboot_core::{Error, Kind, Result};
use flashboot_rendezvous::{
    Client, Membership, fetch_manifest,
    protocol::{Content, Wanted},
    status,
};
use futures_util::future::{join_all, try_join_all};
use serde::Serialize;
use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep};

/// How often the service is asked for a seed of the image.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Ranks that have everything. Times in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub struct ClonedRanks {
    /// The image's id.
    pub image: String,
    /// Payload bytes of all.
    pub bytes: u64,
    /// From the call until every rank was verified.
    pub ready_ms: f64,
    /// Each, in the image's order.
    pub ranks: Vec<Cloned>,
}

/// Clones the ranks called `ranks`, or, where none are, every rank of the image, into an arena each: the GPUs are gone around. The
/// request's output is a directory, which must not be there. Otherwise as [`clone`](fn@super::clone): `told` once, for all.
///
/// # Errors
/// Those of a clone, of whichever rank was first; [`Kind::Invalid`] for an output that is there.
pub async fn clone_ranks(
    request: CloneRequest,
    ranks: &[String],
    told: impl FnOnce(&ClonedRanks),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    tokio::pin!(stop);
    let (client_, security) = client(&request.rendezvous, &request.seat.network()).await?;
    let (cloned, mut held) = tokio::select! {
        done = all(&request, ranks, &client_) => done?,
        () = &mut stop => return Err(Error::new(Kind::Cancelled, "clone", "stopped by a signal")),
    };
    held.iter().for_each(|member| member.watched.ready());
    told(&cloned);
    let reason = || held.iter_mut().find_map(Member::reason);
    let (standing, evicted) = serve_on(&request, &security, stop, reason).await;
    let gone = held.into_iter().map(|Member { membership, kept, watched }| {
        let (seat, client) = (request.seat.clone(), Arc::clone(&client_));
        let drain = seat.drain_after(evicted.as_ref());
        watched.draining();
        async move {
            let Kept { opened, held, .. } = kept;
            if let Ok(membership) = Arc::try_unwrap(membership) {
                seat.go(&client, membership, held, drain).await;
            }
            drop(opened);
        }
    });
    join_all(gone).await;
    if let Some(standing) = standing {
        standing.end().await;
    }
    evicted.map_or(Ok(()), Err)
}

/// One rank's clone, as long as it serves.
struct Member {
    membership: Arc<Membership>,
    kept: Kept,
    watched: Arc<Watched>,
}

impl Member {
    /// Why it has to go, if so.
    fn reason(&mut self) -> Option<Error> {
        self.membership.evicted().or_else(|| self.kept.recheck.look(&self.membership))
    }
}

type All = (ClonedRanks, Vec<Member>);

async fn all(request: &CloneRequest, ranks: &[String], client_: &Arc<Client>) -> Result<All> {
    let began = Instant::now();
    if let Some(there) = request.output.as_ref().filter(|path| path.exists()) {
        let detail = format!("{} is there: all ranks are written to a new directory", there.display());
        return Err(Error::new(Kind::Invalid, "clone", detail));
    }
    if let Some(path) = request.output.clone() {
        blocking(move || payload::writable(&path)).await?;
    }
    let (image, every) = ranks_of(request, client_).await?;
    let known = |rank: &String| every.iter().any(|(name, _)| name == rank);
    if let Some(rank) = ranks.iter().find(|rank| !known(rank)) {
        let names: Vec<_> = every.iter().map(|(name, _)| name.as_str()).collect();
        let detail = format!("the image has no rank {rank}, but {}", names.join(", "));
        return Err(Error::new(Kind::Invalid, "clone", detail));
    }
    let (names, sizes): (Vec<String>, Vec<u64>) =
        every.into_iter().filter(|(name, _)| ranks.is_empty() || ranks.contains(name)).unzip();
    if let Some(path) = request.output.clone() {
        payload::room(path, sizes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))).await?;
    }
    let replicate = &request.seat.config.replicate;
    let devices = resolve_devices(&replicate.device, replicate.setup_timeout).await?;
    let one = |(number, name): (usize, &String)| {
        let (mut one, name) = (request.clone(), name.clone());
        one.wanted =
            Wanted { image: Some(image.clone()), rank: Some(name.clone()), ..request.wanted.clone() };
        one.output = None;
        if let Some(device) = number.checked_rem(devices.len()).and_then(|turn| devices.get(turn)) {
            one.seat.config.replicate.device = Devices::These(vec![device.uuid().to_owned()]);
        }
        if let Some(node) = &mut one.seat.labels.name {
            // A later member of a name replaces an earlier: each rank has its own.
            node.push_str(&format!("/{name}"));
        }
        async move {
            // A connection each: one that waits keeps nobody else waiting.
            let (own, _) = client(&one.rendezvous, &one.seat.network()).await?;
            let watched = Arc::new(one.seat.observed.begin("clone"));
            let read = read(&one, &own, &watched, new_trace()?, None, |_| ()).await;
            let (cloned, membership, kept) = read.map_err(|error| of_rank(error, &name))?;
            Ok::<_, Error>((cloned, Member { membership, kept, watched }))
        }
    };
    let done = match try_join_all(names.iter().enumerate().map(one)).await {
        Ok(done) => done,
        Err(error) => return Err(missing(error, &image, &names, client_).await),
    };
    let ready = began.elapsed();
    if let Some(path) = &request.output {
        let arenas: Vec<_> =
            names.into_iter().zip(done.iter().map(|(_, m)| Arc::clone(&m.kept.held.arena))).collect();
        let path = path.clone();
        blocking(move || {
            commit(&path, |dir| {
                arenas
                    .iter()
                    .try_for_each(|(name, arena)| payload::write(&**arena, &dir.join(format!("{name}.img"))))
            })
        })
        .await?;
    }
    let (reports, held): (Vec<_>, Vec<_>) = done.into_iter().unzip();
    let bytes = reports.iter().map(|cloned: &Cloned| cloned.bytes).sum();
    Ok((ClonedRanks { image, bytes, ready_ms: ready.as_secs_f64() * 1e3, ranks: reports }, held))
}

/// `error`, as what became of the rank called `name`.
fn of_rank(error: Error, name: &str) -> Error {
    let (kind, op, peer, chunk, code) =
        (error.kind(), error.op(), error.peer().map(str::to_owned), error.chunk(), error.code());
    let remedy = error.remedy().map(str::to_owned);
    let mut named = Error::new(kind, op, format!("rank {name}: {}", error.detail()));
    if let Some(peer) = peer {
        named = named.with_peer(peer);
    }
    if let Some(chunk) = chunk {
        named = named.with_chunk(chunk);
    }
    if let Some(code) = code {
        named = named.with_code(code);
    }
    if let Some(remedy) = remedy { named.with_remedy(remedy) } else { named }
}

/// `error`, with the names of all ranks of `names` that nobody holds whole, where that may be why.
async fn missing(error: Error, image: &str, names: &[String], client: &Client) -> Error {
    if !matches!(error.kind(), Kind::Unavailable | Kind::Deadline | Kind::SourceLost) {
        return error;
    }
    let Ok(status) = status(client).await else { return error };
    let held = |name: &&String| {
        let mut members = status.members.iter();
        members.any(|m| {
            let content = status.contents.get(m.content);
            content.is_some_and(|c| c.image == image && c.rank == **name && c.bytes == m.holds)
        })
    };
    let missing: Vec<_> = names.iter().filter(|name| !held(name)).map(String::as_str).collect();
    if missing.is_empty() {
        return error;
    }
    error.with_remedy(format!("start a seed (--rank) of each rank that nobody holds: {}", missing.join(", ")))
}

/// What `write` puts into a directory, under the name `path`, all of it at once. Blocks.
fn commit(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let failed = |op| move |e: std::io::Error| Error::from_io(op, &e, path.display().to_string());
    let parent = payload::parent(path);
    // Removed again where anything fails.
    let whole = tempfile::Builder::new().prefix(".flashboot-").tempdir_in(parent).map_err(failed("mkdir"))?;
    write(whole.path())?;
    std::fs::rename(whole.path(), path).map_err(failed("rename"))?;
    // It has another name now: nothing is left to be removed.
    let _ = whole.keep();
    std::fs::File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed("fsync"))
}

/// The image that is asked for, once somebody holds a part of it, and the names of all its ranks, with their bytes.
async fn ranks_of(request: &CloneRequest, client: &Client) -> Result<(String, Vec<(String, u64)>)> {
    let patience = request.seat.patience;
    let until = Instant::now() + patience;
    let wanted = Wanted { rank: None, ..resolved(&request.wanted, client).await? };
    let content: Content = loop {
        let error = match status(client).await {
            Ok(status) => {
                let live = |number: usize| status.members.iter().any(|m| m.content == number);
                let fits = status.contents.iter().enumerate();
                let fits: Vec<_> = fits.filter(|(n, c)| wanted.fits(c) && live(*n)).map(|(_, c)| c).collect();
                let images: BTreeSet<_> = fits.iter().map(|content| &content.image).collect();
                if images.len() > 1 {
                    let detail =
                        format!("{} images are what is asked for: say which with --image", images.len());
                    return Err(Error::new(Kind::Invalid, "clone", detail).with_peer(client.peer()));
                }
                if let Some(first) = fits.first() {
                    break (*first).clone();
                }
                Error::new(Kind::Unavailable, "find", "nobody holds what is asked for")
                    .with_peer(client.peer())
            }
            Err(error) => error,
        };
        if Instant::now() >= until {
            return Err(error);
        }
        sleep(ASK_EVERY).await;
    };
    let bytes = fetch_manifest(client, &content, patience).await?;
    let id = content.image.clone();
    let manifest = blocking(move || Ok(Manifest::check(&bytes, &content.image, &content.rank)?)).await?;
    let ranks = manifest.metadata.ranks.iter();
    Ok((id, ranks.map(|entry| (entry.coordinate.to_string(), entry.payload_bytes)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_its_name_when_all_is_in_it_and_else_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ranks");
        let broken = Error::new(Kind::Corrupt, "write", "the second");
        let failed = commit(&path, |inner| {
            std::fs::write(inner.join("first"), "1").unwrap();
            Err(broken.clone())
        });
        assert_eq!(failed, Err(broken));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        commit(&path, |inner| {
            std::fs::write(inner.join("first"), "1").unwrap();
            assert!(!path.exists());
            Ok(())
        })
        .unwrap();
        assert_eq!(std::fs::read_to_string(path.join("first")).unwrap(), "1");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
