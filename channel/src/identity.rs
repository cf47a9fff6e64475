//! The certificate that this process shows, with its key.

use crate::{endpoint::Pin, token::secret};
use flashboot_core::{Error, Kind, Result};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject as _};
use std::{fmt, path::Path};

/// The most certificates of a file that are looked at.
const MAX_CERTIFICATES: usize = 64;
const MAX_PEM: u64 = 1 << 20;

pub(crate) struct Identity {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl Identity {
    /// From PEM files; the first certificate is this process's own.
    pub(crate) fn read(certificate: &Path, key: &Path) -> Result<Self> {
        let chain = certificates(certificate)?;
        let pem = secret(key)?;
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|e| {
            Error::new(Kind::Invalid, "key", format!("{} holds no private key: {e}", key.display()))
        })?;
        Ok(Self { chain, key })
    }

    /// Made now, signed by itself: worth as much as the way by which its pin reaches the peer.
    pub(crate) fn fresh() -> Result<Self> {
        let failed =
            |e: rcgen::Error| Error::new(Kind::Io, "certificate", format!("cannot make a certificate: {e}"));
        // Readers compare the pin, so the name says nothing.
        let made = rcgen::generate_simple_self_signed(["flashboot".to_owned()]).map_err(failed)?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        Ok(Self { chain: vec![made.cert.der().clone()], key: key.into() })
    }

    pub(crate) fn pin(&self) -> Option<Pin> {
        self.chain.first().map(|certificate| Pin::of(certificate))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({:?})", self.pin())
    }
}

/// Every certificate of a PEM file; at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let shown = path.display();
    let invalid = |what: String| Error::new(Kind::Invalid, "certificate", format!("{shown}: {what}"));
    let len = std::fs::metadata(path).map_err(|e| Error::from_io("stat", &e, shown.to_string()))?.len();
    if len > MAX_PEM {
        return Err(invalid(format!("{len} bytes; at most {MAX_PEM} are read")));
    }
    let pem = std::fs::read(path).map_err(|e| Error::from_io("read", &e, shown.to_string()))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).take(MAX_CERTIFICATES).collect();
    let found = found.map_err(|e| invalid(format!("no PEM: {e}")))?;
    if found.is_empty() { Err(invalid("no certificate".into())) } else { Ok(found) }
}
