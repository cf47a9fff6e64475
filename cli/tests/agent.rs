//! The node agent with real processes: staged, pushed and held, on host memory and on the stand-in driver; killed at any moment.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;
#[path = "../../loader/tests/objects/mod.rs"]
mod objects;

use common::{
    MIB, Place,
    fleet::{LIMIT, Proc},
    flip,
    http::{free, get},
    object, said,
    stand_in::Driver,
    text,
};
use serde_json::Value;
use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

/// A host with an image, perhaps GPUs, and an agent.
struct Node {
    place: Place,
    driver: Option<Driver>,
    image: PathBuf,
    agent: Option<Proc>,
}

impl Node {
    fn new(driver: bool) -> Self {
        let place = Place::new();
        let image = place.image("m", &[("a", 40 * MIB), ("b", 9)]);
        let driver = driver.then(|| Driver::new(&place));
        Self { place, driver, image, agent: None }
    }

    fn started(driver: bool, args: &[&str]) -> Self {
        let mut node = Self::new(driver);
        node.start(args);
        node
    }

    fn sockets(&self) -> PathBuf {
        self.place.path("sockets")
    }

    fn command(&self, args: &[&str]) -> Command {
        let sockets = self.sockets();
        let command = self.place.flashboot(&[args, &["--agent", text(&sockets), "--json"]].concat());
        match &self.driver {
            Some(driver) => driver.on(command),
            None => command,
        }
    }

    fn start(&mut self, args: &[&str]) -> Value {
        let mut agent = Proc::start(self.command(&[&["agent"], args].concat()));
        let said = agent.object();
        assert!(said["socket"].is_string(), "{said}");
        self.agent = Some(agent);
        said
    }

