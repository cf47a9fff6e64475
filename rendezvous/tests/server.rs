//! Server, client and membership over real sockets: a store that goes away and comes back, bad clients, what both
//! sides are told.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use flashboot_channel::{
    Channel, Dial, Endpoint, Liveness, Purpose, Security, SecurityConfig, TlsPolicy, dial,
};
use flashboot_core::Kind;
use flashboot_rendezvous::{
    Client, Loss, Membership, Server, ServerConfig, fetch_manifest, find,
    protocol::{
        Cause, Content, Greeting, Hello, Reason, Registration, Role, Rules, Status, Wanted, decode, encode,
    },
    status,
};
use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{io::AsyncWriteExt as _, net::TcpStream, sync::oneshot, task::JoinHandle};

const SECOND: Duration = Duration::from_secs(1);

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

fn rules() -> Rules {
    Rules { lease: 2 * SECOND, ..Rules::default() }
}

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn manifest() -> Arc<Vec<u8>> {
    Arc::new((0..200_000u32).map(|i| (i % 251) as u8).collect())
}

fn content() -> Content {
    let manifest = manifest();
    let hash = blake3::hash(&manifest).to_hex().to_string();
    Content { manifest: hash, manifest_bytes: manifest.len() as u64, ..sim::content(0) }
}

fn said(word: u64, role: Role) -> Registration {
    sim::registration(word, role, content(), 1)
}

fn client(endpoint: &Endpoint) -> Arc<Client> {
    Arc::new(Client::new(endpoint.clone(), Security::default()))
}

async fn join(client: &Arc<Client>, said: Registration) -> flashboot_core::Result<Membership> {
    Membership::join(Arc::clone(client), said, manifest(), 5 * SECOND).await
}

/// The status, once it is as wanted.
async fn until(client: &Client, wanted: impl Fn(&Status) -> bool) -> Status {
    let began = Instant::now();
    loop {
        let found = status(client).await;
        match found {
            Ok(found) if wanted(&found) => return found,
            other => assert!(began.elapsed() < 20 * SECOND, "not within 20 s, but {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn wanted() -> Wanted {
    Wanted { image: None, model: Some("model-0".into()), revision: None, rank: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_finds_the_image_its_manifest_and_its_source() {
    let up = Up::at(loopback(), &Security::default()).await;
    let client = client(&up.endpoint);
    let none = find(&client, &wanted(), Duration::ZERO).await.unwrap_err();
    assert_eq!(none.kind(), Kind::Unavailable, "{none}");
    let seed = join(&client, said(1, Role::Seed)).await.unwrap();
    let found = find(&client, &wanted(), SECOND).await.unwrap();
    assert_eq!(found, content());
    assert_eq!(fetch_manifest(&client, &found, SECOND).await.unwrap(), *manifest());
    let clone = join(&client, said(2, Role::Clone)).await.unwrap();
    assert_eq!(clone.upstream(), Some(said(1, Role::Seed).member));
    assert_eq!(clone.holder(clone.upstream().unwrap()).unwrap().locators, said(1, Role::Seed).locators);
    clone.complete();
    let status = until(&client, |s| s.members[1].holds == sim::CHUNKS).await;
    assert_eq!((status.members[1].upstream, status.members[0].readers.len()), (None, 0));
    seed.leave(SECOND).await;
    until(&client, |s| s.members.len() == 1).await;
    up.down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_comes_back_loses_nobody_and_is_done_without_meanwhile() {
    let up = Up::at(loopback(), &Security::default()).await;
    let client = client(&up.endpoint);
    let seed = join(&client, said(1, Role::Seed)).await.unwrap();
    let other = join(&client, said(2, Role::Seed)).await.unwrap();
    let clone = join(&client, said(3, Role::Clone)).await.unwrap();
    clone.progress(5);
    let first = clone.upstream().unwrap();
    let at = up.down().await;
    // Alone, it finds the other of the two.
    let loss = Loss { source: first, cause: Cause::Lost };
    let next = clone.lost(loss, 5 * SECOND).await.unwrap();
    assert_ne!(next, first);
    let up = Up::at(at, &Security::default()).await;
    let status = until(&client, |s| s.members.len() == 3).await;
    let of = |word| {
        let id = said(word, Role::Seed).member;
        status.members.iter().find(move |m| m.member == id).unwrap()
    };
    assert_eq!((of(3).upstream, of(3).holds), (Some(next), 5), "what it found by itself stands");
    assert_eq!((of(1).holds, of(2).holds), (sim::CHUNKS, sim::CHUNKS));
    assert_eq!(fetch_manifest(&client, &content(), 5 * SECOND).await.unwrap(), *manifest());
    assert!(seed.evicted().is_none() && other.evicted().is_none());
    up.down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_silent_is_forgotten_within_a_lease_or_so() {
    let up = Up::at(loopback(), &Security::default()).await;
    let client = client(&up.endpoint);
    let seed = join(&client, said(1, Role::Seed)).await.unwrap();
    tokio::time::sleep(3 * SECOND).await;
    assert_eq!(status(&client).await.unwrap().members.len(), 1, "renewed");
    drop(seed);
    until(&client, |s| s.members.is_empty()).await;
    up.down().await;
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
