//! Starting one process of this program, and keeping what it said last.

use super::{Workers, job::who};
use flashboot_core::{Error, Result, schedule::Rank};
use std::{
    collections::VecDeque,
    path::Path,
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, BufReader},
    process::{Child, Command},
    sync::watch,
    time::timeout,
};

/// Lines of a dead worker's stderr that are shown.
const TAIL: usize = 8;
/// How long the last lines of a dead worker may take to arrive.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The last lines of one worker's stderr; the sender is dropped at their end.
pub(crate) struct Words {
    tail: Arc<Mutex<VecDeque<String>>>,
    ended: watch::Receiver<()>,
}

impl Words {
    /// Those lines as one, once there are no more, or after a moment.
    pub(super) async fn last(&mut self) -> String {
        // Ends with an error when the reader has ended; a grandchild may hold the pipe open.
        let _ = timeout(LAST_WORDS, self.ended.changed()).await;
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        tail.iter().map(String::as_str).collect::<Vec<_>>().join(" | ")
    }
}

pub(crate) fn spawn(workers: &Workers, board: &Path, rank: Rank) -> Result<Child> {
    let mut command = Command::new(&workers.program);
    command.args(&workers.args).arg("--board").arg(board).arg("--rank").arg(rank.to_string());
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    // A terminal's Ctrl-C is for the parent, which ends them in order; they see its end by their stdin.
    command.process_group(0);
    command.spawn().map_err(|e| {
        let detail = format!("starting {} as {}", workers.program.display(), who(rank));
        Error::from_io("spawn", &e, detail).with_remedy(
            "raise the limits on processes and descriptors (ulimit -u, ulimit -n), or start fewer clones",
        )
    })
}

/// Hands a worker's lines on as they come and keeps the last.
pub(crate) fn listen(
    stderr: Option<impl AsyncRead + Send + Unpin + 'static>,
    rank: Rank,
    tell: fn(u32, &str),
) -> Words {
    let tail = Arc::new(Mutex::new(VecDeque::with_capacity(TAIL)));
    let (sender, ended) = watch::channel(());
    let Some(stderr) = stderr else { return Words { tail, ended } };
    let keep = Arc::clone(&tail);
    tokio::spawn(async move {
        let mut lines = BufReader::new(stderr).split(b'\n');
        // Whatever bytes they are: a reader that stopped would break the worker's pipe.
        while let Ok(Some(line)) = lines.next_segment().await {
            let line = String::from_utf8_lossy(&line).into_owned();
            tell(rank, &line);
            let mut tail = keep.lock().unwrap_or_else(PoisonError::into_inner);
            if tail.len() == TAIL {
                tail.pop_front();
            }
            tail.push_back(line);
        }
        drop(sender);
    });
    Words { tail, ended }
}
