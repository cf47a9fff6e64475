//! The HTTP endpoint over real sockets: who is admitted, by what, and what garbage does to it.
#![allow(clippy::unwrap_used, missing_docs)]

use flashboot::observe::{Http, Observed, Showing, serve};
use flashboot_channel::{Security, SecurityConfig, TlsPolicy};
use flashboot_core::{Kind, Result};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt as _, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout},
};

const TOKEN: &str = "a secret of enough bytes";
const LIMIT: Duration = Duration::from_secs(20);

async fn shown(http: &Http, security: &Security) -> Result<Showing> {
    serve(http, security, Observed::default()).await.map(Option::unwrap)
}

fn at(text: &str) -> Http {
    Http { listen: Some(text.parse().unwrap()), ..Http::default() }
}

fn secret(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &[u8]) -> String {
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(LIMIT, stream.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

async fn get(at: SocketAddr, path: &str, more: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}\r\n");
    ask(TcpStream::connect(at).await.unwrap(), request.as_bytes()).await
}

#[tokio::test]
async fn on_loopback_everything_is_shown_and_nothing_else_is() {
    let showing = shown(&at("127.0.0.1:0"), &Security::default()).await.unwrap();
    let at = showing.address();
    assert!(get(at, "/livez", "").await.ends_with("ok\n"));
    assert!(get(at, "/readyz", "").await.starts_with("HTTP/1.1 503"), "nothing is here yet");
    let metrics = get(at, "/metrics?x=1", "").await;
    assert!(metrics.contains("flashboot_ready 0.0") && metrics.ends_with("# EOF\n"), "{metrics}");
    let status = get(at, "/status", "").await;
    assert!(status.contains("application/json") && status.contains(r#""ready":false"#), "{status}");
    assert!(get(at, "/", "").await.starts_with("HTTP/1.1 404"));
    let post = ask(TcpStream::connect(at).await.unwrap(), b"POST /livez HTTP/1.0\r\n\r\n").await;
    assert!(post.starts_with("HTTP/1.0 405"), "{post}");
    drop(showing);
    let ended = async {
        while TcpStream::connect(at).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, ended).await.expect("it ends with its owner");
}

#[tokio::test]
async fn off_loopback_it_wants_a_token_and_a_certificate_or_a_word_that_it_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let open = at("0.0.0.0:0");
    let refused = shown(&open, &Security::default()).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Permission, "{refused}");
    let token = Http { token_file: Some(secret(&dir, "token", TOKEN)), ..open };
    let refused = shown(&token, &Security::default()).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Permission, "{refused}");
    assert!(refused.remedy().unwrap().contains("security.certificate"));
    let clear = Http { tls: TlsPolicy::Off, ..token };
    let showing = shown(&clear, &Security::default()).await.unwrap();
    let at = SocketAddr::new("127.0.0.1".parse().unwrap(), showing.address().port());
    for path in ["/status", "/metrics", "/other"] {
        for wrong in ["", "Authorization: Bearer x\r\n", "Authorization: Basic YTpi\r\n"] {
            let answer = get(at, path, wrong).await;
            assert!(answer.starts_with("HTTP/1.1 401"), "{path} {wrong}: {answer}");
            assert!(!answer.contains(TOKEN));
        }
    }
    assert!(get(at, "/livez", "").await.starts_with("HTTP/1.1 200"), "probes have no token");
    let with = get(at, "/status", &format!("Authorization: Bearer {TOKEN}\r\n")).await;
    assert!(with.starts_with("HTTP/1.1 200"), "{with}");
    // The channels' token never goes over a wire: this one would.
    let same = SecurityConfig { token_file: Some(secret(&dir, "copy", TOKEN)), ..SecurityConfig::default() };
    let refused = shown(&clear, &Security::load(&same).unwrap()).await.unwrap_err();
    assert_eq!(refused.kind(), Kind::Permission, "{refused}");
    assert!(refused.to_string().contains("channels' own token"), "{refused}");
    fs::set_permissions(dir.path().join("token"), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(shown(&clear, &Security::default()).await.unwrap_err().kind(), Kind::Permission);
}

#[tokio::test]
async fn by_tls_it_shows_the_certificate_that_was_given() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["node-1".to_owned()]).unwrap();
    let certificate = secret(&dir, "cert", &made.cert.pem());
    let key = secret(&dir, "key", &made.signing_key.serialize_pem());
    let config =
        SecurityConfig { certificate: Some(certificate), key: Some(key), ..SecurityConfig::default() };
    let http = Http { tls: TlsPolicy::On, ..at("127.0.0.1:0") };
    let showing = shown(&http, &Security::load(&config).unwrap()).await.unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider);
    let client = client.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
    let client = client.with_root_certificates(roots).with_no_client_auth();
    let dialled = TcpStream::connect(showing.address()).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
    let stream = connector.connect(ServerName::try_from("node-1").unwrap(), dialled).await.unwrap();
    let answer = ask(stream, b"GET /livez HTTP/1.0\r\n\r\n").await;
    assert!(answer.ends_with("ok\n"), "{answer}");
    let clear = get(showing.address(), "/livez", "").await;
    assert!(!clear.contains("ok"), "{clear}");
}

#[tokio::test]
async fn garbage_and_who_says_nothing_leave_the_endpoint_to_others() {
    let showing = shown(&at("127.0.0.1:0"), &Security::default()).await.unwrap();
    let at = showing.address();
    for i in 0..500u32 {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let bytes: Vec<u8> = (0..i % 90).map(|b| (b.wrapping_mul(i) >> 3) as u8).collect();
        let _ = stream.write_all(&bytes).await;
    }
    let long = format!("GET /livez HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(64 << 10));
    let mut stream = TcpStream::connect(at).await.unwrap();
    // It may hang up before it has read all of it.
    let _ = stream.write_all(long.as_bytes()).await;
    let mut answer = String::new();
    let _ = timeout(LIMIT, stream.read_to_string(&mut answer)).await.unwrap();
    assert!(!answer.contains("200 OK"), "{answer}");
    // More than there is room for, and none says anything: they are let go, and others are answered.
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(at).await.unwrap());
    }
    let began = Instant::now();
    assert!(get(at, "/livez", "").await.ends_with("ok\n"));
    assert!(began.elapsed() < LIMIT);
}
