//! Server and client over real sockets: bad clients, other releases, certificates and tokens, and what both sides are told.
//! What every store must do beside is in `suite`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;
mod suite;

use flashboot_channel::{
    Channel, Dial, Endpoint, Liveness, Purpose, Security, SecurityConfig, TlsPolicy, dial,
};
use flashboot_core::Kind;
use flashboot_rendezvous::{
    Client, Server, ServerConfig,
    protocol::{Greeting, Hello, Reason, Role, decode, encode},
    status,
};
use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc};
use suite::{SECOND, join, rules, said, until};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, sync::oneshot, task::JoinHandle};

struct Up {
    endpoint: Endpoint,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Up {
    async fn at(at: SocketAddr, security: &Security) -> Self {
        Self::with(ServerConfig { at, advertise: None, rules: rules(), connections: 64 }, security).await
    }

    async fn with(config: ServerConfig, security: &Security) -> Self {
        let server = Server::bind(config, security).await.unwrap();
        let endpoint = server.endpoint().clone();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            server.serve(async { drop(stopped.await) }).await.unwrap();
        });
        Self { endpoint, stop, task }
    }

    async fn down(self) -> SocketAddr {
        drop(self.stop);
        self.task.await.unwrap();
        self.endpoint.place().parse().unwrap()
    }
}

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn client(endpoint: &Endpoint) -> Arc<Client> {
    Arc::new(Client::new(endpoint.clone(), Security::default()))
}

async fn raw(endpoint: &Endpoint) -> Channel {
    let purpose = Purpose::new("rendezvous").unwrap();
    let how = Dial { purpose, timeout: 5 * SECOND, liveness: Liveness::default() };
    dial(endpoint, &Security::default(), how).await.unwrap()
}

async fn greeted(channel: &mut Channel) -> Greeting {
    decode(&channel.receive(1 << 20, 5 * SECOND).await.unwrap().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_and_one_too_many_are_refused_by_name_at_both_ends() {
    let config = ServerConfig { at: loopback(), advertise: None, rules: rules(), connections: 1 };
    let up = Up::with(config, &Security::default()).await;
    let mut newer = raw(&up.endpoint).await;
    let hello = Hello { oldest: 7, newest: 9, release: "7.0.0".into() };
    newer.send(&encode(&hello), 4096, SECOND).await.unwrap();
    let Greeting::Refused(refusal) = greeted(&mut newer).await else { panic!() };
    assert_eq!(refusal.reason, Reason::Version);
    assert!(refusal.detail.contains("7 to 9"), "{refusal}");
    assert!(newer.receive(4096, 5 * SECOND).await.unwrap().is_none(), "and hung up");
    let client_ = client(&up.endpoint);
    status(&client_).await.unwrap();
    let second = status(&client(&up.endpoint)).await.unwrap_err();
    assert_eq!(second.kind(), Kind::Exhausted, "{second}");
    up.down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_at_every_layer_leaves_the_service_to_others() {
    let up = Up::at(loopback(), &Security::default()).await;
    let client = client(&up.endpoint);
    let _seed = join(&client, said(1, Role::Seed)).await.unwrap();
    for i in 0..10_000u32 {
        let mut socket = TcpStream::connect(up.endpoint.place()).await.unwrap();
        let bytes: Vec<u8> = (0..i % 90).map(|b| (b.wrapping_mul(i) >> 3) as u8).collect();
        let _ = socket.write_all(&bytes).await;
    }
    for body in [&b""[..], b"{}", b"\xff\xff", b"{\"register\":{}}", b"[[[[[[[[[[[[[[", b"null"] {
        let mut channel = raw(&up.endpoint).await;
        channel.send(&encode(&Hello::ours()), 4096, SECOND).await.unwrap();
        assert!(matches!(greeted(&mut channel).await, Greeting::Welcome { .. }));
        channel.send(body, 4096, SECOND).await.unwrap();
        let answer: flashboot_rendezvous::protocol::Answer =
            decode(&channel.receive(4096, 5 * SECOND).await.unwrap().unwrap()).unwrap();
        let flashboot_rendezvous::protocol::Answer::Refused(refusal) = answer else { panic!("{answer:?}") };
        assert_eq!(refusal.reason, Reason::Malformed);
    }
    let mut channel = raw(&up.endpoint).await;
    channel.send(&[b'x'; 4097], 8192, SECOND).await.unwrap();
    assert_eq!(channel.receive(4096, 5 * SECOND).await.unwrap_or(None), None, "over the cap: hung up");
    assert_eq!(status(&client).await.unwrap().members.len(), 1);
    up.down().await;
}

/// TLS and a token; every call makes another certificate where one is needed.
fn with_token(dir: &Path, name: &str) -> Security {
    let path = dir.join(name);
    fs::write(&path, format!("the token called {name} is long")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let config = SecurityConfig { tls: TlsPolicy::On, token_file: Some(path), ..SecurityConfig::default() };
    Security::load(&config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_comes_back_with_another_certificate_is_known_by_the_token_and_evicts_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::at(loopback(), &with_token(dir.path(), "one")).await;
    let client = |pin| {
        let endpoint = Endpoint { pin, ..up.endpoint.clone() };
        Arc::new(Client::new(endpoint, with_token(dir.path(), "one")))
    };
    let (by_token, by_pin) = (client(None), client(up.endpoint.pin));
    assert!(up.endpoint.pin.is_some());
    let first = join(&by_token, said(1, Role::Seed)).await.unwrap();
    let second = join(&by_pin, said(2, Role::Seed)).await.unwrap();
    let at = up.down().await;
    let up = Up::at(at, &with_token(dir.path(), "one")).await;
    until(&by_token, |s| s.members.len() == 1).await;
    let pinned = status(&by_pin).await.unwrap_err();
    assert_eq!(pinned.kind(), Kind::Permission, "{pinned}");
    assert!(first.evicted().is_none() && second.evicted().is_none());
    up.down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_and_tls_let_in_who_has_the_token() {
    let dir = tempfile::tempdir().unwrap();
    let security = |name: &str| with_token(dir.path(), name);
    let up = Up::at(loopback(), &security("one")).await;
    status(&Client::new(up.endpoint.clone(), security("one"))).await.unwrap();
    let wrong = status(&Client::new(up.endpoint.clone(), security("two"))).await.unwrap_err();
    assert_eq!(wrong.kind(), Kind::Permission, "{wrong}");
    assert!(!wrong.to_string().contains("the token called"));
    up.down().await;
    let config =
        ServerConfig { at: "0.0.0.0:0".parse().unwrap(), advertise: None, rules: rules(), connections: 1 };
    let open = Server::bind(config, &Security::default()).await;
    assert_eq!(open.unwrap_err().kind(), Kind::Permission);
}
