//! One socket, its lock and its thread, for as long as somebody exports by it.

use crate::{config::IpcConfig, error::failed, registry::Registry, responder::Responder};
use flashboot_channel::local::{Lock, directory, sweep};
use flashboot_core::{Error, Kind, Result};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{Mode, chmod},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with},
};
use std::{fmt, os::fd::OwnedFd, sync::Arc, thread::JoinHandle};

/// Readers that may wait to be accepted.
const BACKLOG: i32 = 128;

pub(crate) struct Endpoint {
    path: String,
    registry: Arc<Registry>,
    close: OwnedFd,
    thread: Option<JoinHandle<()>>,
    // Last: the files go after the thread.
    _lock: Lock,
}

impl Endpoint {
    pub(crate) fn open(config: &IpcConfig) -> Result<Self> {
        let policy = config.policy();
        let name = config.checked_name()?;
        let directory = directory::prepare(&config.directory, policy.is_shared())?;
        let path = directory::socket_path(&directory.join(format!("{name}.sock")))?;
        sweep(&directory);
        let lock = Lock::take(&directory, &name)?;

        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|errno| failed("socket", errno, "a Unix socket"))?;
        let address = SocketAddrUnix::new(path.as_str()).map_err(|errno| failed("bind", errno, &*path))?;
        bind(&listener, &address).map_err(|errno| failed("bind", errno, &*path))?;
        let mode = if policy.is_shared() { 0o666 } else { 0o600 };
        chmod(path.as_str(), Mode::from_raw_mode(mode)).map_err(|errno| failed("chmod", errno, &*path))?;
        listen(&listener, BACKLOG).map_err(|errno| failed("listen", errno, &*path))?;

        let close = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|errno| failed("eventfd", errno, "to end the responder"))?;
        let registry = Arc::new(Registry::default());
        let responder = Responder {
            listener,
            close: close.try_clone().map_err(|e| Error::new(Kind::Exhausted, "dup", e.to_string()))?,
            registry: Arc::clone(&registry),
            policy,
            handshake: config.handshake,
            max_pending: config.max_pending,
            max_readers: config.max_readers,
        };
        let thread = std::thread::Builder::new()
            .name("flashboot-ipc".into())
            .spawn(move || responder.run())
            .map_err(|e| Error::new(Kind::Exhausted, "clone", format!("the responder's thread: {e}")))?;
        tracing::debug!(path, "opened an ipc endpoint");
        Ok(Self { path, registry, close, thread: Some(thread), _lock: lock })
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Err(errno) = rustix::io::write(&self.close, &1u64.to_ne_bytes()) {
            tracing::error!(%errno, "cannot end the responder");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the responder panicked");
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Endpoint").field(&self.path).finish()
    }
}
