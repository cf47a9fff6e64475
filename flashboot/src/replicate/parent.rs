//! The process that starts seed and clones, and answers for them.
//!
//! Owns: the run's directory, the board, the release, the deadline of every phase. Whatever happens, it returns
//! with every worker dead and the directory gone; should it be killed itself, the workers see the end of their
//! stdin and do the same.

use super::{
    LEASE, Outcome, RUN_PREFIX, Request, Workers,
    clock::Clock,
    job::{self, About, Job, Mapped, Ready, ServiceAt, who},
    process::{Words, listen, spawn},
    report::{self, Known, Setting},
    worker::secured,
};
use crate::{
    ErrorWire,
    config::{Memory, Pages},
    scratch::Scratch,
    service,
};
use flashboot_core::{Error, Kind, Result, Retry, schedule::Rank};
use flashboot_memory::{budget, pages::HugePages};
use flashboot_rendezvous::{Board as _, BoardServer, Inside, LocalBoard, Server, protocol};
use std::{
    collections::BTreeMap,
    fs::File,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    os::unix::{fs::OpenOptionsExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, timeout, timeout_at},
};
use tracing::{debug, warn};

/// How long workers may take to exit once they are told that all is done.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long clones may take to find out that the seed's death left nobody who holds everything.
const ORPHANS: Duration = Duration::from_secs(3);

/// How long the first restart of a rank waits; the next twice as long.
const BACK_OFF: Duration = Duration::from_millis(500);

/// Something a process of a rank did, by the process's number.
enum News {
    Mapped(Rank, Mapped),
    Ready(Rank, Ready),
    Exited(Rank, std::io::Result<ExitStatus>),
}

struct Parent {
    job: Arc<Job>,
    service: Arc<Inside>,
    board: Arc<LocalBoard>,
    workers: Workers,
    path: PathBuf,
    /// By rank, of the last process of it.
    words: Vec<Option<Words>>,
    known: Vec<Known>,
    gone: Vec<bool>,
    /// What ended the first process of a rank that has been started again, until it is ready.
    first: BTreeMap<Rank, Error>,
    tell: mpsc::UnboundedSender<News>,
    news: mpsc::UnboundedReceiver<News>,
    /// Dropped: every child is killed and waited for.
    stop: watch::Sender<bool>,
    children: JoinSet<()>,
    watchers: JoinSet<()>,
}

pub(super) async fn run(mut job: Job, request: &Request, stop: impl Future<Output = ()>) -> Result<Outcome> {
    let began = Clock::Host.now();
    admit(&job)?;
    let directory = run_directory(&request.workers.directory)?;
    let path = directory.path().join("board");
    let server = BoardServer::bind(&path)?;
    let (service, at) = serve(directory.path()).await?;
    job.service = Some(at);
    let job = Arc::new(job);
    // Ends when it is dropped, last of all.
    let inside = service.inside();
    let mut serving = JoinSet::new();
    serving.spawn(service.serve(std::future::pending()));
    job::put(&*server.board(), job::JOB, &*job).await?;
    let mut parent = Parent::start(Arc::clone(&job), inside, server.board(), &request.workers, &path)?;
    let outcome = tokio::select! {
        biased;
        () = stop => {
            Err(Error::new(Kind::Cancelled, "replicate", "stopped by a signal; every worker was ended"))
        }
        outcome = parent.conduct(began, &request.source.rank) => outcome,
    };
    // Whatever happened: no worker writes into the directory any more when it goes.
    parent.end(outcome.is_ok()).await;
    serving.shutdown().await;
    drop(server);
    if let Err(error) = directory.close() {
        debug!(%error, "the run's directory was not removed");
    }
    outcome
}

/// Refuses what cannot be: each rank asks for its own memory, but they ask at the same time.
fn admit(job: &Job) -> Result<()> {
    if !job.gpus.is_empty() {
        // Asked of the GPUs already; the host gives windows only.
        return Ok(());
    }
    host_room(job.memory, job.bytes.saturating_mul(u64::from(job.ranks())))
}

