//! Calls that block: without the interpreter's lock, on a runtime of their own, and with a look every while at signals and at
//! who wants to know how far it is. Nothing outlives the call, so that a process may fork between calls.

use crate::error::{OrRaise as _, raised};
use flashboot_core::{Error, Result};
use pyo3::prelude::*;
use std::time::Duration;

/// How often it is looked.
const EVERY: Duration = Duration::from_millis(50);

/// A runtime on the calling thread.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime> {
    let made = tokio::runtime::Builder::new_current_thread().enable_all().build();
    made.map_err(|e| Error::from_io("epoll_create", &e, "a runtime"))
}

/// Runs the future that `make` makes. A signal whose handler raises, or a `look` that does, gives it up.
pub(crate) fn wait<T: Send, F: Future<Output = Result<T>>>(
    py: Python<'_>,
    make: impl FnOnce() -> F + Send,
    mut look: impl FnMut(Python<'_>) -> PyResult<()> + Send,
) -> PyResult<T> {
    let runtime = runtime().or_raise(py)?;
    let (done, runtime) = py.detach(move || {
        let done = runtime.block_on(async {
            let future = make();
            tokio::pin!(future);
            loop {
                tokio::select! {
                    biased;
                    done = &mut future => return Ok(done),
                    () = tokio::time::sleep(EVERY) => {
                        Python::attach(|py| py.check_signals().and_then(|()| look(py)))?;
                    }
                }
            }
        });
        (done, runtime)
    });
    // What a call that was given up has left on threads ends there.
    runtime.shutdown_background();
    match done {
        Ok(done) => done.map_err(|e| raised(py, &e)),
        Err(raised) => Err(raised),
    }
}

/// Tells `progress` at every look, once it is known how much there is; what it raises gives the call up.
pub(crate) fn teller(
    progress: Option<Py<PyAny>>,
    now: impl Fn() -> (u64, u64) + Send,
) -> impl FnMut(Python<'_>) -> PyResult<()> + Send {
    move |py| {
        let at = now();
        match &progress {
            Some(progress) if at.1 > 0 => progress.call1(py, at).map(drop),
            _ => Ok(()),
        }
    }
}
