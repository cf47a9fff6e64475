//! SIGINT, SIGTERM and SIGHUP: verbs stop, leave nothing behind, and say that they were stopped. SIGXFSZ: an error.

use crate::{exit::Failure, output::Output};
use flashboot_core::{Error, Kind};
use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};
use tokio::signal::unix::{Signal, SignalKind, signal};

static ASKED: AtomicBool = AtomicBool::new(false);
/// Whether a verb looks after itself.
static COOPERATIVE: AtomicBool = AtomicBool::new(false);

/// Whether this process was asked to stop.
pub(crate) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// The three signals. While it lives, and after, they do not end the process by themselves.
struct Signals([io::Result<Signal>; 3]);

impl Signals {
    /// Must be called on a runtime with IO.
    fn new() -> Self {
        Self([SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal))
    }

    /// Waits for the next one since the last, or since they were made.
    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = self.0.each_mut().map(|watched| async move {
            match watched {
                Ok(signal) => drop(signal.recv().await),
                Err(error) => {
                    tracing::debug!(%error, "cannot watch a signal");
                    std::future::pending::<()>().await;
                }
            }
        });
        tokio::select! {
            () = interrupt => {}
            () = terminate => {}
            () = hangup => {}
        }
    }
}

/// Waits for one of the signals, which from the call on do not end the process by themselves. Must be called on a runtime
/// with IO.
pub(crate) fn signalled() -> impl Future<Output = ()> {
    let mut signals = Signals::new();
    watch();
    async move {
        // One that came just before the call was not seen by these.
        if !asked() {
            signals.next().await;
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

/// From now on a signal ends this process with a word on why, exit 1, and the one object with `--json`; until a verb
/// undertakes to stop by itself ([`watch`], [`signalled`]). Called first of all: a verb that reads its configuration, or
/// waits for a driver, is stopped so.
pub(crate) fn begin(output: Output) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    let mut signals = {
        let _inside = runtime.enter();
        Signals::new()
    };
    let spawned = std::thread::Builder::new().name("flashboot-signals".into()).spawn(move || {
        runtime.block_on(signals.next());
        ASKED.store(true, Ordering::Relaxed);
        if !COOPERATIVE.load(Ordering::Relaxed) {
            let error = Error::new(Kind::Cancelled, "flashboot", "stopped by a signal");
            if output.fail_by_signal(&Failure::from(error)).is_some() {
                std::process::exit(1);
            }
            // It has said how it ended, and is about to.
            return;
        }
        // Asked again: it means it.
        runtime.block_on(signals.next());
        std::process::exit(1);
    });
    if let Err(error) = spawned {
        tracing::debug!(%error, "signals end this process at once");
    }
}

/// Lets blocking verbs see the signals through [`asked`].
pub(crate) fn watch() {
    COOPERATIVE.store(true, Ordering::Relaxed);
}
