//! SIGINT, SIGTERM and SIGHUP: verbs stop, leave nothing behind, and say that they were stopped. SIGXFSZ: an error.

use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{SignalKind, signal};

static ASKED: AtomicBool = AtomicBool::new(false);

/// Whether this process was asked to stop since [`watch`] was called.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Waits for one of the signals. From the call on, not only from the first poll, they do not end the process by
/// themselves. Must be called on a runtime with IO.
pub(crate) fn signalled() -> impl Future<Output = ()> {
    let on = |kind| {
        let watched = signal(kind);
        async move {
            match watched {
                Ok(mut signal) => drop(signal.recv().await),
                Err(error) => {
                    tracing::debug!(%error, "cannot watch a signal");
                    std::future::pending::<()>().await;
                }
            }
        }
    };
    let (interrupt, terminate, hangup) =
        (on(SignalKind::interrupt()), on(SignalKind::terminate()), on(SignalKind::hangup()));
    async move {
        tokio::select! {
            () = interrupt => {}
            () = terminate => {}
            () = hangup => {}
        }
        ASKED.store(true, Ordering::Relaxed);
    }
}

/// Makes a write past the limit on file sizes an error (EFBIG), which says what to do, where it would end the process
/// with SIGXFSZ.
pub(crate) fn survive_file_limit() {
    /// SIGXFSZ of Linux on x86_64 and aarch64.
    const SIGXFSZ: i32 = 25;
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    let _inside = runtime.enter();
    // The handler stays installed past the runtime; nobody waits for the signal.
    if let Err(error) = signal(SignalKind::from_raw(SIGXFSZ)) {
        tracing::debug!(%error, "the limit on file sizes ends this process");
    }
}

/// Lets blocking verbs see the signals through [`asked`].
pub(crate) fn watch() {
    let spawned = std::thread::Builder::new().name("flashboot-signals".into()).spawn(|| {
        if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() {
            runtime.block_on(async { signalled().await });
            // Asked again: it means it.
            runtime.block_on(async { signalled().await });
            std::process::exit(1);
        }
    });
    if let Err(error) = spawned {
        tracing::debug!(%error, "signals end this process at once");
    }
}
