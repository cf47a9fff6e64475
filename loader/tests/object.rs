//! Images behind an HTTP server that serves ranges, and what goes wrong there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod objects;
#[path = "../../checkpoint/tests/support/mod.rs"]
mod support;

use flashboot_checkpoint::{Image, PackOptions, pack};
use flashboot_core::{ArenaSpec, ByteSize, Dtype, Kind};
use flashboot_loader::{
    io::IoConfig,
    pipeline::FillConfig,
    source::{Load, ObjectConfig, ObjectImage, ObjectSource, Source, SourceKind, Wanted},
};
use flashboot_memory::{HostArena, HostArenaConfig};
use objects::Server;
use std::{
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tempfile::TempDir;

fn image() -> (TempDir, PathBuf, Image) {
    let dir = TempDir::new().unwrap();
    let shard = vec![support::tensor("a", Dtype::U8, &[20 << 20]), support::tensor("b", Dtype::F32, &[77])];
    support::sharded(&dir.path().join("m"), &[shard]);
    let at = dir.path().join("i");
    pack(&support::open(&dir.path().join("m")).unwrap(), &at, &PackOptions::default(), &()).unwrap();
    let image = Image::open(&at).unwrap();
    (dir, at, image)
}

fn load(wanted: Wanted) -> Load {
    let config = FillConfig::new(&IoConfig::default()).unwrap();
    let payload = wanted.payload;
    Load::new(wanted, config, move || {
        Ok(HostArena::create(ArenaSpec { payload, shards: 1 }, &HostArenaConfig::default())?.0 as _)
    })
}

fn config(server: &Server) -> ObjectConfig {
    ObjectConfig {
        range: ByteSize::mib(1),
        timeout: Duration::from_secs(5),
        // More than all faults of a test: they may all hit the same range.
        attempts: 6,
        ..ObjectConfig::new(&server.url)
    }
}

fn source(config: ObjectConfig, image: &Image) -> (Wanted, Box<ObjectSource>) {
    let object = ObjectImage::open(config).unwrap();
    let manifest = object.manifest(None, Some(image.id())).unwrap();
    let wanted = Wanted {
        image: Some(image.id().into()),
        rank: manifest.entry.coordinate.to_string(),
        payload: manifest.entry.payload_bytes,
        digests: Arc::new(manifest.table.digests().clone()).into(),
    };
    (wanted, Box::new(ObjectSource::new(object, &manifest.entry.payload).unwrap()))
}

#[test]
fn an_image_is_fetched_in_ranges_and_verified_whatever_is_cut_or_refused_for_a_while() {
    let (_dir, at, image) = image();
    let server = Server::start(&at);
    let file = std::fs::read(&image.ranks()[0].path).unwrap();
    for (cut, busy) in [(0, 0), (3, 0), (0, 3), (2, 2)] {
        server.faults.cut.store(cut, Ordering::Relaxed);
        server.faults.busy.store(busy, Ordering::Relaxed);
        server.faults.ranges.store(0, Ordering::Relaxed);
        let (wanted, source) = source(config(&server), &image);
        let load = load(wanted);
        let (arena, report) = load.run(&[source as Box<dyn Source>]).unwrap();
        let mut found = vec![0; file.len()];
        arena.copy_out(0, &mut found).unwrap();
        assert!(found == file);
        assert_eq!((report.source, report.verified), (Some(SourceKind::Object), true));
        assert!(report.phases.connect > 0.0 && report.phases.read > 0.0);
        let ranges = server.faults.ranges.load(Ordering::Relaxed);
        assert!(u64::from(ranges) >= (file.len() as u64).div_ceil(1 << 20), "{ranges} ranges");
    }
}

#[test]
fn a_range_is_asked_for_as_often_as_is_allowed_and_no_oftener() {
    let (_dir, at, image) = image();
    for attempts in [1, 3] {
        let server = Server::start(&at);
        let config = ObjectConfig { attempts, ..config(&server) };
        let (wanted, source) = source(config.clone(), &image);
        server.faults.busy.store(u32::MAX, Ordering::Relaxed);
        let e = load(wanted).run(&[source as Box<dyn Source>]).unwrap_err();
        assert_eq!(e.kind(), Kind::SourceLost, "{e}");
        let asked = server.faults.asked.lock().unwrap().clone();
        assert_eq!(asked.values().copied().max(), Some(attempts), "{asked:?}");
        // One fewer than that, and all of it comes.
        let server = Server::start(&at);
        let config = ObjectConfig { url: server.url.clone(), ..config };
        let (wanted, source) = self::source(config, &image);
        server.faults.busy.store(attempts - 1, Ordering::Relaxed);
        load(wanted).run(&[source as Box<dyn Source>]).unwrap();
    }
}

#[test]
fn what_goes_on_being_wrong_is_said_with_the_object_and_the_host() {
    let (_dir, at, image) = image();
    let server = Server::start(&at);
    let run = |server: &Server| {
        let (wanted, source) = source(config(server), &image);
        move || load(wanted.clone()).run(&[source as Box<dyn Source>]).unwrap_err()
    };
    let ready = run(&server);
    server.faults.flipped.store(true, Ordering::Relaxed);
    let e = ready();
    assert!(e.kind() == Kind::Corrupt && e.detail().contains("block 1"), "{e}");
    server.faults.flipped.store(false, Ordering::Relaxed);
    let ready = run(&server);
    server.faults.no_ranges.store(true, Ordering::Relaxed);
    let e = ready();
    assert!(e.detail().contains("target-0-0-0-0.img"), "{e}");
    server.faults.no_ranges.store(false, Ordering::Relaxed);
    let ready = run(&server);
    server.faults.forbidden.store(true, Ordering::Relaxed);
    let e = ready();
    assert_eq!(e.kind(), Kind::Permission, "{e}");
}

#[test]
fn a_server_that_says_nothing_ends_at_the_deadline() {
    let (_dir, at, image) = image();
    let server = Server::start(&at);
    server.faults.silent.store(true, Ordering::Relaxed);
    let config = ObjectConfig { attempts: 2, timeout: Duration::from_millis(200), ..config(&server) };
    let began = std::time::Instant::now();
    let e = ObjectImage::open(config).unwrap().manifest(None, Some(image.id())).unwrap_err();
    assert_eq!(e.kind(), Kind::Deadline, "{e}");
    assert!(e.peer().unwrap().contains("127.0.0.1") && began.elapsed() < Duration::from_secs(20));
}

#[test]
fn another_image_a_missing_one_and_a_missing_rank_are_refused() {
    let (dir, at, image) = image();
    let server = Server::start(&at);
    let object = ObjectImage::open(config(&server)).unwrap();
    let e = object.manifest(None, Some(&"0".repeat(64))).unwrap_err();
    assert_eq!(e.kind(), Kind::Mismatch);
    let e = object.manifest(Some("target-0-1-0-0"), None).unwrap_err();
    assert!(e.kind() == Kind::Invalid && e.detail().contains("target-0-0-0-0"), "{e}");
    let empty = Server::start(&dir.path().join("m"));
    let e = ObjectImage::open(config(&empty)).unwrap().manifest(None, None).unwrap_err();
    assert_eq!(e.kind(), Kind::Unavailable, "{e}");
    // A table that is not the one that the metadata speaks of.
    std::fs::write(at.join("target-0-0-0-0.json"), b"{}").unwrap();
    let e = object.manifest(None, Some(image.id())).unwrap_err();
    assert_eq!(e.kind(), Kind::Corrupt, "{e}");
}

#[test]
fn plain_http_to_another_host_and_nonsense_are_refused_before_anything_is_asked() {
    for (url, kind) in [
        ("http://models.example/a", Kind::Permission),
        ("not a url", Kind::Invalid),
        ("gopher://models.example/a", Kind::Invalid),
    ] {
        assert_eq!(ObjectImage::open(ObjectConfig::new(url)).unwrap_err().kind(), kind, "{url}");
    }
    let elsewhere = ("aws_endpoint".to_owned(), "http://10.0.0.1:9000".to_owned());
    let config = ObjectConfig { options: vec![elsewhere], ..ObjectConfig::new("s3://bucket/a") };
    assert_eq!(ObjectImage::open(config.clone()).unwrap_err().kind(), Kind::Permission);
    assert!(ObjectImage::open(ObjectConfig { allow_http: true, ..config.clone() }).is_ok());
    assert!(!format!("{config:?}").contains("10.0.0.1"), "values of options are not shown");
    let image = ObjectImage::open(ObjectConfig::new("http://127.0.0.1:1/a")).unwrap();
    assert_eq!(ObjectSource::new(image, "../x").unwrap_err().kind(), Kind::Corrupt);
}
