//! One file of a checkpoint, and reading the headers of all of them.

use super::OpenOptions;
use crate::blocks::on_threads;
use crate::error::{Error, Result};
use crate::header::Header;
use crate::source::{Identity, Source};
use crate::tensors::Tensors;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// One safetensors file of a checkpoint.
#[derive(Debug, Clone)]
pub struct Shard {
    /// Its name below the checkpoint's directory.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its length.
    pub len: u64,
    /// Bytes of its header, without the 8 that give its length.
    pub header_len: u64,
    /// Bytes of its tensors.
    pub data_bytes: u64,
    pub(crate) identity: Identity,
    pub(crate) header_hash: blake3::Hash,
}

impl Shard {
    /// Where its data begins.
    pub fn data_start(&self) -> u64 {
        self.header_len.saturating_add(8)
    }

    /// Bytes after its last tensor.
    pub fn trailing(&self) -> u64 {
        self.len.saturating_sub(self.data_start()).saturating_sub(self.data_bytes)
    }

    /// Opens it again, refusing a file that is not the one that was read.
    pub(crate) fn reopen(&self) -> Result<Source> {
        reopen(&self.path, &self.identity)
    }
}

pub(super) fn reopen(path: &Path, identity: &Identity) -> Result<Source> {
    let source = Source::open(path)?;
    if source.identity != *identity {
        return Err(Error::Changed { path: path.into() });
    }
    Ok(source)
}

/// All shards' headers, merged.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) shards: Vec<Shard>,
    pub(super) tensors: Tensors,
    pub(super) metadata: Vec<(String, String)>,
}

impl Parts {
    fn add(&mut self, shard: Shard, header: Header) -> Result<()> {
        let number = u32::try_from(self.shards.len()).unwrap_or(u32::MAX);
        self.metadata.extend(header.metadata);
        self.tensors.append(header.tensors, number).map_err(|(tensor, there)| {
            let other = self.shards.get(there).map_or_else(String::new, |s| s.name.clone());
            Error::InTwoShards { file: shard.path.clone(), tensor, other }
        })?;
        self.shards.push(shard);
        Ok(())
    }
}

/// Reads and checks every shard's header, on as many threads as there are cores. Each thread adds its shard in
/// the shards' order and then takes the next, so at most one header a thread is in memory beside the merged
/// ones. The first bad shard in order is the one reported.
pub(super) fn read_shards(files: &[(String, PathBuf)], options: &OpenOptions) -> Result<Parts> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(files.len());
    let next = AtomicUsize::new(0);
    // The parts so far, or the first error.
    let merged = (Mutex::new((0usize, Ok(Parts::default()))), Condvar::new());
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((name, path)) = files.get(number) else { return };
            let read = read_shard(name, path, options);
            let (lock, turned) = &merged;
            let state = lock.lock().unwrap_or_else(PoisonError::into_inner);
            let mut state =
                turned.wait_while(state, |(turn, _)| *turn != number).unwrap_or_else(PoisonError::into_inner);
            if let Ok(parts) = &mut state.1 {
                let added = read.and_then(|(shard, header)| parts.add(shard, header));
                if let Err(e) = added {
                    state.1 = Err(e);
                    next.store(files.len(), Ordering::Relaxed);
                }
            }
            state.0 = number.saturating_add(1);
            turned.notify_all();
        }
    };
    on_threads(threads.saturating_sub(1), work, work);
    let (lock, _) = merged;
    lock.into_inner().unwrap_or_else(PoisonError::into_inner).1
}

fn read_shard(name: &str, path: &Path, options: &OpenOptions) -> Result<(Shard, Header)> {
    let source = Source::open(path)?;
    let (len, file) = (source.len(), path.to_path_buf());
    if len < 8 {
        return Err(Error::TooShort { file, found: len });
    }
    let mut prefix = [0; 8];
    source.read_at(0, &mut prefix)?;
    let header_len = u64::from_le_bytes(prefix);
    // The cap before everything else: nothing of a length that a file claims is allocated unchecked.
    if header_len > options.header_cap.0 {
        return Err(Error::HeaderOverCap { file, size: header_len, cap: options.header_cap.0 });
    }
    let needed = header_len.saturating_add(8);
    if needed > len {
        return Err(Error::HeaderPastEnd { file, needed, found: len });
    }
    let json = source.bytes_at(8, header_len)?;
    let header = Header::parse(path, &json)?;
    let data_bytes = header.check_coverage(path, needed, len, options.allow_trailing_bytes)?;
    let shard = Shard {
        name: name.to_owned(),
        path: file,
        len,
        header_len,
        data_bytes,
        identity: source.identity,
        header_hash: blake3::hash(&json),
    };
    Ok((shard, header))
}
