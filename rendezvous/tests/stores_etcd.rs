//! The suite of stores on a real etcd, which is killed in the middle; and what is its alone: who takes whose place,
//! garbage under the key, TLS.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod etcd_server;
mod sim;
mod suite;

use async_trait::async_trait;
use etcd_client::PutOptions;
use etcd_server::EtcdServer;
use flashboot_channel::{Security, TlsPolicy};
use flashboot_core::Kind;
use flashboot_rendezvous::{
    Client, ServerConfig,
    protocol::{Role, Rules},
    store::{Address, EtcdConfig, Post, Store, open, stand},
};
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    sync::Arc,
    time::{Duration, Instant},
};
use suite::{Fixture, LIMIT, SECOND, join, rules, said, until};
use tokio::task::JoinHandle;

/// One fleet's key.
const KEY: &str = "fleet/service";

fn store(etcd: &EtcdServer) -> Arc<dyn Store> {
    let address: Address = etcd.address("fleet").parse().unwrap();
    open(&address, &EtcdConfig::default()).unwrap()
}

struct Service {
    post: Post,
    task: JoinHandle<()>,
}

impl Service {
    fn of(etcd: &EtcdServer) -> Self {
        Self::with(etcd, rules())
    }

    fn with(etcd: &EtcdServer, rules: Rules) -> Self {
        let config =
            ServerConfig { at: "127.0.0.1:0".parse().unwrap(), advertise: None, rules, connections: 64 };
        let (post, store) = (Post::default(), store(etcd));
        let stood = stand(store, config, Security::default(), post.clone(), std::future::pending());
        Self { post, task: tokio::spawn(async move { stood.await.unwrap() }) }
    }
}

impl Drop for Service {
    /// As if killed: nothing is given up.
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Etcd {
    etcd: EtcdServer,
    services: Vec<Service>,
}

impl Etcd {
    fn held(&self) -> usize {
        self.services.iter().filter(|service| service.post.is_held()).count()
    }

