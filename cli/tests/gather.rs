//! `gather` with real processes: nodes that read a part each and complete one another, and what happens when one is lost.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests panic where they fail")]

mod common;

use common::{
    MIB, Place,
    fleet::{Proc, service},
    flip, text,
};
use serde_json::Value;
use std::{collections::BTreeSet, fs, path::PathBuf};

/// An image of five blocks, a service, and nodes with a number each.
struct Nodes {
    place: Place,
    image: PathBuf,
    endpoint: String,
    _service: Proc,
    transport: &'static str,
}

impl Nodes {
    fn new(transport: &'static str) -> Self {
        let place = Place::in_memory();
        let image = place.image("m", &[("a", 70 * MIB), ("b", 9)]);
        let (service, endpoint) = service(&place, "127.0.0.1:0");
        Self { place, image, endpoint, _service: service, transport }
    }

    fn out(&self, ring: &str, number: usize) -> PathBuf {
        self.place.path(&format!("out-{ring}-{number}"))
    }

    /// The racks put them into the order of their numbers.
    fn node(&self, ring: &str, nodes: usize, number: usize, more: &[&str]) -> Proc {
        let (n, rack, out) = (nodes.to_string(), format!("r{number}"), self.out(ring, number));
        let args = ["gather", text(&self.image), "--nodes", &n, "--ring", ring, "--rack", &rack];
        let at = ["-o", text(&out), "--rendezvous", &self.endpoint, "--transport", self.transport, "--json"];
        let small = ["--stall", "5s", "--threads", "1", "--patience", "30s", "--drain", "20s"];
        Proc::start(self.place.flashboot(&[&args[..], &at, &small, more].concat()))
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
    std::thread::scope(|scope| {
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
