//! Settings of the etcd that says where the replication service is.

use super::Network;
use flashboot_channel::TlsPolicy;
use flashboot_rendezvous::store::EtcdConfig;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How an etcd is spoken to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Etcd {
    /// Whether by TLS: `auto` (off on loopback only, unless a `ca` is named), `on`, `off`.
    pub tls: TlsPolicy,
    /// PEM file of the authority that signed its certificates.
    pub ca: Option<PathBuf>,
    /// PEM file of the certificate that it asks for.
    pub certificate: Option<PathBuf>,
    /// PEM file, mode 0600, of its key.
    pub key: Option<PathBuf>,
    /// The user.
    pub user: Option<String>,
    /// A file, mode 0600, with the user's password.
    pub password_file: Option<PathBuf>,
}

impl Network {
    /// As the store wants it.
    pub(crate) fn etcd(&self) -> EtcdConfig {
        let Etcd { tls, ca, certificate, key, user, password_file } = self.etcd.clone();
        EtcdConfig { tls, ca, certificate, key, user, password_file }
    }
}
