//! What protects channels: the policy, and the material read from files.

use crate::{
    endpoint::{Endpoint, Pin},
    identity::{self, Identity},
    tls::{self, Trust},
    token::Token,
};
use flashboot_core::{Error, Kind, Result};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

/// Whether channels are encrypted. Both ends must say the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsPolicy {
    /// Off where both ends are one host's loopback, on elsewhere.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never: everything is sent in clear, and whoever is on the way can change it.
    Off,
}

impl fmt::Display for TlsPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

/// What protects channels, by file names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SecurityConfig {
    /// Whether channels are encrypted.
    pub tls: TlsPolicy,
    /// A file, mode 0600, with a secret of at least 16 bytes that both ends have. It is never sent.
    pub token_file: Option<PathBuf>,
    /// PEM file of authorities: the other end must show a certificate that one of them signed.
    pub ca: Option<PathBuf>,
    /// PEM file of this process's certificate and what signed it. Without one a listener makes its own.
    pub certificate: Option<PathBuf>,
    /// PEM file, mode 0600, of its key.
    pub key: Option<PathBuf>,
    /// Listen off loopback although dialers prove nothing: whoever reaches the port may read.
    pub allow_anonymous: bool,
}

/// What protects channels, ready for use. Cloning shares it.
#[derive(Clone)]
pub struct Security(Arc<Inner>);

struct Inner {
    tls: TlsPolicy,
    token: Option<Token>,
    roots: Option<Arc<RootCertStore>>,
    given: Option<Identity>,
    /// Made when the first listener opens, if none was given.
    made: OnceLock<Result<Identity>>,
    allow_anonymous: bool,
}

impl Default for Security {
    /// That of [`SecurityConfig::default`]: nothing on loopback; elsewhere TLS, and no listener.
    fn default() -> Self {
        let tls = TlsPolicy::Auto;
        let (token, roots, given, made) = (None, None, None, OnceLock::new());
        Self(Arc::new(Inner { tls, token, roots, given, made, allow_anonymous: false }))
    }
}

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Security")
            .field("tls", &self.0.tls)
            .field("token", &self.0.token)
            .field("ca", &self.0.roots.is_some())
            .field("identity", &self.0.given)
            .field("allow_anonymous", &self.0.allow_anonymous)
            .finish()
    }
}

impl Security {
    /// Reads and checks the files. Blocks on the file system.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for what does not fit together or does not parse, [`Kind::Permission`] for a secret that others
    /// may read.
    pub fn load(config: &SecurityConfig) -> Result<Self> {
        let invalid = |what: &str| Err(Error::new(Kind::Invalid, "security", what));
        let given = match (&config.certificate, &config.key) {
            (Some(certificate), Some(key)) => Some(Identity::read(certificate, key)?),
            (None, None) => None,
            _ => return invalid("a certificate needs its key, and a key its certificate"),
        };
        if config.tls == TlsPolicy::Off && (given.is_some() || config.ca.is_some()) {
            return invalid("certificates are of no use with tls = off");
        }
        let roots =
            config.ca.as_deref().map(|path| tls::roots(&identity::certificates(path)?)).transpose()?;
        if roots.is_some() && given.is_none() {
            return invalid("a ca without a certificate: both ends show one, so this end needs its own");
        }
        let token = config.token_file.as_deref().map(Token::read).transpose()?;
        let (tls, allow_anonymous) = (config.tls, config.allow_anonymous);
        Ok(Self(Arc::new(Inner { tls, token, roots, given, made: OnceLock::new(), allow_anonymous })))
    }

    /// Whether `token` is the channels' own, which must never be sent.
    pub fn holds(&self, token: &Token) -> bool {
        self.0.token.as_ref() == Some(token)
    }

    pub(crate) fn token(&self) -> Option<&Token> {
        self.0.token.as_ref()
    }

    /// Whether a channel to or from `peer` is encrypted.
    pub fn encrypts(&self, peer: IpAddr) -> bool {
        match self.0.tls {
            TlsPolicy::On => true,
            TlsPolicy::Off => false,
            TlsPolicy::Auto => !peer.to_canonical().is_loopback(),
        }
    }

    /// Whether a channel that we dial is encrypted: where [`encrypts`](Self::encrypts) says so, and wherever `endpoint` says by
    /// what certificate it is known. A name that leads to loopback would else take whoever listens there for it.
    pub(crate) fn encrypts_to(&self, endpoint: &Endpoint, address: IpAddr) -> bool {
        self.encrypts(address) || endpoint.pin.is_some() && self.0.tls != TlsPolicy::Off
    }

    /// Refuses to listen where anybody could come and nothing be asked of them.
    pub(crate) fn check_listen(&self, at: IpAddr) -> Result<()> {
        let asks = self.0.token.is_some() || self.0.roots.is_some();
        if at.to_canonical().is_loopback() || asks || self.0.allow_anonymous {
            return Ok(());
        }
        let detail = format!(
            "{at} is no loopback address, and readers are asked for neither a token nor a certificate"
        );
        Err(Error::new(Kind::Permission, "listen", detail).with_remedy(
            "set security.token_file, or security.ca with security.certificate and security.key; or say \
             security.allow_anonymous = true if whoever reaches the port may read",
        ))
    }

    fn identity(&self) -> Result<&Identity> {
        match &self.0.given {
            Some(given) => Ok(given),
            None => self.0.made.get_or_init(Identity::fresh).as_ref().map_err(Clone::clone),
        }
    }

    /// What a locator of a listener at `at` must carry so that a reader knows it. `None` where it encrypts no channel.
    pub(crate) fn pin(&self, at: IpAddr) -> Result<Option<Pin>> {
        // Whoever reaches a loopback address comes from one.
        if self.encrypts(at) { self.identity().map(Identity::pin) } else { Ok(None) }
    }

    pub(crate) fn server(&self) -> Result<Arc<ServerConfig>> {
        tls::server(self.identity()?, self.0.roots.clone())
    }

    /// TLS for a listener of another protocol: it shows the certificate that was given, and asks for none. `None` where none was
    /// given.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a certificate that does not go with its key.
    pub fn by_certificate(&self) -> Result<Option<Arc<ServerConfig>>> {
        self.0.given.as_ref().map(|given| tls::server(given, None)).transpose()
    }

    /// # Errors
    /// [`Kind::Permission`] when nothing would tell the listener from somebody else.
    pub(crate) fn client(&self, endpoint: &Endpoint) -> Result<Arc<ClientConfig>> {
        let trust = Trust { roots: self.0.roots.clone(), pin: endpoint.pin };
        if trust.roots.is_none() && trust.pin.is_none() && self.0.token.is_none() {
            let detail = "nothing tells the exporter from somebody else: no pin, no ca, no token";
            return Err(Error::new(Kind::Permission, "dial", detail)
                .with_peer(endpoint.place())
                .with_remedy("use the endpoint with its pin, or set security.ca or security.token_file"));
        }
        tls::client(trust, self.0.given.as_ref())
    }
}
