//! What goes wrong, as values.

use std::time::Duration;

/// One thing that goes wrong. `pull` counts the pulls from that host, from 0, over all its readers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The pull moves nothing and does not end until it is cancelled.
    Drop {
        /// The source.
        host: u32,
        /// Which pull.
        pull: u64,
    },
    /// From this pull on the source's progress words read as they were.
    Stall {
        /// The source.
        host: u32,
        /// Which pull.
        pull: u64,
    },
    /// One byte of what lands is flipped.
    Corrupt {
        /// The source.
        host: u32,
        /// Which pull.
        pull: u64,
    },
    /// The pull takes `by` longer to become quiet, cancelled or not, and writes until then.
    Late {
        /// The source.
        host: u32,
        /// Which pull.
        pull: u64,
        /// How much longer.
        by: Duration,
    },
    /// The host dies when this pull begins.
    Kill {
        /// The source.
        host: u32,
        /// Which pull.
        pull: u64,
    },
}

impl Fault {
    pub(crate) fn at(&self) -> (u32, u64) {
        match *self {
            Self::Drop { host, pull }
            | Self::Stall { host, pull }
            | Self::Corrupt { host, pull }
            | Self::Late { host, pull, .. }
            | Self::Kill { host, pull } => (host, pull),
        }
    }
}

/// `count` faults over `hosts` hosts (the first, the seed, never dies) and the first `pulls` pulls of each,
/// drawn from `seed` alone.
pub fn seeded_faults(seed: u64, count: usize, hosts: u32, pulls: u64) -> Vec<Fault> {
    let mut state = seed;
    let mut draw = move |below: u64| {
        // SplitMix64 (Steele, Lea, Flood 2014).
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % below.max(1)
    };
    (0..count)
        .map(|_| {
            let host = draw(u64::from(hosts)) as u32;
            let pull = draw(pulls);
            match draw(5) {
                0 => Fault::Drop { host, pull },
                1 if host > 0 => Fault::Stall { host, pull },
                2 => Fault::Late { host, pull, by: Duration::from_millis(1 + draw(20)) },
                3 if host > 0 => Fault::Kill { host, pull },
                _ => Fault::Corrupt { host, pull },
            }
        })
        .collect()
}

/// A defect that a transport could have, planted so that the conformance suite can be seen to find it. Each
/// also reports digests of what *should* have landed, as a transport that hashes its source would.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The last range of the payload never lands.
    DropsLastChunk,
    /// The last byte of every range is left out.
    OffByOne,
    /// A pull says it is quiet when half of it is still to land.
    CompletesEarly,
    /// The generation is taken from the locator and never looked at.
    ReadsStaleGeneration,
    /// The reader's progress word is advanced when a pull begins.
    PublishesBeforeVerifying,
}
