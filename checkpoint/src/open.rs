//! From a path to a checkpoint: which files belong to it, that each is sound, and that they agree.

use crate::cause::Names;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::header::Header;
use crate::index::Index;
use crate::source::{Identity, Source};
use crate::tensors::Tensors;
use flashboot_core::ByteSize;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What to accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenOptions {
    /// The longest header that is read; 100 MB, as in safetensors itself.
    pub header_cap: ByteSize,
    /// The longest index that is read. An index may name the tensors of very many shards: 1 GiB.
    pub index_cap: ByteSize,
    /// Whether bytes after the last tensor are accepted.
    pub allow_trailing_bytes: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { header_cap: ByteSize(100_000_000), index_cap: ByteSize::gib(1), allow_trailing_bytes: false }
    }
}

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

fn reopen(path: &Path, identity: &Identity) -> Result<Source> {
    let source = Source::open(path)?;
    if source.identity != *identity {
        return Err(Error::Changed { path: path.into() });
    }
    Ok(source)
}

/// The index a checkpoint was opened by.
#[derive(Debug, Clone)]
pub struct IndexFile {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    pub(crate) identity: Identity,
}

impl IndexFile {
    pub(crate) fn reopen(&self) -> Result<Source> {
        reopen(&self.path, &self.identity)
    }
}

/// Stock safetensors files, parsed and checked against each other and their index. Holds no file open.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: Tensors,
    aliases: Vec<(String, usize)>,
    index: Option<IndexFile>,
    config: ModelConfig,
}

impl Checkpoint {
    /// Opens a `.safetensors` file, an index, or a directory that holds an index or `*.safetensors` files.
    ///
    /// Blocks; reads headers only, on all cores.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let meta = std::fs::metadata(path).map_err(|e| Error::io("stat", path, &e))?;
        if meta.is_dir() {
            return match find_index(path)? {
                Some(index) => Self::from_index(path, &index, options),
                None => Self::from_files(path, list_safetensors(path)?, options),
            };
        }
        let dir = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        if path.extension() == Some(OsStr::new("json")) {
            return Self::from_index(dir, path, options);
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self::from_files(dir, vec![(name, path.to_path_buf())], options)
    }

    fn from_files(dir: &Path, files: Vec<(String, PathBuf)>, options: &OpenOptions) -> Result<Self> {
        if files.is_empty() {
            return Err(Error::NoSafetensors { dir: dir.into() });
        }
        let parsed = read_shards(&files, options)?;
        Self::assemble(dir, parsed, None)
    }

    fn from_index(dir: &Path, path: &Path, options: &OpenOptions) -> Result<Self> {
        let source = Source::open(path)?;
        let index = Index::parse(path, &source.all(options.index_cap.0)?)?;
        let files: Vec<_> = index.files.iter().map(|name| (name.clone(), dir.join(name))).collect();
        let parsed = read_shards(&files, options).map_err(|e| match e {
            Error::Missing { path: missing } => {
                let shard = files.iter().find(|(_, path)| *path == missing).map(|(name, _)| name.clone());
                Error::MissingShard { index: path.into(), shard: shard.unwrap_or_default(), path: missing }
            }
            other => other,
        })?;
        let file = IndexFile {
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            path: path.into(),
            identity: source.identity,
        };
        Self::assemble(dir, parsed, Some((file, index)))
    }

    fn assemble(dir: &Path, parsed: Vec<(Shard, Header)>, index: Option<(IndexFile, Index)>) -> Result<Self> {
        let (mut tensors, mut shards, mut metadata) = (Tensors::default(), Vec::new(), Vec::new());
        for (number, (shard, header)) in parsed.into_iter().enumerate() {
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            metadata.extend(header.metadata);
            tensors.append(header.tensors, number).map_err(|(tensor, there)| {
                let other = shards.get(there).map_or_else(String::new, |s: &Shard| s.name.clone());
                Error::InTwoShards { file: shard.path.clone(), tensor, other }
            })?;
            shards.push(shard);
        }
        let config = ModelConfig::read(dir)?;
        let aliases = crate::aliases::find(dir, &tensors, &metadata, &config)?;
        let index = match index {
            None => None,
            Some((file, index)) => {
                check_index(&file.path, &index, &tensors, &aliases)?;
                Some(file)
            }
        };
        Ok(Self { dir: dir.into(), shards, tensors, aliases, index, config })
    }

