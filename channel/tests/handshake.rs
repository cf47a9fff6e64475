//! Both ends of a channel, over real sockets: who is let in, who is not, and what both are told.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

use flashboot_channel::{
    Channel, Dial, Endpoint, Host, Listen, Listener, Liveness, Purpose, Security, SecurityConfig, TlsPolicy,
    dial,
};
use flashboot_core::{Error, Kind, Result};
use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::Instant,
};

const TEST: Purpose = Purpose::new("test").unwrap();
const SECOND: Duration = Duration::from_secs(1);

fn how() -> Dial {
    Dial { purpose: TEST, timeout: 10 * SECOND, liveness: Liveness::default() }
}

fn listen() -> Listen {
    Listen { handshake: 2 * SECOND, ..Listen::new(TEST) }
}

async fn bound(at: &str, config: &SecurityConfig) -> Listener {
    Listener::bind(at.parse().unwrap(), &Security::load(config).unwrap(), listen()).await.unwrap()
}

fn secret(dir: &Path, name: &str, content: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn with_token(dir: &Path, token: &str, tls: TlsPolicy) -> SecurityConfig {
    let token_file = Some(secret(dir, token, token));
    SecurityConfig { tls, token_file, ..SecurityConfig::default() }
}

const A: &str = "the first token of two";
const B: &str = "the other token of two";

/// Dials `listener` at its own endpoint; what the dialler got, and what the listener took within a second.
async fn meet(listener: &mut Listener, by: &SecurityConfig) -> (Result<Channel>, Option<Channel>) {
    let endpoint = listener.endpoint(None).unwrap();
    meet_at(listener, &endpoint, by).await
}

async fn meet_at(
    listener: &mut Listener,
    endpoint: &Endpoint,
    by: &SecurityConfig,
) -> (Result<Channel>, Option<Channel>) {
    let by = Security::load(by).unwrap();
    let taking =
        async { tokio::time::timeout(SECOND, listener.accept()).await.ok().map(|taken| taken.unwrap()) };
    tokio::join!(dial(endpoint, &by, how()), taking)
}

async fn works(dialled: &mut Channel, taken: &mut Channel) {
    dialled.send(b"ping", 4, SECOND).await.unwrap();
    assert_eq!(taken.receive(4, SECOND).await.unwrap().as_deref(), Some(&b"ping"[..]));
    taken.write_all(&[7; 100_000]).await.unwrap();
    taken.flush().await.unwrap();
    let mut all = vec![0; 100_000];
    dialled.read_exact(&mut all).await.unwrap();
    assert_eq!(all, [7; 100_000]);
}

#[tokio::test]
async fn every_policy_meets_its_like() {
    let dir = tempfile::tempdir().unwrap();
    for tls in [TlsPolicy::Auto, TlsPolicy::On, TlsPolicy::Off] {
        for token in [false, true] {
            for at in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
                let config = if token {
                    with_token(dir.path(), A, tls)
                } else {
                    SecurityConfig { tls, ..SecurityConfig::default() }
                };
                let mut listener = bound(at, &config).await;
                let (dialled, taken) = meet(&mut listener, &config).await;
                let (mut dialled, mut taken) = (dialled.unwrap(), taken.unwrap());
                assert_eq!(dialled.is_encrypted(), tls == TlsPolicy::On);
                assert_eq!(taken.is_encrypted(), tls == TlsPolicy::On);
                works(&mut dialled, &mut taken).await;
            }
        }
    }
}

#[tokio::test]
async fn a_host_name_is_dialled_at_each_of_its_addresses() {
    // `localhost` is ::1 first on most hosts, and only 127.0.0.1 listens.
    let config = SecurityConfig::default();
    let mut listener = bound("127.0.0.1:0", &config).await;
    let endpoint = listener.endpoint(Some(&"localhost".parse().unwrap())).unwrap();
    assert_eq!(endpoint.host, Host::Name("localhost".into()));
    let (dialled, taken) = meet_at(&mut listener, &endpoint, &config).await;
    works(&mut dialled.unwrap(), &mut taken.unwrap()).await;

    let nowhere = Endpoint { host: "no-such-host.invalid".parse().unwrap(), ..endpoint };
    let refused = dial(&nowhere, &Security::default(), how()).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Unavailable, "{refused}");
}

#[tokio::test]
async fn who_has_not_the_token_is_refused_at_both_ends() {
    let dir = tempfile::tempdir().unwrap();
    for tls in [TlsPolicy::On, TlsPolicy::Off] {
        let with = |token| with_token(dir.path(), token, tls);
        let none = SecurityConfig { tls, ..SecurityConfig::default() };
        for (listens, dials) in [(with(A), with(B)), (with(A), none.clone()), (none.clone(), with(A))] {
            let mut listener = bound("127.0.0.1:0", &listens).await;
            let (dialled, taken) = meet(&mut listener, &dials).await;
            let refused = dialled.unwrap_err();
            assert_eq!(refused.kind(), Kind::Permission, "{refused}");
            assert!(refused.remedy().is_some() && refused.peer().is_some(), "{refused}");
            assert!(taken.is_none());
        }
    }
}