/// Whether the host has `bytes` for arenas.
pub(crate) fn host_room(memory: Memory, bytes: u64) -> Result<()> {
    let huge = HugePages::read(memory.numa_node).is_some_and(|pages| pages.available > 0);
    if huge || memory.pages == Pages::Huge {
        // Of a pool of their own; an arena that does not get them says so.
        return Ok(());
    }
    budget::admit(bytes)
}

/// The run's service, on loopback, for who can read `directory`.
async fn serve(directory: &Path) -> Result<(Server, ServiceAt)> {
    let token = directory.join("token");
    let secret: String = (0..4).map(|_| Ok(format!("{:016x}", service::random()?))).collect::<Result<_>>()?;
    let failed = |e: std::io::Error| Error::from_io("write", &e, token.display().to_string());
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&token).map_err(failed)?;
    file.write_all(secret.as_bytes()).map_err(failed)?;
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = service::bind(at, None, LEASE, &secured(&token).await?).await?;
    let endpoint = server.endpoint().to_string();
    Ok((server, ServiceAt { endpoint, token }))
}

/// What runs that were killed with all their workers left behind goes first.
fn run_directory(parent: &Path) -> Result<Scratch> {
    Scratch::new(parent, RUN_PREFIX).map_err(|e| {
        let detail = format!("a directory for sockets in {}", parent.display());
        Error::from_io("mkdir", &e, detail).with_remedy("point TMPDIR at a directory that can be written")
    })
}

impl Parent {
    fn start(
        job: Arc<Job>,
        service: Arc<Inside>,
        board: Arc<LocalBoard>,
        workers: &Workers,
        path: &Path,
    ) -> Result<Self> {
        let (tell, news) = mpsc::unbounded_channel();
        let stop = watch::Sender::new(false);
        let ranks = usize::try_from(job.ranks()).unwrap_or(usize::MAX);
        let mut parent = Self {
            workers: workers.clone(),
            path: path.to_owned(),
            words: (0..ranks).map(|_| None).collect(),
            known: vec![Known::default(); ranks],
            gone: vec![false; ranks],
            first: BTreeMap::new(),
            job,
            service,
            board,
            tell,
            news,
            stop,
            children: JoinSet::new(),
            watchers: JoinSet::new(),
        };
        for rank in 0..parent.job.ranks() {
            // On failure `parent` drops, and with it (kill_on_drop) the workers started so far.
            parent.begin(rank)?;
        }
        Ok(parent)
    }

    /// Starts the process with this number.
    fn begin(&mut self, number: Rank) -> Result<()> {
        let rank = self.job.base(number);
        let mut child = spawn(&self.workers, &self.path, number)?;
        let stdin = child.stdin.take();
        if let Some(words) = self.words.get_mut(rank as usize) {
            *words = Some(listen(child.stderr.take(), rank, self.workers.stderr));
        }
        let (news, mut stopped) = (self.tell.clone(), self.stop.subscribe());
        self.children.spawn(async move {
            let status = tokio::select! {
                status = child.wait() => status,
                // An error means that the parent is gone: the same.
                () = told(&mut stopped) => {
                    if let Err(error) = child.start_kill() {
                        debug!(number, %error, "it has exited already");
                    }
                    child.wait().await
                }
            };
            // Open until here: its end is the worker's end.
            drop(stdin);
            let _ = news.send(News::Exited(number, status));
        });
        self.watchers.spawn(watch_board(Arc::clone(&self.board), number, self.tell.clone()));
        Ok(())
    }

    /// Starts another process in the place of one that `death` ended, where only a new process helps, after a while that grows: it
    /// joins as a late clone does. Whether it was started.
    async fn again(&mut self, number: Rank, death: &Error) -> bool {
        let rank = self.job.base(number);
        let next = self.job.successor(number).filter(|_| rank != 0 && death.retry() == Retry::NewProcess);
        let Some(next) = next else { return false };
        warn!(rank, %death, "only a new process helps: starting one in its place");
        tokio::time::sleep(BACK_OFF.saturating_mul(1 << self.job.restarts(number).min(6))).await;
        if let Err(error) = self.begin(next) {
            warn!(rank, %error, "it cannot be started again");
            return false;
        }
        if let Some(known) = self.known.get_mut(rank as usize) {
            known.restarts += 1;
        }
        if let Some(gone) = self.gone.get_mut(rank as usize) {
            *gone = false;
        }
        true
    }