    fn run(&self, args: &[&str]) -> (i32, Value) {
        let output = self.command(args).output().unwrap();
        (output.status.code().unwrap_or(-1), object(&output))
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> Value {
        let output = self.command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", said(&output));
        object(&output)
    }

    /// Loads, and compares what came with the image's file.
    #[track_caller]
    fn load(&self, args: &[&str]) -> Value {
        let out = self.place.path("out");
        let report = self.ok(&[&["load", text(&self.image), "-o", text(&out)], args].concat());
        assert!(fs::read(&out).unwrap() == self.payload(), "other bytes than the image's: {report}");
        assert_eq!(report["verified"], true);
        report
    }

    fn file(&self) -> PathBuf {
        self.image.join("target-0-0-0-0.img")
    }

    fn payload(&self) -> Vec<u8> {
        fs::read(self.file()).unwrap()
    }

    fn entries(&self) -> Vec<Value> {
        self.ok(&["ls"])["entries"].as_array().unwrap().clone()
    }

    #[track_caller]
    fn until(&self, what: &str, wanted: impl Fn(&[Value]) -> bool) {
        let began = Instant::now();
        while !wanted(&self.entries()) {
            assert!(began.elapsed() < LIMIT, "{what}: {:?}", self.entries());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn source(report: &Value) -> &str {
    report["source"].as_str().unwrap()
}

#[test]
fn staged_and_held_images_are_loaded_in_the_order_of_the_sources() {
    let node = Node::started(false, &["--limit", "1GiB"]);
    let report = node.load(&[]);
    assert_eq!(source(&report), "image");
    let skipped: Vec<_> = report["skips"].as_array().unwrap().iter().map(|skip| &skip["kind"]).collect();
    assert_eq!(skipped, ["held", "staged"], "it was asked, and had nothing: {report}");
    let entry = node.ok(&["stage", text(&node.image), "--priority", "-3"]);
    assert_eq!(
        (&entry["state"], &entry["held"], &entry["priority"]),
        (&"ready".into(), &false.into(), &(-3).into())
    );
    let report = node.load(&[]);
    assert_eq!(
        (source(&report), &report["bytes_read"]),
        ("staged", &0.into()),
        "nothing is read from disk: {report}"
    );
    assert_eq!(report["bytes_copied"], node.payload().len());
    let entry = node.ok(&["hold", text(&node.image)]);
    assert_eq!((&entry["held"], &entry["place"]), (&true.into(), &"host".into()));
    let report = node.load(&[]);
    assert_eq!(
        (source(&report), &report["bytes_copied"]),
        ("held", &0.into()),
        "it is used where it is: {report}"
    );
    let report = node.load(&["--attach", "private"]);
    assert_eq!((source(&report), &report["bytes_copied"]), ("held", &node.payload().len().into()));
    let report = node.load(&["--sources", "staged,image"]);
    assert_eq!(source(&report), "staged", "what is held can be copied too");
    let (code, report) = node.run(&["load", text(&node.place.path("m")), "--sources", "held,checkpoint"]);
    assert_eq!((code, source(&report)), (0, "checkpoint"), "the agent keeps images: {report}");
    let image = node.entries()[0]["image"].as_str().unwrap().to_owned();
    let gone = node.ok(&["evict", &image[..8]]);
    assert_eq!(gone["evicted"].as_array().unwrap().len(), 1);
    assert_eq!(source(&node.load(&[])), "image");
    let (code, refused) = node.run(&["evict", "ffff"]);
    assert_eq!((code, &refused["error"]["kind"]), (1, &"unavailable".into()), "{refused}");
}

#[test]
fn an_image_that_its_id_alone_names_comes_from_the_agent_or_nowhere() {
    let mut node = Node::new(false);
    let ranks = node.place.two_ranks("n", [16, 8]);
    let id = |image: &Path| node.place.ok(&["inspect", text(image)])["id"].as_str().unwrap().to_owned();
    let (whole, of_two) = (id(&node.image), id(&ranks));
    let refused = |node: &Node, args: &[&str]| {
        let (code, said) = node.run(&[&["load"], args].concat());
        (code, said["error"]["kind"].as_str().unwrap().to_owned(), said["error"]["message"].to_string())
    };
    let (code, kind, said) = refused(&node, &["--image", &whole]);
    assert_eq!((code, &*kind), (1, "unavailable"), "nobody is there: {said}");
    node.start(&["--limit", "1GiB"]);
    let (code, kind, said) = refused(&node, &["--image", &whole]);
    assert_eq!((code, &*kind), (1, "unavailable"), "it has nothing: {said}");
    node.ok(&["stage", text(&node.image)]);
    let out = node.place.path("out");
    for (named, how) in [(&*whole, "staged"), (&whole[..8], "staged"), (&whole.to_uppercase()[..9], "held")] {
        if how == "held" {
            node.ok(&["hold", text(&node.image)]);
        }
        let report = node.ok(&["load", "--image", named, "-o", text(&out)]);
        assert_eq!((source(&report), &report["image"]), (how, &Value::from(&*whole)), "{report}");
        assert!(report["verified"] == true && fs::read(&out).unwrap() == node.payload());
    }
    let (code, _, said) = refused(&node, &["--image", &whole, "--rank", "target-0-9-0-0"]);
    assert!(code != 0 && said.contains("target-0-9-0-0"), "{said}");
    let (code, kind, said) = refused(&node, &["--image", &whole, "--sources", "image"]);
    assert_eq!((code, &*kind), (2, "invalid"), "{said}");
    // Which of several ranks is meant is never guessed.
    node.ok(&["stage", text(&ranks), "--rank", "target-0-1-1-0"]);
    let (code, kind, said) = refused(&node, &["--image", &of_two]);
    assert!((code, &*kind) == (2, "invalid") && said.contains("target-0-1-1-0"), "{said}");
    let report = node.ok(&["load", "--image", &of_two[..8], "--rank", "target-0-1-1-0"]);
    assert_eq!((source(&report), &report["rank"]), ("staged", &"target-0-1-1-0".into()));
    // Beside a place it says what has to lie there.
    assert_eq!(source(&node.load(&["--image", &whole[..8], "--sources", "image"])), "image");
    let (code, kind, said) = refused(&node, &[text(&node.image), "--image", &of_two[..8]]);
    assert_eq!((code, &*kind), (3, "mismatch"), "{said}");
    assert_eq!(node.run(&["load", "--image", &whole[..7]]).0, 2, "too short to be one");
}

#[test]
fn more_than_the_limit_is_refused_with_sizes_and_nothing_damaged_is_kept() {
    let node = Node::started(false, &["--limit", "30MiB"]);
    let (code, refused) = node.run(&["stage", text(&node.image)]);
    assert_eq!((code, &refused["error"]["kind"]), (1, &"exhausted".into()), "{refused}");
    let detail = refused["error"]["detail"].as_str().unwrap();
    assert!(detail.contains("the agent's limit is 30MiB"), "{detail}");
    assert!(refused["error"]["remedy"].as_str().unwrap().contains("agent.limit"));
    drop(node);
    let node = Node::started(false, &["--limit", "1GiB"]);
    flip(&node.file(), 20 << 20);
    let (code, refused) = node.run(&["stage", text(&node.image)]);
    assert_eq!((code, &refused["error"]["kind"]), (3, &"corrupt".into()), "{refused}");
    assert_eq!(node.entries(), Vec::<Value>::new());
    flip(&node.file(), 20 << 20);
    node.ok(&["stage", text(&node.image)]);
    assert_eq!(source(&node.load(&[])), "staged");
}

#[test]
fn an_agent_killed_at_any_moment_leaves_nothing_ready_and_the_next_one_works() {
    let mut node = Node::new(false);
    for moment in [0, 5, 20, 60, 150] {
        node.start(&["--limit", "1GiB"]);
        // Never waited for: it may be anywhere in its work.
        let mut staging = Proc::start(node.command(&["stage", text(&node.image)]));
        thread::sleep(Duration::from_millis(moment));
        node.agent.as_mut().unwrap().kill();
        let ended = staging.ended();
        let said = staging.object();
        let whole = ended.success() && said["state"] == "ready";
        let lost =
            !ended.success() && ["source-lost", "unavailable"].iter().any(|k| said["error"]["kind"] == *k);
        assert!(whole || lost, "{moment} ms: {said}");
        // Its socket is still there; a load goes on without it.
        assert!(node.sockets().join("agent.sock").exists());
        assert_eq!(source(&node.load(&[])), "image");
        let (code, refused) = node.run(&["ls"]);
        assert_eq!((code, &refused["error"]["kind"]), (1, &"unavailable".into()), "{refused}");
    }
    node.start(&["--limit", "1GiB"]);
    assert_eq!(node.entries(), Vec::<Value>::new(), "nothing stale is ready");
    node.ok(&["stage", text(&node.image)]);
    assert_eq!(source(&node.load(&[])), "staged");
}

#[test]
fn a_second_agent_is_refused_by_name_and_the_first_stops_when_it_is_told_to() {
    let mut node = Node::new(false);
    let heard = UnixDatagram::bind(node.place.path("notify")).unwrap();
    heard.set_read_timeout(Some(LIMIT)).unwrap();
    let mut command = node.command(&["agent", "--limit", "1GiB"]);
    let mut first = Proc::start(command.env("NOTIFY_SOCKET", node.place.path("notify")).spawn_ready());
    let said = first.object();
    let hear = || {
        let mut word = [0; 100];
        let len = heard.recv(&mut word).unwrap();
        String::from_utf8_lossy(&word[..len]).into_owned()
    };
    assert_eq!(hear(), "READY=1");
    let (code, refused) = node.run(&["agent"]);
    assert_eq!((code, &refused["error"]["kind"]), (1, &"busy".into()), "{refused}");
    let detail = refused["error"]["detail"].as_str().unwrap();
    assert!(detail.contains(&format!("process {}", said["pid"])), "{detail}");
    node.ok(&["hold", text(&node.image), "--lease", "1h"]);
    first.signal(rustix::process::Signal::TERM);
    assert!(first.ended().success());
    assert_eq!(hear(), "STOPPING=1");
    assert_eq!(fs::read_dir(node.sockets()).unwrap().count(), 0, "nothing is left");
    node.start(&["--limit", "1GiB"]);
    assert_eq!(node.entries(), Vec::<Value>::new());
}

/// So that a command whose environment was changed can be handed on.
trait SpawnReady {
    fn spawn_ready(&mut self) -> Command;
}

impl SpawnReady for Command {
    fn spawn_ready(&mut self) -> Command {
        std::mem::replace(self, Self::new("true"))
    }
}

#[test]
fn what_lies_among_objects_is_staged_from_there_and_asked_for_as_often_as_is_allowed() {
    let node = Node::started(false, &["--limit", "1GiB"]);
    let server = objects::Server::start(&node.image);
    let stage = ["stage", "--object", &server.url];
    // One attempt, and a store that has no time for it: nothing is kept.
    server.faults.busy.store(u32::MAX, Ordering::Relaxed);
    let mut once = node.command(&stage);
    let refused = once.env("FLASHBOOT_LOAD__ATTEMPTS", "1").output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    assert!(object(&refused)["error"]["message"].as_str().unwrap().contains("target-0-0-0-0.img"));
    assert_eq!(node.entries(), Vec::<Value>::new());
    assert_eq!(server.faults.asked.lock().unwrap().values().max(), Some(&1));
    // A store that is busy for a while.
    server.faults.busy.store(2, Ordering::Relaxed);
    let entry = node.ok(&stage);
    assert_eq!((&entry["state"], &entry["held"]), (&"ready".into(), &false.into()), "{entry}");
    assert_eq!(source(&node.load(&[])), "staged");
    node.ok(&["evict", "--all"]);
    // What is not the image's is not kept, wherever it came from.
    server.faults.flipped.store(true, Ordering::Relaxed);
    let (code, refused) = node.run(&stage);
    assert_eq!((code, &refused["error"]["kind"]), (3, &"corrupt".into()), "{refused}");
    assert_eq!(node.entries(), Vec::<Value>::new());
    server.faults.flipped.store(false, Ordering::Relaxed);
    let held = node.ok(&["hold", "--object", &server.url]);
    assert_eq!(held["held"], true);
    assert_eq!(source(&node.load(&[])), "held");
    let (code, _) = node.run(&["stage"]);
    assert_eq!(code, 2, "nothing was named");
}

#[test]
fn what_it_keeps_is_shown_by_http() {
    let at = free();
    let node = Node::started(false, &["--limit", "1GiB", "--http", &at]);
    for probe in ["/livez", "/readyz"] {
        assert_eq!(get(&at, probe).0, 200, "{probe}");
    }
    node.ok(&["hold", text(&node.image)]);
    node.load(&[]);
    let (code, metrics) = get(&at, "/metrics");
    assert_eq!(code, 200);
    for line in [
        "flashboot_ready 1",
        "flashboot_agent_limit_bytes 1073741824",
        "flashboot_agent_arenas{state=\"ready\",as=\"held\"} 1",
        "flashboot_agent_events_total{event=\"attached\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found.starts_with(line)), "no {line} in\n{metrics}");
    }
    let status: Value = serde_json::from_str(&get(&at, "/status").1).unwrap();
    let entry = &status["agent"]["entries"][0];
    assert_eq!(
        (&entry["rank"], &entry["verified"]),
        (&"target-0-0-0-0".into(), &node.payload().len().into())
    );
}

#[test]
fn what_is_staged_is_pushed_into_a_gpu_by_the_agent_or_copied_by_the_engine() {
    let node = Node::started(true, &["--limit", "1GiB"]);
    node.ok(&["stage", text(&node.image)]);
    for device in ["cuda:0", "cuda:1", "cuda:0"] {
        let report = node.load(&["--device", device]);
        assert_eq!(source(&report), "staged", "{report}");
        assert_eq!(report["bytes_copied"], node.payload().len());
        assert_eq!(report["peak_host_bytes"], 0, "this process pins nothing: {report}");
        assert!(report["phases_ms"]["verify"].as_f64().unwrap() > 0.0, "and verifies by itself: {report}");
    }
    assert_eq!(node.ok(&["ls"])["pinned"], node.payload().len());
    // The engine copies by itself: out of the agent's memory, which it pins for that and unpins afterwards.
    let report = node.load(&["--device", "cuda:0", "--no-push"]);
    assert_eq!((source(&report), &report["peak_host_bytes"]), ("staged", &0.into()), "{report}");
    for phase in ["pin", "h2d", "verify", "unpin"] {
        assert!(report["phases_ms"][phase].as_f64().unwrap() > 0.0, "{phase}: {report}");
    }
    // Where the driver pins no memory that may only be read: through windows of its own, and the reason is said.
    let mut windows = node.command(&["load", text(&node.image), "--device", "cuda:0", "--no-push"]);
    let output = windows.env("FLASHBOOT_CUDA_SIM_NO_READ_ONLY_REGISTER", "1").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let report = object(&output);
    assert_eq!((source(&report), &report["verified"]), ("staged", &true.into()), "{report}");
    assert!(report["peak_host_bytes"].as_u64().unwrap() > 0, "{report}");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(log.contains("registers no memory that may only be read"), "{log}");
    assert_eq!(node.ok(&["evict", "--all"])["evicted"].as_array().unwrap().len(), 1);
    assert_eq!(node.ok(&["ls"])["pinned"], 0);
    assert_eq!(source(&node.load(&["--device", "cuda:0"])), "image");
}

#[test]
fn an_agent_that_dies_under_a_load_is_left_and_the_image_goes_on() {
    let mut node = Node::new(true);
    // What the agent queues on a GPU takes up to two seconds: it dies in the middle of a push.
    let mut command = node.command(&["agent", "--limit", "1GiB"]);
    command.env("FLASHBOOT_CUDA_SIM_LATE_US", "2000000");
    let mut agent = Proc::start(command);
    agent.object();
    node.agent = Some(agent);
    node.ok(&["stage", text(&node.image)]);
    let out = node.place.path("out");
    let args = ["load", text(&node.image), "--device", "cuda:0", "-o", text(&out)];
    let mut loading = Proc::start(node.command(&args));
    node.until("it pushes", |entries| entries[0]["attached"] == 1 || out.exists());
    node.agent.as_mut().unwrap().kill();
    let report = loading.object();
    assert!(loading.ended().success(), "{report}");
    assert!(["image", "staged"].contains(&source(&report)) && report["verified"] == true, "{report}");
    assert!(fs::read(&out).unwrap() == node.payload());
}

#[test]
fn an_agent_that_cannot_pin_is_no_reason_to_read_the_disk() {
    let mut node = Node::new(true);
    let mut command = node.command(&["agent", "--limit", "1GiB"]);
    command.env("FLASHBOOT_CUDA_SIM_FAULTS", "cuMemHostRegister_v2:*:OUT_OF_MEMORY");
    let mut agent = Proc::start(command);
    agent.object();
    node.agent = Some(agent);
    node.ok(&["stage", text(&node.image)]);
    let report = node.load(&["--device", "cuda:0"]);
    assert_eq!((source(&report), &report["bytes_read"]), ("staged", &0.into()), "{report}");
    assert!(report["phases_ms"]["unpin"].as_f64().unwrap() > 0.0, "the engine copies by itself: {report}");
    // Nor is it one not to hold.
    node.ok(&["hold", text(&node.image), "--device", "cuda:1"]);
    assert_eq!(source(&node.load(&["--device", "cuda:1"])), "held");
}

#[test]
fn an_arena_held_on_a_gpu_is_attached_where_it_is_and_outlives_its_engine() {
    let node = Node::started(true, &["--limit", "1GiB"]);
    node.ok(&["stage", text(&node.image)]);
    let entry = node.ok(&["hold", text(&node.image), "--device", "cuda:1"]);
    assert!(entry["place"]["gpu"].is_string(), "{entry}");
    for _ in 0..2 {
        let report = node.load(&["--device", "cuda:1"]);
        assert_eq!((source(&report), &report["bytes_copied"]), ("held", &0.into()), "{report}");
    }
    let report = node.load(&["--device", "cuda:1", "--attach", "private"]);
    assert_eq!((source(&report), &report["bytes_copied"]), ("held", &node.payload().len().into()));
    let report = node.load(&["--device", "cuda:0"]);
    assert_eq!(source(&report), "staged", "it is held on the other one: {report}");
    node.until("every engine has gone", |entries| entries.iter().all(|entry| entry["attached"] == 0));
    // Without the staged copy it comes from its file.
    node.ok(&["evict", "--all"]);
    node.ok(&["hold", text(&node.image), "--device", "cuda:0"]);
    let report = node.load(&["--device", "cuda:0"]);
    assert_eq!(source(&report), "held");
}

#[test]
fn an_engine_killed_while_attached_lets_go_and_harms_nobody() {
    let node = Node::started(true, &["--limit", "1GiB"]);
    let hold = ["hold", text(&node.image), "--device", "cuda:0"];
    node.ok(&hold);
    // The agent has given it the arena; the driver does not answer the engine, which maps it.
    let hang = node.driver.as_ref().unwrap().hang();
    let args = ["load", text(&node.image), "--device", "cuda:0", "--sources", "held"];
    let mut engine = Proc::start(node.command(&args));
    node.until("it is attached", |entries| entries[0]["attached"] == 1);
    let (code, refused) = node.run(&["evict", "--all"]);
    assert_eq!((code, &refused["error"]["kind"]), (1, &"busy".into()), "{refused}");
    assert!(engine.is_running());
    engine.kill();
    drop(hang);
    node.until("it has let go", |entries| entries[0]["attached"] == 0);
    assert_eq!(source(&node.load(&["--device", "cuda:0"])), "held");
    node.until("so has the next one", |entries| entries[0]["attached"] == 0);
    node.ok(&["evict", "--all"]);
    node.ok(&hold);
}

#[test]
fn what_is_held_yields_to_a_load_of_a_higher_priority() {
    let mut node = Node::new(true);
    // Room for one arena, and not for two.
    node.driver.as_mut().unwrap().only("MEM", "64MiB");
    node.start(&["--limit", "1GiB"]);
    node.ok(&["hold", text(&node.image), "--device", "cuda:0", "--priority", "3"]);
    let args = ["load", text(&node.image), "--device", "cuda:0", "--sources", "image", "--priority"];
    let (code, refused) = node.run(&[&args[..], &["3"]].concat());
    assert_eq!((code, &refused["error"]["kind"]), (1, &"exhausted".into()), "{refused}");
    assert_eq!(node.entries().len(), 1);
    let report = node.ok(&[&args[..], &["4"]].concat());
    assert_eq!(source(&report), "image");
    assert_eq!(node.entries(), Vec::<Value>::new());
}
