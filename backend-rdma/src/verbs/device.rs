//! An open device with its one protection domain, and completion queues of it.

use super::{Call, Completion, Event, Gid, Handle, Limits, Port, Verbs, VerbsError};
use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, RawFd},
    sync::Arc,
};

/// An open device. Everything made of it keeps it open.
pub(crate) struct Device {
    pub(super) verbs: Arc<dyn Verbs>,
    context: Handle,
    pub(super) domain: Handle,
    name: String,
    limits: Limits,
}

impl Device {
    pub(crate) fn open(verbs: &Arc<dyn Verbs>, name: &str) -> Call<Arc<Self>> {
        let context = verbs.open(name)?;
        let rest = || Ok((verbs.limits(context)?, verbs.domain(context)?));
        match rest() {
            Ok((limits, domain)) => Ok(Arc::new(Self {
                verbs: Arc::clone(verbs),
                context,
                domain,
                name: name.to_owned(),
                limits,
            })),
            Err(e) => {
                // The first error is the one to tell.
                let _ = verbs.close(context);
                Err(e)
            }
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) fn port(&self, port: u8) -> Call<Port> {
        self.verbs.port(self.context, port)
    }

    pub(crate) fn gids(&self, port: u8, len: u32) -> Call<Vec<Gid>> {
        self.verbs.gids(self.context, &self.name, port, len)
    }

    /// The next event, without waiting.
    pub(crate) fn event(&self) -> Call<Option<Event>> {
        self.verbs.event(self.context)
    }
}

impl AsFd for Device {
    /// Readable when there is an [`event`](Device::event).
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context's own descriptor, open as long as the context.
        unsafe { BorrowedFd::borrow_raw(self.verbs.event_fd(self.context)) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let gone = self.verbs.drop_domain(self.domain).and(self.verbs.close(self.context));
        if let Err(e) = gone {
            tracing::error!(device = self.name, call = e.call, errno = e.errno, "a device does not close");
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name).finish()
    }
}

/// A completion queue with a channel of its own.
pub(crate) struct Completions {
    pub(super) device: Arc<Device>,
    channel: Handle,
    pub(super) queue: Handle,
    fd: RawFd,
    entries: u32,
}

impl Completions {
    /// Room for `entries` completions, or as many as the device has.
    pub(crate) fn new(device: &Arc<Device>, entries: u32) -> Call<Arc<Self>> {
        let entries = entries.clamp(1, device.limits.max_cqe.max(1));
        let (channel, fd) = device.verbs.channel(device.context)?;
        match device.verbs.queue(device.context, entries, channel) {
            Ok(queue) => Ok(Arc::new(Self { device: Arc::clone(device), channel, queue, fd, entries })),
            Err(e) => {
                let _ = device.verbs.drop_channel(channel);
                Err(e)
            }
        }
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    /// Asks for the descriptor to become readable at the next completion. What has completed before must be polled.
    pub(crate) fn arm(&self) -> Call<()> {
        self.device.verbs.arm(self.queue)
    }

    /// Call when the descriptor is readable, once.
    pub(crate) fn disarm(&self) -> Call<()> {
        self.device.verbs.disarm(self.channel)
    }

    /// Appends what has completed.
    pub(crate) fn poll(&self, into: &mut Vec<Completion>) -> Result<(), VerbsError> {
        while self.device.verbs.poll(self.queue, into)? {}
        Ok(())
    }
}

impl AsFd for Completions {
    /// Readable after [`arm`](Completions::arm), once something has completed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's own descriptor, open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        let gone = self.device.verbs.drop_queue(self.queue).and(self.device.verbs.drop_channel(self.channel));
        if let Err(e) = gone {
            tracing::error!(device = self.device.name, call = e.call, errno = e.errno, "a queue does not go");
        }
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completions").field("device", &self.device).field("entries", &self.entries).finish()
    }
}
