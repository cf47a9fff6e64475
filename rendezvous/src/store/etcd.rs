//! The record in an etcd, under one key that lives as long as its lease.
//!
//! Taking the post is one transaction: make the key if there is none. The etcd ends the lease of a service that is gone, and its
//! watch wakes the next. Every call has a deadline of its own; a connection is made for what is asked, and kept only by who
//! has the post or waits for it, so that an etcd sees as many connections as there are candidates, and not members.

use super::{
    EtcdAddress, EtcdConfig, Store, new_id,
    record::{FORMAT, NoService, Record},
    term::{Hold, Term},
};
use async_trait::async_trait;
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Identity, PutOptions, TlsOptions, Txn, TxnOp,
    WatchOptions,
};
use flashboot_channel::{Endpoint, TlsPolicy};
use flashboot_core::{Error, Kind, Result};
use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};
use tokio::time::{Instant, timeout};

/// How long one call may take.
const CALL: Duration = Duration::from_secs(3);
/// How long a watch is believed to see everything; then the key is read again.
const WATCH: Duration = Duration::from_secs(10);
/// How often a server that says nothing is asked whether it is there.
const ALIVE: Duration = Duration::from_secs(3);
/// The longest file of a certificate, a key or a password.
const FILE: u64 = 1 << 20;

/// See [module](self).
#[derive(Debug)]
pub(super) struct Etcd {
    address: EtcdAddress,
    config: EtcdConfig,
    encrypted: bool,
    key: String,
}

/// What is under the key.
struct Found {
    /// The etcd's own count, at the time of reading.
    revision: i64,
    value: Option<Value>,
}

struct Value {
    bytes: Vec<u8>,
    created: i64,
    modified: i64,
    lease: i64,
}

fn failed(op: &'static str, error: &etcd_client::Error) -> Error {
    use etcd_client::Error as E;
    let kind = match error {
        E::GRpcStatus(status) => match i32::from(status.code()) {
            // Unauthenticated and PermissionDenied of gRPC.
            7 | 16 => Kind::Permission,
            4 => Kind::Deadline,
            _ => Kind::SourceLost,
        },
        E::InvalidArgs(_) | E::InvalidUri(_) => Kind::Invalid,
        _ => Kind::SourceLost,
    };
    // What came from a peer is bounded and printable before anybody reads it.
    let detail: String = error.to_string().chars().filter(|c| !c.is_control()).take(500).collect();
    Error::new(kind, op, detail)
}

impl Etcd {
    pub(super) fn new(address: EtcdAddress, config: EtcdConfig) -> Result<Self> {
        let local = address.servers.iter().all(|server| server.host.is_loopback());
        let encrypted = match config.tls {
            TlsPolicy::On => true,
            TlsPolicy::Off => false,
            TlsPolicy::Auto => config.ca.is_some() || !local,
        };
        if encrypted && config.ca.is_none() {
            let detail =
                "an etcd off loopback is spoken to by TLS, and no authority for its certificates is named";
            return Err(Error::new(Kind::Permission, "etcd", detail)
                .with_peer(&address)
                .with_remedy("name it in etcd.ca, or say etcd.tls = \"off\""));
        }
        let invalid = |detail: &str| Err(Error::new(Kind::Invalid, "etcd", detail));
        if config.certificate.is_some() != config.key.is_some() {
            return invalid("a certificate needs its key, and a key its certificate");
        }
        if config.user.is_some() != config.password_file.is_some() {
            return invalid("a user needs a password file, and a password file its user");
        }
        let key = format!("{}/service", address.name);
        Ok(Self { address, config, encrypted, key })
    }

    async fn call<T>(
        &self,
        op: &'static str,
        call: impl Future<Output = std::result::Result<T, etcd_client::Error>>,
    ) -> Result<T> {
        let late = |_| Error::new(Kind::Deadline, op, format!("no answer within {CALL:?}"));
        let answered = timeout(CALL, call).await.map_err(late);
        let answered = answered.and_then(|answer| answer.map_err(|e| failed(op, &e)));
        answered.map_err(|error| error.with_peer(&self.address))
    }

