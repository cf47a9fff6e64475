//! The node agent over its socket, on host arenas: nothing unverified is ever ready, nothing attached is ever taken away, and a
//! client that misbehaves harms itself only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

#[path = "../../checkpoint/tests/support/mod.rs"]
mod support;

use flashboot_channel::local::Wire;
use flashboot_checkpoint::{Image, Manifest, PackOptions, pack};
use flashboot_core::{Arena, ArenaSpec, Dtype, Error, Kind, Result};
use flashboot_loader::{
    agent::{
        Agent, AgentConfig, Client, ClientConfig, Entry, HeldSource, Key, Order, PROTOCOL_VERSION, Payload,
        Place, ServeConfig, Serving, StagedSource, State, Target, serve,
    },
    io::{Call, Engine, Io, IoConfig, Ops, System},
    pipeline::FillConfig,
    source::{Load, LoadReport, Source, SourceKind, Wanted},
};
use flashboot_memory::{HostArena, HostArenaConfig, PageKind};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// A place with images, and an agent.
struct Node {
    dir: TempDir,
    agent: Option<Agent>,
    serving: Option<Serving>,
}

fn io_config() -> IoConfig {
    IoConfig { engine: Engine::Pread, direct: false, ..IoConfig::default() }
}

fn config(limit: u64, ops: Arc<dyn Ops>) -> AgentConfig {
    let fill = FillConfig::new(&io_config()).unwrap();
    AgentConfig {
        limit,
        memory: HostArenaConfig { pages: PageKind::Base, ..HostArenaConfig::default() },
        fill: FillConfig { io: Io::with_ops(&io_config(), ops).unwrap(), ..fill },
        pin_for: None,
    }
}

impl Node {
    fn new(limit: u64) -> Self {
        Self::with(limit, Arc::new(System))
    }

    fn with(limit: u64, ops: Arc<dyn Ops>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut node = Self { dir, agent: None, serving: None };
        let agent = Agent::new(config(limit, ops)).unwrap();
        node.serving = Some(serve(&agent, &node.serve_config()).unwrap());
        node.agent = Some(agent);
        node
    }

    fn serve_config(&self) -> ServeConfig {
        ServeConfig { directory: self.dir.path().join("sockets"), ..ServeConfig::default() }
    }

    fn client_config(&self) -> ClientConfig {
        ClientConfig { socket: self.socket(), allow_uids: vec![], allow_gids: vec![] }
    }

    fn socket(&self) -> PathBuf {
        self.serve_config().directory.join("agent.sock")
    }

    fn client(&self) -> Client {
        Client::dial(&self.client_config()).unwrap()
    }

    /// An image of `mib` and a little.
    fn image(&self, name: &str, mib: u64) -> Image {
        let at = self.dir.path().join(format!("{name}.image"));
        let model = self.dir.path().join(name);
        let shard = vec![
            support::tensor(name, Dtype::U8, &[mib * MIB]),
            support::tensor(&format!("{name}.b"), Dtype::F32, &[77]),
        ];
        support::sharded(&model, &[shard]);
        pack(&support::open(&model).unwrap(), &at, &PackOptions::default(), &()).unwrap();
        Image::open(&at).unwrap()
    }

    fn entries(&self) -> Vec<Entry> {
        self.client().status().unwrap().entries.into_iter().map(|listed| listed.entry).collect()
    }

    fn images(&self) -> Vec<String> {
        self.entries().into_iter().map(|entry| entry.image).collect()
    }