    async fn conduct(&mut self, began: Duration, rank: &str) -> Result<Outcome> {
        self.set_up().await?;
        let release = Clock::Host.now();
        job::put(&*self.board, job::RELEASE, &release).await?;
        let error = self.transfer().await;
        let setting = Setting { processes: true, setup: release.saturating_sub(began), release };
        Ok(Outcome { report: report::report(&self.job, rank, &self.known, setting), error })
    }

    /// Until every rank is mapped. Nothing has moved yet: any failure is the whole's.
    async fn set_up(&mut self) -> Result<()> {
        let limit = self.job.settings.setup_timeout;
        let until = Instant::now() + limit;
        while self.known.iter().any(|known| known.mapped.is_none()) {
            let Ok(news) = timeout_at(until, self.news.recv()).await else {
                return Err(self.late("set-up", limit, |known| known.mapped.is_some()));
            };
            match news {
                Some(News::Exited(rank, status)) => {
                    let death = self.death(rank, status).await;
                    return Err(self.cause(death).await);
                }
                Some(news) => self.note(news),
                None => return Err(lost_touch()),
            }
        }
        Ok(())
    }

    /// What `death` followed from: a rank that failed takes its readers with it, and one of them may be heard
    /// of first.
    async fn cause(&self, death: Error) -> Error {
        if death.kind() != Kind::SourceLost {
            return death;
        }
        for rank in 0..self.job.ranks() {
            if let Some(error) = self.failed(rank).await
                && error.kind() != Kind::SourceLost
            {
                return error;
            }
        }
        death
    }

    /// What `rank` says it failed with.
    async fn failed(&self, rank: Rank) -> Option<Error> {
        let said = job::look::<ErrorWire>(&*self.board, &job::name(About::Failed, rank)).await;
        said.ok().flatten().map(|wire| wire.into_error("replicate", &who(rank)))
    }

    /// Until every clone is ready or gone. Returns the first failure that was not asked for.
    async fn transfer(&mut self) -> Option<Error> {
        let limit = self.job.settings.transfer_timeout;
        let end = Instant::now() + limit;
        let mut error = None;
        let mut orphans = None;
        while self.clones().any(|(known, gone)| known.ready.is_none() && !gone) {
            // Without the seed, and before any clone has everything, nobody can end.
            let until = match orphans {
                Some(until) if self.clones().all(|(known, _)| known.ready.is_none()) => end.min(until),
                _ => end,
            };
            let Ok(news) = timeout_at(until, self.news.recv()).await else {
                error.get_or_insert(self.late("transfer", limit, |known| known.ready.is_some()));
                return error;
            };
            match news {
                Some(News::Exited(number, status)) => {
                    let rank = self.job.base(number);
                    let asked_for = self.job.kill.is_some_and(|kill| kill.rank == rank);
                    let death = self.death(number, status).await;
                    if asked_for {
                        debug!(rank, %death, "killed as asked");
                    } else if self.again(number, &death).await {
                        self.first.entry(rank).or_insert(death);
                    } else {
                        // What ended the first of it says more than what the others met with.
                        let death = self.first.remove(&rank).unwrap_or(death);
                        warn!(%death, "a rank died; the others go on");
                        if rank == 0 {
                            orphans = Some(Instant::now() + ORPHANS);
                        }
                        error.get_or_insert(death);
                    }
                }
                Some(news) => self.note(news),
                None => return error.or_else(|| Some(lost_touch())),
            }
        }
        error
    }

    fn clones(&self) -> impl Iterator<Item = (&Known, bool)> {
        self.known.iter().zip(self.gone.iter().copied()).skip(1)
    }

