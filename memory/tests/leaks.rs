//! Arenas, imports and jobs give everything back. One test: others in the process would change the counts.
#![allow(clippy::unwrap_used, missing_docs)]

use flashboot_core::{Arena, ArenaSpec, ByteRange, Pull};
use flashboot_memory::{CopyEngine, CopyEngineConfig, Expected, HostArena, HostArenaConfig, ImportedArena};
use std::{os::fd::AsFd, sync::Arc};

fn counts() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let arenas = maps.lines().filter(|line| line.contains("flashboot-arena")).count();
    (arenas, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

#[test]
fn a_hundred_rounds_leave_no_mapping_and_no_descriptor() {
    let before = counts();
    let engine = CopyEngine::new(&CopyEngineConfig { threads: Some(2) }).unwrap();
    for round in 0..100u64 {
        let spec = ArenaSpec { payload: 70_000 + round, shards: 1 };
        let (source, _) = HostArena::create(spec, &HostArenaConfig::default()).unwrap();
        let (sink, _) = HostArena::create(spec, &HostArenaConfig::default()).unwrap();
        let expected = Expected { payload: spec.payload, capacity: source.capacity(), shards: 1 };
        let fd = source.as_fd().try_clone_to_owned().unwrap();
        let peer = Arc::new(ImportedArena::map(fd, expected).unwrap());
        let pull = Pull { range: ByteRange::new(0, spec.payload), hash: Some(1024) };
        let job = engine.pull(&peer, &sink, pull).unwrap();
        // Both ends may go while the job runs.
        drop((source, sink, peer));
        if round % 2 == 0 {
            job.wait().unwrap();
        }
    }
    drop(engine);
    assert_eq!(counts(), before);
}