    async fn connect(&self) -> Result<Client> {
        let config = self.config.clone();
        let encrypted = self.encrypted;
        let read = tokio::task::spawn_blocking(move || options(&config, encrypted)).await;
        let options =
            read.map_err(|e| Error::new(Kind::Exhausted, "thread", format!("a thread to read files: {e}")))??;
        let scheme = if self.encrypted { "https" } else { "http" };
        let servers: Vec<String> =
            self.address.servers.iter().map(|server| format!("{scheme}://{}", server.place())).collect();
        self.call("etcd connect", Client::connect(&servers, Some(options))).await
    }

    async fn get(&self, client: &mut Client) -> Result<Found> {
        let mut answer = self.call("etcd get", client.get(self.key.as_str(), None)).await?;
        let revision = answer.header().map_or(0, |header| header.revision());
        let value = answer.take_kvs().into_iter().next().map(|kv| Value {
            created: kv.create_revision(),
            modified: kv.mod_revision(),
            lease: kv.lease(),
            bytes: kv.into_key_value().1,
        });
        Ok(Found { revision, value })
    }

    /// Returns when the key has changed since `revision`, or it is time to read it again.
    async fn changed(&self, client: &mut Client, revision: i64, patience: Duration) -> Result<()> {
        let from = WatchOptions::new().with_start_revision(revision + 1);
        let mut watch = self.call("etcd watch", client.watch(self.key.as_str(), Some(from))).await?;
        let wait = async {
            loop {
                match watch.message().await.map_err(|e| failed("etcd watch", &e).with_peer(&self.address))? {
                    // Compacted, or cancelled by the etcd: what is there has to be read.
                    Some(news) if !news.events().is_empty() || news.canceled() => return Ok(()),
                    Some(_) => {}
                    None => {
                        let detail = "the watch ended";
                        return Err(
                            Error::new(Kind::SourceLost, "etcd watch", detail).with_peer(&self.address)
                        );
                    }
                }
            }
        };
        timeout(patience.min(WATCH), wait).await.unwrap_or(Ok(()))
    }

    /// The record under the key.
    fn read(value: Option<&Value>) -> std::result::Result<Record, NoService> {
        Record::decode(&value.ok_or(NoService::Empty)?.bytes)
    }
}

/// Certificates and passwords are read whenever a connection is made: they may have been renewed. Blocks.
fn options(config: &EtcdConfig, encrypted: bool) -> Result<ConnectOptions> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(CALL)
        .with_keep_alive(ALIVE, CALL)
        .with_keep_alive_while_idle(true);
    if encrypted {
        let mut tls = TlsOptions::new();
        if let Some(ca) = &config.ca {
            tls = tls.ca_certificate(Certificate::from_pem(file(ca, false)?));
        }
        if let (Some(certificate), Some(key)) = (&config.certificate, &config.key) {
            tls = tls.identity(Identity::from_pem(file(certificate, false)?, file(key, true)?));
        }
        options = options.with_tls(tls);
    }
    if let (Some(user), Some(path)) = (&config.user, &config.password_file) {
        let password = String::from_utf8(file(path, true)?)
            .map_err(|_| Error::new(Kind::Invalid, "etcd", format!("{}: no text", path.display())))?;
        options = options.with_user(user, password.trim_end_matches(['\r', '\n']));
    }
    Ok(options)
}

fn file(path: &Path, secret: bool) -> Result<Vec<u8>> {
    let failed = |e: std::io::Error| Error::from_io("read", &e, path.display().to_string());
    let metadata = fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() || metadata.len() > FILE {
        let detail = format!("{}: no regular file of at most {FILE} bytes", path.display());
        return Err(Error::new(Kind::Invalid, "etcd", detail));
    }
    if secret && metadata.permissions().mode() & 0o077 != 0 {
        let detail = format!("{}: others may read it", path.display());
        return Err(Error::new(Kind::Permission, "etcd", detail).with_remedy("chmod 600"));
    }
    fs::read(path).map_err(failed)
}

#[async_trait]
impl Store for Etcd {
    fn name(&self) -> String {
        self.address.to_string()
    }

