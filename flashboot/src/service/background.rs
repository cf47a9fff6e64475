//! A seed on a thread of its own, for faces whose callers have no runtime.

use super::{SeedRequest, Serving, seed};
use flashboot_core::{Error, Kind, Result};
use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread::JoinHandle,
    time::Duration,
};
use tokio::sync::oneshot;

/// A seed that is about to serve. Dropped, it is given up.
#[derive(Debug)]
pub struct Starting {
    told: mpsc::Receiver<Serving>,
    running: Running,
}

/// A seed that serves until it is stopped. Dropped, it is told to stop and not waited for.
#[derive(Debug)]
pub struct Running {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<()>>,
}

/// What a wait came to.
#[derive(Debug)]
pub enum Waited {
    /// Clones can come.
    Serving(Box<Serving>, Running),
    /// Not yet.
    Starting(Starting),
}

impl Starting {
    /// Begins.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] without a thread to be had.
    pub fn begin(request: SeedRequest) -> Result<Self> {
        let (telling, told) = mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let serve = move || {
            let made = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = made.map_err(|e| Error::from_io("epoll_create", &e, "a runtime"))?;
            let tell = move |serving: &Serving| {
                // Who asked may have given up.
                let _ = telling.send(serving.clone());
            };
            let done = runtime.block_on(seed(request, tell, async { drop(stopped.await) }));
            runtime.shutdown_background();
            done
        };
        let thread = std::thread::Builder::new().name("flashboot-seed".into()).spawn(serve);
        let thread = thread.map_err(|e| Error::from_io("thread", &e, "a thread to serve on"))?;
        Ok(Self { told, running: Running { stop, thread } })
    }

    /// Waits no longer than `timeout`.
    ///
    /// # Errors
    /// Why it ended before it served: those of [`seed`](fn@seed).
    pub fn wait(self, timeout: Duration) -> Result<Waited> {
        match self.told.recv_timeout(timeout) {
            Ok(serving) => Ok(Waited::Serving(Box::new(serving), self.running)),
            Err(RecvTimeoutError::Timeout) => Ok(Waited::Starting(self)),
            Err(RecvTimeoutError::Disconnected) => {
                ended(self.running.thread)?;
                Err(Error::new(Kind::Protocol, "seed", "it ended before it served"))
            }
        }
    }
}

impl Running {
    /// Whether it serves: until it is stopped, or another member of its name came.
    pub fn is_serving(&self) -> bool {
        !self.thread.is_finished()
    }

    /// Says goodbye, drains readers and ends.
    ///
    /// # Errors
    /// What ended it before.
    pub fn stop(self) -> Result<()> {
        // One that has ended does not hear it.
        let _ = self.stop.send(());
        ended(self.thread)
    }
}

fn ended(thread: JoinHandle<Result<()>>) -> Result<()> {
    let panicked = || Error::new(Kind::Protocol, "seed", "the thread that serves panicked");
    thread.join().unwrap_or_else(|_| Err(panicked()))
}
