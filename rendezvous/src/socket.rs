//! A board served on a Unix socket: one request a connection, one JSON line each way.

use crate::{Board, LocalBoard};
use async_trait::async_trait;
use flashboot_core::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
    task::JoinHandle,
    time::timeout,
};
use tracing::debug;

/// The longest request or answer: the digests of a 4 TB image fit.
const MAX_FRAME: u64 = 32 << 20;
/// How long a client may take to say what it wants, and the server to answer beyond what was asked to wait.
const SLACK: Duration = Duration::from_secs(10);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Request {
    Put { name: String, value: String },
    Wait { name: String, millis: u64 },
    Look { name: String },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Value(Option<String>),
    Mismatch(String),
    Deadline(String),
}

/// Serves a board on a socket of mode 0600 until it is dropped.
#[derive(Debug)]
pub struct BoardServer {
    path: PathBuf,
    board: Arc<LocalBoard>,
    task: JoinHandle<()>,
}

impl BoardServer {
    /// Binds `path`, which must not exist; its directory should be the owner's alone. Must be called on a
    /// tokio runtime, which serves the board.
    pub fn bind(path: &Path) -> Result<Self> {
        let failed = |e: &io::Error| {
            let detail = format!("the board's socket {}", path.display());
            Error::from_io("bind", e, detail)
        };
        let listener = UnixListener::bind(path).map_err(|e| failed(&e))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(|e| failed(&e))?;
        let board = Arc::new(LocalBoard::default());
        let task = tokio::spawn(serve(listener, Arc::clone(&board)));
        Ok(Self { path: path.to_owned(), board, task })
    }

    /// The board itself, for the process that serves it.
    pub fn board(&self) -> Arc<LocalBoard> {
        Arc::clone(&self.board)
    }
}

impl Drop for BoardServer {
    fn drop(&mut self) {
        self.task.abort();
        // It may be gone with its directory.
        let _ = fs::remove_file(&self.path);
    }
}

async fn serve(listener: UnixListener, board: Arc<LocalBoard>) {
    // Dropped with this task, and every connection with it.
    let mut connections = tokio::task::JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let board = Arc::clone(&board);
                connections.spawn(async move {
                    if let Err(error) = answer(stream, &board).await {
                        debug!(%error, "a client of the board went away");
                    }
                });
            }
            // Out of descriptors, say: give the others time to end.
            Err(error) => {
                debug!(%error, "accept");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(stream: UnixStream, board: &LocalBoard) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let request: Request = timeout(SLACK, read_line(read)).await.map_err(io::Error::from)??;
    let answered = match request {
        Request::Put { name, value } => board.put(&name, value).await.map(|()| None),
        Request::Wait { name, millis } => board.wait(&name, Duration::from_millis(millis)).await.map(Some),
        Request::Look { name } => board.look(&name).await,
    };
    let answer = match answered {
        Ok(value) => Answer::Value(value),
        Err(e) if e.kind() == Kind::Deadline => Answer::Deadline(e.detail().to_owned()),
        Err(e) => Answer::Mismatch(e.detail().to_owned()),
    };
    write_line(&mut write, &answer).await
}

async fn read_line<T: serde::de::DeserializeOwned>(read: impl tokio::io::AsyncRead + Unpin) -> io::Result<T> {
    let mut line = String::new();
    BufReader::new(read).take(MAX_FRAME).read_line(&mut line).await?;
    if !line.ends_with('\n') {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "no whole line"));
    }
    Ok(serde_json::from_str(&line)?)
}

async fn write_line(
    write: &mut (impl tokio::io::AsyncWrite + Unpin),
    value: &impl Serialize,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    write.write_all(&line).await
}

/// A client of a [`BoardServer`].
#[derive(Debug, Clone)]
pub struct SocketBoard(PathBuf);

impl SocketBoard {
    /// The board at `path`. Nothing is dialled before the first call.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    async fn ask(&self, request: Request, wait: Duration) -> Result<Option<String>> {
        let lost = |e: io::Error| {
            let detail = format!("the board at {} does not answer: {e}", self.0.display());
            Error::new(Kind::SourceLost, "board", detail)
        };
        let asked = async {
            let (read, mut write) = UnixStream::connect(&self.0).await?.into_split();
            write_line(&mut write, &request).await?;
            read_line::<Answer>(read).await
        };
        let answer = timeout(wait.saturating_add(SLACK), asked)
            .await
            .map_err(|_| Error::new(Kind::Deadline, "board", "the board's server does not answer"))?
            .map_err(lost)?;
        match answer {
            Answer::Value(value) => Ok(value),
            Answer::Mismatch(detail) => Err(Error::new(Kind::Mismatch, "board put", detail)),
            Answer::Deadline(detail) => Err(Error::new(Kind::Deadline, "board wait", detail)),
        }
    }
}

#[async_trait]
impl Board for SocketBoard {
    async fn put(&self, name: &str, value: String) -> Result<()> {
        self.ask(Request::Put { name: name.to_owned(), value }, Duration::ZERO).await.map(drop)
    }

    async fn wait(&self, name: &str, timeout: Duration) -> Result<String> {
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let value = self.ask(Request::Wait { name: name.to_owned(), millis }, timeout).await?;
        value
            .ok_or_else(|| Error::new(Kind::Protocol, "board wait", format!("`{name}` came without a value")))
    }

    async fn look(&self, name: &str) -> Result<Option<String>> {
        self.ask(Request::Look { name: name.to_owned() }, Duration::ZERO).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::barrier;

    #[tokio::test]
    async fn clients_share_the_servers_board() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("board");
        let server = BoardServer::bind(&path).unwrap();
        let client = SocketBoard::new(&path);
        client.put("a", "1\n2".into()).await.unwrap();
        assert_eq!(server.board().look("a").await, Ok(Some("1\n2".into())));
        assert_eq!(client.look("b").await, Ok(None));
        assert_eq!(client.put("a", "x".into()).await.unwrap_err().kind(), Kind::Mismatch);
        let late = client.wait("b", Duration::from_millis(20)).await;
        assert_eq!(late.unwrap_err().kind(), Kind::Deadline);
        let board = server.board();
        let (one, two) = tokio::join!(
            barrier(&client, "go", 0, 2, Duration::from_secs(5)),
            barrier(&*board, "go", 1, 2, Duration::from_secs(5))
        );
        assert_eq!((one, two), (Ok(()), Ok(())));
        drop(server);
        tokio::task::yield_now().await;
        assert_eq!(client.look("a").await.unwrap_err().kind(), Kind::SourceLost);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn garbage_does_not_disturb_the_server() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("board");
        let _server = BoardServer::bind(&path).unwrap();
        for garbage in [&b"\xff\xff\n"[..], b"{}\n", b"", b"{\"put\":"] {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            stream.write_all(garbage).await.unwrap();
        }
        let client = SocketBoard::new(&path);
        client.put("a", "1".into()).await.unwrap();
    }
}
