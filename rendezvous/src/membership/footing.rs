//! Where a member stands with the service: what may be said of it to whoever asks whether it is ready.
//!
//! A service that is silent has a member for a lease, and not longer. One that cannot prove itself any more, or that does
//! not take our proof, is another service: it does not have us now, and will not have us.

use super::pulse::Beat;
use flashboot_core::{Error, Kind};
use serde::Serialize;

/// Where a member stands with the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Footing {
    /// It is registered, as far as can be known.
    Registered,
    /// The service was silent for a lease: it has forgotten the member, or is gone.
    Forgotten,
    /// Who answers there is not the service that the member registered at, or does not take the member for one of its own.
    Stranger,
    /// The service will not have it any more.
    Refused,
    /// Readers found wrong bytes: the service gives it to nobody.
    Withdrawn,
}

impl Footing {
    pub(super) fn of(beat: &Beat) -> Self {
        if beat.evicted.is_some() {
            Self::Refused
        } else if beat.trouble.as_ref().is_some_and(is_other) {
            Self::Stranger
        } else if beat.silence > beat.lease {
            Self::Forgotten
        } else if beat.blame.withdrawn {
            Self::Withdrawn
        } else {
            Self::Registered
        }
    }
}

/// Whether `error` says that who is there is not who was, rather than that nobody is.
pub(super) fn is_other(error: &Error) -> bool {
    matches!(error.kind(), Kind::Permission | Kind::Mismatch | Kind::Protocol | Kind::Invalid)
}

/// The same with what to do about it, where the service has changed under a member that runs.
pub(crate) fn explained(error: Error) -> Error {
    if error.kind() != Kind::Permission {
        return error;
    }
    let before = error.remedy().map(|remedy| format!("; at first: {remedy}")).unwrap_or_default();
    error.with_remedy(format!(
        "the service was started with another certificate (its pin changed) or another token, and will not have this member: start \
         the service with the same security.certificate, security.key and token, or start this process again with what the service \
         prints now{before}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_proves_itself_otherwise_is_another_and_a_silent_one_is_not() {
        let of = |kind| Error::new(kind, "TLS", "x");
        for kind in [Kind::Permission, Kind::Mismatch, Kind::Protocol] {
            assert!(is_other(&of(kind)), "{kind:?}");
        }
        for kind in [Kind::SourceLost, Kind::Deadline, Kind::Unavailable, Kind::Io, Kind::Exhausted] {
            assert!(!is_other(&of(kind)), "{kind:?}");
        }
        let told = explained(of(Kind::Permission).with_remedy("look"));
        let remedy = told.remedy().unwrap_or_default();
        assert!(remedy.contains("its pin changed") && remedy.ends_with("at first: look"), "{remedy}");
        assert_eq!(explained(of(Kind::Io)), of(Kind::Io));
    }
}
