//! Loads into host memory: sources in order, faults in the middle, nothing unverified.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use flashboot_core::{
    Arena, ArenaSpec, ByteRange, ByteSize, Code, Digests, Error, Geometry, Kind, Result, digest,
};
use flashboot_loader::{
    io::{Call, Engine, Io, IoConfig, Ops},
    pipeline::FillConfig,
    source::{Delivered, ImageSource, Load, Source, SourceKind, Wanted},
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

const BLOCK: u64 = 64 << 10;
const PAYLOAD: u64 = 9 * BLOCK + 4096;

fn payload() -> Vec<u8> {
    (0..PAYLOAD).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

fn digests() -> Digests {
    Digests::of(&Geometry::new(PAYLOAD, BLOCK, BLOCK, 1).unwrap(), &payload())
}

fn image(dir: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = payload();
    change(&mut bytes);
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn config(engine: Engine, ops: Arc<dyn Ops>) -> FillConfig {
    let io = IoConfig { engine, piece: ByteSize(8192), depth: 4, ..IoConfig::default() };
    FillConfig { io: Io::with_ops(&io, ops).unwrap(), threads: 3, ..FillConfig::new(&io).unwrap() }
}

fn load(config: FillConfig, made: &Arc<AtomicU32>) -> Load {
    let wanted = Wanted {
        image: None,
        rank: "target-0-0-0-0".into(),
        payload: PAYLOAD,
        digests: Arc::new(digests()).into(),
    };
    let made = Arc::clone(made);
    Load::new(wanted, config, move || {
        made.fetch_add(1, Ordering::Relaxed);
        let spec = ArenaSpec { payload: PAYLOAD, shards: 1 };
        Ok(HostArena::create(spec, &HostArenaConfig::default())?.0 as _)
    })
}

fn source(path: &Path) -> Box<dyn Source> {
    Box::new(ImageSource::new(path, digests()))
}

fn holds(arena: &dyn Arena) {
    let mut found = vec![0; PAYLOAD as usize];
    arena.copy_out(0, &mut found).unwrap();
    assert!(found == payload());
}

fn system() -> Arc<dyn Ops> {
    Arc::new(flashboot_loader::io::System)
}

#[test]
fn an_image_is_loaded_and_verified_by_either_engine() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "a.img", |_| ());
    for engine in [Engine::Pread, Engine::Auto] {
        let made = Arc::default();
        let load = load(config(engine, system()), &made);
        let (arena, report) = load.run(&[source(&path)]).unwrap();
        holds(&*arena);
        assert_eq!((report.source, report.verified, report.skips.len()), (Some(SourceKind::Image), true, 0));
        assert_eq!(report.used[0].bytes, PAYLOAD);
        assert!(report.ms > 0.0 && report.phases.read > 0.0 && report.phases.verify > 0.0);
        assert_eq!(load.config().io.stats().requested, PAYLOAD, "every byte is asked for once");
    }
}

#[test]
fn what_is_missing_or_not_wanted_is_passed_over_by_name_before_an_arena_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let short = image(dir.path(), "short.img", |bytes| bytes.truncate(4096));
    let other = Digests::of(&Geometry::new(PAYLOAD, BLOCK, BLOCK, 1).unwrap(), &vec![0; PAYLOAD as usize]);
    let good = image(dir.path(), "good.img", |_| ());
    let made = Arc::default();
    let load = load(config(Engine::Auto, system()), &made);
    let none: Box<dyn Source> = source(&dir.path().join("none.img"));
    let others: Box<dyn Source> = Box::new(ImageSource::new(&good, other));
    let e = load.run(&[none, source(&short), others]).unwrap_err();
    assert_eq!((e.kind(), made.load(Ordering::Relaxed)), (Kind::Mismatch, 0));
    for part in ["none.img", "no such file", "short.img", "4096 found", "other bytes"] {
        assert!(e.detail().contains(part), "{part}: {e}");
    }
    let (arena, report) = load.run(&[source(&short), source(&good)]).unwrap();
    holds(&*arena);
    assert_eq!((report.skips.len(), report.failovers(), report.skips[0].kind), (1, 0, SourceKind::Image));
    assert_eq!(load.run(&[]).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn a_flipped_bit_is_found_and_the_next_source_mends_only_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let bad = image(dir.path(), "bad.img", |bytes| bytes[5 * BLOCK as usize + 77] ^= 4);
    let good = image(dir.path(), "good.img", |_| ());
    for engine in [Engine::Pread, Engine::Auto] {
        let made = Arc::default();
        let load_one = FillConfig { threads: 1, ..config(engine, system()) };
        let alone = load(load_one.clone(), &made);
        let e = alone.run(&[source(&bad)]).unwrap_err();
        assert_eq!(e.kind(), Kind::Corrupt);
        assert!(e.detail().contains("bad.img") && e.detail().contains("block 5"), "{e}");
        let load = load(load_one, &made);
        let before = load.config().io.stats().requested;
        let (arena, report) = load.run(&[source(&bad), source(&good)]).unwrap();
        holds(&*arena);
        assert_eq!(report.failovers(), 1);
        let bytes: Vec<_> = report.used.iter().map(|used| used.bytes).collect();
        assert_eq!(bytes, [5 * BLOCK, PAYLOAD - 5 * BLOCK], "the first missing block on");
        let asked = load.config().io.stats().requested - before;
        assert_eq!(asked, PAYLOAD + BLOCK, "only the bad block is read twice");
    }
}

/// Reads of one file fail from some byte on.
#[derive(Debug)]
struct Dying {
    name: &'static str,
    from: u64,
    code: i32,
}

impl Dying {
    fn says(&self, call: &Call<'_>) -> Option<io::Error> {
        let dead = call.file.path().ends_with(self.name) && call.offset + call.len as u64 > self.from;
        dead.then(|| io::Error::from_raw_os_error(self.code))
    }
}

impl Ops for Dying {
    fn pread(&self, call: &Call<'_>, into: &mut [u8]) -> io::Result<usize> {
        match self.says(call) {
            Some(e) => Err(e),
            None => flashboot_loader::io::System.pread(call, into),
        }
    }

    fn completed(&self, call: &Call<'_>, said: io::Result<usize>) -> io::Result<usize> {
        self.says(call).map_or(said, Err)
    }
}

#[test]
fn a_disk_that_dies_in_the_middle_hands_over_and_alone_is_an_io_error() {
    let dir = tempfile::tempdir().unwrap();
    let dying = image(dir.path(), "dying.img", |_| ());
    let good = image(dir.path(), "good.img", |_| ());
    for engine in [Engine::Pread, Engine::Auto] {
        let ops: Arc<dyn Ops> = Arc::new(Dying { name: "dying.img", from: 4 * BLOCK, code: 5 });
        let made = Arc::default();
        let load = load(FillConfig { threads: 1, ..config(engine, ops) }, &made);
        let e = load.run(&[source(&dying)]).unwrap_err();
        assert_eq!((e.kind(), e.code()), (Kind::Io, Some(Code::Errno(5))));
        assert!(e.detail().contains(&format!("at {}", 4 * BLOCK)), "{e}");
        let (arena, report) = load.run(&[source(&dying), source(&good)]).unwrap();
        holds(&*arena);
        assert_eq!(report.used.last().unwrap().bytes, PAYLOAD - 4 * BLOCK);
        assert_eq!(made.load(Ordering::Relaxed), 1, "one arena");
    }
}

#[test]
fn a_file_that_changes_meanwhile_says_so_instead_of_a_digest() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "a.img", |_| ());
    #[derive(Debug)]
    struct Writer(PathBuf, Mutex<bool>);
    impl Ops for Writer {
        fn pread(&self, call: &Call<'_>, into: &mut [u8]) -> io::Result<usize> {
            let mut written = self.1.lock().unwrap();
            if !std::mem::replace(&mut written, true) {
                let mut bytes = payload();
                bytes.reverse();
                std::fs::write(&self.0, bytes).unwrap();
            }
            drop(written);
            flashboot_loader::io::System.pread(call, into)
        }
    }
    let ops: Arc<dyn Ops> = Arc::new(Writer(path.clone(), Mutex::new(false)));
    let made = Arc::default();
    let load = load(config(Engine::Pread, ops), &made);
    let e = load.run(&[source(&path)]).unwrap_err();
    assert_eq!(e.kind(), Kind::Corrupt);
    assert!(e.detail().contains("changed while it was read"), "{e}");
}