#[tokio::test]
async fn another_certificate_than_the_pinned_one_is_refused() {
    let config = SecurityConfig { tls: TlsPolicy::On, ..SecurityConfig::default() };
    let mut listener = bound("127.0.0.1:0", &config).await;
    let other = bound("127.0.0.1:0", &config).await.endpoint(None).unwrap();
    let ours = listener.endpoint(None).unwrap();
    let wrong = Endpoint { pin: other.pin, ..ours.clone() };
    let (dialled, taken) = meet_at(&mut listener, &wrong, &config).await;
    assert_eq!(dialled.unwrap_err().kind(), Kind::Permission);
    assert!(taken.is_none());

    let unpinned = Endpoint { pin: None, ..ours };
    let refused = dial(&unpinned, &Security::load(&config).unwrap(), how()).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Permission, "{refused}");
}

#[tokio::test]
async fn a_pin_is_looked_at_on_loopback_too() {
    // Of every address of this host: a reader elsewhere needs the pin, and here the name may lead to loopback.
    let open = SecurityConfig { allow_anonymous: true, ..SecurityConfig::default() };
    let here = "127.0.0.1".parse().unwrap();
    let mut listener = bound("0.0.0.0:0", &open).await;
    let pinned = listener.endpoint(Some(&here)).unwrap();
    assert!(pinned.pin.is_some());
    let (dialled, taken) = meet_at(&mut listener, &pinned, &open).await;
    let (mut dialled, mut taken) = (dialled.unwrap(), taken.unwrap());
    assert!(dialled.is_encrypted() && taken.is_encrypted());
    works(&mut dialled, &mut taken).await;
    // Typed without it, it is what it was.
    let plain = Endpoint { pin: None, ..pinned.clone() };
    let (dialled, taken) = meet_at(&mut listener, &plain, &open).await;
    assert!(!dialled.unwrap().is_encrypted() && taken.is_some());

    // Whoever else listens there, in clear or with a certificate of its own.
    let impostors = [bound("127.0.0.1:0", &SecurityConfig::default()).await, bound("0.0.0.0:0", &open).await];
    for mut impostor in impostors {
        let endpoint = Endpoint { pin: pinned.pin, ..impostor.endpoint(Some(&here)).unwrap() };
        let (dialled, taken) = meet_at(&mut impostor, &endpoint, &open).await;
        let refused = dialled.unwrap_err();
        assert!(matches!(refused.kind(), Kind::Permission | Kind::Protocol), "{refused}");
        assert!(taken.is_none());
    }
}

/// A certificate authority and what it signed, as PEM files.
struct Authority {
    dir: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    ca: PathBuf,
}

impl Authority {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let ca = secret(dir.path(), "ca.pem", &pem("CERTIFICATE", certificate.der()));
        Self { dir, issuer: rcgen::Issuer::new(params, key), ca }
    }

    fn config(&self, name: &str) -> SecurityConfig {
        let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |kind: &str, text: String| secret(self.dir.path(), &format!("{name}.{kind}"), &text);
        SecurityConfig {
            tls: TlsPolicy::On,
            ca: Some(self.ca.clone()),
            certificate: Some(file("pem", pem("CERTIFICATE", certificate.der()))),
            key: Some(file("key", pem("PRIVATE KEY", &key.serialize_der()))),
            ..SecurityConfig::default()
        }
    }
}

fn pem(kind: &str, der: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in der.chunks(3) {
        let word =
            three.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for at in 0..4 {
            let letter = ALPHABET[(word >> (18 - 6 * at) & 63) as usize] as char;
            text.push(if at <= three.len() { letter } else { '=' });
        }
    }
    format!("-----BEGIN {kind}-----\n{text}\n-----END {kind}-----\n")
}

#[tokio::test]
async fn certificates_of_one_authority_are_taken_and_no_others() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let mut listener = bound("127.0.0.1:0", &ours.config("127.0.0.1")).await;
    let (dialled, taken) = meet(&mut listener, &ours.config("reader")).await;
    works(&mut dialled.unwrap(), &mut taken.unwrap()).await;

    // A stranger, one without a certificate, and one who trusts the pin but shows nothing.
    let anonymous = SecurityConfig { tls: TlsPolicy::On, ..SecurityConfig::default() };
    for stranger in [theirs.config("reader"), anonymous] {
        let (dialled, taken) = meet(&mut listener, &stranger).await;
        let refused = dialled.unwrap_err();
        assert_eq!(refused.kind(), Kind::Permission, "{refused}");
        assert!(taken.is_none());
    }
    // The right authority, another name than the one dialled.
    let mut listener = bound("127.0.0.1:0", &ours.config("elsewhere")).await;
    let (dialled, _) = meet(&mut listener, &ours.config("reader")).await;
    assert_eq!(dialled.unwrap_err().kind(), Kind::Permission);
}