    /// The directory its files lie in.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its files, in the order their tensors are numbered.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Its tensors.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Further names of tensors (tied weights): the alias, and the number of the tensor it names.
    pub fn aliases(&self) -> &[(String, usize)] {
        &self.aliases
    }

    /// The index it was opened by, if there was one.
    pub fn index(&self) -> Option<&IndexFile> {
        self.index.as_ref()
    }

    /// What its `config.json` says.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.shards.iter().fold(0, |sum, s| sum.saturating_add(s.data_bytes))
    }

    /// Bytes of all headers.
    pub fn header_bytes(&self) -> u64 {
        self.shards.iter().fold(0, |sum, s| sum.saturating_add(s.header_len))
    }
}

fn entries(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io("readdir", dir, &e))? {
        let entry = entry.map_err(|e| Error::io("readdir", dir, &e))?;
        // A name that is not UTF-8 is no file of a checkpoint: indices are JSON.
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable_by(|a, b| flashboot_core::layout::natural_order(a, b));
    Ok(names)
}

fn find_index(dir: &Path) -> Result<Option<PathBuf>> {
    let found: Vec<_> =
        entries(dir)?.into_iter().filter(|n| n.ends_with(".safetensors.index.json")).collect();
    match found.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(dir.join(one))),
        several => match several.iter().find(|n| *n == "model.safetensors.index.json") {
            Some(stock) => Ok(Some(dir.join(stock))),
            None => {
                let mut names = Names::default();
                several.iter().for_each(|n| names.push(n));
                Err(Error::SeveralIndices { dir: dir.into(), names })
            }
        },
    }
}

fn list_safetensors(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let names = entries(dir)?.into_iter().filter(|n| n.ends_with(".safetensors") && !n.starts_with('.'));
    Ok(names.map(|n| (n.clone(), dir.join(n))).collect())
}

/// Reads and checks every shard's header, on as many threads as there are cores: at most one header's bytes
/// a thread are in memory. The first bad shard in order is the one reported.
fn read_shards(files: &[(String, PathBuf)], options: &OpenOptions) -> Result<Vec<(Shard, Header)>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(files.len());
    if threads <= 1 {
        return files.iter().map(|(name, path)| read_shard(name, path, options)).collect();
    }
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(files.len()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some((name, path)) = files.get(number) else { return };
                    let result = read_shard(name, path, options);
                    if result.is_err() {
                        next.store(files.len(), Ordering::Relaxed);
                    }
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((number, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
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

/// Checks that the index names every tensor once, in the shard that holds it, and nothing else.
fn check_index(path: &Path, index: &Index, tensors: &Tensors, aliases: &[(String, usize)]) -> Result<()> {
    let mut named = vec![false; tensors.len()];
    let (mut not_in_shard, mut elsewhere, mut not_in_index) =
        (Names::default(), Names::default(), Names::default());
    for (name, file) in index.entries() {
        let Some(number) = tensors.find(name) else {
            if !aliases.iter().any(|(alias, _)| alias == name) {
                not_in_shard.push(name);
            }
            continue;
        };
        // Shards are read in the order in which the index first mentions them, so their numbers agree.
        if tensors.at(number).is_none_or(|t| t.shard != file) {
            elsewhere.push(name);
        }
        if let Some(seen) = named.get_mut(number)
            && std::mem::replace(seen, true)
        {
            return Err(Error::Duplicate { file: path.into(), tensor: name.into() });
        }
    }
    for (number, _) in named.iter().enumerate().filter(|(_, named)| !**named) {
        if let Some(tensor) = tensors.at(number) {
            not_in_index.push(tensor.name);
        }
    }
    if not_in_shard.is_empty() && elsewhere.is_empty() && not_in_index.is_empty() {
        return Ok(());
    }
    Err(Error::StaleIndex { index: path.into(), not_in_shard, elsewhere, not_in_index })
}
