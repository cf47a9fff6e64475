//! Opens an image: nothing of it is believed before its hash, its length and its bounds are checked. Payloads
//! are only measured here; `verify` reads them.

use super::id::{METADATA, OPENING, parse_hash, unseal};
use super::metadata::{Coordinate, Metadata, RankEntry};
use super::table::RankTable;
use crate::cause::FieldProblem;
use crate::error::{Error, Result};
use crate::source::Source;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The same number on every Linux.
const ENOTDIR: i32 = 20;

/// Far above the metadata of ten thousand ranks.
const METADATA_CAP: u64 = 64 << 20;

/// A packed model whose metadata and tables are sound.
#[derive(Debug, Clone)]
pub struct Image {
    dir: PathBuf,
    metadata: Metadata,
    ranks: Vec<RankImage>,
}

/// One rank's image.
#[derive(Debug, Clone)]
pub struct RankImage {
    /// Whose it is.
    pub coordinate: Coordinate,
    /// The payload's file.
    pub path: PathBuf,
    /// The payload's length.
    pub payload_bytes: u64,
    /// What lies where. Ranks that share a file share this.
    pub table: Arc<RankTable>,
}

impl Image {
    /// Opens the image in `dir`: checks the image id, every table against its hash, and every payload's length.
    ///
    /// Blocks; reads metadata and tables, no payload.
    pub fn open(dir: &Path) -> Result<Self> {
        ImageHead::open(dir)?.image()
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The image id, 64 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.metadata.id
    }

    /// All of `metadata.json`.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Its ranks, in the order of the metadata.
    pub fn ranks(&self) -> &[RankImage] {
        &self.ranks
    }

    /// The rank image of `coordinate`.
    pub fn rank(&self, coordinate: Coordinate) -> Option<&RankImage> {
        self.ranks.iter().find(|rank| rank.coordinate == coordinate)
    }

    /// Its ranks' images, each file once.
    pub fn files(&self) -> impl Iterator<Item = &RankImage> {
        self.ranks
            .iter()
            .enumerate()
            .filter(|(i, rank)| !self.ranks.iter().take(*i).any(|earlier| earlier.path == rank.path))
            .map(|(_, rank)| rank)
    }
}

/// An image's `metadata.json`, checked against the id in it. The id covers what it says of tables and payloads, their hashes
/// and lengths: those files themselves have not been looked at.
#[derive(Debug, Clone)]
pub struct ImageHead {
    dir: PathBuf,
    metadata: Metadata,
}

impl ImageHead {
    /// Reads it from the image in `dir`. Blocks.
    ///
    /// # Errors
    /// Why there is no image in `dir`, or none that is sound so far.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(METADATA);
        let source = Source::open(&path).map_err(|e| match e {
            Error::Missing { .. } if dir.is_dir() => super::lacking::without_metadata(dir),
            Error::Missing { .. } => Error::Missing { path: dir.into() },
            Error::Io { .. } if dir.exists() && !dir.is_dir() => {
                Error::NotAnImage { path: dir.into(), detail: "it is no directory".into() }
            }
            other => other,
        })?;
        Ok(Self { dir: dir.into(), metadata: unseal(&path, &source.all(METADATA_CAP)?)? })
    }

    /// All of `metadata.json`.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Where the payload of `entry`, one of the metadata's, lies.
    ///
    /// # Errors
    /// [`Error::Field`] for a name that leads elsewhere.
    pub fn payload(&self, entry: &RankEntry) -> Result<PathBuf> {
        check_plain(&self.dir.join(METADATA), "payload", &entry.payload)?;
        Ok(self.dir.join(&entry.payload))
    }

    /// The image: checks every table against its hash, and every payload's length. Blocks; reads no payload.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn image(self) -> Result<Image> {
        let Self { dir, metadata } = self;
        let path = dir.join(METADATA);
        let mut tables = HashMap::<&str, Arc<RankTable>>::new();
        let mut ranks = Vec::with_capacity(metadata.ranks.len());
        for entry in &metadata.ranks {
            let table = match tables.get(entry.table.as_str()) {
                Some(table) => Arc::clone(table),
                None => {
                    let table = Arc::new(read_table(&dir, &path, entry)?);
                    tables.insert(&entry.table, Arc::clone(&table));
                    table
                }
            };
            ranks.push(check_rank(&dir, &path, entry, table)?);
        }
        Ok(Image { dir, metadata, ranks })
    }
}

fn read_table(dir: &Path, metadata: &Path, entry: &RankEntry) -> Result<RankTable> {
    check_plain(metadata, "table", &entry.table)?;
    let path = dir.join(&entry.table);
    let source = Source::open(&path)?;
    check_len(&source, entry.table_bytes)?;
    let bytes = source.bytes_at(0, source.len())?;
    let found = blake3::hash(&bytes);
    if found != parse_hash(metadata, &entry.table_hash)? {
        let (needed, found) = (entry.table_hash.clone(), found.to_hex().to_string());
        return Err(Error::ImageHash { file: path, needed, found });
    }
    RankTable::parse(&path, &bytes)
}

fn check_rank(dir: &Path, metadata: &Path, entry: &RankEntry, table: Arc<RankTable>) -> Result<RankImage> {
    check_plain(metadata, "payload", &entry.payload)?;
    let path = dir.join(&entry.payload);
    check_len(&Source::open(&path)?, entry.payload_bytes)?;
    if table.payload_bytes() != entry.payload_bytes {
        let file = dir.join(&entry.table);
        return Err(Error::ImageSize { file, needed: entry.payload_bytes, found: table.payload_bytes() });
    }
    let root = blake3::Hash::from_bytes(table.digests().root());
    if root != parse_hash(metadata, &entry.root)? {
        let (needed, found) = (entry.root.clone(), root.to_hex().to_string());
        return Err(Error::ImageHash { file: dir.join(&entry.table), needed, found });
    }
    Ok(RankImage { coordinate: entry.coordinate, path, payload_bytes: entry.payload_bytes, table })
}

fn check_len(source: &Source, needed: u64) -> Result<()> {
    if source.len() != needed {
        return Err(Error::ImageSize { file: source.path.clone(), needed, found: source.len() });
    }
    Ok(())
}

/// An image's files lie in its own directory, without exception.
fn check_plain(metadata: &Path, field: &'static str, name: &str) -> Result<()> {
    if crate::index::path_problem(name).is_some() || name.contains('/') {
        return Err(Error::Field {
            file: metadata.into(),
            tensor: "(ranks)".into(),
            field,
            problem: FieldProblem::Value { found: name.into(), needed: "a plain file name".into() },
        });
    }
    Ok(())
}

/// Whether `dir` holds an image of any version, sound or not. A `metadata.json` that may not be read is an error:
/// it is not for us to say that there is none.
pub fn is_image(dir: &Path) -> Result<bool> {
    let source = match Source::open(&dir.join(METADATA)) {
        Ok(source) => source,
        // A file has nothing below it.
        Err(Error::Io { cause, .. }) if cause.errno == Some(ENOTDIR) => return Ok(false),
        Err(e @ (Error::NotPermitted { .. } | Error::Io { .. })) => return Err(e),
        Err(_) => return Ok(false),
    };
    let opening = OPENING.len() as u64;
    Ok(source.len() >= opening && source.bytes_at(0, opening)? == OPENING.as_bytes())
}