#[tokio::test]
async fn ends_that_disagree_about_tls_say_so() {
    let (on, off) = (TlsPolicy::On, TlsPolicy::Off);
    let config = |tls| SecurityConfig { tls, ..SecurityConfig::default() };
    let pin = bound("127.0.0.1:0", &config(on)).await.endpoint(None).unwrap().pin;
    for (listens, dials) in [(on, off), (off, on)] {
        let mut listener = bound("127.0.0.1:0", &config(listens)).await;
        let endpoint = Endpoint { pin, ..listener.endpoint(None).unwrap() };
        let (dialled, taken) = meet_at(&mut listener, &endpoint, &config(dials)).await;
        let refused = dialled.unwrap_err();
        assert_eq!(refused.kind(), Kind::Protocol, "{refused}");
        assert_eq!(refused.remedy(), Some("set security.tls alike at both ends"), "{refused}");
        assert!(taken.is_none());
    }
}

#[tokio::test]
async fn another_purpose_and_another_release_are_refused_by_name() {
    let config = SecurityConfig::default();
    let mut listener = bound("127.0.0.1:0", &config).await;
    let endpoint = listener.endpoint(None).unwrap();
    let other = Dial { purpose: Purpose::new("other").unwrap(), ..how() };
    let taking = tokio::time::timeout(SECOND, listener.accept());
    let security = Security::default();
    let (dialled, _) = tokio::join!(dial(&endpoint, &security, other), taking);
    let refused = dialled.unwrap_err();
    assert_eq!(refused.kind(), Kind::Mismatch);
    assert!(refused.detail().contains("listener of test, not of other"), "{refused}");

    // A newer listener: magic, version 2, and whatever it says then.
    let newer = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = newer.local_addr().unwrap().port();
    let answer = async {
        let (mut socket, _) = newer.accept().await.unwrap();
        socket.write_all(b"FLASHNET\x02\0and more").await.unwrap();
        let _ = socket.read_to_end(&mut Vec::new()).await;
    };
    let dialling = async {
        let refused = dial(&Endpoint { port, ..endpoint.clone() }, &security, how()).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Mismatch);
        assert!(refused.detail().contains("version 2"), "{refused}");
    };
    tokio::join!(answer, dialling);
}

#[tokio::test]
async fn a_recorded_handshake_admits_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let config = with_token(dir.path(), A, TlsPolicy::Off);
    let mut listener = bound("127.0.0.1:0", &config).await;
    let endpoint = listener.endpoint(None).unwrap();
    // Between the two, writing down what the dialler says.
    let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = between.local_addr().unwrap().port();
    let address = listener.address();
    let recorded = tokio::spawn(async move {
        let (mut dialler, _) = between.accept().await.unwrap();
        let mut exporter = TcpStream::connect(address).await.unwrap();
        let mut said = vec![0; 56 + 32];
        dialler.read_exact(&mut said[..56]).await.unwrap();
        exporter.write_all(&said[..56]).await.unwrap();
        let mut hello = [0; 56];
        exporter.read_exact(&mut hello).await.unwrap();
        dialler.write_all(&hello).await.unwrap();
        dialler.read_exact(&mut said[56..]).await.unwrap();
        exporter.write_all(&said[56..]).await.unwrap();
        let mut verdict = [0; 36];
        exporter.read_exact(&mut verdict).await.unwrap();
        dialler.write_all(&verdict).await.unwrap();
        said
    });
    let through = Endpoint { port, ..endpoint };
    let (dialled, taken) = meet_at(&mut listener, &through, &config).await;
    dialled.unwrap();
    assert!(taken.is_some());
    let said = recorded.await.unwrap();
    assert!(!said.windows(A.len()).any(|window| window == A.as_bytes()), "the token is never sent");
    let replay = async {
        let mut exporter = TcpStream::connect(address).await.unwrap();
        exporter.write_all(&said).await.unwrap();
        let mut answer = Vec::new();
        exporter.read_to_end(&mut answer).await.unwrap();
        answer
    };
    let (answer, taken) = tokio::join!(replay, tokio::time::timeout(SECOND, listener.accept()));
    assert!(taken.is_err(), "a replay was let in");
    assert_ne!(u16::from_le_bytes([answer[56], answer[57]]), 0);
}

