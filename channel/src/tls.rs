//! TLS 1.3 and nothing older, by the provider that needs only a C compiler.

use crate::{endpoint::Pin, identity::Identity};
use flashboot_core::{Error, Kind, Result};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    version::TLS13,
};
use std::sync::Arc;

/// Bytes of the keying material that a proof covers.
pub(crate) const KEYING: usize = 32;
const KEYING_LABEL: &[u8] = b"EXPORTER-flashboot-channel";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn refused(what: &'static str) -> impl Fn(rustls::Error) -> Error {
    move |e| Error::new(Kind::Invalid, "TLS", format!("{what}: {e}"))
}

/// The authorities of `ca`.
pub(crate) fn roots(ca: &[CertificateDer<'static>]) -> Result<Arc<RootCertStore>> {
    let mut roots = RootCertStore::empty();
    for certificate in ca {
        roots.add(certificate.clone()).map_err(refused("security.ca"))?;
    }
    Ok(Arc::new(roots))
}

/// What a listener needs; with `roots` it demands a certificate that one of them signed.
pub(crate) fn server(identity: &Identity, roots: Option<Arc<RootCertStore>>) -> Result<Arc<ServerConfig>> {
    let config = ServerConfig::builder_with_provider(provider());
    let config = config.with_protocol_versions(&[&TLS13]).map_err(refused("TLS 1.3"))?;
    let config = match roots {
        Some(roots) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
            config.with_client_cert_verifier(
                verifier.map_err(|e| Error::new(Kind::Invalid, "TLS", format!("security.ca: {e}")))?,
            )
        }
        None => config.with_no_client_auth(),
    };
    let made = config.with_single_cert(identity.chain.clone(), identity.key.clone_key());
    let mut config = made.map_err(refused("security.certificate and security.key"))?;
    // A resumed session would not show its certificate again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// What a dialler needs.
pub(crate) fn client(trust: Trust, identity: Option<&Identity>) -> Result<Arc<ClientConfig>> {
    let config = ClientConfig::builder_with_provider(provider());
    let config = config.with_protocol_versions(&[&TLS13]).map_err(refused("TLS 1.3"))?;
    let config = config.dangerous().with_custom_certificate_verifier(Arc::new(Verifier::new(trust)?));
    let mut config = match identity {
        Some(identity) => config
            .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
            .map_err(refused("security.certificate and security.key"))?,
        None => config.with_no_client_auth(),
    };
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// By what a dialler knows the listener. With neither, the token's proof, which covers this TLS session, must do it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trust {
    pub(crate) roots: Option<Arc<RootCertStore>>,
    pub(crate) pin: Option<Pin>,
}

/// Everything that `Trust` names must hold; that the peer has the certificate's key is always checked.
#[derive(Debug)]
struct Verifier {
    signed: Option<Arc<WebPkiServerVerifier>>,
    pin: Option<Pin>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn new(trust: Trust) -> Result<Self> {
        let signed = trust.roots.map(|roots| {
            WebPkiServerVerifier::builder_with_provider(roots, provider())
                .build()
                .map_err(|e| Error::new(Kind::Invalid, "TLS", format!("security.ca: {e}")))
        });
        Ok(Self { signed: signed.transpose()?, pin: trust.pin, provider: provider() })
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if self.pin.is_some_and(|pin| pin != Pin::of(end_entity)) {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        match &self.signed {
            Some(signed) => {
                signed.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            }
            None => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        None
    }
}

/// Keying material that only the two ends of this session have.
pub(crate) fn keying(stream: &tokio_rustls::TlsStream<tokio::net::TcpStream>) -> Result<[u8; KEYING]> {
    use tokio_rustls::TlsStream;
    let out = [0; KEYING];
    let made = match stream {
        TlsStream::Client(stream) => stream.get_ref().1.export_keying_material(out, KEYING_LABEL, None),
        TlsStream::Server(stream) => stream.get_ref().1.export_keying_material(out, KEYING_LABEL, None),
    };
    made.map_err(|e| Error::new(Kind::Protocol, "TLS", format!("keying material: {e}")))
}
