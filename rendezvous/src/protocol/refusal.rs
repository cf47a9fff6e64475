//! Why the service says no: a reason both sides know by name, and a sentence with the numbers.

use flashboot_core::{Error, Kind};
use serde::{Deserialize, Serialize};

/// Why, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Reason {
    /// No version of the protocol is spoken by both.
    Version,
    /// It is no message of the version agreed on, or one field of it is impossible.
    Malformed,
    /// The member is not, or no more, registered: register again.
    UnknownMember,
    /// Another process holds a member of this generation.
    GenerationTaken,
    /// The member has left, or another of its name came after it.
    Gone,
    /// Nobody has registered what is asked for.
    NoSuchImage,
    /// More than one image is what is asked for.
    Ambiguous,
    /// The same image with another size, fingerprint, model or manifest.
    Mismatch,
    /// No room for more members, images or bytes.
    Full,
    /// What a later release says, and this one does not know.
    #[serde(other)]
    Other,
}

/// The service's no.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{detail}")]
pub struct Refusal {
    /// By name.
    pub reason: Reason,
    /// The sentence with the numbers.
    pub detail: String,
}

impl Refusal {
    /// For a reason, in a sentence.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }

    /// As the boundary's error; `op` is what was asked of the service at `peer`.
    pub fn into_error(self, op: &'static str, peer: &str) -> Error {
        let (kind, remedy) = match self.reason {
            Reason::Version => (Kind::Mismatch, "run releases that speak one version at both ends"),
            Reason::Malformed | Reason::Other => (Kind::Protocol, ""),
            Reason::UnknownMember | Reason::Gone => (Kind::Cancelled, ""),
            Reason::GenerationTaken => (Kind::Mismatch, "give every process an arena of its own"),
            Reason::NoSuchImage => (Kind::Unavailable, "start a seed of it, or look at `flashboot status`"),
            Reason::Ambiguous => (Kind::Invalid, "say which with --image and --rank"),
            Reason::Mismatch => (Kind::Mismatch, "pack the image once, and copy it to every seed"),
            Reason::Full => (Kind::Exhausted, "end members that nobody needs, or run a second service"),
        };
        // What came from a peer is bounded and printable before anybody reads it.
        let detail: String = self.detail.chars().filter(|c| !c.is_control()).take(1000).collect();
        let error = Error::new(kind, op, detail).with_peer(peer);
        if remedy.is_empty() { error } else { error.with_remedy(remedy) }
    }
}
