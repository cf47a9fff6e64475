//! Where the pieces of rank images go: hashed, written, and now and then noted in the ranks' journals.

use super::journal::{self, Journal};
use super::set::RankSet;
use super::turns::Turns;
use crate::blocks::on_threads;
use crate::direct::DirectFile;
use crate::error::{Error, Result};
use crate::stream::Sink;
use flashboot_core::digest::{self, Piece};
use flashboot_core::{BLOCK, BlockDigest, ByteRange, Digests};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Files that are synced at once.
const SYNCS: usize = 16;

/// The images that are being written.
pub(super) struct ImageSink {
    piece: u64,
    /// Bytes after which what was written is synced and noted.
    every: u64,
    files: Vec<RankFile>,
    since: AtomicU64,
    noting: Mutex<()>,
    hashing: Turns,
}

struct RankFile {
    file: DirectFile,
    payload: u64,
    values: Mutex<Vec<Option<Piece>>>,
    journal: Mutex<Option<Journal>>,
}

impl ImageSink {
    /// Opens every image's file in `dir`, and what a killed writer left there.
    pub(super) fn open(
        dir: &Path,
        set: &RankSet<'_, '_>,
        piece: u64,
        every: u64,
        hashing: Turns,
    ) -> Result<Self> {
        let mut files = Vec::with_capacity(set.images.len());
        for image in &set.images {
            let (payload, name) = (image.layout.payload(), image.coordinate.to_string());
            let path = dir.join(format!("{name}.img"));
            let known = std::fs::metadata(&path).is_ok_and(|m| m.len() == payload);
            let count = usize::try_from(payload.div_ceil(piece)).unwrap_or(usize::MAX);
            let at = journal::path(dir, &name);
            // Values of bytes that are not there are no use.
            let (journal, found) = Journal::open(at, if known { count } else { 0 })?;
            let mut values: Vec<Option<Piece>> = found.into_iter().map(Some).collect();
            values.resize(count, None);
            let file = DirectFile::create_or_go_on(&path, payload)?;
            files.push(RankFile {
                file,
                payload,
                values: Mutex::new(values),
                journal: Mutex::new(Some(journal)),
            });
        }
        Ok(Self { piece, every, files, since: AtomicU64::new(0), noting: Mutex::new(()), hashing })
    }

    /// Bytes of each stream and how many of its first pieces are complete.
    pub(super) fn streams(&self) -> Vec<(u64, u64)> {
        let complete = |file: &RankFile| {
            let values = file.values.lock().unwrap_or_else(PoisonError::into_inner);
            values.iter().take_while(|v| v.is_some()).count() as u64
        };
        self.files.iter().map(|file| (file.payload, complete(file))).collect()
    }

    fn rank(&self, stream: usize) -> Result<&RankFile> {
        self.files.get(stream).ok_or_else(|| Error::Missing { path: format!("stream {stream}").into() })
    }

    /// Syncs every image and notes how far it has come.
    fn note(&self) -> Result<()> {
        self.each(|file| {
            // The values first: what they are of is written already, and is on the disk after the sync.
            let values = file.values.lock().unwrap_or_else(PoisonError::into_inner).clone();
            file.file.sync()?;
            match file.journal.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
                Some(journal) => journal.note(&values),
                None => Ok(()),
            }
        })
    }

    /// Does something to every file, several at once: a file system commits syncs that come together in one go.
    fn each(&self, work: impl Fn(&RankFile) -> Result<()> + Sync) -> Result<()> {
        let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
        let run = || {
            while let Some(file) = self.files.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(e) = work(file) {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                }
            }
        };
        on_threads(self.files.len().min(SYNCS).saturating_sub(1), run, run);
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Syncs everything and gives every image's digests.
    pub(super) fn finish(self, path: &Path) -> Result<Vec<Digests>> {
        self.each(|file| file.file.sync())?;
        let mut all = Vec::with_capacity(self.files.len());
        let wrong = |detail: String| Error::NotJson { file: path.into(), detail };
        for file in self.files {
            let values = file.values.into_inner().unwrap_or_else(PoisonError::into_inner);
            let pieces: Option<Vec<Piece>> = values.into_iter().collect();
            let pieces = pieces.ok_or_else(|| wrong("a piece was not written".into()))?;
            let each = usize::try_from(BLOCK / self.piece.min(BLOCK)).unwrap_or(1).max(1);
            let blocks = pieces.chunks(each).zip(0u64..).map(|(pieces, i)| {
                let range = ByteRange::new(i * BLOCK, (i + 1).saturating_mul(BLOCK).min(file.payload));
                digest::merge(file.payload, range, pieces).unwrap_or(BlockDigest([0; 32]))
            });
            let digests = Digests::new(file.payload, BLOCK, blocks.collect());
            all.push(digests.map_err(|e| wrong(e.to_string()))?);
            if let Some(journal) = file.journal.into_inner().unwrap_or_else(PoisonError::into_inner) {
                journal.remove()?;
            }
        }
        Ok(all)
    }
}

impl Sink for ImageSink {
    fn put(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()> {
        let rank = self.rank(stream)?;
        let value = self.hashing.take(|| digest::piece(rank.payload, start, bytes));
        rank.file.write_at(start, bytes)?;
        let index = usize::try_from(start / self.piece).unwrap_or(usize::MAX);
        if let Some(slot) = rank.values.lock().unwrap_or_else(PoisonError::into_inner).get_mut(index) {
            *slot = Some(value);
        }
        let since = self.since.fetch_add(bytes.len() as u64, Ordering::Relaxed) + bytes.len() as u64;
        if since >= self.every
            && let Ok(_noting) = self.noting.try_lock()
        {
            self.since.store(0, Ordering::Relaxed);
            self.note()?;
        }
        Ok(())
    }

    fn spill(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()> {
        self.rank(stream)?.file.write_at(start, bytes)
    }

    fn reload(&self, stream: usize, start: u64, into: &mut [u8]) -> Result<()> {
        self.rank(stream)?.file.read_at(start, into)
    }
}
