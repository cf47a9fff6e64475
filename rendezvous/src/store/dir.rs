//! A shared directory with the record in one file: for finding the service, where there is nothing better.
//!
//! The file is written beside its name, synced and renamed, so it is whole whenever it is read. A directory has no
//! compare-and-swap: two services that see the post vacant at one moment may both take it; after
//! [`SETTLE`] the one whose file was replaced stands back, and one that sleeps longer finds it at its next renewal. Nobody looks at a
//! file's times or at another's clock: a record is alive if it *changes* within its lease, as seen from here.

use super::{
    Store, new_id,
    record::{FORMAT, MAX_RECORD, NoService, Record},
    term::{Hold, Term},
};
use async_trait::async_trait;
use flashboot_channel::Endpoint;
use flashboot_core::{Error, Kind, Result};
use rustix::fs::{Mode, OFlags};
use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// The file's name.
const FILE: &str = "service.json";
/// How often the file is read while somebody waits for it.
const LOOK: Duration = Duration::from_millis(100);
/// How long after its rename a service looks whether the file is still its own.
const SETTLE: Duration = Duration::from_millis(300);
/// How long a directory on a network may take for one call.
const CALL: Duration = Duration::from_secs(5);
/// The lease of what is no record: it is given up as stale after it.
const UNKNOWN: Duration = Duration::from_secs(10);

/// See [module](self).
#[derive(Debug, Clone)]
pub(super) struct Dir {
    path: PathBuf,
    /// What was read last.
    seen: Arc<Mutex<Option<Seen>>>,
}

/// A file's bytes, and when it was first read like that.
#[derive(Debug)]
struct Seen {
    bytes: Vec<u8>,
    since: Instant,
}

impl Dir {
    /// # Errors
    /// [`Kind::Invalid`] for a path that is not absolute: it would mean another place to each process.
    pub(super) fn new(path: PathBuf) -> Result<Self> {
        let path = std::path::absolute(&path)
            .map_err(|e| Error::new(Kind::Invalid, "rendezvous", format!("{}: {e}", path.display())))?;
        Ok(Self { path, seen: Arc::default() })
    }

    fn file(&self) -> PathBuf {
        self.path.join(FILE)
    }

    /// The file's bytes; `None` without one.
    async fn read(&self) -> Result<Option<Vec<u8>>> {
        let path = self.file();
        self.call(move || read(&path)).await
    }

    async fn write(&self, record: Record) -> Result<()> {
        let (dir, path) = (self.path.clone(), self.file());
        self.call(move || write(&dir, &path, &record.encode())).await
    }

    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> Result<T> {
        let at = || self.file().display().to_string();
        match tokio::time::timeout(CALL, tokio::task::spawn_blocking(work)).await {
            Ok(Ok(Ok(done))) => Ok(done),
            Ok(Ok(Err(e))) => Err(Error::from_io("rendezvous", &e, at())),
            Ok(Err(e)) => Err(Error::new(Kind::Exhausted, "thread", format!("a thread for files: {e}"))),
            Err(_) => Err(Error::new(Kind::Deadline, "rendezvous", format!("{} within {CALL:?}", at()))),
        }
    }

    /// Notes what is there; how long it has been just like that.
    fn unchanged(&self, bytes: &[u8]) -> Duration {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match &*seen {
            Some(before) if before.bytes == bytes => before.since.elapsed(),
            _ => {
                *seen = Some(Seen { bytes: bytes.to_vec(), since: Instant::now() });
                Duration::ZERO
            }
        }
    }

    /// The service that is there now, as far as can be seen.
    async fn look(&self) -> Result<std::result::Result<Record, NoService>> {
        let Some(bytes) = self.read().await? else { return Ok(Err(NoService::Empty)) };
        let silent = self.unchanged(&bytes);
        let found = Record::decode(&bytes);
        Ok(match found {
            Ok(record) if silent > record.lease() => {
                Err(NoService::Stale { endpoint: record.endpoint.to_string(), silent, lease: record.lease() })
            }
            found => found,
        })
    }
}

#[async_trait]
impl Store for Dir {
    fn name(&self) -> String {
        format!("dir:{}", self.path.display())
    }

    async fn find(&self, patience: Duration) -> Result<Endpoint> {
        let began = Instant::now();
        loop {
            match self.look().await? {
                Ok(record) => return Ok(record.endpoint),
                Err(none) if began.elapsed() >= patience || matches!(none, NoService::Format { .. }) => {
                    return Err(none.into_error(&self.name()));
                }
                Err(_) => sleep(LOOK).await,
            }
        }
    }

    async fn vacant(&self) -> Result<()> {
        loop {
            let Some(bytes) = self.read().await? else { return Ok(()) };
            let lease = Record::decode(&bytes).map_or(UNKNOWN, |record| record.lease());
            // Also what is no record has an owner, if it changes: a later release's, say.
            if self.unchanged(&bytes) > lease {
                return Ok(());
            }
            sleep(LOOK).await;
        }
    }

