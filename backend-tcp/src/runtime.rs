//! The threads on which listeners, handshakes and looks run, whatever their callers' runtimes do.

use flashboot_core::{Error, Kind, Result};
use std::sync::OnceLock;
use tokio::runtime::{Builder, Handle, Runtime};

/// One that a driver call may hold up, and one that goes on.
const THREADS: usize = 2;

/// The process's own runtime for this transport, started at the first call and never stopped: a busy owner's runtime must
/// not delay a reader, and a mover may outlive the runtime that made it.
pub(crate) fn handle() -> Result<Handle> {
    static RUNTIME: OnceLock<Result<Runtime>> = OnceLock::new();
    let make = || {
        let made = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("flashboot-tcp")
            .enable_all()
            .build();
        made.map_err(|e| Error::new(Kind::Exhausted, "tcp", format!("no threads for a runtime: {e}")))
    };
    RUNTIME.get_or_init(make).as_ref().map(|runtime| runtime.handle().clone()).map_err(Clone::clone)
}

/// Runs `work` there, and ends it when the returned future is dropped.
pub(crate) async fn run<T: Send + 'static>(
    op: &'static str,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let mut running = Ended(handle()?.spawn(work));
    match (&mut running.0).await {
        Ok(done) => done,
        Err(e) => Err(Error::new(Kind::Cancelled, op, format!("its task ended: {e}"))),
    }
}

/// A task that ends with its owner.
#[derive(Debug)]
pub(crate) struct Ended<T>(pub(crate) tokio::task::JoinHandle<T>);

impl<T> Drop for Ended<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
