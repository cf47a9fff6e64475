//! What an endpoint has done, counted: how its promises are tested and shown.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// What an endpoint has done since it was opened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
        #[non_exhaustive]
        pub struct Counts {
            $($(#[$doc])* pub $field: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $field: Counter,)*
        }

        impl Counters {
            pub(crate) fn read(&self) -> Counts {
                Counts { $($field: self.$field.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Devices opened.
    devices_opened,
    /// Memory regions registered.
    regions_registered,
    /// Queue pairs made, the spare ones among them.
    pairs_made,
    /// Queue pairs made while a connection waited for them, because no spare one was left.
    pairs_made_late,
    /// Queue pairs that were there before the connection that took them.
    spares_used,
    /// Requests over a control channel, each answered once.
    control_round_trips,
    /// READs of payload posted.
    reads_posted,
    /// READs of words posted.
    looks_posted,
    /// READs whose success was asked to be told.
    reads_signalled,
    /// Completions taken.
    completions,
    /// The most READs of payload that were in flight at once on one queue pair.
    most_in_flight,
    /// Bytes of payload landed by READs.
    bytes_read,
    /// READs that were posted again on another device after theirs had failed.
    reads_repeated,
    /// Devices dropped from a hop after a failure.
    rails_lost,
    /// Queue pairs ended to stop a cancelled pull.
    pairs_ended_by_cancel,
    /// Queue pairs destroyed because they were ended and did not give back what was posted on them.
    pairs_destroyed_unheard,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn at_least(&self, n: u64) {
        self.0.fetch_max(n, Ordering::Relaxed);
    }
}