    #[track_caller]
    fn until(&self, what: &str, wanted: impl Fn(&[Entry]) -> bool) {
        let began = Instant::now();
        while !wanted(&self.entries()) {
            assert!(began.elapsed() < LIMIT, "{what}: {:?}", self.entries());
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn load(&self, image: &Image, source: impl Source + 'static) -> Result<(Arc<dyn Arena>, LoadReport)> {
        let payload = image.ranks()[0].payload_bytes;
        let load = Load::new(wanted(image), FillConfig::new(&io_config()).unwrap(), move || {
            Ok(HostArena::create(ArenaSpec { payload, shards: 1 }, &HostArenaConfig::default())?.0 as _)
        });
        load.run(&[Box::new(source)])
    }

    fn staged(&self) -> StagedSource {
        StagedSource::new(self.client_config(), true)
    }

    fn held(&self, private: bool) -> HeldSource {
        HeldSource::new(self.client_config(), Target::Host, private)
    }
}

fn wanted(image: &Image) -> Wanted {
    let rank = &image.ranks()[0];
    Wanted {
        image: Some(image.id().to_owned()),
        rank: rank.coordinate.to_string(),
        payload: rank.payload_bytes,
        digests: Arc::new(rank.table.digests().clone()).into(),
    }
}

fn key(image: &Image) -> Key {
    let rank = image.ranks()[0].coordinate.to_string();
    Key { image: image.id().to_owned(), rank, place: Place::Host }
}

fn order(image: &Image) -> Order {
    let rank = &image.ranks()[0];
    Order {
        key: key(image),
        payload: Payload::File(rank.path.clone()),
        manifest: Manifest::read(image, rank).unwrap(),
        priority: 0,
        hold: None,
        wait: true,
    }
}

fn stage(node: &Node, image: &Image) -> Result<Entry> {
    node.client().keep(&order(image), &mut |_, _| ())
}

#[track_caller]
fn holds(arena: &dyn Arena, image: &Image) {
    let mut found = vec![0; arena.payload() as usize];
    arena.copy_out(0, &mut found).unwrap();
    assert!(found == fs::read(&image.ranks()[0].path).unwrap());
}

#[test]
fn what_is_staged_is_loaded_byte_for_byte_by_who_ever_asks() {
    let node = Node::new(1 << 30);
    let (image, other) = (node.image("a", 33), node.image("b", 1));
    let e = node.load(&image, node.staged()).unwrap_err();
    assert_eq!(e.kind(), Kind::Unavailable, "nothing is there yet");
    let entry = stage(&node, &image).unwrap();
    assert_eq!((entry.state, entry.held, entry.attached), (State::Ready, false, 0));
    assert!(entry.bytes >= image.ranks()[0].payload_bytes);
    for _ in 0..2 {
        let (arena, report) = node.load(&image, node.staged()).unwrap();
        holds(&*arena, &image);
        assert_eq!((report.source, report.verified), (Some(SourceKind::Staged), true));
        assert!(is_own(&arena), "a copy, and ours to write");
    }
    let e = node.load(&other, node.staged()).unwrap_err();
    assert!(e.detail().contains("it has no staged copy of"), "{e}");
    assert_eq!(node.load(&image, node.held(false)).unwrap_err().kind(), Kind::Unavailable, "it is not held");
    // Again: it is there, and nothing is read.
    fs::remove_file(&image.ranks()[0].path).unwrap();
    let e = stage(&node, &image).unwrap_err();
    assert!(e.detail().contains("target-0-0-0-0"), "the client has to show that it may read it: {e}");
}

/// Whether an arena is this process's to write.
fn is_own(arena: &Arc<dyn Arena>) -> bool {
    arena.copy_in(0, &[]).is_ok()
}

#[test]
fn a_held_arena_is_attached_where_it_is_and_a_private_copy_is_ones_own() {
    let node = Node::new(1 << 30);
    let image = node.image("a", 20);
    let held = Order { hold: Some(None), ..order(&image) };
    assert!(node.client().keep(&held, &mut |_, _| ()).unwrap().held);
    let (arena, report) = node.load(&image, node.held(false)).unwrap();
    holds(&*arena, &image);
    assert_eq!(report.source, Some(SourceKind::Held));
    assert_eq!(arena.copy_in(0, &[1]).unwrap_err().kind(), Kind::Permission);
    // Attached: it stays, whoever asks.
    assert_eq!(node.entries()[0].attached, 1);
    let e = node.client().evict(Some(image.id()), None, None).unwrap_err();
    assert_eq!(e.kind(), Kind::Busy, "{e}");
    let (private, report) = node.load(&image, node.held(true)).unwrap();
    holds(&*private, &image);
    assert!(report.verified && private.copy_in(0, &[1]).is_ok());
    holds(&*arena, &image);
    // The arena is the lease: gone with it.
    drop(arena);
    node.until("it is let go", |entries| entries[0].attached == 0);
    assert_eq!(node.client().evict(Some(image.id()), None, None).unwrap().len(), 1);
    assert_eq!(node.client().evict(None, None, None).unwrap_err().kind(), Kind::Unavailable);
    assert_eq!(node.images(), Vec::<String>::new());
}

#[test]
fn a_lease_ends_what_nobody_uses_and_nothing_else() {
    let node = Node::new(1 << 30);
    let (image, other) = (node.image("a", 1), node.image("b", 1));
    // Long enough for a slow machine to attach within it.
    let lease = Duration::from_secs(2);
    node.client().keep(&Order { hold: Some(Some(lease)), ..order(&image) }, &mut |_, _| ()).unwrap();
    let (arena, _) = node.load(&image, node.held(false)).unwrap();
    stage(&node, &other).unwrap();
    thread::sleep(lease + lease / 4);
    assert_eq!(node.images(), [image.id(), other.id()], "attached");
    drop(arena);
    node.until("its lease ends", |entries| entries.iter().all(|entry| entry.image == other.id()));
    assert_eq!(node.images(), [other.id()]);
}

#[test]
fn the_limit_holds_the_least_goes_first_and_a_refusal_names_sizes_and_limit() {
    let node = Node::new(25 * MIB);
    let images: Vec<_> = ["a", "b", "c", "d"].iter().map(|name| node.image(name, 10)).collect();
    stage(&node, &images[0]).unwrap();
    stage(&node, &images[1]).unwrap();
    // The first was used last.
    node.load(&images[0], node.staged()).unwrap();
    node.until("it is let go", |entries| entries.iter().all(|entry| entry.attached == 0));
    stage(&node, &images[2]).unwrap();
    assert_eq!(node.images(), [images[0].id(), images[2].id()]);
    let high = Order { priority: 7, ..order(&images[0]) };
    node.client().keep(&high, &mut |_, _| ()).unwrap();
    node.client().keep(&Order { priority: 7, ..order(&images[2]) }, &mut |_, _| ()).unwrap();
    let e = stage(&node, &images[3]).unwrap_err();
    assert_eq!(e.kind(), Kind::Exhausted);
    assert!(e.detail().contains("the agent's limit is 25MiB") && e.remedy().is_some(), "{e}");
    let large = node.image("large", 26);
    let e = stage(&node, &large).unwrap_err();
    assert!(e.kind() == Kind::Exhausted && e.detail().contains("the agent's limit"), "{e}");
    assert_eq!(node.images(), [images[0].id(), images[2].id()], "a refusal changes nothing");
    // Somebody's load needs the room.
    let gone = node.client().room(&Place::Host, u64::MAX, 8).unwrap_err();
    assert_eq!(gone.kind(), Kind::Exhausted);
    assert_eq!(node.client().room(&Place::Host, 1, 8).unwrap(), Vec::<Entry>::new(), "there is room");
    let counts = node.client().status().unwrap().counts;
    assert_eq!((counts.staged, counts.evicted, counts.refused), (3, 1, 2));
}

#[test]
fn a_damaged_a_short_and_a_missing_payload_are_never_ready() {
    let node = Node::new(1 << 30);
    let image = node.image("a", 20);
    let path = image.ranks()[0].path.clone();
    let right = fs::read(&path).unwrap();
    let mut wrong = right.clone();
    wrong[17 << 20] ^= 1;
    fs::write(&path, wrong).unwrap();
    let e = stage(&node, &image).unwrap_err();
    assert_eq!(e.kind(), Kind::Corrupt);
    assert!(e.detail().contains("block 1") && e.detail().contains("target-0-0-0-0.img"), "{e}");
    assert_eq!(node.images(), Vec::<String>::new());
    fs::write(&path, &right[..right.len() - 1]).unwrap();
    let e = stage(&node, &image).unwrap_err();
    assert!(e.kind() == Kind::Corrupt && e.detail().contains("found"), "{e}");
    fs::write(&path, &right).unwrap();
    stage(&node, &image).unwrap();
    holds(&*node.load(&image, node.staged()).unwrap().0, &image);
    assert_eq!(node.client().status().unwrap().counts.failed, 1);
}

/// Holds reads back until it is told to go on, and may do something to the file first.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gate")
    }
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Ops for Gate {
    fn pread(&self, call: &Call<'_>, into: &mut [u8]) -> std::io::Result<usize> {
        let open = self.open.lock().unwrap();
        drop(self.changed.wait_while(open, |open| !*open).unwrap());
        System.pread(call, into)
    }
}

#[test]
fn a_file_that_changes_while_it_is_staged_is_said_and_not_kept() {
    let gate = Arc::new(Gate::default());
    let node = Node::with(1 << 30, Arc::<Gate>::clone(&gate));
    let image = node.image("a", 20);
    let path = image.ranks()[0].path.clone();
    let staging = thread::spawn({
        let (config, order) = (node.client_config(), order(&image));
        move || Client::dial(&config)?.keep(&order, &mut |_, _| ())
    });
    node.until("it is filled", |entries| entries.iter().any(|entry| entry.state == State::Filling));
    let mut bytes = fs::read(&path).unwrap();
    bytes.reverse();
    fs::write(&path, bytes).unwrap();
    gate.open();
    let e = staging.join().unwrap().unwrap_err();
    assert_eq!(e.kind(), Kind::Corrupt);
    assert!(e.detail().contains("changed while it was read"), "{e}");
    assert_eq!(node.images(), Vec::<String>::new());
}

#[test]
fn a_load_waits_for_what_is_being_staged_and_hears_when_it_is_given_up() {
    let gate = Arc::new(Gate::default());
    let node = Node::with(1 << 30, Arc::<Gate>::clone(&gate));
    let (image, later) = (node.image("a", 20), node.image("b", 1));
    let mut not_waited = Order { wait: false, ..order(&image) };
    assert_ne!(node.client().keep(&not_waited, &mut |_, _| ()).unwrap().state, State::Ready);
    not_waited = Order { wait: false, ..order(&later) };
    assert_eq!(node.client().keep(&not_waited, &mut |_, _| ()).unwrap().state, State::Waiting);
    node.until("one is filled at a time", |entries| {
        entries[0].state == State::Filling && entries[1].state == State::Waiting
    });
    thread::scope(|scope| {
        let first = scope.spawn(|| node.load(&image, node.staged()));
        let second = scope.spawn(|| node.load(&later, node.staged()));
        // Longer than a heartbeat: they see signs of life.
        thread::sleep(Duration::from_millis(1500));
        assert_eq!(node.client().evict(Some(later.id()), None, None).unwrap().len(), 1);
        assert_eq!(second.join().unwrap().unwrap_err().kind(), Kind::Cancelled);
        gate.open();
        let (arena, report) = first.join().unwrap().unwrap();
        holds(&*arena, &image);
        assert!(report.phases.io_wait > 100.0, "{report:?}");
    });
    // Nor is what was given up while it was filled.
    assert_eq!(node.images(), [image.id()]);
}

#[test]
fn an_agent_that_ends_says_so_to_who_waits_and_leaves_what_is_mapped() {
    let gate = Arc::new(Gate::default());
    let mut node = Node::with(1 << 30, Arc::<Gate>::clone(&gate));
    let (image, slow) = (node.image("a", 2), node.image("b", 2));
    gate.open();
    node.client().keep(&Order { hold: Some(None), ..order(&image) }, &mut |_, _| ()).unwrap();
    let (arena, _) = node.load(&image, node.held(false)).unwrap();
    *gate.open.lock().unwrap() = false;
    let waiting = thread::spawn({
        let (config, order) = (node.client_config(), order(&slow));
        move || Client::dial(&config)?.keep(&order, &mut |_, _| ())
    });
    node.until("it is filled", |entries| entries.len() == 2 && entries[1].state == State::Filling);
    let agent = node.agent.take();
    let ending = thread::spawn(move || drop(agent));
    let e = waiting.join().unwrap().unwrap_err();
    assert!(e.detail().contains("stopping"), "{e}");
    gate.open();
    ending.join().unwrap();
    drop(node.serving.take());
    assert!(!node.socket().exists(), "nothing is left");
    holds(&*arena, &image);
    let e = node.load(&image, node.staged()).unwrap_err();
    assert!(e.kind() == Kind::Unavailable && e.remedy().unwrap().contains("flashboot agent"), "{e}");
}

#[test]
fn one_agent_a_socket_and_it_is_private() {
    let mut node = Node::new(1 << 30);
    let other = Agent::new(config(1 << 30, Arc::new(System))).unwrap();
    let e = serve(&other, &node.serve_config()).unwrap_err();
    assert_eq!(e.kind(), Kind::Busy);
    assert!(e.detail().contains(&format!("process {}", std::process::id())), "{e}");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&node.socket()), mode(node.socket().parent().unwrap())), (0o600, 0o700));
    // What a killed agent leaves: its socket, and a lock that nobody holds.
    let left = node.dir.path().join("left");
    fs::copy(node.socket().with_extension("lock"), &left).unwrap();
    drop((node.serving.take(), node.agent.take()));
    drop(std::os::unix::net::UnixListener::bind(node.socket()).unwrap());
    fs::copy(left, node.socket().with_extension("lock")).unwrap();
    node.serving = Some(serve(&other, &node.serve_config()).unwrap());
    assert_eq!(node.images(), Vec::<String>::new(), "it begins with nothing");
    // A directory that others can enter is none for it.
    let open = node.dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    let e = serve(&other, &ServeConfig { directory: open, ..ServeConfig::default() }).unwrap_err();
    assert_eq!(e.kind(), Kind::Permission);
}

