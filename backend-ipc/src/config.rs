//! How to open an endpoint.

use flashboot_channel::local::{Policy, directory};
use flashboot_core::{Error, Kind, Result};
use std::{path::PathBuf, time::Duration};

/// How to open an `ipc` endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpcConfig {
    /// Where the endpoint's socket and its lock lie. Created when missing; otherwise it must be a directory of
    /// ours that nobody else can write, and, without `allow_uids` and `allow_gids`, not enter either.
    pub directory: PathBuf,
    /// The socket's name without its `.sock`. `None`: a random one.
    pub name: Option<String>,
    /// Users, besides our own, that may read what we export and whose exports we read. With any user or group
    /// here the directory is 0711 and the socket 0666, and the peer's identity alone decides.
    pub allow_uids: Vec<u32>,
    /// Primary groups that may, as `allow_uids`.
    pub allow_gids: Vec<u32>,
    /// How long a reader may take to say what it wants.
    pub handshake: Duration,
    /// Readers that may be in their handshake at once; more are refused.
    pub max_pending: usize,
    /// Readers that may be attached at once; more are refused.
    pub max_readers: usize,
    /// The GPU whose arenas are to be served ([`flashboot_cuda::Device::find`] reads it), for the probe to try. `None`:
    /// host arenas only are probed; GPU arenas are served all the same.
    pub device: Option<String>,
    /// Fill the page table for a peer's payload while importing, for at most half of the import's time, so
    /// that the copies take no faults: about 70 ms a GiB of 4 KiB pages.
    pub populate: bool,
}

impl Default for IpcConfig {
    /// Our own user only, in `/run/user/UID/flashboot`, or `/tmp/flashboot-UID` where the system has no `/run/user/UID`.
    fn default() -> Self {
        Self {
            directory: directory::usual(),
            name: None,
            allow_uids: Vec::new(),
            allow_gids: Vec::new(),
            handshake: Duration::from_secs(5),
            max_pending: 64,
            max_readers: 1024,
            device: None,
            populate: true,
        }
    }
}

impl IpcConfig {
    pub(crate) fn policy(&self) -> Policy {
        Policy::new(&self.allow_uids, &self.allow_gids)
    }

    /// The name to use; a given one may not leave the directory.
    pub(crate) fn checked_name(&self) -> Result<String> {
        let Some(name) = &self.name else {
            let bits = getrandom::u64()
                .map_err(|e| Error::new(Kind::Io, "getrandom", format!("no random name: {e}")))?;
            return Ok(format!("{bits:016x}"));
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(plain) {
            return Err(Error::new(Kind::Invalid, "open", format!("`{name}` is no name for an endpoint"))
                .with_remedy("use up to 64 letters, digits, `-`, `_` and `.`, not beginning with `.`"));
        }
        Ok(name.clone())
    }
}
