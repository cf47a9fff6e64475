//! Images behind an HTTP server that serves ranges, and what goes wrong there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

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
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};
use tempfile::TempDir;

/// What the server does to answers for payloads.
#[derive(Debug, Default)]
struct Faults {
    /// So many first requests of a payload's range are cut in the middle.
    cut: AtomicU32,
    /// So many are answered with 503.
    busy: AtomicU32,
    /// Ranges are ignored: all of it is sent.
    no_ranges: AtomicBool,
    /// Nothing is answered.
    silent: AtomicBool,
    /// One byte is another.
    flipped: AtomicBool,
    /// 403 for everything.
    forbidden: AtomicBool,
    ranges: AtomicU32,
}

struct Server {
    url: String,
    faults: Arc<Faults>,
}

fn take(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
}

impl Server {
    /// Serves files of `dir` until the process ends.
    fn start(dir: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/models/a", listener.local_addr().unwrap());
        let faults: Arc<Faults> = Arc::default();
        let (dir, told) = (dir.to_owned(), Arc::clone(&faults));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (dir, told) = (dir.clone(), Arc::clone(&told));
                std::thread::spawn(move || serve(stream, &dir, &told));
            }
        });
        Self { url, faults }
    }

    fn config(&self) -> ObjectConfig {
        ObjectConfig {
            range: ByteSize::mib(1),
            timeout: Duration::from_secs(5),
            ..ObjectConfig::new(&self.url)
        }
    }
}

fn serve(stream: TcpStream, dir: &Path, faults: &Faults) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let mut request = String::new();
        if reader.read_line(&mut request).unwrap_or(0) == 0 {
            return;
        }
        let mut range = None;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let line = line.trim().to_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(bytes) = line.strip_prefix("range: bytes=") {
                let (from, to) = bytes.split_once('-').unwrap();
                range = Some((from.parse::<u64>().unwrap(), to.parse::<u64>().unwrap() + 1));
            }
        }
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        if faults.silent.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_secs(60));
        }
        let answer = |stream: &mut TcpStream, head: &str, body: &[u8]| {
            let _ = stream.write_all(
                format!("HTTP/1.1 {head}\r\nlast-modified: Tue, 01 Dec 2026 00:00:00 GMT\r\n\r\n").as_bytes(),
            );
            let _ = stream.write_all(body);
        };
        if faults.forbidden.load(Ordering::Relaxed) {
            answer(&mut stream, "403 Forbidden\r\ncontent-length: 0", b"");
            continue;
        }
        let name = path.strip_prefix("/models/a/").unwrap_or("none");
        let Ok(mut file) = std::fs::File::open(dir.join(name)) else {
            answer(&mut stream, "404 Not Found\r\ncontent-length: 0", b"");
            continue;
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        if method == "HEAD" {
            answer(&mut stream, &format!("200 OK\r\ncontent-length: {}", bytes.len()), b"");
            continue;
        }
        let payload = name.ends_with(".img");
        if payload && take(&faults.busy) {
            answer(&mut stream, "503 Slow Down\r\ncontent-length: 0", b"");
            continue;
        }
        if payload && faults.flipped.load(Ordering::Relaxed) {
            bytes[(17 << 20) + 5] ^= 1;
        }
        match range.filter(|_| !faults.no_ranges.load(Ordering::Relaxed)) {
            None => answer(&mut stream, &format!("200 OK\r\ncontent-length: {}", bytes.len()), &bytes),
            Some((from, to)) => {
                let all = bytes.len();
                let part = &bytes[from as usize..(to as usize).min(all)];
                let to = from + part.len() as u64;
                let head = format!(
                    "206 Partial Content\r\ncontent-length: {}\r\ncontent-range: bytes {from}-{}/{all}",
                    part.len(),
                    to - 1
                );
                if payload {
                    faults.ranges.fetch_add(1, Ordering::Relaxed);
                    if take(&faults.cut) {
                        answer(&mut stream, &head, &part[..part.len() / 2]);
                        return;
                    }
                }
                answer(&mut stream, &head, part);
            }
        }
    }
}

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

fn source(server: &Server, image: &Image) -> (Wanted, Box<ObjectSource>) {
    let object = ObjectImage::open(server.config()).unwrap();
    let manifest = object.manifest(None, Some(image.id())).unwrap();
    let wanted = Wanted {
        image: Some(image.id().into()),
        rank: manifest.entry.coordinate.to_string(),
        payload: manifest.entry.payload_bytes,
        digests: Some(Arc::new(manifest.table.digests().clone())),
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
        let (wanted, source) = source(&server, &image);
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
fn what_goes_on_being_wrong_is_said_with_the_object_and_the_host() {
    let (_dir, at, image) = image();
    let server = Server::start(&at);
    let run = |server: &Server| {
        let (wanted, source) = source(server, &image);
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
    let config = ObjectConfig { attempts: 2, timeout: Duration::from_millis(200), ..server.config() };
    let began = std::time::Instant::now();
    let e = ObjectImage::open(config).unwrap().manifest(None, Some(image.id())).unwrap_err();
    assert_eq!(e.kind(), Kind::Deadline, "{e}");
    assert!(e.peer().unwrap().contains("127.0.0.1") && began.elapsed() < Duration::from_secs(20));
}

#[test]
fn another_image_a_missing_one_and_a_missing_rank_are_refused() {
    let (dir, at, image) = image();
    let server = Server::start(&at);
    let object = ObjectImage::open(server.config()).unwrap();
    let e = object.manifest(None, Some(&"0".repeat(64))).unwrap_err();
    assert_eq!(e.kind(), Kind::Mismatch);
    let e = object.manifest(Some("target-0-1-0-0"), None).unwrap_err();
    assert!(e.kind() == Kind::Invalid && e.detail().contains("target-0-0-0-0"), "{e}");
    let empty = Server::start(&dir.path().join("m"));
    let e = ObjectImage::open(empty.config()).unwrap().manifest(None, None).unwrap_err();
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