/// A source of any kind and outcome.
struct Told(SourceKind, Result<()>, Mutex<Option<Arc<dyn Arena>>>);

impl Source for Told {
    fn kind(&self) -> SourceKind {
        self.0
    }
    fn name(&self) -> String {
        "told".into()
    }
    fn probe(&self, _: &Load) -> Result<()> {
        self.1.clone()
    }
    fn deliver(&self, _: &Load) -> Result<Delivered> {
        Ok(self.2.lock().unwrap().take().map_or(Delivered::Filled, Delivered::Arena))
    }
}

#[test]
fn a_held_arena_is_taken_as_it_is_and_one_that_claims_too_much_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let good = image(dir.path(), "good.img", |_| ());
    let made = Arc::default();
    let first = load(config(Engine::Auto, system()), &made);
    let (arena, _) = first.run(&[source(&good)]).unwrap();
    let second = load(config(Engine::Auto, system()), &made);
    let held: Box<dyn Source> =
        Box::new(Told(SourceKind::Held, Ok(()), Mutex::new(Some(Arc::clone(&arena)))));
    let (again, report) = second.run(&[held]).unwrap();
    assert!(Arc::ptr_eq(&arena, &again));
    assert_eq!((report.source, made.load(Ordering::Relaxed)), (Some(SourceKind::Held), 1), "no second arena");
    let liar: Box<dyn Source> = Box::new(Told(SourceKind::Peer, Ok(()), Mutex::new(None)));
    let third = load(config(Engine::Auto, system()), &made);
    let (arena, report) = third.run(&[liar, source(&good)]).unwrap();
    holds(&*arena);
    assert!(report.skips[0].reason.contains("still missing"), "{:?}", report.skips);
}

