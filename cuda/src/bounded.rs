//! Driver calls from async code.

use flashboot_core::{Error, Kind, Result};
use std::time::Duration;

/// Runs what may block on a thread that may, and stops waiting for it after `timeout`: a sick driver blocks for ever,
/// and then `work` ends whenever it does, its result dropped. `what` is for the error; needs a tokio runtime with
/// its timer.
///
/// # Errors
/// [`Kind::Deadline`] after `timeout`, [`Kind::Cancelled`] when the runtime ends, and those of `work`.
pub async fn bounded<T: Send + 'static>(
    op: &'static str,
    what: &str,
    timeout: Duration,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::time::timeout(timeout, tokio::task::spawn_blocking(work)).await {
        Ok(Ok(done)) => done,
        Ok(Err(e)) => Err(Error::new(Kind::Cancelled, op, format!("the runtime is ending: {e}"))),
        Err(_) => Err(Error::new(Kind::Deadline, op, format!("{what} did not happen within {timeout:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_hangs_does_not_hang_its_caller() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let late = runtime.block_on(bounded("import", "mapping", Duration::from_millis(20), move || {
            let _ = ends.recv();
            Ok(())
        }));
        let late = late.unwrap_err();
        assert_eq!(late.kind(), Kind::Deadline);
        assert_eq!(late.detail(), "mapping did not happen within 20ms");
        drop(end);
    }
}
