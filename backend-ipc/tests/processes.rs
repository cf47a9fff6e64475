//! What only real processes show: death, other users, other processes' rights, leaks.
//!
//! The binary runs itself again as a child with a role in `FLASHBOOT_TEST_ROLE`; its arguments are the
//! role's. A test that cannot run here is listed as ignored, its reason as its kind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;
use common::*;

use flashboot_backend_ipc::IpcConfig;
use flashboot_core::{Arena as _, ByteRange, Generation, Kind, Locator, Mover, Pull, ShardId};
use libtest_mimic::{Arguments, Failed, Trial};
use std::{
    future::Future,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

const ROLE: &str = "FLASHBOOT_TEST_ROLE";
const NOBODY: u32 = 65534;
const PAYLOAD: u64 = 8 * BLOCK;
/// What a child exporter publishes of it.
const PUBLISHED: u64 = 4 * BLOCK;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Ok(role) = std::env::var(ROLE) {
        return match role.as_str() {
            "exporter" => exporter(&args),
            "reader" => reader(&args),
            "attached" => attached(&args),
            "writer" => writer(&args),
            "leaks" => leaks(&args),
            other => panic!("no role {other}"),
        };
    }
    let root = rustix::process::geteuid().is_root();
    let trial = |name: &str, test: fn()| {
        let name = name.to_owned();
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
    };
    let as_root = |name: &str, test: fn()| {
        let trial = trial(name, test);
        if root {
            trial
        } else {
            trial.with_kind("not run here: needs root, to act as another user").with_ignored_flag(true)
        }
    };
    let tests = vec![
        trial("a_killed_source_is_lost_at_once_and_its_published_bytes_stay", killed_source),
        trial("a_source_that_ends_is_lost_at_once", ended_source),
        trial("a_killed_reader_never_harms_its_source", killed_reader),
        trial("a_live_owners_socket_is_never_taken_and_a_dead_ones_is", stale_socket),
        trial("a_reader_process_cannot_write_what_it_got", no_writing),
        trial("a_hundred_imports_leave_no_descriptor_and_no_mapping", no_leaks),
        as_root("another_user_is_refused_unless_allowed", other_users),
        as_root("another_users_directory_is_refused", others_directory),
        as_root("another_users_export_is_not_read_unless_allowed", others_export),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// A child process that is killed when the test is done with it, or fails.
struct Role {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Role {
    fn spawn(role: &str, args: &[&str]) -> Self {
        Self::run(Command::new(std::env::current_exe().unwrap()), role, args)
    }

    fn run(mut command: Command, role: &str, args: &[&str]) -> Self {
        command.args(args).env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let until = Instant::now() + PATIENCE;
        let mut child = loop {
            match command.spawn() {
                Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                spawned => break spawned.unwrap(),
            }
        };
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn locator(&mut self) -> Locator {
        self.line().parse().unwrap()
    }

    /// SIGKILL; returns when it was sent.
    fn kill(&mut self) -> Instant {
        let at = Instant::now();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        at
    }

    /// Lets it end by itself.
    fn end(&mut self) -> bool {
        drop(self.stdin.take());
        self.child.wait().unwrap().success()
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until_stdin_closes() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn in_directory(directory: &str) -> IpcConfig {
    IpcConfig { directory: PathBuf::from(directory), ..IpcConfig::default() }
}

/// `DIRECTORY NAME|- [uid|gid]...`: exports an arena of which half is published, prints its locator.
fn exporter(args: &[String]) {
    let mut config = in_directory(&args[0]);
    config.name = (args[1] != "-").then(|| args[1].clone());
    for allowed in &args[2..] {
        let (kind, id) = allowed.split_at(3);
        let id: u32 = id.parse().unwrap();
        if kind == "uid" { config.allow_uids.push(id) } else { config.allow_gids.push(id) }
    }
    block_on(async {
        let exchange = open(&config).await.unwrap();
        let source = arena(PAYLOAD);
        source.copy_in(0, &data(PAYLOAD)).unwrap();
        source.begin(Generation::from_random(u64::from(std::process::id())));
        source.publish(ShardId(0), PUBLISHED).unwrap();
        let export = exchange.export(source, PATIENCE).await.unwrap();
        println!("{}", export.locator());
        until_stdin_closes();
    });
}

/// `DIRECTORY LOCATOR [uid]...`: pulls what is published and prints `ok`, or the kind and text of the error.
fn reader(args: &[String]) {
    let mut config = in_directory(&args[0]);
    config.allow_uids = args[2..].iter().map(|uid| uid.parse().unwrap()).collect();
    let outcome = block_on(async {
        let exchange = open(&config).await?;
        let locator: Locator = args[1].parse().unwrap();
        let sink = arena(locator.payload);
        let mover = exchange.import(&locator, sink.clone(), PATIENCE).await?;
        let digests = pull_published(&*mover).await;
        assert_eq!(digests, expected(PAYLOAD)[..digests.len()]);
        Ok::<_, flashboot_core::Error>(())
    });
    match outcome {
        Ok(()) => println!("ok"),
        Err(e) => println!("{:?}: {e}", e.kind()),
    }
}

/// `DIRECTORY LOCATOR`: stays attached, with a pull under way again and again.
fn attached(args: &[String]) {
    block_on(async {
        let exchange = open(&in_directory(&args[0])).await.unwrap();
        let locator: Locator = args[1].parse().unwrap();
        let mover = exchange.import(&locator, arena(locator.payload), PATIENCE).await.unwrap();
        println!("attached");
        loop {
            pull_published(&*mover).await;
        }
    });
}

async fn pull_published(mover: &dyn Mover) -> Vec<flashboot_core::BlockDigest> {
    let pull = Pull { range: ByteRange::new(0, PUBLISHED), hash: Some(BLOCK) };
    mover.start(pull).unwrap().quiesced().await.unwrap().digests
}

/// `LOCATOR`: takes the descriptor by the raw protocol and tries to write; prints what got through.
fn writer(args: &[String]) {
    let through = write_through(&args[0].parse().unwrap());
    println!("{}", if through.is_empty() { "refused".into() } else { through.join(" ") });
}

/// `DIRECTORY LOCATOR`: counts descriptors and mappings around a hundred imports; alone in its process.
fn leaks(args: &[String]) {
    let counts = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let arenas = maps.lines().filter(|line| line.contains("flashboot-arena")).count();
        (arenas, std::fs::read_dir("/proc/self/fd").unwrap().count())
    };
    let locator: Locator = args[1].parse().unwrap();
    block_on(async {
        let exchange = open(&in_directory(&args[0])).await.unwrap();
        let round = async |index: u32| {
            let mover = exchange.import(&locator, arena(PAYLOAD), PATIENCE).await.unwrap();
            let mut wrong = locator.clone();
            wrong.generation = Generation::from_random(1);
            assert!(exchange.import(&wrong, arena(PAYLOAD), PATIENCE).await.is_err());
            if index.is_multiple_of(2) {
                pull_published(&*mover).await;
            }
        };
        round(0).await;
        let before = counts();
        for index in 0..100 {
            round(index).await;
        }
        // A pull that was dropped may still be ending.
        let until = Instant::now() + Duration::from_secs(5);
        while counts() != before && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        println!("{}", if counts() == before { "ok".into() } else { format!("{before:?} {:?}", counts()) });
    });
}

fn sockets(dir: &tempfile::TempDir) -> String {
    dir.path().join("sockets").to_str().unwrap().to_owned()
}

/// How long a waiting reader takes to notice that its source is gone, `go` being what takes it away.
fn time_to_notice(go: fn(&mut Role) -> Instant) -> Duration {
    let dir = tempfile::tempdir().unwrap();
    let mut source = Role::spawn("exporter", &[&sockets(&dir), "-"]);
    let locator = source.locator();
    block_on(async {
        let own = tempfile::tempdir().unwrap();
        let exchange = open(&config(own.path())).await.unwrap();
        let sink = arena(PAYLOAD);
        let mover = exchange.import(&locator, sink.clone(), PATIENCE).await.unwrap();
        let seen = mover.observe(ShardId(0), PUBLISHED, PATIENCE).await.unwrap();
        assert_eq!(seen.progress, PUBLISHED);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            (go(&mut source), source)
        });
        let e = mover.observe(ShardId(0), PAYLOAD, PATIENCE).await.unwrap_err();
        let noticed = Instant::now();
        assert_eq!(e.kind(), Kind::SourceLost, "{e}");
        assert!(e.peer().is_some());
        let (sent, _source) = killer.join().unwrap();
        // What it had published is still there to look at and to pull.
        let seen = mover.observe(ShardId(0), PUBLISHED, Duration::ZERO).await.unwrap();
        assert_eq!((seen.generation, seen.progress), (Some(locator.generation), PUBLISHED));
        assert_eq!(pull_published(&*mover).await, expected(PAYLOAD)[..4]);
        assert_eq!(bytes(&sink)[..PUBLISHED as usize], data(PAYLOAD)[..PUBLISHED as usize]);
        noticed.saturating_duration_since(sent)
    })
}

fn fastest_of_three(go: fn(&mut Role) -> Instant) {
    // The bound is the transport's; a busy machine may delay any one of them.
    let fastest = (0..3).map(|_| time_to_notice(go)).min().unwrap();
    assert!(fastest < Duration::from_millis(100), "noticed after {fastest:?}");
}

fn killed_source() {
    fastest_of_three(Role::kill);
}

fn ended_source() {
    fastest_of_three(|source| {
        let at = Instant::now();
        assert!(source.end());
        at
    });
}

fn killed_reader() {
    let (dir, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut source = Role::spawn("exporter", &[&sockets(&dir), "-"]);
    let locator = source.locator();
    for _ in 0..3 {
        let mut reader = Role::spawn("attached", &[&sockets(&own), &locator.to_string()]);
        assert_eq!(reader.line(), "attached");
        reader.kill();
    }
    let mut reader = Role::spawn("reader", &[&sockets(&own), &locator.to_string()]);
    assert_eq!(reader.line(), "ok");
    assert!(source.end());
    assert_eq!(std::fs::read_dir(sockets(&dir)).unwrap().count(), 0, "the source left nothing");
    // The killed readers' endpoints went when the next one opened.
    assert!(reader.end());
    assert_eq!(std::fs::read_dir(sockets(&own)).unwrap().count(), 0);
}

fn stale_socket() {
    let dir = tempfile::tempdir().unwrap();
    let sockets = sockets(&dir);
    let mut owner = Role::spawn("exporter", &[&sockets, "agent"]);
    let locator = owner.locator();
    let named = IpcConfig { name: Some("agent".into()), ..in_directory(&sockets) };
    block_on(async {
        let e = open(&named).await.err().unwrap();
        assert_eq!(e.kind(), Kind::Busy, "{e}");
        assert!(e.detail().contains(&format!("process {}", owner.child.id())), "{e}");
        // Neither did another endpoint's sweep harm it.
        let other = open(&in_directory(&sockets)).await.unwrap();
        other.import(&locator, arena(PAYLOAD), PATIENCE).await.unwrap();
        drop(other);

        let mut unnamed = Role::spawn("exporter", &[&sockets, "-"]);
        let left = unnamed.locator().endpoint;
        unnamed.kill();
        owner.kill();
        assert!(
            Path::new(&left).exists() && Path::new(&locator.endpoint).exists(),
            "killed owners leave sockets"
        );
        let next = open(&named).await.expect("a dead owner's name is free");
        assert!(!Path::new(&left).exists(), "and its socket is swept");
        let export = next.export(seed(PAYLOAD, 3), PATIENCE).await.unwrap();
        assert_eq!(export.locator().endpoint, locator.endpoint);
        next.import(export.locator(), arena(PAYLOAD), PATIENCE).await.unwrap();
        let e = next.import(&locator, arena(PAYLOAD), PATIENCE).await.unwrap_err();
        assert_eq!(e.kind(), Kind::StaleGeneration, "the dead owner's locator: {e}");
    });
}

fn no_writing() {
    let dir = tempfile::tempdir().unwrap();
    let mut source = Role::spawn("exporter", &[&sockets(&dir), "-"]);
    let locator = source.locator();
    let mut writer = Role::spawn("writer", &[&locator.to_string()]);
    assert_eq!(writer.line(), "refused");
    assert!(writer.end());
}

fn no_leaks() {
    let (dir, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut source = Role::spawn("exporter", &[&sockets(&dir), "-"]);
    let locator = source.locator();
    let mut reader = Role::spawn("leaks", &[&sockets(&own), &locator.to_string()]);
    assert_eq!(reader.line(), "ok");
    assert!(reader.end());
    // Nor does the source keep anything of its readers: its connections are the endpoint's own descriptors.
    let fds = || std::fs::read_dir(format!("/proc/{}/fd", source.child.id())).unwrap().count();
    let until = Instant::now() + Duration::from_secs(5);
    while fds() > 20 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(fds() <= 20, "{} descriptors", fds());
}

/// A place that another user can reach: a copy of this binary and a directory of that user's.
struct Stage {
    dir: tempfile::TempDir,
    binary: PathBuf,
}

impl Stage {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let binary = dir.path().join("test");
        // A copy is busy while another test forks with it open for writing; a link never is.
        let own = std::env::current_exe().unwrap();
        std::fs::hard_link(&own, &binary).or_else(|_| std::fs::copy(&own, &binary).map(drop)).unwrap();
        std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
        let stage = Self { dir, binary };
        std::fs::create_dir(stage.path("nobody")).unwrap();
        std::fs::set_permissions(stage.path("nobody"), std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(stage.path("nobody"), Some(NOBODY), Some(NOBODY)).unwrap();
        stage
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn nobody(&self, role: &str, args: &[&str]) -> Role {
        let mut command = Command::new(&self.binary);
        command.uid(NOBODY).gid(NOBODY);
        Role::run(command, role, args)
    }

    fn read_as_nobody(&self, locator: &Locator) -> String {
        self.nobody("reader", &[&self.path("nobody"), &locator.to_string()]).line()
    }
}

fn other_users() {
    let stage = Stage::new();
    let with = |name: &str, allowed: &[&str]| {
        let directory = stage.path(name);
        let mut source = Role::spawn("exporter", &[&[&directory, "-"], allowed].concat());
        let locator = source.locator();
        (stage.read_as_nobody(&locator), source)
    };
    let (private, _) = with("private", &[]);
    assert!(private.starts_with("Permission: connect"), "{private}");
    // Let in as far as the socket, the peer's identity alone decides.
    let (other, _) = with("shared", &["uid12345", "gid12345"]);
    assert!(other.starts_with("Permission: import: the exporter refuses"), "{other}");
    assert!(other.contains("allow_uids"), "{other}");
    let (by_uid, _) = with("by-uid", &["uid65534"]);
    assert_eq!(by_uid, "ok");
    let (by_gid, mut source) = with("by-gid", &["gid65534"]);
    assert_eq!(by_gid, "ok");
    assert!(source.end());
}

fn others_directory() {
    let stage = Stage::new();
    let e = block_on(open(&in_directory(&stage.path("nobody")))).err().unwrap();
    assert_eq!(e.kind(), Kind::Permission, "{e}");
    assert!(e.detail().contains("belongs to uid 65534"), "{e}");
}

fn others_export() {
    let stage = Stage::new();
    std::fs::set_permissions(stage.path("nobody"), std::fs::Permissions::from_mode(0o711)).unwrap();
    let mut source = stage.nobody("exporter", &[&stage.path("nobody"), "-", "uid0"]);
    let locator = source.locator();
    let read = |allowed: &[&str]| {
        let (own, text) = (stage.path("own"), locator.to_string());
        Role::spawn("reader", &[&[own.as_str(), text.as_str()], allowed].concat()).line()
    };
    // `own` is 0700 without and 0711 with users allowed.
    let refused = read(&[]);
    assert!(refused.starts_with("Permission: import: the exporter runs as uid 65534"), "{refused}");
    std::fs::set_permissions(stage.path("own"), std::fs::Permissions::from_mode(0o711)).unwrap();
    assert_eq!(read(&["65534"]), "ok");
}