/// A client that says what it likes.
struct Raw(Wire);

impl Raw {
    fn dial(node: &Node) -> Self {
        Self(Wire::dial(&node.socket(), Instant::now() + LIMIT).unwrap())
    }

    fn say(&self, frame: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.0.send(frame, descriptors, 1 << 30, Instant::now() + LIMIT).unwrap();
    }

    /// What it is refused with; the empty string where the agent hangs up.
    fn refused(&self) -> String {
        match self.0.receive(8 << 20, 1, Instant::now() + LIMIT).unwrap() {
            Some((frame, _)) => {
                let reply: Value = serde_json::from_slice(&frame).unwrap();
                reply["refused"]["detail"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
            }
            None => String::new(),
        }
    }

    fn ask(&self, request: &Value, descriptors: &[BorrowedFd<'_>]) {
        let envelope = json!({ "version": PROTOCOL_VERSION, "request": request });
        self.say(&serde_json::to_vec(&envelope).unwrap(), descriptors);
    }
}

#[test]
fn a_client_that_talks_nonsense_is_refused_and_others_are_served() {
    let node = Node::new(1 << 30);
    let image = node.image("a", 1);
    for nonsense in [&b"{"[..], b"", b"[]", b"{\"version\":1}", &[0xff; 100]] {
        let raw = Raw::dial(&node);
        raw.say(nonsense, &[]);
        assert!(raw.refused().contains("none of the agent's"), "{nonsense:?}");
        assert_eq!(raw.refused(), "", "it hangs up");
    }
    let raw = Raw::dial(&node);
    raw.say(
        &serde_json::to_vec(&json!({ "version": PROTOCOL_VERSION + 1, "request": "list" })).unwrap(),
        &[],
    );
    assert!(raw.refused().contains(&format!("protocol {}", PROTOCOL_VERSION + 1)));
    let raw = Raw::dial(&node);
    // It hangs up before it has heard all of it.
    let _ = raw.0.send(&vec![b' '; 2 << 20], &[], 1 << 30, Instant::now() + LIMIT);
    assert!(raw.refused().contains("bytes"));

    let rank = &image.ranks()[0];
    let manifest = Manifest::read(&image, rank).unwrap();
    let file = File::open(&rank.path).unwrap();
    let writer = File::options().append(true).open(&rank.path).unwrap();
    let path_only = File::options()
        .read(true)
        .custom_flags(rustix::fs::OFlags::PATH.bits().cast_signed())
        .open(&rank.path)
        .unwrap();
    let (pipe, _other) = std::io::pipe().unwrap();
    let keep = |image: &str, rank: &str| {
        let key = json!({ "image": image, "rank": rank, "place": "host" });
        json!({ "keep": { "key": key, "name": "n", "priority": 0, "hold": null, "wait": true } })
    };
    let right = keep(image.id(), "target-0-0-0-0");
    let mut damaged = manifest.clone();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    let cases: [(&Value, Vec<BorrowedFd<'_>>, &[u8], &str); 7] = [
        (&right, vec![], &manifest, "descriptor"),
        (&right, vec![writer.as_fd()], &manifest, "not one for reading"),
        (&right, vec![path_only.as_fd()], &manifest, "not one for reading"),
        (&right, vec![pipe.as_fd()], &manifest, "no regular file"),
        (&right, vec![file.as_fd()], b"nothing", "manifest"),
        (&right, vec![file.as_fd()], &damaged, "manifest"),
        (&keep(image.id(), "target-9-9-9-9"), vec![file.as_fd()], &manifest, "no rank"),
    ];
    // One connection: a refusal leaves it usable.
    let raw = Raw::dial(&node);
    for (request, descriptors, manifest, said) in &cases {
        raw.ask(request, descriptors);
        raw.say(manifest, &[]);
        let refused = raw.refused();
        assert!(refused.contains(said), "{said}: {refused}");
    }
    let place = json!({ "gpu": "GPU-none" });
    raw.ask(&json!({ "room": { "place": place, "bytes": 1, "priority": 0 } }), &[]);
    assert_ne!(raw.refused(), "", "there is no such GPU");
    assert_eq!(node.images(), Vec::<String>::new());
    // Silent ones and ones in the middle of a frame cost nobody else anything.
    let silent: Vec<_> = (0..8).map(|_| Raw::dial(&node)).collect();
    stage(&node, &image).unwrap();
    drop(silent);
    holds(&*node.load(&image, node.staged()).unwrap().0, &image);
}

#[test]
fn too_many_clients_are_refused_and_those_that_go_make_room() {
    let node = Node::new(1 << 30);
    let other = Agent::new(config(1 << 30, Arc::new(System))).unwrap();
    let directory = node.dir.path().join("few");
    let few = serve(&other, &ServeConfig { directory, most: 2, ..ServeConfig::default() }).unwrap();
    let config = ClientConfig { socket: few.socket().to_owned(), allow_uids: vec![], allow_gids: vec![] };
    let dial = || Client::dial(&config).unwrap();
    let (one, two) = (dial(), dial());
    one.status().unwrap();
    two.status().unwrap();
    let refused = |result: Result<_>| {
        let e: Error = result.map(drop::<flashboot_loader::agent::Status>).unwrap_err();
        e.kind()
    };
    assert_eq!(refused(dial().status()), Kind::Busy);
    drop(one);
    let began = Instant::now();
    while dial().status().is_err() {
        assert!(began.elapsed() < LIMIT, "{} clients", few.clients());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_agent_that_answers_nonsense_is_an_error_and_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let grant = json!({ "payload": 1, "capacity": 1, "shards": 1, "generation": 1, "place": "host" });
    let retired = json!({ "payload": 1, "capacity": 1, "shards": 1, "generation": 0, "place": "host" });
    let null = File::open("/dev/null").unwrap();
    let cases: [(Value, Vec<BorrowedFd<'_>>, Kind, &str); 7] = [
        (json!("what"), vec![], Kind::Protocol, "none of the agent's"),
        (json!({ "listed": 5 }), vec![], Kind::Protocol, "none of the agent's"),
        (json!({ "pushed": { "bytes": 1, "pin_ms": 0.0 } }), vec![], Kind::Protocol, "something else"),
        (json!({ "attached": grant }), vec![], Kind::Protocol, "no descriptor"),
        (json!({ "attached": grant }), vec![null.as_fd(), null.as_fd()], Kind::Protocol, "descriptors"),
        (json!({ "attached": retired }), vec![null.as_fd()], Kind::Protocol, "holds nothing"),
        (Value::Null, vec![], Kind::SourceLost, "without an answer"),
    ];
    for (number, (reply, descriptors, kind, said)) in cases.into_iter().enumerate() {
        let socket = dir.path().join(format!("{number}.sock"));
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let config = ClientConfig { socket, allow_uids: vec![], allow_gids: vec![] };
        let key = Key { image: "i".into(), rank: "r".into(), place: Place::Host };
        thread::scope(|scope| {
            scope.spawn(|| {
                let wire = Wire::new(listener.accept().unwrap().0, "a client").unwrap();
                wire.receive(1 << 20, 1, Instant::now() + LIMIT).unwrap().unwrap();
                if !reply.is_null() {
                    let frame = serde_json::to_vec(&reply).unwrap();
                    wire.send(&frame, &descriptors, 1 << 20, Instant::now() + LIMIT).unwrap();
                }
            });
            let e = Client::dial(&config).unwrap().attach(&key, false).unwrap_err();
            assert!(e.kind() == kind && e.detail().contains(said), "{reply}: {e}");
        });
    }
    // A descriptor that is no sealed memfd is not mapped.
    let sized = tempfile::NamedTempFile::new().unwrap();
    sized.as_file().set_len(1 << 20).unwrap();
    let socket = dir.path().join("file.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let client = ClientConfig { socket, allow_uids: vec![], allow_gids: vec![] };
    thread::scope(|scope| {
        scope.spawn(|| {
            let wire = Wire::new(listener.accept().unwrap().0, "a client").unwrap();
            wire.receive(1 << 20, 1, Instant::now() + LIMIT).unwrap().unwrap();
            let frame = serde_json::to_vec(&json!({ "attached": grant })).unwrap();
            wire.send(&frame, &[sized.as_file().as_fd()], 1 << 20, Instant::now() + LIMIT).unwrap();
        });
        let key = Key { image: "i".into(), rank: "r".into(), place: Place::Host };
        let attached = Client::dial(&client).unwrap().attach(&key, false).unwrap();
        let e = flashboot_loader::agent::AttachedProducer::map(attached).unwrap_err();
        assert_eq!(e.kind(), Kind::Permission, "{e}");
    });
}

#[test]
fn what_is_held_can_be_known_by_its_id_alone_and_is_proved_by_it() {
    let node = Node::new(64 * MIB);
    let image = node.image("m", 1);
    let rank = image.ranks()[0].clone();
    let key = Key { image: image.id().to_owned(), rank: rank.coordinate.to_string(), place: Place::Host };
    assert_eq!(
        node.client().manifest(&key.image, &key.rank).unwrap_err().kind(),
        Kind::Unavailable,
        "nothing is there"
    );
    let order = Order {
        key: key.clone(),
        payload: Payload::File(rank.path.clone()),
        manifest: Manifest::read(&image, &rank).unwrap(),
        priority: 0,
        hold: Some(None),
        wait: true,
    };
    node.client().keep(&order, &mut |_, _| ()).unwrap();
    let client = node.client();
    let found = client.manifest(&key.image, &key.rank).unwrap();
    assert_eq!(found.metadata.id, image.id());
    assert_eq!(found.table.digests(), rank.table.digests());
    // The connection goes on after it.
    assert_eq!(client.status().unwrap().entries.len(), 1);
    assert_eq!(client.attach(&key, true).unwrap().payload, rank.payload_bytes);
}
