//! From a path to a checkpoint: which files belong to it, that each is sound, and that they agree.

mod agree;
mod files;
mod shard;

pub use shard::Shard;

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::source::{Identity, Source};
use crate::tensors::Tensors;
use agree::{check_all_named, check_index};
use files::{find_index, list_safetensors};
use flashboot_core::ByteSize;
use shard::{Parts, read_shards, reopen};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

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
