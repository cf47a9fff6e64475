//! Reading: every engine, every kind of file system, every fault.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use flashboot_core::{ByteSize, Code, Kind, Result};
use flashboot_loader::io::{Call, Engine, Io, IoConfig, Ops};
use flashboot_memory::Buffer;
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

const PIECE: usize = 8192;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

fn config(engine: Engine) -> IoConfig {
    IoConfig { engine, piece: ByteSize(PIECE as u64), depth: 4, ..IoConfig::default() }
}

fn engines() -> Vec<Engine> {
    let ring = Io::new(&config(Engine::Uring));
    if ring.is_ok() { vec![Engine::Pread, Engine::Uring] } else { vec![Engine::Pread] }
}

fn file(dir: &Path, len: usize) -> PathBuf {
    let path = dir.join("file");
    std::fs::write(&path, bytes(len)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    flashboot_memory::uncache(&file, 0, len as u64);
    path
}

/// Reads `len` bytes from `offset` on into memory that begins `skew` bytes into a page; checks that each piece was seen once.
fn read(io: &Io, path: &Path, offset: u64, len: usize, skew: usize) -> Result<Vec<u8>> {
    let opened = io.open(path)?;
    let mut buffer = Buffer::new(len + skew)?;
    let into = &mut buffer.as_mut_slice()[skew..];
    let mut seen = vec![0u8; len];
    let mut copy = vec![0u8; len];
    io.lane().read(&opened, offset, into, &mut |at, piece| {
        seen[at..at + piece.len()].iter_mut().for_each(|n| *n += 1);
        copy[at..at + piece.len()].copy_from_slice(piece);
        Ok(())
    })?;
    let there = (opened.len() - offset).min(len as u64) as usize;
    assert!(seen[..there].iter().all(|n| *n == 1) && seen[there..].iter().all(|n| *n == 0));
    assert_eq!(copy[..there], into[..there]);
    Ok(into.to_vec())
}

/// Places with and, most likely, without direct IO.
fn places() -> Vec<tempfile::TempDir> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut places = vec![tempfile::tempdir_in(target).unwrap()];
    places.extend(tempfile::tempdir_in("/dev/shm"));
    places
}

#[test]
fn any_range_of_any_file_system_by_any_engine_is_the_files_bytes() {
    for dir in places() {
        let len = 10 * PIECE + 777;
        let path = file(dir.path(), len);
        let all = bytes(len);
        for engine in engines() {
            let io = Io::new(&config(engine)).unwrap();
            for (offset, n, skew) in
                [(0, len, 0), (4096, 5 * PIECE, 0), (1, 40_000, 0), (8192, 30_000, 3), (0, 0, 0)]
            {
                let got = read(&io, &path, offset, n, skew).unwrap();
                assert_eq!(got, all[offset as usize..offset as usize + n], "{engine:?} {offset} {n} {skew}");
            }
            let stats = io.stats();
            assert_eq!(stats.requested, stats.direct + stats.cached + stats.buffered, "{stats:?}");
        }
    }
}

#[test]
fn the_last_page_of_a_file_is_read_directly_into_a_whole_page() {
    for dir in places() {
        let len = 3 * 4096 + 100;
        let path = file(dir.path(), len);
        for engine in engines() {
            let io = Io::new(&config(engine)).unwrap();
            let got = read(&io, &path, 4096, 3 * 4096, 0).unwrap();
            assert_eq!(got[..len - 4096], bytes(len)[4096..]);
            let e = read(&io, &path, 4096, 4 * 4096, 0).unwrap_err();
            assert_eq!(e.kind(), Kind::Invalid, "{e}");
        }
    }
}

