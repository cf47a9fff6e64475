//! From the system's and TLS's words to the boundary's error, in one place.

use flashboot_core::{Code, Error, Kind};
use std::{io, time::Duration};

pub(crate) const SAME_TLS: &str = "set security.tls alike at both ends";

/// What a failed call on a channel to `peer` means: `call` as a person would look it up, `what` was being done.
///
/// A connection that ended, was refused or went silent is [`Kind::SourceLost`], a certificate that was refused
/// [`Kind::Permission`], bytes that are no TLS [`Kind::Protocol`].
pub fn failed(call: &'static str, error: &io::Error, what: &str, peer: &str) -> Error {
    if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return tls_failed(tls, what).with_peer(peer);
    }
    use io::ErrorKind as E;
    let made = match error.kind() {
        E::UnexpectedEof | E::WriteZero => {
            Error::new(Kind::SourceLost, call, format!("{what}: the peer closed the connection"))
        }
        E::ConnectionReset
        | E::ConnectionAborted
        | E::ConnectionRefused
        | E::BrokenPipe
        | E::NotConnected
        | E::TimedOut
        | E::HostUnreachable
        | E::NetworkUnreachable
        | E::NetworkDown => {
            let lost = Error::new(Kind::SourceLost, call, what);
            match error.raw_os_error() {
                Some(errno) => lost.with_code(Code::Errno(errno)),
                None => Error::new(Kind::SourceLost, call, format!("{what}: {error}")),
            }
        }
        _ => Error::from_io(call, error, what),
    };
    made.with_peer(peer)
}

fn tls_failed(error: &rustls::Error, what: &str) -> Error {
    use rustls::{AlertDescription as A, Error as E};
    match error {
        E::InvalidCertificate(why) => {
            Error::new(Kind::Permission, "TLS", format!("{what}: the peer's certificate is refused: {why}"))
                .with_remedy(
                    "fetch a fresh locator if the exporter has restarted; else look who answers in its place",
                )
        }
        E::NoCertificatesPresented => {
            Error::new(Kind::Permission, "TLS", format!("{what}: the peer presented no certificate"))
        }
        E::AlertReceived(
            alert @ (A::CertificateRequired
            | A::UnknownCA
            | A::BadCertificate
            | A::CertificateUnknown
            | A::CertificateExpired
            | A::CertificateRevoked
            | A::UnsupportedCertificate
            | A::AccessDenied
            | A::DecryptError),
        ) => Error::new(Kind::Permission, "TLS", format!("{what}: the peer refused us: {alert:?}"))
            .with_remedy("give security.certificate and security.key that the peer's security.ca has signed"),
        E::InvalidMessage(_) | E::AlertReceived(_) | E::DecryptError => {
            Error::new(Kind::Protocol, "TLS", format!("{what}: {error}")).with_remedy(SAME_TLS)
        }
        _ => Error::new(Kind::Protocol, "TLS", format!("{what}: {error}")),
    }
}

/// The peer speaks TLS where none was expected, or none of our protocols.
pub(crate) fn speaks_tls(op: &'static str, peer: &str) -> Error {
    Error::new(Kind::Protocol, op, "the peer speaks TLS, and this channel was to be without")
        .with_peer(peer)
        .with_remedy(SAME_TLS)
}

/// A deadline that passed.
pub(crate) fn deadline(op: &'static str, timeout: Duration, what: &str, peer: &str) -> Error {
    Error::new(Kind::Deadline, op, format!("{what} took longer than {timeout:?}")).with_peer(peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_of_a_connection_has_its_kind_and_code() {
        let of = |e: io::Error| {
            let error = failed("read", &e, "the answer", "h:1");
            (error.kind(), error.code())
        };
        let os = io::Error::from_raw_os_error;
        assert_eq!(of(os(104)), (Kind::SourceLost, Some(Code::Errno(104))));
        assert_eq!(of(os(110)), (Kind::SourceLost, Some(Code::Errno(110))));
        assert_eq!(of(os(24)), (Kind::Exhausted, Some(Code::Errno(24))));
        assert_eq!(of(io::ErrorKind::UnexpectedEof.into()), (Kind::SourceLost, None));
        let no_tls = rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType);
        assert_eq!(of(io::Error::new(io::ErrorKind::InvalidData, no_tls)), (Kind::Protocol, None));
        let bad = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        assert_eq!(of(io::Error::new(io::ErrorKind::InvalidData, bad)), (Kind::Permission, None));
    }
}