#[tokio::test]
async fn a_listener_off_loopback_asks_for_something_or_was_told_not_to() {
    let dir = tempfile::tempdir().unwrap();
    let bind = async |config: SecurityConfig, at: &str| -> Result<(), Error> {
        let at: SocketAddr = at.parse().unwrap();
        Listener::bind(at, &Security::load(&config).unwrap(), listen()).await.map(drop)
    };
    for at in ["0.0.0.0:0", "[::]:0"] {
        let refused = bind(SecurityConfig::default(), at).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Permission);
        assert!(refused.remedy().unwrap().contains("security.token_file"));
        bind(with_token(dir.path(), A, TlsPolicy::Auto), at).await.unwrap();
        bind(Authority::new().config("x"), at).await.unwrap();
        bind(SecurityConfig { allow_anonymous: true, ..SecurityConfig::default() }, at).await.unwrap();
    }
    let everywhere = bound("0.0.0.0:0", &with_token(dir.path(), A, TlsPolicy::Auto)).await;
    assert_eq!(everywhere.endpoint(None).unwrap_err().kind(), Kind::Invalid);
    let named = everywhere.endpoint(Some(&"node-1".parse().unwrap())).unwrap();
    assert_eq!(
        (named.place(), named.pin.is_some()),
        (format!("node-1:{}", everywhere.address().port()), true)
    );
}

#[tokio::test]
async fn material_that_does_not_fit_together_is_refused() {
    let authority = Authority::new();
    let whole = authority.config("x");
    let bad = [
        SecurityConfig { key: None, ..whole.clone() },
        SecurityConfig { certificate: None, ..whole.clone() },
        SecurityConfig { certificate: None, key: None, ..whole.clone() },
        SecurityConfig { tls: TlsPolicy::Off, ..whole.clone() },
        SecurityConfig { certificate: whole.key.clone(), ..whole.clone() },
        SecurityConfig { key: whole.certificate.clone(), ..whole.clone() },
    ];
    for config in bad {
        assert_eq!(Security::load(&config).unwrap_err().kind(), Kind::Invalid, "{config:?}");
    }
    fs::set_permissions(whole.key.as_ref().unwrap(), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(Security::load(&whole).unwrap_err().kind(), Kind::Permission);
}

#[tokio::test]
async fn a_dialler_waits_for_nobody_past_its_deadline() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let host = "127.0.0.1".parse().unwrap();
    let endpoint = Endpoint { host, port: silent.local_addr().unwrap().port(), pin: None };
    let began = Instant::now();
    let short = Dial { timeout: SECOND / 4, ..how() };
    let refused = dial(&endpoint, &Security::default(), short).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Deadline);
    assert!(began.elapsed() < 20 * SECOND);
    drop(silent);
    assert_eq!(dial(&endpoint, &Security::default(), short).await.unwrap_err().kind(), Kind::SourceLost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_prove_nothing_neither_exhaust_a_listener_nor_keep_others_out() {
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let config = SecurityConfig::default();
    let how = Listen { handshake: 30 * SECOND, max_pending: 16, ..listen() };
    let mut listener =
        Listener::bind("127.0.0.1:0".parse().unwrap(), &Security::default(), how).await.unwrap();
    let (address, endpoint) = (listener.address(), listener.endpoint(None).unwrap());
    let before = descriptors();
    // Some say nothing and stay, most say rubbish and go.
    let flood = tokio::spawn(async move {
        let mut silent = Vec::new();
        for number in 0..10_000 {
            let Ok(mut socket) = TcpStream::connect(address).await else { continue };
            if number % 500 == 0 {
                silent.push(socket);
            } else {
                let _ = socket.write_all(b"GET / HTTP/1.1\r\nHost: flashboot\r\n\r\n").await;
            }
        }
        silent
    });
    let mut let_in = 0;
    while let_in < 3 {
        let (dialled, taken) = meet_at(&mut listener, &endpoint, &config).await;
        if let (Ok(mut dialled), Some(mut taken)) = (dialled, taken) {
            works(&mut dialled, &mut taken).await;
            let_in += 1;
        }
        // 20 that say nothing, of which 16 may be waiting, and what the kernel still has to hand over.
        assert!(descriptors() < before + 200, "{} descriptors", descriptors());
    }
    let emptying = async {
        while tokio::time::timeout(SECOND / 2, listener.accept()).await.is_ok() || !flood.is_finished() {}
    };
    tokio::time::timeout(60 * SECOND, emptying).await.unwrap();
    let silent = flood.await.unwrap();
    let (dialled, taken) = meet_at(&mut listener, &endpoint, &config).await;
    works(&mut dialled.unwrap(), &mut taken.unwrap()).await;
    drop(silent);
}