#[test]
fn a_lost_context_or_a_cancelled_load_asks_no_other_source() {
    let dir = tempfile::tempdir().unwrap();
    let good = image(dir.path(), "good.img", |_| ());
    for kind in [Kind::ContextLost, Kind::Cancelled] {
        let made = Arc::default();
        let load = load(config(Engine::Auto, system()), &made);
        let lost: Box<dyn Source> =
            Box::new(Told(SourceKind::Peer, Err(Error::new(kind, "test", "over")), Mutex::new(None)));
        assert_eq!(load.run(&[lost, source(&good)]).unwrap_err().kind(), kind);
        assert_eq!(made.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn memory_that_cannot_be_had_is_said_with_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let good = image(dir.path(), "good.img", |_| ());
    let wanted =
        Wanted { image: None, rank: "r".into(), payload: PAYLOAD, digests: Arc::new(digests()).into() };
    let load = Load::new(wanted, config(Engine::Auto, system()), || {
        let spec = ArenaSpec { payload: 1 << 50, shards: 1 };
        Ok(HostArena::create(spec, &HostArenaConfig::default())?.0 as _)
    });
    let e = load.run(&[source(&good)]).unwrap_err();
    assert_eq!(e.kind(), Kind::Exhausted);
    assert!(e.detail().contains("bytes available by"), "{e}");
}

#[test]
fn the_root_of_what_was_loaded_is_the_files_hash() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "a.img", |_| ());
    let made = Arc::default();
    let load = load(config(Engine::Auto, system()), &made);
    load.run(&[source(&path)]).unwrap();
    let filling = load.filling().unwrap();
    assert_eq!(filling.present(), [ByteRange::new(0, PAYLOAD)]);
    assert_eq!(digest::root(filling.digests().unwrap().unwrap().values()), digests().root());
}
