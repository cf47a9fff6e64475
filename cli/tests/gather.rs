//! `gather` with real processes: nodes that read a part each and complete one another, and what happens when one is lost.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB, Place,
    fleet::{LIMIT, Proc, service, until},
    flip,
    http::{free, get},
    stand_in::Driver,
    text,
};
use rustix::process::Signal;
use serde_json::Value;
use std::{collections::BTreeSet, fs, path::PathBuf, process::Command, thread, time::Duration};

/// An image of five blocks, a service, and nodes with a number each.
struct Nodes {
    place: Place,
    image: PathBuf,
    endpoint: String,
    service: Proc,
    transport: &'static str,
}

impl Nodes {
    fn new(transport: &'static str) -> Self {
        let place = Place::in_memory();
        let image = place.image("m", &[("a", 70 * MIB), ("b", 9)]);
        let (service, endpoint) = service(&place, "127.0.0.1:0");
        Self { place, image, endpoint, service, transport }
    }

    fn out(&self, ring: &str, number: usize) -> PathBuf {
        self.place.path(&format!("out-{ring}-{number}"))
    }

    /// The racks put them into the order of their numbers.
    fn node(&self, ring: &str, nodes: usize, number: usize, more: &[&str]) -> Proc {
        Proc::start(self.command(ring, nodes, number, &[&["--stall", "5s"], more].concat()))
    }

    fn command(&self, ring: &str, nodes: usize, number: usize, more: &[&str]) -> Command {
        let (n, rack, out) = (nodes.to_string(), format!("r{number}"), self.out(ring, number));
        let args = ["gather", text(&self.image), "--nodes", &n, "--ring", ring, "--rack", &rack];
        let at = ["-o", text(&out), "--rendezvous", &self.endpoint, "--transport", self.transport, "--json"];
        let small = ["--threads", "1", "--patience", "30s", "--drain", "20s"];
        self.place.flashboot(&[&args[..], &at, &small, more].concat())
    }

    #[track_caller]
    fn check(&self, ring: &str, number: usize, node: &mut Proc) -> Value {
        let report = node.object();
        assert!(report["error"].is_null(), "{ring}: {report}");
        assert_eq!((&report["verified"], &report["blocks"]), (&5.into(), &5.into()), "{ring}: {report}");
        assert_eq!(report["index"], number, "{ring}");
        for field in ["nodes", "read_ms", "gather_ms", "bytes_per_s"] {
            assert!(report[field].is_number(), "`{field}` of {report}");
        }
        assert!(node.ended().success(), "{ring}");
        let payload = fs::read(self.image.join("target-0-0-0-0.img")).unwrap();
        assert!(fs::read(self.out(ring, number)).unwrap() == payload, "{ring}: other bytes than the image's");
        report
    }
}

fn numbers(value: &Value) -> BTreeSet<u64> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

#[test]
fn nodes_read_a_part_each_and_complete_one_another() {
    for (transport, nodes, more) in [
        ("ipc", 3, &[][..]),
        ("tcp", 4, &["--chunk", "16MiB"]),
        // More nodes than blocks: the last ones have nothing to read from disk.
        ("ipc", 7, &["--chunk", "16MiB"]),
        ("tcp", 1, &[]),
    ] {
        let all = Nodes::new(transport);
        let mut procs: Vec<_> = (0..nodes).map(|number| all.node("g", nodes, number, more)).collect();
        for (number, proc) in procs.iter_mut().enumerate() {
            let report = all.check("g", number, proc);
            assert_eq!((&report["losses"], &report["nodes"]), (&0.into(), &nodes.into()));
            assert_eq!(numbers(&report["from_disk"]), BTreeSet::from([number as u64]), "each its own");
            let chunk = if more.is_empty() { 5_usize.div_ceil(nodes) * 16 * MIB } else { 16 * MIB };
            assert_eq!(report["chunk_bytes"], chunk, "a whole shard, or what was asked for");
            assert_eq!(report["sources"].as_array().unwrap().len(), usize::from(nodes > 1));
        }
    }
}