    async fn take(&self, endpoint: &Endpoint, lease: Duration) -> Result<Option<Term>> {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        let record = Record {
            format: FORMAT,
            endpoint: endpoint.clone(),
            release: env!("CARGO_PKG_VERSION").into(),
            id: new_id()?,
            beat: 0,
            lease_ms,
        };
        let asked = Instant::now();
        self.write(record.clone()).await?;
        sleep(SETTLE).await;
        let mut held = Held { dir: self.clone(), record };
        if !held.is_ours().await? {
            return Ok(None);
        }
        Ok(Some(Term::begin(Box::new(held), self.name(), lease, asked)))
    }
}

/// The file, while it is this service's.
struct Held {
    dir: Dir,
    record: Record,
}

impl Held {
    async fn is_ours(&mut self) -> Result<bool> {
        let found = self.dir.read().await?.and_then(|bytes| Record::decode(&bytes).ok());
        Ok(found.is_some_and(|found| found.id == self.record.id))
    }
}

#[async_trait]
impl Hold for Held {
    async fn renew(&mut self) -> Result<bool> {
        if !self.is_ours().await? {
            return Ok(false);
        }
        self.record.beat = self.record.beat.wrapping_add(1);
        self.dir.write(self.record.clone()).await?;
        Ok(true)
    }

    async fn give_up(&mut self) {
        if matches!(self.is_ours().await, Ok(true)) {
            let path = self.dir.file();
            let _ = self.dir.call(move || fs::remove_file(path)).await;
        }
    }
}

/// The whole file, of at most one byte more than a record may have. A pipe, a link or a device is an error, and waits for
/// nobody.
fn read(path: &Path) -> std::io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("it is no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_RECORD as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn write(dir: &Path, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = tempfile::Builder::new().prefix(".service-").tempfile_in(dir)?;
    file.write_all(bytes)?;
    // Members may be of other users; there is no secret in it.
    file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_millis(600);

    fn dir(at: &tempfile::TempDir) -> Dir {
        Dir::new(at.path().to_owned()).unwrap()
    }

    fn here() -> Endpoint {
        "127.0.0.1:7400".parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_is_found_while_it_changes_and_stale_a_lease_after() {
        let at = tempfile::tempdir().unwrap();
        let store = dir(&at);
        let none = store.find(Duration::ZERO).await.unwrap_err();
        assert_eq!(none.kind(), Kind::Unavailable, "{none}");
        store.vacant().await.unwrap();
        let term = store.take(&here(), LEASE).await.unwrap().unwrap();
        let other = dir(&at);
        for _ in 0..10 {
            assert_eq!(other.find(Duration::ZERO).await.unwrap(), here());
            sleep(LEASE / 4).await;
        }
        assert!(tokio::time::timeout(LEASE * 2, other.vacant()).await.is_err(), "it is held");
        // As if it had died: the record stays, and nobody renews it.
        drop(term);
        sleep(LEASE).await;
        other.find(Duration::ZERO).await.ok();
        sleep(LEASE * 2).await;
        let stale = other.find(Duration::ZERO).await.unwrap_err();
        assert!(stale.to_string().contains("has not renewed its record"), "{stale}");
        other.vacant().await.unwrap();
        let next = other.take(&here(), LEASE).await.unwrap().unwrap();
        next.resign().await;
        assert_eq!(fs::read_dir(at.path()).unwrap().count(), 0, "nothing is left behind");
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_that_take_it_at_once_one_has_it() {
        let at = tempfile::tempdir().unwrap();
        let (one, two) = (dir(&at), dir(&at));
        let ends = (here(), here());
        let (a, b) = tokio::join!(one.take(&ends.0, LEASE), two.take(&ends.1, LEASE));
        assert!(a.unwrap().is_some() != b.unwrap().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_post_that_another_takes_is_over_at_the_next_renewal() {
        let at = tempfile::tempdir().unwrap();
        let mut first = dir(&at).take(&here(), LEASE).await.unwrap().unwrap();
        let _second = dir(&at).take(&here(), LEASE).await.unwrap().unwrap();
        let over = tokio::time::timeout(LEASE, first.over()).await.unwrap();
        assert_eq!(over.kind(), Kind::Cancelled, "{over}");
    }

    #[tokio::test(start_paused = true)]
    async fn garbage_and_what_is_no_file_are_said_by_name_and_a_later_form_refused() {
        let at = tempfile::tempdir().unwrap();
        let store = dir(&at);
        let path = at.path().join(FILE);
        for garbage in [&b"{}"[..], b"", b"\xff\xfe", &[b'['; 9000]] {
            fs::write(&path, garbage).unwrap();
            let error = store.find(Duration::ZERO).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.detail().contains("no record of a service"), "{error}");
        }
        fs::write(&path, br#"{"format":9}"#).unwrap();
        let later = store.find(Duration::from_secs(60)).await.unwrap_err();
        assert_eq!(later.kind(), Kind::Mismatch, "at once");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(store.find(Duration::ZERO).await.unwrap_err().detail().contains("no regular file"));
        fs::remove_dir(&path).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(pipe.success());
        assert!(store.find(Duration::ZERO).await.is_err(), "and nobody waits for the pipe's other end");
        let nowhere = Dir::new(at.path().join("no/such")).unwrap();
        assert!(nowhere.take(&here(), LEASE).await.is_err(), "no directory");
    }
}
