//! From a path to a checkpoint: which files belong to it, that each is sound, and that they agree.

use crate::blocks::on_threads;
use crate::cause::Names;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::header::Header;
use crate::index::Index;
use crate::source::{Identity, Source};
use crate::tensors::Tensors;
use flashboot_core::ByteSize;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

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
    notes: Vec<String>,
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
                None => {
                    let files = list_safetensors(path)?;
                    if files.is_empty() && crate::image::is_image(path)? {
                        return Err(Error::IsImage { path: path.into() });
                    }
                    Self::from_files(path, files, options)
                }
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
        let parts = read_shards(&files, options)?;
        Self::assemble(dir, parts, None)
    }

    fn from_index(dir: &Path, path: &Path, options: &OpenOptions) -> Result<Self> {
        let source = Source::open(path)?;
        // Read twice, for the files now and for the tensors at the end: that costs less than keeping its names.
        let index = Index::parse(path, &source.all(options.index_cap.0)?, |_, _| ())?;
        let files: Vec<_> = index.files.iter().map(|name| (name.clone(), dir.join(name))).collect();
        let parts = read_shards(&files, options).map_err(|e| match e {
            Error::Missing { path: missing } => {
                let shard = files.iter().find(|(_, path)| *path == missing).map(|(name, _)| name.clone());
                Error::MissingShard { index: path.into(), shard: shard.unwrap_or_default(), path: missing }
            }
            other => other,
        })?;
        let unrelated = check_all_named(dir, path, &index)?;
        let mut checkpoint = Self::assemble(dir, parts, Some(&source))?;
        if !unrelated.is_empty() {
            let index = checkpoint.index.as_ref().map_or("the index", |index| &index.name);
            let note =
                format!("{unrelated} lie beside {index}, which does not name them: they were not read");
            checkpoint.notes.push(note);
        }
        Ok(checkpoint)
    }

    fn assemble(dir: &Path, parts: Parts, index: Option<&Source>) -> Result<Self> {
        let Parts { shards, tensors, metadata } = parts;
        let config = ModelConfig::read(dir)?;
        let aliases = crate::aliases::find(dir, &tensors, &metadata, &config)?;
        let index = match index {
            None => None,
            Some(source) => {
                check_index(source, &tensors, &aliases)?;
                let name = source.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                Some(IndexFile { name, path: source.path.clone(), identity: source.identity })
            }
        };
        let mut notes = Vec::new();
        if let Some(why) = &config.unreadable {
            notes.push(format!("config.json is not valid JSON and was not used: {why}"));
        }
        Ok(Self { dir: dir.into(), shards, tensors, aliases, index, config, notes })
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

    /// What a person should know: a `config.json` that could not be used, files that the index leaves out.
    pub fn notes(&self) -> &[String] {
        &self.notes
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

/// Checks that no shard beside an index is left out of it: a file numbered as the index's own are. Others are
/// returned, to be told.
fn check_all_named(dir: &Path, path: &Path, index: &Index) -> Result<Names> {
    let families: HashSet<&str> = index.files.iter().filter_map(|name| shard_family(name)).collect();
    let named: HashSet<&str> = index.files.iter().map(String::as_str).collect();
    let (mut shards, mut unrelated) = (Names::default(), Names::default());
    for (name, _) in list_safetensors(dir)?.iter().filter(|(name, _)| !named.contains(name.as_str())) {
        match shard_family(name) {
            Some(family) if families.contains(family) => shards.push(name),
            _ => unrelated.push(name),
        }
    }
    if shards.is_empty() {
        Ok(unrelated)
    } else {
        Err(Error::ShardNotInIndex { index: path.into(), names: shards })
    }
}

/// `model` of `model-00001-of-00002.safetensors`.
fn shard_family(name: &str) -> Option<&str> {
    let (rest, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (family, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (digits(total) && digits(number)).then_some(family)
}

/// All shards' headers, merged.
#[derive(Default)]
struct Parts {
    shards: Vec<Shard>,
    tensors: Tensors,
    metadata: Vec<(String, String)>,
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
fn read_shards(files: &[(String, PathBuf)], options: &OpenOptions) -> Result<Parts> {
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

/// Checks that the index names every tensor once, in the shard that holds it, and nothing else.
fn check_index(source: &Source, tensors: &Tensors, aliases: &[(String, usize)]) -> Result<()> {
    let path = &source.path;
    let mut named = vec![false; tensors.len()];
    let (mut not_in_shard, mut elsewhere, mut not_in_index) =
        (Names::default(), Names::default(), Names::default());
    let mut twice = None;
    // Its length was held against the cap when it was read first.
    let json = source.bytes_at(0, source.len())?;
    Index::parse(path, &json, |name, file| {
        let Some(number) = tensors.find(name) else {
            if !aliases.iter().any(|(alias, _)| alias == name) {
                not_in_shard.push(name);
            }
            return;
        };
        // Shards are numbered as the index first mentions them, so their numbers agree.
        if tensors.at(number).is_none_or(|t| t.shard != file) {
            elsewhere.push(name);
        }
        if let Some(seen) = named.get_mut(number)
            && std::mem::replace(seen, true)
        {
            twice.get_or_insert_with(|| name.to_owned());
        }
    })?;
    if let Some(tensor) = twice {
        return Err(Error::Duplicate { file: path.into(), tensor });
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