#[test]
fn a_lost_nodes_shard_is_read_again_by_its_successor_and_the_rest_complete() {
    let over = |transport: &'static str| {
        let all = Nodes::new(transport);
        for (victim, moment) in
            [(1, "registered"), (2, "pull:0"), (0, "chunk:0"), (3, "pull:2"), (1, "chunk:2"), (2, "complete")]
        {
            let ring = format!("{victim}-{}", moment.replace(':', "-"));
            let mut procs: Vec<_> = (0..4)
                .map(|number| {
                    let kill = ["--kill", moment];
                    all.node(&ring, 4, number, if number == victim { &kill } else { &[] })
                })
                .collect();
            for (number, proc) in procs.iter_mut().enumerate() {
                if number == victim {
                    assert!(!proc.ended().success());
                    assert!(!all.out(&ring, number).exists(), "a killed node leaves no payload");
                    continue;
                }
                let report = all.check(&ring, number, proc);
                let disk = numbers(&report["from_disk"]);
                let mut expected = BTreeSet::from([number as u64]);
                if number == (victim + 1) % 4 && report["losses"] == 1 {
                    expected.insert(victim as u64);
                }
                assert_eq!(disk, expected, "{transport} {ring}: {report}");
                // Who has nothing of a shard cannot have got it from the dead.
                assert!(
                    number != (victim + 1) % 4
                        || report["losses"] == 1
                        || moment == "complete"
                        || moment == "chunk:2",
                    "{transport} {ring}: {report}"
                );
            }
        }
    };
    thread::scope(|scope| {
        ["ipc", "tcp"].into_iter().for_each(|transport| drop(scope.spawn(move || over(transport))));
    });
}

#[test]
fn two_nodes_in_a_row_may_be_lost_and_a_bad_disk_is_one_nodes_loss() {
    let all = Nodes::new("ipc");
    let mut procs: Vec<_> = (0..4)
        .map(|n| all.node("two", 4, n, if n == 1 || n == 2 { &["--kill", "pull:0"] } else { &[] }))
        .collect();
    for number in [0, 3] {
        let report = all.check("two", number, &mut procs[number]);
        if number == 3 {
            assert_eq!(numbers(&report["from_disk"]), BTreeSet::from([1, 2, 3]), "{report}");
        }
    }
    // One node's copy of the image is damaged in its own part: it fails, and says so; its successor reads that part.
    let good = all.image.clone();
    let bad = all.place.path("bad");
    fs::create_dir(&bad).unwrap();
    for entry in fs::read_dir(&good).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), bad.join(entry.file_name())).unwrap();
    }
    // Five blocks over three nodes: 2, 2 and 1.
    flip(&bad.join("target-0-0-0-0.img"), 33 * MIB as i64);
    let mut all = all;
    let mut procs: Vec<_> = (0..3)
        .map(|number| {
            all.image = if number == 1 { bad.clone() } else { good.clone() };
            all.node("bad", 3, number, &[])
        })
        .collect();
    all.image = good;
    let error = procs[1].object();
    assert_eq!(error["error"]["kind"], "corrupt", "{error}");
    assert_eq!(procs[1].ended().code(), Some(3));
    all.check("bad", 0, &mut procs[0]);
    let report = all.check("bad", 2, &mut procs[2]);
    assert_eq!(numbers(&report["from_disk"]), BTreeSet::from([1, 2]), "{report}");
}

#[test]
fn a_neighbour_below_the_floor_is_left_and_its_shard_read_from_disk() {
    let all = Nodes::new("tcp");
    let mut procs: Vec<_> = (0..3)
        .map(|number| {
            // Two blocks at this rate take half a minute, and seven seconds at the floor.
            let pace = if number == 1 { ["--rate", "1MB"] } else { ["--floor", "5MB"] };
            let mut command = all.command("slow", 3, number, &[&["--stall", "50s"][..], &pace].concat());
            command.env("FLASHBOOT_REPLICATE__FLOOR_WINDOW", "2s");
            Proc::start(command)
        })
        .collect();
    for (number, proc) in procs.iter_mut().enumerate() {
        let report = all.check("slow", number, proc);
        let (losses, disk) = if number == 2 { (1, vec![1, 2]) } else { (0, vec![number as u64]) };
        assert_eq!(report["losses"], losses, "only whoever reads from it leaves it: {report}");
        assert_eq!(numbers(&report["from_disk"]), BTreeSet::from_iter(disk), "{report}");
    }
    let log = procs[2].stderr.recv_timeout(LIMIT).unwrap();
    assert!(log.contains("below the floor of 5000000B a second"), "{log}");
}

#[test]
fn a_service_killed_and_started_again_loses_a_ring_no_node() {
    let mut all = Nodes::new("tcp");
    let at = free();
    (all.service, all.endpoint) = service(&all.place, &at);
    let http = free();
    // Five blocks in two seconds each: 2, 2 and 1.
    let slow = ["--rate", "8MB", "--chunk", "16MiB", "--stall", "50s"];
    let mut procs: Vec<_> = (0..3)
        .map(|number| {
            let shown = [&slow[..], &["--http", &http]].concat();
            Proc::start(all.command("r", 3, number, if number == 0 { &shown } else { &slow }))
        })
        .collect();
    // The first has no more than its own shard yet, and everybody reads.
    until("it reads", || get_or(&http, "/status").contains("\"upstream\":\""));
    all.service.kill();
    thread::sleep(Duration::from_secs(1));
    let (again, _) = service(&all.place, &at);
    all.service = again;
    for (number, proc) in procs.iter_mut().enumerate() {
        let report = all.check("r", number, proc);
        assert_eq!(report["losses"], 0, "nobody left before the others were done: {report}");
        assert_eq!(numbers(&report["from_disk"]), BTreeSet::from([number as u64]), "{report}");
    }
    let log = procs[0].stderr.recv_timeout(LIMIT).unwrap();
    // Told when it goes, and not at every question; a machine that is busy may see it go twice.
    assert!((1..=3).contains(&log.matches("the service does not answer").count()), "{log}");
}

