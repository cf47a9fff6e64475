//! Stores: who says where the one service of a fleet is, when that is not written on every command line.
//!
//! A store keeps one small [`Record`] and nothing of what the service knows. Services campaign for the post: one [takes](Store::take)
//! it and is reached by everybody through its record; the others stand by ([`stand`]). So there is one machine at a time, and all
//! that is proved of it holds; one that follows another knows nothing, and is told again by the members, as after a
//! restart. `docs/rendezvous.md` says why not otherwise.
//!
//! One file each: how a store is named ([`address`](self)), what it holds ([`record`](self)), for how long the post is held
//! ([`term`](self)), the loop of a service behind a store ([`post`](self)), a shared directory ([`dir`](self)), etcd ([`etcd`](self)).
//!
//! Must never: believe a wall clock or a file's time; let a service answer after its term.

mod address;
mod dir;
#[cfg(feature = "etcd")]
mod etcd;
mod post;
mod record;
mod term;

pub use address::{Address, AddressError, EtcdAddress};
pub use post::{Post, stand};
pub use record::{FORMAT, MAX_RECORD, NoService, Record};
pub use term::{Fence, Term};

use async_trait::async_trait;
use flashboot_channel::{Endpoint, Security, TlsPolicy};
use flashboot_core::{Error, Kind, Result};
use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

/// How services and members speak to an etcd.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EtcdConfig {
    /// Whether by TLS. Off loopback without it only when that is said.
    pub tls: TlsPolicy,
    /// PEM file of the authority that signed the etcd's certificates.
    pub ca: Option<PathBuf>,
    /// PEM file of the certificate that this end shows.
    pub certificate: Option<PathBuf>,
    /// PEM file of its key.
    pub key: Option<PathBuf>,
    /// The etcd's user.
    pub user: Option<String>,
    /// File, mode 0600, of that user's password.
    pub password_file: Option<PathBuf>,
}

/// One place for one record.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// As people wrote it.
    fn name(&self) -> String;

    /// Where the service is; waits up to `patience` for one to be there.
    ///
    /// # Errors
    /// [`NoService`] as an error; the store's own when it does not answer, [`Kind::Deadline`] among them.
    async fn find(&self, patience: Duration) -> Result<Endpoint>;

    /// Waits until nobody has the post, as far as can be seen.
    ///
    /// # Errors
    /// The store's own.
    async fn vacant(&self) -> Result<()>;

    /// Takes the post for the service at `endpoint`, with a lease of `lease` at least; `None` when another was quicker.
    ///
    /// # Errors
    /// The store's own.
    async fn take(&self, endpoint: &Endpoint, lease: Duration) -> Result<Option<Term>>;
}

/// The store at `address`. Nothing is dialled yet.
///
/// # Errors
/// [`Kind::Invalid`] for a service's own address; [`Kind::Unavailable`] for an etcd in a build without it;
/// [`Kind::Permission`] for one off loopback without TLS.
pub fn open(address: &Address, etcd: &EtcdConfig) -> Result<Arc<dyn Store>> {
    match address {
        Address::Tcp(_) => {
            let detail = format!("{address} is a service's own address, and no store that names one");
            Err(Error::new(Kind::Invalid, "rendezvous", detail)
                .with_remedy("name an etcd (etcd://HOST:PORT/NAME) or a directory (dir:PATH)"))
        }
        Address::Dir(path) => Ok(Arc::new(dir::Dir::new(path.clone())?)),
        Address::Etcd(address) => opened(address, etcd),
    }
}

#[cfg(feature = "etcd")]
fn opened(address: &EtcdAddress, config: &EtcdConfig) -> Result<Arc<dyn Store>> {
    Ok(Arc::new(etcd::Etcd::new(address.clone(), config.clone())?))
}

#[cfg(not(feature = "etcd"))]
fn opened(address: &EtcdAddress, _config: &EtcdConfig) -> Result<Arc<dyn Store>> {
    Err(Error::new(Kind::Unavailable, "etcd", "this build speaks to no etcd")
        .with_peer(address)
        .with_remedy("build it with `--features etcd`, which needs protoc"))
}

/// The client of whatever is at `address`.
///
/// # Errors
/// Those of [`open`].
pub fn client(address: &Address, etcd: &EtcdConfig, security: Security) -> Result<crate::Client> {
    match address {
        Address::Tcp(endpoint) => Ok(crate::Client::new(endpoint.clone(), security)),
        store => Ok(crate::Client::through(open(store, etcd)?, security)),
    }
}

/// A number that no two services share.
fn new_id() -> Result<u64> {
    getrandom::u64().map_err(|e| {
        Error::new(Kind::Unavailable, "getrandom", format!("the system gives no random bits: {e}"))
    })
}
