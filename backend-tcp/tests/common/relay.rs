//! A relay between a reader and its source, which ends their connections.

use flashboot_channel::Endpoint;
use flashboot_core::Locator;
use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Notify,
};

/// What becomes of a connection, by its number: the first is the one by which words are watched.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fate {
    /// It lasts.
    Lasts,
    /// It is reset after so many bytes from the source.
    ResetAfter(u64),
    /// It is closed after so many.
    ClosedAfter(u64),
    /// It is closed when the test says so, and no more than so many pass before.
    ClosedWhenTold(u64),
    /// It is taken, and nothing is passed on.
    Hangs,
}

/// Stands between a reader and its source.
pub(crate) struct Relay {
    pub(crate) locator: Locator,
    connections: Arc<AtomicUsize>,
    /// Bytes that came from the source.
    passed: Arc<AtomicU64>,
    /// Connections that have ended at the reader's end too.
    pub(crate) ended: Arc<AtomicUsize>,
    pub(crate) close: Arc<Notify>,
    _task: tokio::task::JoinHandle<()>,
}

impl Relay {
    pub(crate) async fn new(real: &Locator, fate: impl Fn(usize) -> Fate + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let to: Endpoint = real.endpoint.parse().unwrap();
        let endpoint = real.endpoint.replacen(&format!(":{}", to.port), &format!(":{port}"), 1);
        let (connections, passed, ended, close) = Default::default();
        let relay = (Arc::clone(&connections), Arc::clone(&passed), Arc::clone(&ended), Arc::clone(&close));
        let task = tokio::spawn(async move {
            let (number, passed, ended, close): (Arc<AtomicUsize>, _, Arc<AtomicUsize>, _) = relay;
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let fate = fate(number.fetch_add(1, Ordering::AcqRel));
                let far = TcpStream::connect(("127.0.0.1", to.port)).await.unwrap();
                let (passed, ended, close) = (Arc::clone(&passed), Arc::clone(&ended), Arc::clone(&close));
                tokio::spawn(async move {
                    relayed(near, far, fate, &passed, &close).await;
                    ended.fetch_add(1, Ordering::AcqRel);
                });
            }
        });
        let locator = Locator { endpoint, ..real.clone() };
        Self { locator, connections, passed, ended, close, _task: task }
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }

    pub(crate) fn passed(&self) -> u64 {
        self.passed.load(Ordering::Acquire)
    }
}

async fn relayed(near: TcpStream, far: TcpStream, fate: Fate, passed: &AtomicU64, close: &Notify) {
    let mut left = match fate {
        Fate::Hangs => return std::future::pending().await,
        Fate::Lasts => u64::MAX,
        Fate::ResetAfter(bytes) | Fate::ClosedAfter(bytes) | Fate::ClosedWhenTold(bytes) => bytes,
    };
    if matches!(fate, Fate::ResetAfter(_)) {
        near.set_zero_linger().unwrap();
    }
    let (mut from_near, mut to_near) = near.into_split();
    let (mut from_far, mut to_far) = far.into_split();
    let up = async {
        let _ = tokio::io::copy(&mut from_near, &mut to_far).await;
    };
    let down = async {
        let mut bytes = vec![0; 64 << 10];
        while left > 0 {
            let Ok(came @ 1..) = from_far.read(&mut bytes).await else { return };
            let pass = left.min(came as u64);
            left -= pass;
            passed.fetch_add(pass, Ordering::AcqRel);
            if to_near.write_all(&bytes[..pass as usize]).await.is_err() {
                return;
            }
        }
        match fate {
            Fate::ClosedAfter(_) => {}
            Fate::ClosedWhenTold(_) => close.notified().await,
            _ => return,
        }
        // Whatever has been passed on arrives, and the reader hangs up in its turn.
        let _ = to_near.shutdown().await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
    if let Fate::ResetAfter(_) = fate {
        // Without a shutdown before it, which would be a close.
        to_near.forget();
    }
}
