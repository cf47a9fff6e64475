//! The endpoint's thread: posts every READ, takes every completion, and is the only one to do either.
//!
//! One thread drives all devices and hops of an endpoint. It polls while there is something to expect, then sleeps on the
//! completion channels. It never copies a byte of payload: NICs write the arena, hashing threads read it.

mod hop;
mod job;
mod landing;
mod lane;
mod look;
pub(crate) mod plan;
mod run;
#[cfg(test)]
mod tests;

use crate::{
    config::RdmaConfig,
    counters::Counters,
    rail::Rail,
    scratch::{SLOTS, Scratch, WORDS},
};
use async_trait::async_trait;
use flashboot_core::{Error, InFlight, Kind, Landed, Result};
pub(crate) use hop::Hop;
use hop::Shared;
use job::Job;
pub(crate) use landing::Landing;
pub(crate) use lane::Lane;
use look::Look;
pub(crate) use look::Words;
use plan::Cutter;
use rustix::event::{EventfdFlags, eventfd};
use std::{
    fmt,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};
use tokio::sync::oneshot;

/// What the thread is asked.
enum Command {
    Attach(Box<Hop>),
    Start(u32, Job),
    Look(u32, Look),
    Cancel(u32, u64),
    Close(u32),
    Stop,
}

/// How to reach the thread. Cloning shares it.
#[derive(Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    wake: Arc<OwnedFd>,
    numbers: Arc<(AtomicU32, AtomicU64)>,
}

/// The thread, for as long as its endpoint.
pub(crate) struct Engine {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    pub(crate) fn start(rails: Vec<Arc<Rail>>, config: &RdmaConfig, counters: Arc<Counters>) -> Result<Self> {
        let exhausted =
            |what: &str, e: &dyn fmt::Display| Error::new(Kind::Exhausted, "clone", format!("{what}: {e}"));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(config.hash_threads.unwrap_or(cores).max(1))
            .thread_name(|n| format!("flashboot-hash-{n}"))
            .build()
            .map_err(|e| exhausted("threads to hash with", &e))?;
        let scratch = Scratch::new(&rails, &counters)?;
        let shared = Shared {
            rails,
            scratch,
            free_slots: (0..SLOTS).rev().collect(),
            pool,
            counters,
            grace: config.cancel_grace,
            answer: config.longest_answer(),
            drain: config.drain,
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::from_errno("eventfd", e.raw_os_error(), "to wake the endpoint's thread"))?;
        let (commands, queue) = mpsc::channel();
        let handle = Handle { commands, wake: Arc::new(wake), numbers: Arc::default() };
        let (wake, spin) = (Arc::clone(&handle.wake), config.spin);
        let thread = std::thread::Builder::new()
            .name("flashboot-rdma".into())
            .spawn(move || run::Run::new(shared, queue, wake, spin).run())
            .map_err(|e| exhausted("the endpoint's thread", &e))?;
        Ok(Self { handle, thread: Some(thread) })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Engine {
    /// Ends every queue pair and waits until they are quiet.
    fn drop(&mut self) {
        self.handle.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the endpoint's thread panicked");
        }
    }
}

impl Handle {
    fn send(&self, command: Command) -> bool {
        let sent = self.commands.send(command).is_ok();
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        sent
    }

    /// A number for a hop; 24 bits, so that it comes back after 16 million.
    pub(crate) fn number(&self) -> u32 {
        self.numbers.0.fetch_add(1, Ordering::Relaxed) & 0xff_ffff
    }

    pub(crate) fn attach(&self, hop: Hop) {
        self.send(Command::Attach(Box::new(hop)));
    }

    pub(crate) fn close(&self, hop: u32) {
        self.send(Command::Close(hop));
    }

    /// Reads words of the peer's allocation, in order.
    pub(crate) async fn look(&self, hop: u32, words: Words, lane: Option<usize>) -> Result<[u64; WORDS]> {
        let (tell, told) = oneshot::channel();
        self.send(Command::Look(hop, Look { words, lane, tell }));
        told.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Begins a pull; `cutter` says of which READs.
    pub(crate) fn pull(&self, hop: u32, cutter: Cutter, landing: Arc<Landing>) -> RdmaInFlight {
        let id = self.numbers.1.fetch_add(1, Ordering::Relaxed);
        let job = Job::new(id, cutter, Arc::clone(&landing));
        if let Err(mpsc::SendError(Command::Start(..))) = self.commands.send(Command::Start(hop, job)) {
            landing.fail(ended());
            landing.account();
        }
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        RdmaInFlight { handle: self.clone(), hop, id, landing }
    }
}

fn ended() -> Error {
    Error::new(Kind::Cancelled, "rdma", "the endpoint is closed")
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle")
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Engine")
    }
}

/// A pull in flight. Dropping it cancels it; the range stays owned until every READ of it has completed.
#[derive(Debug)]
pub(crate) struct RdmaInFlight {
    handle: Handle,
    hop: u32,
    id: u64,
    landing: Arc<Landing>,
}

#[async_trait]
impl InFlight for RdmaInFlight {
    fn cancel(&self) {
        self.handle.send(Command::Cancel(self.hop, self.id));
    }

    async fn quiesced(&mut self) -> Result<Landed> {
        std::future::poll_fn(|context| self.landing.poll(context)).await
    }
}

impl Drop for RdmaInFlight {
    fn drop(&mut self) {
        self.cancel();
    }
}
