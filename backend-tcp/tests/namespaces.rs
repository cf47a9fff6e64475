//! Several hosts, each a network namespace, on a wire that delays and loses: a chain that repairs itself when a link is cut
//! in mid-chunk, and a peer that is gone without a word.
//!
//! The binary runs itself again as a host's process with a role in `FLASHBOOT_TEST_ROLE`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use async_trait::async_trait;
use common::{
    MIB, SECOND, Source, byte, expect_seed, import,
    netns::{self, FAIR, Network, Weather},
    seed,
};
use flashboot_backend_tcp::TcpConfig;
use flashboot_channel::{SecurityConfig, TlsPolicy};
use flashboot_core::{
    ByteSize, Digests, Error, Geometry, Kind, Locator, Mover, PeerId, Pull, Result, ShardId,
    replica::{Assignment, Policy},
    schedule::Schedule,
};
use flashboot_driver::{Job, Limits, Sources, Step, replicate};
use flashboot_memory::HostArena;
use libtest_mimic::{Arguments, Failed, Trial};
use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::UdpSocket,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

const ROLE: &str = "FLASHBOOT_TEST_ROLE";
const PAYLOAD: u64 = 12 * MIB + 4321;
const BLOCK: u64 = MIB;
const CHUNK: u64 = 2 * MIB;
/// As short as a socket can be told.
const LIVENESS: Duration = Duration::from_secs(3);
/// How long anything here may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Ok(role) = std::env::var(ROLE) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return match role.as_str() {
            "source" => runtime.block_on(source(&args)),
            "clone" => runtime.block_on(clone(&args)),
            "watcher" => runtime.block_on(watcher(&args)),
            "echo" => echo(&args),
            "prober" => prober(&args),
            other => panic!("no role {other}"),
        };
    }
    let missing = netns::missing();
    let trial = |name: &str, test: fn()| {
        let trial = Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        });
        match &missing {
            Some(why) => trial.with_kind(format!("not run here: {why}")).with_ignored_flag(true),
            None => trial,
        }
    };
    let tests = vec![
        trial("the_wire_delays_and_loses_as_it_is_told", weather),
        trial("a_chain_over_a_bad_wire_repairs_itself_when_a_link_is_cut_in_mid_chunk", chain),
        trial("a_half_open_peer_is_found_at_both_ends_within_the_bound", half_open),
        trial("a_reader_without_the_token_is_refused_between_hosts", stranger),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

/// One host's process.
struct Host {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Host {
    fn start(network: &Network, host: usize, role: &str, args: &[&str]) -> Self {
        let mut command = network.command(host, &std::env::current_exe().unwrap());
        command.args(args).env(ROLE, role).env("RUST_BACKTRACE", "0");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout }
    }

    /// What it says next.
    #[track_caller]
    fn hear(&mut self, what: &str) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        let said = line
            .trim_end()
            .strip_prefix(what)
            .unwrap_or_else(|| panic!("`{what}` was to come, not {line:?}"));
        said.trim().to_owned()
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says something to the test.
fn say(line: impl std::fmt::Display) {
    println!("{line}");
}

fn told() -> String {
    let mut line = String::new();
    assert_ne!(std::io::stdin().read_line(&mut line).unwrap(), 0, "the test is gone");
    line.trim().to_owned()
}

/// TLS and a token, as between hosts; `rate` in bytes a second.
fn config(address: &str, token: &str, rate: &str) -> TcpConfig {
    let token_file = (token != "-").then(|| token.into());
    TcpConfig {
        bind: address.parse().unwrap(),
        security: SecurityConfig { tls: TlsPolicy::Auto, token_file, ..SecurityConfig::default() },
        rate: rate.parse().ok().map(ByteSize),
        liveness: LIVENESS,
        ..TcpConfig::default()
    }
}

fn token(dir: &Path, text: &str) -> String {
    let path = dir.join(text);
    let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&path).unwrap();
    file.write_all(text.repeat(4).as_bytes()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn geometry() -> Geometry {
    Geometry::new(PAYLOAD, BLOCK, CHUNK, 1).unwrap()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// ADDRESS TOKEN RATE: a seed that says its locator, and how many descriptors it has whenever it is told something.
async fn source(args: &[String]) {
    let [address, token, rate] = args else { panic!("{args:?}") };
    let arena = seed(PAYLOAD);
    let source = Source::of(&arena, config(address, token, rate)).await;
    say(format!("locator {}", source.locator().encode()));
    loop {
        // The transport's threads go on meanwhile.
        told();
        say(format!("descriptors {}", descriptors()));
    }
}

/// Where a clone's bytes come from: the first locator, then the second.
struct Upstream {
    arena: Arc<HostArena>,
    config: TcpConfig,
    locators: Vec<Locator>,
}

#[async_trait]
impl Sources for Upstream {
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        let locator = &self.locators[usize::try_from(source.0).unwrap()];
        import(locator, &self.arena, self.config.clone()).await
    }

    async fn replace(&self, lost: PeerId, _: ShardId, from: u64, cause: &Error) -> Option<PeerId> {
        say(format!("lost {} {from} {:?} {cause}", lost.0, cause.kind()));
        let next = PeerId(lost.0 + 1);
        (next.0 < self.locators.len() as u64).then_some(next)
    }
}

/// ADDRESS TOKEN RATE: exports an empty arena, is told its sources, fills it from them, and says how it goes.
async fn clone(args: &[String]) {
    let [address, token, rate] = args else { panic!("{args:?}") };
    let config = config(address, token, rate);
    let arena = common::arena(PAYLOAD);
    let source = Source::of(&arena, config.clone()).await;
    say(format!("locator {}", source.locator().encode()));
    let locators = told().split_whitespace().map(|text| text.parse().unwrap()).collect();
    let bytes: Vec<u8> = (0..PAYLOAD).map(byte).collect();
    let geometry = geometry();
    let job = Job {
        arena: Arc::clone(&arena) as _,
        assignment: Assignment::of(Schedule::Chain { clones: 1 }, 1, geometry),
        expected: Some(Arc::new(Digests::of(&geometry, &bytes))),
        policy: Policy { stall: PATIENCE, ..Policy::default() },
        limits: Limits { pull: PATIENCE, quiesce: 5 * SECOND, floor: None },
    };
    let sources = Upstream { arena: Arc::clone(&arena), config, locators };
    let mut observer = |step: Step| {
        if let Step::Published { bytes, .. } = step {
            say(format!("published {bytes}"));
        }
    };
    let report = replicate(job, Arc::new(sources), &mut observer).await;
    match report {
        Ok(report) => {
            expect_seed(&arena);
            say(format!("whole {} {}", report.losses, report.bytes));
        }
        Err(e) => say(format!("failed {e}")),
    }
    told();
}

/// ADDRESS TOKEN LOCATOR: attaches, says so, and then when and as what the loss of its source came.
async fn watcher(args: &[String]) {
    let [address, token, locator] = args else { panic!("{args:?}") };
    let arena = common::arena(PAYLOAD);
    let mover = match import(&locator.parse().unwrap(), &arena, config(address, token, "-")).await {
        Ok(mover) => mover,
        Err(e) => return say(format!("refused {:?} {e}", e.kind())),
    };
    let range = flashboot_core::ByteRange::new(0, PAYLOAD);
    mover.start(Pull { range, hash: None }).unwrap().quiesced().await.unwrap();
    expect_seed(&arena);
    say("attached");
    told();
    let began = Instant::now();
    let (watched, pulled) = tokio::join!(mover.observe(ShardId(0), u64::MAX, PATIENCE), async {
        let range = flashboot_core::ByteRange::new(0, 8 * BLOCK);
        mover.start(Pull { range, hash: Some(BLOCK) }).unwrap().quiesced().await
    });
    for lost in [watched.map(drop), pulled.map(drop)] {
        let lost = lost.unwrap_err();
        assert!(matches!(lost.kind(), Kind::SourceLost | Kind::Stalled), "{lost}");
        assert!(lost.peer().is_some(), "{lost}");
    }
    assert!(arena.is_free(range), "nothing lands any more");
    say(format!("lost {}", began.elapsed().as_millis()));
}

/// ADDRESS: sends every datagram back.
fn echo(args: &[String]) {
    let [address] = args else { panic!("{args:?}") };
    let socket = UdpSocket::bind((address.as_str(), 0)).unwrap();
    say(format!("at {}", socket.local_addr().unwrap()));
    let mut bytes = [0; 64];
    loop {
        let (len, from) = socket.recv_from(&mut bytes).unwrap();
        socket.send_to(&bytes[..len], from).unwrap();
    }
}

/// ADDRESS ECHO: says how many of [`PROBES`] datagrams came back, and how long the fastest took, in microseconds.
fn prober(args: &[String]) {
    let [address, echo] = args else { panic!("{args:?}") };
    let socket = UdpSocket::bind((address.as_str(), 0)).unwrap();
    socket.connect(echo.as_str()).unwrap();
    let mut bytes = [0; 64];
    // Until the two have found each other; whatever comes of that later has number 0.
    socket.set_read_timeout(Some(SECOND / 5)).unwrap();
    while socket.send(&0u64.to_le_bytes()).is_err() || socket.recv(&mut bytes).is_err() {}
    socket.set_read_timeout(Some(SECOND / 500)).unwrap();
    let mut sent = Vec::new();
    let (mut back, mut fastest, began) = (0, Duration::MAX, Instant::now());
    while sent.len() < PROBES || sent.last().is_some_and(|last: &Instant| last.elapsed() < SECOND / 2) {
        assert!(began.elapsed() < PATIENCE, "{back} of {}", sent.len());
        if sent.len() < PROBES {
            sent.push(Instant::now());
            socket.send(&(sent.len() as u64).to_le_bytes()).unwrap();
        }
        while let Ok(8) = socket.recv(&mut bytes) {
            let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let Some(at) = number.checked_sub(1) else { continue };
            back += 1;
            fastest = fastest.min(sent[usize::try_from(at).unwrap()].elapsed());
        }
    }
    say(format!("echoed {back} {}", fastest.as_micros()));
}

const PROBES: usize = 300;

/// What the chain below stands on: 5 ms each way, and a tenth lost each way.
fn weather() {
    let delay = 5 * SECOND / 1000;
    let network = Network::new("w", 2, Weather { delay, loss: 10_000 });
    let mut echo = Host::start(&network, 0, "echo", &[&netns::address(0, 4)]);
    let at = echo.hear("at");
    let mut prober = Host::start(&network, 1, "prober", &[&netns::address(1, 4), &at]);
    let echoed = prober.hear("echoed");
    let (back, fastest) = echoed.split_once(' ').unwrap();
    let (back, fastest) = (back.parse::<usize>().unwrap(), Duration::from_micros(fastest.parse().unwrap()));
    println!("by {}: {back} of {PROBES} came back, the fastest after {fastest:?}", network.by());
    assert!(fastest >= 2 * delay, "{fastest:?}");
    // 243 are to be expected.
    assert!((PROBES / 2..PROBES * 19 / 20).contains(&back), "{back}");
}

/// Seed 0 → clone 1 → clone 2, on a wire of 2 ms and 0.5 %. Clone 1 sends slowly; in the middle of a chunk of clone 2 it is
/// cut off, and clone 2 goes on at the seed.
fn chain() {
    let dir = tempfile::tempdir().unwrap();
    let token = token(dir.path(), "one-secret");
    let network = Network::new("r", 3, Weather { delay: 2 * SECOND / 1000, loss: 500 });
    println!("by {}", network.by());
    let host = |host: usize, role: &str, rate: &str| {
        Host::start(&network, host, role, &[&netns::address(host, 4), &token, rate])
    };
    let mut hosts = [host(0, "source", "-"), host(1, "clone", "2000000"), host(2, "clone", "-")];
    let locators: Vec<String> = hosts.iter_mut().map(|host| host.hear("locator")).collect();
    let [_, first, second] = &mut hosts;
    first.tell(&locators[0]);
    second.tell(&format!("{} {}", locators[1], locators[0]));

    // A chunk takes a second from there on: 300 ms later the next is in its middle. The second may have come before the
    // first, of which something was lost.
    let mut published: u64 = second.hear("published").parse().unwrap();
    assert!(published == CHUNK || published == 2 * CHUNK, "{published}");
    std::thread::sleep(3 * SECOND / 10);
    network.cut(1);
    let lost = loop {
        let mut line = String::new();
        second.stdout.read_line(&mut line).unwrap();
        match line.trim().split_once(' ') {
            Some(("published", bytes)) => published = bytes.parse().unwrap(),
            Some(("lost", what)) => break what.to_owned(),
            _ => panic!("{line:?}"),
        }
    };
    // Lost was source 0 of two, and the clone goes on from what it had: nothing before it is pulled again.
    assert!(lost.starts_with(&format!("0 {published} ")), "{lost}, of {published}");
    assert!(published < PAYLOAD, "{lost}");
    let whole = loop {
        let mut line = String::new();
        second.stdout.read_line(&mut line).unwrap();
        match line.trim().split_once(' ') {
            Some(("published", bytes)) => assert!(bytes.parse::<u64>().unwrap() > published),
            Some(("whole", what)) => break what.to_owned(),
            _ => panic!("{line:?}"),
        }
    };
    assert_eq!(whole, format!("1 {PAYLOAD}"), "one loss, and no byte kept twice");
}

fn half_open() {
    let dir = tempfile::tempdir().unwrap();
    let token = token(dir.path(), "one-secret");
    let network = Network::new("h", 2, FAIR);
    let mut source = Host::start(&network, 0, "source", &[&netns::address(0, 6), &token, "-"]);
    let locator = source.hear("locator");
    let count = |source: &mut Host| {
        source.tell("count");
        source.hear("descriptors").parse::<usize>().unwrap()
    };
    let before = count(&mut source);
    let mut watcher = Host::start(&network, 1, "watcher", &[&netns::address(1, 6), &token, &locator]);
    watcher.hear("attached");
    assert!(count(&mut source) > before);
    network.cut(0);
    watcher.tell("cut");
    let took = Duration::from_millis(watcher.hear("lost").parse().unwrap());
    // What was sent unanswered counts from its sending, probes from the last word before it.
    assert!(took >= LIVENESS / 2 && took < LIVENESS + 10 * SECOND, "{took:?}");
    // The source learns it as well, and keeps nothing for a reader that is gone.
    let until = Instant::now() + 2 * LIVENESS;
    while count(&mut source) > before {
        assert!(Instant::now() < until, "the source still keeps its connections");
        std::thread::sleep(SECOND / 10);
    }
}

fn stranger() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (token(dir.path(), "one-secret"), token(dir.path(), "another"));
    let network = Network::new("s", 2, FAIR);
    let mut source = Host::start(&network, 0, "source", &[&netns::address(0, 4), &ours, "-"]);
    let locator = source.hear("locator");
    for token in [theirs.as_str(), "-"] {
        // A listener of one's own would have to ask for something too: on loopback it need not.
        let mut reader = Host::start(&network, 1, "watcher", &["127.0.0.1", token, &locator]);
        assert!(reader.hear("refused").starts_with("Permission"));
    }
    let mut reader = Host::start(&network, 1, "watcher", &["127.0.0.1", &ours, &locator]);
    reader.hear("attached");
}
