//! The suite of stores on a service by its own address, and on one that a shared directory names.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;
mod suite;

use async_trait::async_trait;
use flashboot_channel::{Endpoint, Security};
use flashboot_rendezvous::{
    Client, Server, ServerConfig,
    store::{EtcdConfig, Post, Store, open, stand},
};
use std::{fs, net::SocketAddr, path::Path, sync::Arc, time::Duration};
use suite::{Fixture, LIMIT, rules};
use tokio::{sync::oneshot, task::JoinHandle};

fn config(at: SocketAddr) -> ServerConfig {
    ServerConfig { at, advertise: None, rules: rules(), connections: 64 }
}

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

struct Tcp {
    endpoint: Endpoint,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Tcp {
    async fn serve(at: SocketAddr) -> Self {
        let server = Server::bind(config(at), &Security::default()).await.unwrap();
        let endpoint = server.endpoint().clone();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            server.serve(async { drop(stopped.await) }).await.unwrap();
        });
        Self { endpoint, running: Some((stop, task)) }
    }
}

#[async_trait]
impl Fixture for Tcp {
    async fn up() -> Self {
        Self::serve(loopback()).await
    }

    fn client(&self) -> Arc<Client> {
        Arc::new(Client::new(self.endpoint.clone(), Security::default()))
    }

    async fn away(&mut self) {
        let (stop, task) = self.running.take().unwrap();
        drop(stop);
        task.await.unwrap();
    }

    async fn back(&mut self) {
        *self = Self::serve(self.endpoint.place().parse().unwrap()).await;
    }
}

/// Two services stand behind it.
struct Shared {
    dir: tempfile::TempDir,
    services: Vec<(Post, JoinHandle<()>)>,
}

impl Shared {
    fn store(path: &Path) -> Arc<dyn Store> {
        let address = format!("dir:{}", path.display()).parse().unwrap();
        open(&address, &EtcdConfig::default()).unwrap()
    }

    fn service(path: &Path) -> (Post, JoinHandle<()>) {
        let (post, store) = (Post::default(), Self::store(path));
        let stood =
            stand(store, config(loopback()), Security::default(), post.clone(), std::future::pending());
        (post, tokio::spawn(async move { stood.await.unwrap() }))
    }

    async fn held(&self, wanted: bool) {
        let began = std::time::Instant::now();
        while self.services.iter().any(|(post, _)| post.is_held()) != wanted {
            assert!(began.elapsed() < LIMIT, "held is not {wanted}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.services.iter().for_each(|(_, task)| task.abort());
    }
}

#[async_trait]
impl Fixture for Shared {
    async fn up() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let services = vec![Self::service(dir.path())];
        Self { dir, services }
    }

    fn client(&self) -> Arc<Client> {
        Arc::new(Client::through(Self::store(self.dir.path()), Security::default()))
    }

    /// As a network's file system goes away: the directory is there no more.
    async fn away(&mut self) {
        let hidden = self.dir.path().with_extension("hidden");
        fs::rename(self.dir.path(), hidden).unwrap();
        self.held(false).await;
    }

    async fn back(&mut self) {
        fs::rename(self.dir.path().with_extension("hidden"), self.dir.path()).unwrap();
    }
}

suite!(tcp, crate::Tcp);
suite!(directory, crate::Shared);

#[tokio::test(flavor = "multi_thread")]
async fn a_service_behind_a_directory_takes_the_place_of_one_that_died() {
    let mut up = Shared::up().await;
    up.held(true).await;
    let client = up.client();
    let seed =
        suite::join(&client, suite::said(1, flashboot_rendezvous::protocol::Role::Seed)).await.unwrap();
    up.services.push(Shared::service(up.dir.path()));
    tokio::time::sleep(suite::SECOND).await;
    assert!(!up.services[1].0.is_held(), "one at a time");
    // As if killed: nobody removes the record.
    let (_, first) = up.services.remove(0);
    first.abort();
    suite::until(&client, |s| s.members.len() == 1).await;
    assert!(up.services[0].0.is_held());
    assert!(seed.evicted().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_whose_term_is_over_answers_nothing_on_connections_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::bind(config(loopback()), &Security::default()).await.unwrap();
    let endpoint = server.endpoint().clone();
    let term = Shared::store(dir.path()).take(&endpoint, suite::SECOND * 30).await.unwrap().unwrap();
    let client = Client::new(endpoint, Security::default());
    // It does not know itself that its term is over: nobody tells it to stop.
    let serving = tokio::spawn(server.fenced(term.fence()).serve(std::future::pending()));
    flashboot_rendezvous::status(&client).await.unwrap();
    drop(term);
    let error = flashboot_rendezvous::status(&client).await.unwrap_err();
    assert_eq!(error.kind(), flashboot_core::Kind::SourceLost, "{error}");
    serving.abort();
}