#[test]
fn the_page_cache_is_left_as_it_was_found() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let len = 64 * PIECE;
    let path = file(dir.path(), len);
    let opened = std::fs::File::open(&path).unwrap();
    let Some(0) = flashboot_memory::cached(&opened, 0, len as u64) else { return };
    for engine in engines() {
        for direct in [true, false] {
            let io = Io::new(&IoConfig { direct, ..config(engine) }).unwrap();
            assert_eq!(read(&io, &path, 0, len, 0).unwrap(), bytes(len));
            let stats = io.stats();
            if direct && io.open(&path).unwrap().is_direct() {
                assert_eq!((stats.direct, stats.cached), (len as u64, 0), "{stats:?}");
            }
            let left = flashboot_memory::cached(&opened, 0, len as u64).unwrap();
            assert_eq!(left, 0, "{engine:?}, direct {direct}");
        }
    }
    // What somebody else had there is read from there, and stays.
    std::fs::read(&path).unwrap();
    let before = flashboot_memory::cached(&opened, 0, len as u64).unwrap();
    let io = Io::new(&config(Engine::Auto)).unwrap();
    assert_eq!(read(&io, &path, 0, len, 0).unwrap(), bytes(len));
    assert_eq!(io.stats().cached, len as u64);
    assert_eq!(flashboot_memory::cached(&opened, 0, len as u64), Some(before));
}

#[test]
fn a_file_that_is_truncated_or_written_meanwhile_is_an_error_that_names_it() {
    for dir in places() {
        let path = file(dir.path(), 8 * PIECE);
        for engine in engines() {
            std::fs::write(&path, bytes(8 * PIECE)).unwrap();
            let io = Io::new(&config(engine)).unwrap();
            let opened = io.open(&path).unwrap();
            opened.unchanged().unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(5 * PIECE as u64 + 10).unwrap();
            let mut buffer = Buffer::new(8 * PIECE).unwrap();
            let e = io.lane().read(&opened, 0, buffer.as_mut_slice(), &mut |_, _| Ok(())).unwrap_err();
            assert_eq!(e.kind(), Kind::Corrupt);
            assert!(
                e.detail().contains(path.to_str().unwrap()) && e.detail().contains("nothing is at byte"),
                "{e}"
            );
            assert_eq!(opened.unchanged().unwrap_err().kind(), Kind::Corrupt);
        }
    }
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let io = Io::new(&IoConfig::default()).unwrap();
    assert_eq!(io.open(&dir.path().join("none")).unwrap_err().kind(), Kind::Unavailable);
    assert_eq!(io.open(dir.path()).unwrap_err().kind(), Kind::Invalid);
    let pipe = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    assert_eq!(io.open(&pipe).unwrap_err().kind(), Kind::Invalid);
}

/// A disk with faults.
#[derive(Debug, Default)]
struct Faulty {
    /// Reads that touch this byte fail so.
    bad: Option<(u64, i32)>,
    /// Every direct read is refused so.
    no_direct: Option<i32>,
    /// At most so many bytes a read.
    short: Option<usize>,
    /// Every other read is interrupted.
    interrupted: bool,
    no_ring: bool,
    calls: AtomicU64,
}

impl Faulty {
    fn verdict(&self, call: &Call<'_>) -> Option<io::Error> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let end = call.offset + call.len as u64;
        let bad = self.bad.filter(|(at, _)| (call.offset..end).contains(at)).map(|(_, code)| code);
        let interrupted = (self.interrupted && number.is_multiple_of(2)).then_some(4);
        let code = bad.or(self.no_direct.filter(|_| call.direct)).or(interrupted);
        code.map(io::Error::from_raw_os_error)
    }
}

impl Ops for Faulty {
    fn pread(&self, call: &Call<'_>, into: &mut [u8]) -> io::Result<usize> {
        if let Some(e) = self.verdict(call) {
            return Err(e);
        }
        let len = self.short.unwrap_or(usize::MAX).min(into.len());
        rustix::io::pread(call.file.descriptor(call.direct), &mut into[..len], call.offset)
            .map_err(Into::into)
    }

