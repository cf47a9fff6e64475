//! Objects behind HTTP, as a store serves them: ranges, and faults on demand.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "each test file uses its own part; tests panic"
)]

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

/// What the server does to answers for payloads.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// So many first requests of a payload's range are cut in the middle.
    pub(crate) cut: AtomicU32,
    /// So many are answered with 503.
    pub(crate) busy: AtomicU32,
    /// Ranges are ignored: all of it is sent.
    pub(crate) no_ranges: AtomicBool,
    /// Nothing is answered.
    pub(crate) silent: AtomicBool,
    /// One byte is another.
    pub(crate) flipped: AtomicBool,
    /// 403 for everything.
    pub(crate) forbidden: AtomicBool,
    /// Answers with a part of a payload.
    pub(crate) ranges: AtomicU32,
    /// How often each range of a payload was asked for, by its first byte.
    pub(crate) asked: Mutex<BTreeMap<u64, u32>>,
}

pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) faults: Arc<Faults>,
}

fn take(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
}

impl Server {
    /// Serves files of `dir` until the process ends.
    pub(crate) fn start(dir: &Path) -> Self {
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
        if let (true, Some((from, _))) = (payload, range) {
            *faults.asked.lock().unwrap().entry(from).or_default() += 1;
        }
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
