//! The HTTP endpoint: `/livez`, `/readyz`, `/metrics`, `/status`.
//!
//! Off unless `http.listen` says where. On loopback in clear; elsewhere by TLS with the certificate of `security.certificate`, and
//! `/metrics` and `/status` only for the token of `http.token_file`: it is sent by who asks, so it is another than that of
//! the channels. A request has no body, one connection few of them, and everything a deadline.

use super::{Observed, metrics};
use flashboot_channel::{Security, TlsPolicy, Token};
use flashboot_core::{Error, Kind, Result};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::{Deserialize, Serialize};
use std::{convert::Infallible, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::{AbortHandle, JoinSet},
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info};

/// The most connections at a time; later ones wait in the system's queue.
const CONNECTIONS: usize = 32;
/// How long one may take to say what it wants.
const HEAD: Duration = Duration::from_secs(5);
/// How long one may last.
const CONNECTION: Duration = Duration::from_secs(30);
/// The longest head of a request.
const HEAD_BYTES: usize = 16 << 10;

/// Settings of it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Http {
    /// Where to listen, such as `127.0.0.1:9400`; `None`: nowhere.
    pub listen: Option<SocketAddr>,
    /// A file, mode 0600, with the secret that who asks for `/metrics` and `/status` sends as `Authorization: Bearer …`.
    pub token_file: Option<PathBuf>,
    /// `auto` (off on loopback only), `on`, `off`: whether by TLS.
    pub tls: TlsPolicy,
}

/// An endpoint that is open until this is dropped.
#[derive(Debug)]
pub struct Showing {
    address: SocketAddr,
    task: AbortHandle,
}

impl Showing {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Showing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Shows `observed` where `http` says; `None` where it says nowhere. `security` has the certificate. Needs a tokio runtime
/// with IO and time.
///
/// # Errors
/// [`Kind::Permission`] off loopback without a token or a certificate, and for the channels' own token; the system's own.
pub async fn serve(http: &Http, security: &Security, observed: Observed) -> Result<Option<Showing>> {
    let Some(at) = http.listen else { return Ok(None) };
    let path = http.token_file.clone();
    let token = match path {
        Some(path) => Some(crate::service::blocking(move || Token::read(&path)).await?),
        None => None,
    };
    let local = at.ip().to_canonical().is_loopback();
    let refused =
        |detail: String, remedy: &str| Err(Error::new(Kind::Permission, "http", detail).with_remedy(remedy));
    if token.is_none() && !local {
        let detail = format!("{at} is no loopback address, and who asks there would need no token");
        return refused(detail, "set http.token_file");
    }
    if token.as_ref().is_some_and(|token| security.holds(token)) {
        let detail =
            "http.token_file holds the channels' own token: who asks here sends it, and channels never do";
        return refused(detail.to_owned(), "write another, with `openssl rand -hex 32`");
    }
    let encrypts = http.tls == TlsPolicy::On || http.tls == TlsPolicy::Auto && !local;
    let tls = match (encrypts, security.by_certificate()?) {
        (false, _) => None,
        (true, Some(tls)) => Some(TlsAcceptor::from(tls)),
        (true, None) => {
            let detail = format!("a token that is sent to {at} is sent by TLS, and there is no certificate");
            let remedy = "set security.certificate and security.key, or say http.tls = \"off\"";
            return refused(detail, remedy);
        }
    };
    let failed = |e: std::io::Error| Error::from_io("bind", &e, format!("http at {at}"));
    let listener = TcpListener::bind(at).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    info!(%address, tls = tls.is_some(), "metrics and health");
    let task = tokio::spawn(accept(listener, tls, Arc::new(Shown { token, observed }))).abort_handle();
    Ok(Some(Showing { address, task }))
}

struct Shown {
    token: Option<Token>,
    observed: Observed,
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, shown: Arc<Shown>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    // Dropped with this task, and every connection with it.
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, peer)) => {
                let (tls, shown) = (tls.clone(), Arc::clone(&shown));
                connections.spawn(async move {
                    let ended = timeout(CONNECTION, connection(stream, tls, shown)).await;
                    debug!(%peer, ?ended, "a client of the health endpoint is gone");
                    drop(place);
                });
            }
            // Out of descriptors, say: give the others time to end.
            Err(error) => {
                debug!(%error, "accept");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, shown: Arc<Shown>) -> std::io::Result<()> {
    match tls {
        None => talk(stream, shown).await,
        Some(tls) => talk(timeout(HEAD, tls.accept(stream)).await??, shown).await,
    }
    .map_err(std::io::Error::other)
}

async fn talk(stream: impl AsyncRead + AsyncWrite + Unpin, shown: Arc<Shown>) -> hyper::Result<()> {
    let answer = service_fn(|request: Request<Incoming>| {
        let response = respond(&shown, &request);
        async move { Ok::<_, Infallible>(response) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), answer)
        .await
}

fn respond<B>(shown: &Shown, request: &Request<B>) -> Response<Full<Bytes>> {
    let text = "text/plain; charset=utf-8";
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return answer(StatusCode::METHOD_NOT_ALLOWED, text, "only GET is answered\n");
    }
    let path = request.uri().path();
    let open = matches!(path, "/livez" | "/readyz");
    if !open && !admitted(shown, request) {
        return answer(StatusCode::UNAUTHORIZED, text, "the token of http.token_file is needed\n");
    }
    match path {
        // Whoever gets this answer has proved it.
        "/livez" => answer(StatusCode::OK, text, "ok\n"),
        "/readyz" => match shown.observed.lacking() {
            None => answer(StatusCode::OK, text, "ready\n"),
            Some(why) => answer(StatusCode::SERVICE_UNAVAILABLE, text, format!("not ready: {why}\n")),
        },
        "/metrics" => match metrics::text(&shown.observed.view()) {
            Ok(metrics) => answer(StatusCode::OK, metrics::CONTENT_TYPE, metrics),
            Err(_) => answer(StatusCode::INTERNAL_SERVER_ERROR, text, "the metrics do not encode\n"),
        },
        "/status" => match serde_json::to_vec(&shown.observed.view()) {
            Ok(status) => answer(StatusCode::OK, "application/json", status),
            Err(_) => answer(StatusCode::INTERNAL_SERVER_ERROR, text, "the status does not encode\n"),
        },
        _ => answer(StatusCode::NOT_FOUND, text, "/livez, /readyz, /metrics and /status are here\n"),
    }
}

fn admitted<B>(shown: &Shown, request: &Request<B>) -> bool {
    let Some(token) = &shown.token else { return true };
    let sent = request.headers().get(header::AUTHORIZATION).map(header::HeaderValue::as_bytes);
    sent.and_then(|sent| sent.strip_prefix(b"Bearer ")).is_some_and(|sent| token.is(sent))
}

fn answer(status: StatusCode, content: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content));
    if status == StatusCode::UNAUTHORIZED {
        let scheme = header::HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    response
}