    fn completed(&self, call: &Call<'_>, said: io::Result<usize>) -> io::Result<usize> {
        self.verdict(call).map_or(said, Err).map(|n| n.min(self.short.unwrap_or(usize::MAX)))
    }

    fn may_ring(&self) -> Result<()> {
        if self.no_ring {
            let e = flashboot_core::Error::new(Kind::Unavailable, "io_uring_setup", "not permitted");
            return Err(e);
        }
        Ok(())
    }
}

#[test]
fn short_refused_and_interrupted_reads_end_with_the_right_bytes() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let len = 6 * PIECE + 50;
    let path = file(dir.path(), len);
    for engine in engines() {
        for faulty in [
            Faulty { short: Some(512), ..Faulty::default() },
            Faulty { short: Some(1), ..Faulty::default() },
            Faulty { interrupted: true, ..Faulty::default() },
            Faulty { no_direct: Some(22), ..Faulty::default() },
            Faulty { no_direct: Some(95), interrupted: true, short: Some(700), ..Faulty::default() },
        ] {
            let said = format!("{engine:?} {faulty:?}");
            let refused = faulty.no_direct.is_some();
            let io = Io::with_ops(&config(engine), Arc::new(faulty)).unwrap();
            assert_eq!(read(&io, &path, 0, len, 0).unwrap(), bytes(len), "{said}");
            let stats = io.stats();
            assert_eq!(stats.requested, stats.direct + stats.cached + stats.buffered, "{said}: {stats:?}");
            if refused && io.open(&path).unwrap().is_direct() {
                assert!(stats.direct == 0 && stats.fallbacks >= 1, "{said}: {stats:?}");
            }
        }
    }
}

#[test]
fn a_bad_block_is_an_error_with_path_offset_and_code() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = file(dir.path(), 6 * PIECE);
    for engine in engines() {
        let faulty = Faulty { bad: Some((3 * PIECE as u64 + 5, 5)), ..Faulty::default() };
        let io = Io::with_ops(&config(engine), Arc::new(faulty)).unwrap();
        let e = read(&io, &path, 0, 6 * PIECE, 0).unwrap_err();
        assert_eq!((e.kind(), e.code(), e.op()), (Kind::Io, Some(Code::Errno(5)), "pread"));
        let at = format!("{}: {PIECE} bytes at {}", path.display(), 3 * PIECE);
        assert!(e.detail().contains(&at), "{e}");
    }
}

#[test]
fn a_container_without_io_uring_reads_with_pread_and_says_so() {
    let faulty = || Arc::new(Faulty { no_ring: true, ..Faulty::default() });
    let io = Io::with_ops(&config(Engine::Auto), faulty()).unwrap();
    let stats = io.stats();
    assert_eq!(stats.engine, "pread");
    assert!(stats.engine_reason.unwrap().contains("not permitted"));
    assert_eq!(Io::with_ops(&config(Engine::Uring), faulty()).unwrap_err().kind(), Kind::Unavailable);
}

#[test]
fn who_is_handed_the_pieces_may_stop() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = file(dir.path(), 20 * PIECE);
    for engine in engines() {
        let io = Io::new(&config(engine)).unwrap();
        let opened = io.open(&path).unwrap();
        let mut buffer = Buffer::new(20 * PIECE).unwrap();
        let mut lane = io.lane();
        let mut told = 0;
        let stop = flashboot_core::Error::new(Kind::Cancelled, "test", "enough");
        let stopped = lane.read(&opened, 0, buffer.as_mut_slice(), &mut |_, _| {
            told += 1;
            if told == 3 { Err(stop.clone()) } else { Ok(()) }
        });
        assert_eq!((stopped, told), (Err(stop), 3));
        // The lane goes on.
        lane.read(&opened, 0, buffer.as_mut_slice(), &mut |_, _| Ok(())).unwrap();
        assert_eq!(buffer.as_slice(), bytes(20 * PIECE));
    }
}