    fn note(&mut self, news: News) {
        match news {
            News::Mapped(number, mapped) => {
                if let Some(known) = self.known.get_mut(self.job.base(number) as usize) {
                    known.mapped = Some(mapped);
                }
            }
            News::Ready(number, ready) => {
                if let Some(known) = self.known.get_mut(self.job.base(number) as usize) {
                    known.ready = Some(ready);
                }
            }
            News::Exited(..) => {}
        }
    }

    /// A rank's process exited before its time: says so on the board, and how it ended.
    async fn death(&mut self, number: Rank, status: std::io::Result<ExitStatus>) -> Error {
        let rank = self.job.base(number);
        if let Some(gone) = self.gone.get_mut(rank as usize) {
            *gone = true;
        }
        if let Ok(job::Identity { member, secret }) = self.job.member(number) {
            self.service.handle(protocol::Request::Leave { member, secret });
        }
        // Set once, by nobody else. After the service knows: who hears of it asks that for another source.
        let _ = self.board.put(&job::name(About::Gone, number), String::new()).await;
        if let Ok(Some(failed)) =
            job::look::<ErrorWire>(&*self.board, &job::name(About::Failed, number)).await
        {
            return failed.into_error("replicate", &who(rank));
        }
        let ended = match status {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("exited with status {code}"),
                (None, Some(signal)) => format!("was killed by signal {signal}"),
                (None, None) => format!("ended: {status}"),
            },
            Err(e) => format!("cannot be waited for: {e}"),
        };
        let said = self.last_words(rank).await;
        let said = if said.is_empty() { String::new() } else { format!("; its stderr ended: {said}") };
        Error::new(Kind::SourceLost, "replicate", format!("{} {ended}{said}", who(rank))).with_peer(who(rank))
    }

    async fn last_words(&mut self, rank: Rank) -> String {
        match self.words.get_mut(rank as usize) {
            Some(Some(words)) => words.last().await,
            _ => String::new(),
        }
    }

    fn late(&self, phase: &str, limit: Duration, done: impl Fn(&Known) -> bool) -> Error {
        let first = usize::from(phase == "transfer");
        let ranks = (0..).zip(&self.known).skip(first);
        let missing: Vec<_> = ranks.filter(|(_, known)| !done(known)).map(|(rank, _)| who(rank)).collect();
        let detail = format!("{phase} not complete within {limit:?}: {} missing", missing.join(", "));
        Error::new(Kind::Deadline, "replicate", detail).with_remedy(format!(
            "look at their logs (-v), or raise replicate.{}_timeout",
            if first == 1 { "transfer" } else { "setup" }
        ))
    }

    /// Sends the workers home; kills those that do not go, all of them after a failure.
    async fn end(&mut self, succeeded: bool) {
        if succeeded && self.board.put(job::DONE, String::new()).await.is_ok() {
            let all = async { while self.children.join_next().await.is_some() {} };
            if timeout(FAREWELL, all).await.is_err() {
                warn!("a worker did not exit within {FAREWELL:?} and is killed");
            }
        }
        self.stop.send_replace(true);
        while self.children.join_next().await.is_some() {}
        self.watchers.shutdown().await;
    }
}

/// Returns when the workers are to be killed.
async fn told(stopped: &mut watch::Receiver<bool>) {
    // The guard it returns must not live on.
    drop(stopped.wait_for(|stop| *stop).await);
}

fn lost_touch() -> Error {
    Error::new(Kind::SourceLost, "replicate", "every worker is gone")
}

/// Tells what a rank puts on the board. Ends with the parent.
async fn watch_board(board: Arc<LocalBoard>, rank: Rank, news: mpsc::UnboundedSender<News>) {
    // The parent keeps the deadlines.
    const LONG: Duration = Duration::from_secs(30 * 24 * 3600);
    match job::wait(&*board, &job::name(About::Mapped, rank), LONG).await {
        Ok(mapped) => drop(news.send(News::Mapped(rank, mapped))),
        Err(error) => warn!(rank, %error, "cannot read what it says"),
    }
    if rank == 0 {
        return;
    }
    match job::wait(&*board, &job::name(About::Ready, rank), LONG).await {
        Ok(ready) => drop(news.send(News::Ready(rank, ready))),
        Err(error) => warn!(rank, %error, "cannot read what it says"),
    }
}