/// What is answered there, if anything is.
fn get_or(at: &str, path: &str) -> String {
    match std::net::TcpStream::connect(at) {
        Ok(_) => get(at, path).1,
        Err(_) => String::new(),
    }
}

#[test]
fn a_node_shows_itself_as_a_clone_does() {
    let all = Nodes::new("tcp");
    let http = free();
    let mut first = all.node("m", 2, 0, &["--rate", "4MB", "--chunk", "16MiB", "--http", &http]);
    until("it waits for the other", || get_or(&http, "/status").contains("\"phase\":\"filling\""));
    assert_eq!(get(&http, "/readyz").0, 503, "not before everything is verified");
    // Slow to give: the first is seen while it reads, and stays until the second has all.
    let mut second = all.node("m", 2, 1, &["--rate", "20MB", "--chunk", "16MiB"]);
    until("it reads", || get_or(&http, "/status").contains("\"upstream\":\""));
    let status: Value = serde_json::from_str(&get(&http, "/status").1).unwrap();
    let member = &status["members"][0];
    assert_eq!((&member["role"], &member["standing"]), (&"gather".into(), &"registered".into()), "{status}");
    let payload = fs::metadata(all.image.join("target-0-0-0-0.img")).unwrap().len();
    assert_eq!(member["content"]["bytes"], payload, "{status}");
    until("it is ready", || get(&http, "/readyz").0 == 200);
    let metrics = get(&http, "/metrics").1;
    let report = first.object();
    assert_eq!((&report["member"], &report["trace"]), (&member["member"], &member["trace"]), "{report}");
    // Three blocks of five from its disk, the rest by tcp.
    let disk = 3 * 16 * MIB as u64;
    for (line, value) in [
        ("flashboot_bytes_total{from=\"disk\"}".to_owned(), disk),
        ("flashboot_bytes_total{from=\"tcp\"}".to_owned(), payload - disk),
        ("flashboot_ready".to_owned(), 1),
        (format!("flashboot_verified_bytes{{member={},role=\"gather\"}}", report["member"]), payload),
    ] {
        let found = metrics.lines().find(|found| found.starts_with(&format!("{line} ")));
        let found = found.and_then(|found| found.rsplit(' ').next()?.parse::<f64>().ok());
        assert!(found.is_some_and(|found| (found - value as f64).abs() < 0.5), "{line} {value}:\n{metrics}");
    }
    second.object();
    first.signal(Signal::TERM);
    assert_eq!(first.ended().code(), Some(0));
}

#[test]
fn a_dead_node_whose_memory_outlives_it_is_left_when_the_service_says_so() {
    let all = Nodes::new("auto");
    let driver = Driver::new(&all.place).with_imex();
    let http = free();
    // The first is slow, so that the second has its own shard for long and no other; the third reads that by imex, and waits. No
    // more than a lease: a word may stand still for ten minutes.
    let start = |number: usize| {
        let own: &[&str] = match number {
            0 => &["--allow", "tcp", "--rate", "2MB"],
            1 => &["--allow", "imex,tcp"],
            _ => &["--allow", "imex,tcp", "--http", &http],
        };
        let more = [&["--stall", "10m", "--device", "cuda:0"], own].concat();
        Proc::start(driver.on(all.command("imex", 3, number, &more)))
    };
    let mut procs: Vec<_> = (0..3).map(start).collect();
    // Its own shard, of one block, and the second's.
    let has = |status: &str| {
        let status: Value = serde_json::from_str(status).unwrap_or_default();
        status["members"][0]["verified"].as_u64() > Some(17 * MIB as u64)
    };
    until("the third has the second's shard", || has(&get_or(&http, "/status")));
    procs[1].kill();
    for number in [0, 2] {
        let report = all.check("imex", number, &mut procs[number]);
        assert_eq!(report["losses"], u64::from(number == 2), "{report}");
    }
    let log = procs[2].stderr.recv_timeout(LIMIT).unwrap();
    assert!(log.contains("the source has ended with 0 of"), "{log}");
}