    async fn until(&self, held: usize) {
        let began = Instant::now();
        while self.held() != held {
            assert!(began.elapsed() < LIMIT, "{} of {} have the post", self.held(), self.services.len());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn raw(&self) -> etcd_client::Client {
        etcd_client::Client::connect([self.etcd.place()], None).await.unwrap()
    }
}

#[async_trait]
impl Fixture for Etcd {
    async fn up() -> Self {
        let etcd = EtcdServer::start();
        let services = vec![Service::of(&etcd)];
        Self { etcd, services }
    }

    fn client(&self) -> Arc<Client> {
        Arc::new(Client::through(store(&self.etcd), Security::default()))
    }

    async fn away(&mut self) {
        self.etcd.kill();
        self.until(0).await;
    }

    async fn back(&mut self) {
        self.etcd.again();
    }
}

suite!(etcd, crate::Etcd);

#[tokio::test(flavor = "multi_thread")]
async fn of_four_that_stand_one_serves_and_when_it_dies_another_does_and_nobody_is_lost() {
    let mut up = Etcd::up().await;
    up.services.extend([(); 3].map(|()| Service::of(&up.etcd)));
    up.until(1).await;
    let client = up.client();
    let seed = join(&client, said(1, Role::Seed)).await.unwrap();
    let clone = join(&up.client(), said(2, Role::Clone)).await.unwrap();
    for round in 0..3 {
        let leads = up.services.iter().position(|service| service.post.is_held()).unwrap();
        drop(up.services.remove(leads));
        let began = Instant::now();
        up.until(1).await;
        let took = began.elapsed();
        // Its lease of 2 s, the etcd's own second, and a slow machine's.
        assert!(took < 15 * SECOND, "round {round}: {took:?}");
        let status = until(&client, |s| s.members.len() == 2).await;
        assert!(status.members.iter().any(|m| m.upstream == Some(suite::id(1))), "it reads on where it read");
        assert_eq!(up.held(), 1);
    }
    assert!(seed.evicted().is_none() && clone.evicted().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_back_within_the_lease_was_never_missed() {
    let etcd = EtcdServer::start();
    let long = Rules { lease: 16 * SECOND, ..rules() };
    let mut up = Etcd { services: vec![Service::with(&etcd, long)], etcd };
    let client = up.client();
    let _seed = join(&client, said(1, Role::Seed)).await.unwrap();
    let place = store(&up.etcd).find(LIMIT).await.unwrap();
    for _ in 0..2 {
        up.etcd.kill();
        tokio::time::sleep(SECOND / 5).await;
        assert_eq!(until(&client, |_| true).await.members.len(), 1, "the service needs no etcd to answer");
        up.etcd.again();
        // An etcd alone elects itself within some 2 s; the post's lease is of 8 s.
        tokio::time::sleep(3 * SECOND).await;
        assert_eq!(up.held(), 1);
    }
    assert_eq!(store(&up.etcd).find(LIMIT).await.unwrap(), place, "one term all the time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_removed_by_hand_ends_the_term_and_one_serves_again() {
    let mut up = Etcd::up().await;
    up.services.push(Service::of(&up.etcd));
    up.until(1).await;
    let client = up.client();
    let _seed = join(&client, said(1, Role::Seed)).await.unwrap();
    let before = store(&up.etcd).find(LIMIT).await.unwrap();
    up.raw().await.delete(KEY, None).await.unwrap();
    let began = Instant::now();
    while store(&up.etcd).find(SECOND).await.ok().is_none_or(|now| now == before) {
        assert!(began.elapsed() < LIMIT);
    }
    up.until(1).await;
    until(&client, |s| s.members.len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_under_the_key_is_said_by_name_and_removed_where_no_lease_holds_it() {
    let etcd = EtcdServer::start();
    let mut raw = etcd_client::Client::connect([etcd.place()], None).await.unwrap();
    for garbage in [&b"\xff"[..], b"{}", &[b'7'; 9000]] {
        raw.put(KEY, garbage, None).await.unwrap();
        let error = store(&etcd).find(Duration::ZERO).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert!(error.detail().contains("no record of a service"), "{error}");
    }
    // A later release's, which it renews: nobody takes its post, and whoever looks is told by name, at once.
    let lease = raw.lease_grant(60, None).await.unwrap().id();
    let bound = PutOptions::new().with_lease(lease);
    raw.put(KEY, br#"{"format":2,"where":"?"}"#, Some(bound)).await.unwrap();
    let error = store(&etcd).find(LIMIT).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Mismatch, "{error}");
    let refused =
        join(&Arc::new(Client::through(store(&etcd), Security::default())), said(1, Role::Seed)).await;
    assert_eq!(refused.unwrap_err().kind(), Kind::Mismatch);
    let held = tokio::time::timeout(SECOND, store(&etcd).vacant()).await;
    assert!(held.is_err(), "{held:?}");
    let late = store(&etcd).take(&"127.0.0.1:1".parse().unwrap(), SECOND).await.unwrap();
    assert!(late.is_none(), "it has an owner");
    raw.put(KEY, b"by hand".to_vec(), None).await.unwrap();
    let up = Etcd { services: vec![Service::of(&etcd)], etcd };
    up.until(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_not_there_is_said_by_name_within_a_deadline() {
    let mut etcd = EtcdServer::start();
    etcd.kill();
    let began = Instant::now();
    let error = store(&etcd).find(SECOND).await.unwrap_err();
    assert!(matches!(error.kind(), Kind::SourceLost | Kind::Deadline), "{error}");
    assert!(began.elapsed() < 10 * SECOND);
    assert!(error.peer().unwrap().starts_with("etcd://127.0.0.1:"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn off_loopback_an_etcd_is_spoken_to_by_tls_or_not_at_all() {
    let address: Address = "etcd://etcd.example:2379".parse().unwrap();
    let refused = open(&address, &EtcdConfig::default()).unwrap_err();
    assert_eq!(refused.kind(), Kind::Permission, "{refused}");
    let clear = EtcdConfig { tls: TlsPolicy::Off, ..EtcdConfig::default() };
    assert!(open(&address, &clear).is_ok(), "once it is said");
    let half = EtcdConfig { certificate: Some("c".into()), ..EtcdConfig::default() };
    let local: Address = "etcd://127.0.0.1:1".parse().unwrap();
    assert_eq!(open(&local, &half).unwrap_err().kind(), Kind::Invalid);
}

#[tokio::test(flavor = "multi_thread")]
async fn by_tls_an_etcd_is_known_by_its_authority_and_knows_us_by_our_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let pem = |name: &str, text: String| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    };
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (certificate, key) = (pem("cert", made.cert.pem()), pem("key", made.signing_key.serialize_pem()));
    let etcd = EtcdServer::with(Some([certificate.clone(), certificate.clone(), key.clone()]));
    let address: Address = etcd.address("fleet").parse().unwrap();
    let config = EtcdConfig {
        ca: Some(certificate.clone()),
        certificate: Some(certificate),
        key: Some(key.clone()),
        ..EtcdConfig::default()
    };
    let here = "127.0.0.1:7400".parse().unwrap();
    let store = open(&address, &config).unwrap();
    let began = Instant::now();
    let term = loop {
        match store.take(&here, 5 * SECOND).await {
            Ok(term) => break term.unwrap(),
            // It elects itself first.
            Err(error) => assert!(began.elapsed() < LIMIT, "{error}"),
        }
    };
    assert_eq!(store.find(SECOND).await.unwrap(), here);
    // Neither who shows no certificate, nor in clear, nor with another authority.
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let other = EtcdConfig { ca: Some(pem("other", other.cert.pem())), ..config.clone() };
    let silent = EtcdConfig { certificate: None, key: None, ..config.clone() };
    for config in [other, silent, EtcdConfig::default()] {
        let refused = open(&address, &config).unwrap().find(SECOND).await;
        assert!(refused.is_err(), "{config:?}");
    }
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(open(&address, &config).unwrap().find(SECOND).await.unwrap_err().kind(), Kind::Permission);
    term.resign().await;
}