    async fn find(&self, patience: Duration) -> Result<Endpoint> {
        let until = Instant::now() + patience;
        let mut client = self.connect().await?;
        loop {
            let found = self.get(&mut client).await?;
            let none = match Self::read(found.value.as_ref()) {
                Ok(record) => return Ok(record.endpoint),
                Err(none) => none,
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || matches!(none, NoService::Format { .. }) {
                return Err(none.into_error(&self.name()));
            }
            self.changed(&mut client, found.revision, left).await?;
        }
    }

    async fn vacant(&self) -> Result<()> {
        let mut client = self.connect().await?;
        loop {
            let found = self.get(&mut client).await?;
            let Some(value) = found.value else { return Ok(()) };
            // Whoever writes it by hand, without a lease, would keep it for ever.
            if value.lease == 0 {
                let same = Compare::mod_revision(self.key.as_str(), CompareOp::Equal, value.modified);
                let remove = TxnOp::delete(self.key.as_str(), None);
                let removed = client.txn(Txn::new().when([same]).and_then([remove]));
                self.call("etcd delete", removed).await?;
                tracing::warn!(store = self.name(), "a record that no lease holds is removed");
                continue;
            }
            self.changed(&mut client, found.revision, WATCH).await?;
        }
    }

    async fn take(&self, endpoint: &Endpoint, lease: Duration) -> Result<Option<Term>> {
        let mut client = self.connect().await?;
        let asked = Instant::now();
        let seconds = i64::try_from(lease.as_secs_f64().ceil() as u64).unwrap_or(i64::MAX);
        let granted = self.call("etcd lease", client.lease_grant(seconds, None)).await?;
        // An etcd may grant longer than was asked for, never shorter.
        let lease = Duration::from_secs(u64::try_from(granted.ttl()).unwrap_or_default()).max(lease);
        let record = Record {
            format: FORMAT,
            endpoint: endpoint.clone(),
            release: env!("CARGO_PKG_VERSION").into(),
            id: new_id()?,
            beat: 0,
            lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
        };
        let free = Compare::create_revision(self.key.as_str(), CompareOp::Equal, 0);
        let bound = PutOptions::new().with_lease(granted.id());
        let put = TxnOp::put(self.key.as_str(), record.encode(), Some(bound));
        let taken = client.txn(Txn::new().when([free]).and_then([put]));
        let taken = self.call("etcd txn", taken).await?;
        let created = taken.header().map_or(0, |header| header.revision());
        let store = Self {
            address: self.address.clone(),
            config: self.config.clone(),
            encrypted: self.encrypted,
            key: self.key.clone(),
        };
        let mut held = Held { store, client: Some(client), lease: granted.id(), created };
        if !taken.succeeded() {
            held.give_up().await;
            return Ok(None);
        }
        Ok(Some(Term::begin(Box::new(held), self.name(), lease, asked)))
    }
}

/// The key, while it is this service's.
struct Held {
    store: Etcd,
    client: Option<Client>,
    lease: i64,
    /// When the key was made, by the etcd's count.
    created: i64,
}

impl Held {
    async fn renewed(&mut self) -> Result<bool> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => self.store.connect().await?,
        };
        let kept = client.lease_keep_alive(self.lease);
        match timeout(CALL, kept).await {
            Ok(Ok(_)) => {}
            // The etcd answered: it has no such lease any more.
            Ok(Err(etcd_client::Error::LeaseKeepAliveError(_))) => return Ok(false),
            Ok(Err(e)) => return Err(failed("etcd keepalive", &e).with_peer(&self.store.address)),
            Err(_) => {
                let detail = format!("no answer within {CALL:?}");
                return Err(
                    Error::new(Kind::Deadline, "etcd keepalive", detail).with_peer(&self.store.address)
                );
            }
        }
        // The lease is ours; the key too, unless somebody removed it by hand.
        let found = self.store.get(&mut client).await?;
        self.client = Some(client);
        Ok(found.value.is_some_and(|value| value.created == self.created))
    }
}

#[async_trait]
impl Hold for Held {
    async fn renew(&mut self) -> Result<bool> {
        self.renewed().await
    }

    async fn give_up(&mut self) {
        let client = match self.client.take() {
            Some(client) => Ok(client),
            None => self.store.connect().await,
        };
        if let Ok(mut client) = client {
            // With it goes the key. Best effort: it ends by itself.
            let _ = self.store.call("etcd revoke", client.lease_revoke(self.lease)).await;
        }
    }
}
