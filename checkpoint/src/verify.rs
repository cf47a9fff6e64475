//! Reads every payload of an image and compares every block with its digest.

use crate::blocks::{Progress, each_block, geometry, hash_block, workers};
use crate::direct::DirectFile;
use crate::error::Result;
use crate::image::{Image, RankImage};
use flashboot_core::ByteRange;
use std::sync::{Mutex, PoisonError};

/// Threads that verifying may use.
const WORKERS: usize = 64;

/// How to verify.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyOptions {
    /// Threads, each with a slab of 4 MiB; by default two more than cores, and never more than 64.
    pub workers: Option<usize>,
}

/// What verifying found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct VerifyReport {
    /// Whether every block of every rank is what it was.
    pub ok: bool,
    /// The image id.
    pub id: String,
    /// The numbers of the bad blocks in their payloads, rank by rank.
    pub bad_blocks: Vec<u64>,
    /// Bytes read.
    pub bytes: u64,
    /// What was found in each payload.
    pub ranks: Vec<VerifiedRank>,
}

/// What verifying found in one payload.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct VerifiedRank {
    /// The payload's file name.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// The BLAKE3 hash it should have: what `b3sum` prints for it.
    pub root: String,
    /// The numbers of its bad blocks (16 MiB each), ascending.
    pub bad_blocks: Vec<u64>,
}

/// Verifies every payload of `image`, whose metadata and tables were checked when it was opened. A bad block is a
/// finding; a disk that cannot be read is an error.
///
/// Blocks. Reads with direct IO where the file system has it, so what is checked is the disk and not the cache.
pub fn verify(image: &Image, options: &VerifyOptions, progress: &dyn Progress) -> Result<VerifyReport> {
    let threads = workers(options.workers, WORKERS);
    let ranks = image.files().map(|rank| verify_rank(rank, threads, progress)).collect::<Result<Vec<_>>>()?;
    let bad_blocks: Vec<u64> = ranks.iter().flat_map(|r| r.bad_blocks.iter().copied()).collect();
    Ok(VerifyReport {
        ok: bad_blocks.is_empty(),
        id: image.id().into(),
        bad_blocks,
        bytes: ranks.iter().fold(0, |sum, r| sum.saturating_add(r.bytes)),
        ranks,
    })
}

fn verify_rank(rank: &RankImage, threads: usize, progress: &dyn Progress) -> Result<VerifiedRank> {
    let geometry = geometry(rank.payload_bytes)?;
    let digests = rank.table.digests();
    let file = DirectFile::open(&rank.path)?;
    let bad = Mutex::new(Vec::new());
    each_block(&rank.path, &geometry, threads, progress, |index, range, slab| {
        let read = |piece: ByteRange, bytes: &mut [u8]| file.read_at(piece.start, bytes);
        let found = hash_block(&geometry, range, slab, read, |_, _| Ok(()))?;
        let mismatches = digests.mismatches(index, &[found]);
        bad.lock().unwrap_or_else(PoisonError::into_inner).extend(mismatches);
        Ok(())
    })?;
    let mut bad_blocks = bad.into_inner().unwrap_or_else(PoisonError::into_inner);
    bad_blocks.sort_unstable();
    Ok(VerifiedRank {
        file: rank.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        bytes: rank.payload_bytes,
        root: blake3::Hash::from_bytes(digests.root()).to_hex().to_string(),
        bad_blocks,
    })
}
