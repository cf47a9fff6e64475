//! Staging and holding: the client opens the payload and hands its descriptor over, so that nobody has the agent read what they
//! may not read themselves, and whatever a path means to the agent means nothing. What the bytes have to be is in the manifest,
//! which the image's id proves.

use super::{
    ledger::{Holding, Key, Place},
    protocol::{FRAME, Lease, MOST_MANIFEST, Object, Reply},
    session::Session,
    thing::Origin,
};
use crate::{
    io::SourceFile,
    source::{ObjectConfig, ObjectImage, ObjectSource},
};
use flashboot_checkpoint::Manifest;
use flashboot_core::{ArenaSpec, ByteSize, Error, Kind, Result};
use flashboot_memory::{Layout, pages};
use rustix::fs::{OFlags, fcntl_getfl};
use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// What a client may have the agent try at most, for each range.
const MOST_ATTEMPTS: u32 = 100;
const LONGEST_ATTEMPT: Duration = Duration::from_secs(600);
/// The longest name of a file that is kept for errors.
const LONGEST_NAME: usize = 4096;

impl Session<'_> {
    pub(super) fn keep(
        &self,
        key: Key,
        name: &str,
        (priority, hold): (i32, Option<Lease>),
        wait: bool,
        (descriptor, object): (Option<OwnedFd>, Option<Object>),
    ) -> Result<()> {
        // Read first, whatever comes of it: the next request begins behind it.
        let manifest = self.wire.receive(MOST_MANIFEST, 0, Instant::now() + FRAME)?;
        let protocol = |what: &str| Error::new(Kind::Protocol, "agent", what.to_owned());
        let (proof, _) = manifest.ok_or_else(|| protocol("a manifest was to follow"))?;
        let manifest = Manifest::check(&proof, &key.image, &key.rank)?;
        let name: String = name.chars().take(LONGEST_NAME).collect();
        let payload = manifest.entry.payload_bytes;
        let (origin, found) = match (descriptor, object) {
            (Some(descriptor), None) => {
                let file = self.open(&descriptor, Path::new(&name))?;
                let len = file.len();
                (Origin::File(file), len)
            }
            (None, Some(object)) => {
                let source = self.object(object)?;
                let len = self.meanwhile(payload, || source.measure())?;
                (Origin::Object(Box::new(source)), len)
            }
            _ => return Err(protocol("the payload's descriptor was to come along, or where its object is")),
        };
        if found != payload {
            let detail = format!("{name}: {payload} bytes needed, {found} found");
            return Err(
                Error::new(Kind::Corrupt, "agent", detail).with_remedy("pack or fetch the image again")
            );
        }
        let spec = ArenaSpec { payload, shards: 1 };
        let bytes = match key.place {
            Place::Host => Layout::new(spec, pages::base_page())?.capacity,
            // Devices round up to some megabytes: the driver has the last word.
            Place::Gpu(_) => Layout::new(spec, 2 << 20)?.capacity,
        };
        let hold = hold.map(|lease| Holding { lease: lease.ms.map(Duration::from_millis) });
        let digests = Arc::new(manifest.table.digests().clone());
        let thing = self.agent.want(key, bytes, (priority, hold), (digests, proof.into()), origin)?;
        if wait {
            self.until_ready(&thing)?;
        }
        let entry = self.agent.entry(&thing);
        let entry = entry.ok_or_else(|| Error::new(Kind::Cancelled, "agent", "it was given up at once"))?;
        self.reply(&Reply::Kept(entry), &[])
    }

    /// The payload among objects. What the agent can reach others may not be meant to: it fetches for its own user and for
    /// root, who need no agent for that.
    fn object(&self, object: Object) -> Result<ObjectSource> {
        let (theirs, ours) = (self.wire.peer()?.uid, rustix::process::geteuid().as_raw());
        if theirs != ours && theirs != 0 {
            let detail = format!("the agent fetches objects for uid {ours} and root, not for uid {theirs}");
            return Err(Error::new(Kind::Permission, "agent", detail)
                .with_remedy("fetch the image to a file, and stage that"));
        }
        let Object { url, payload, options, allow_http, range, attempts, timeout_ms } = object;
        let config = ObjectConfig {
            url,
            options,
            allow_http,
            range: ByteSize(range),
            attempts: attempts.min(MOST_ATTEMPTS),
            timeout: Duration::from_millis(timeout_ms).min(LONGEST_ATTEMPT),
        };
        ObjectSource::new(ObjectImage::open(config)?, &payload)
    }

    /// The file behind a descriptor that its sender may read.
    fn open(&self, descriptor: &OwnedFd, name: &Path) -> Result<SourceFile> {
        let flags = fcntl_getfl(descriptor)
            .map_err(|errno| Error::from_errno("fcntl(F_GETFL)", errno.raw_os_error(), "the payload"))?;
        // Whoever has a path alone, or may only write, has not shown that they may read.
        if flags.contains(OFlags::PATH) || flags & OFlags::ACCMODE == OFlags::WRONLY {
            let detail = format!("{}: the descriptor is not one for reading", name.display());
            return Err(Error::new(Kind::Permission, "agent", detail));
        }
        let again = PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
        let opened = self.agent.config.fill.io.open(&again).map_err(|e| {
            let detail = format!("{}: {}", name.display(), e.detail());
            let same = Error::new(e.kind(), e.op(), detail);
            match e.kind() {
                Kind::Permission => same.with_remedy("let the agent's user read the file too"),
                _ => same,
            }
        })?;
        Ok(opened.called(name.to_owned()))
    }
}
