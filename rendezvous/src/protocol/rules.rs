//! What the service holds its members to.

use std::time::Duration;

/// What the service holds its members to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// How long a member may be silent.
    pub lease: Duration,
    /// Members above a tail that cost as much as one reader of a link; more for large contents ([`chain`](super::chain)).
    pub least_chain: u32,
    /// The most members.
    pub members: usize,
    /// The most contents, and bytes of all their manifests.
    pub contents: usize,
    /// Bytes of all manifests.
    pub manifest_bytes: u64,
    /// How long a source stays in doubt after a first report; twice as long after every further one, up to 64 times.
    pub doubt: Duration,
    /// How many members of one name may be lost within [`flap_window`](Self::flap_window) before the next has to wait.
    pub flaps: u32,
    /// See [`flaps`](Self::flaps).
    pub flap_window: Duration,
}

impl Default for Rules {
    /// A lease of 10 s, chains of at least 16, 20,000 members, 1,024 contents with 1 GiB of manifests, 1 s of doubt, 3 losses
    /// in a minute.
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(10),
            least_chain: 16,
            members: 20_000,
            contents: 1024,
            manifest_bytes: 1 << 30,
            doubt: Duration::from_secs(1),
            flaps: 3,
            flap_window: Duration::from_secs(60),
        }
    }
}
