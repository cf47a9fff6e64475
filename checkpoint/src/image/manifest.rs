//! What proves one rank image to who does not have the image: its metadata and its table, as one run of bytes.
//!
//! The length of `metadata.json` as 8 little-endian bytes, its bytes, the bytes of the rank's table. The image's id
//! covers all of it, so it may come from anybody.

use super::id::{METADATA, parse_hash, unseal};
use super::metadata::{Metadata, RankEntry};
use super::read::{Image, RankImage};
use super::table::RankTable;
use crate::error::{Error, Result};
use crate::source::Source;
use std::{path::Path, sync::Arc};

/// A manifest that was checked against the image's id.
#[derive(Debug, Clone)]
pub struct Manifest {
    /// The whole image's.
    pub metadata: Metadata,
    /// The rank's part of it.
    pub entry: RankEntry,
    /// What lies where, and every block's digest.
    pub table: RankTable,
    bytes: Arc<[u8]>,
}

impl Metadata {
    /// Parses the bytes of a `metadata.json` that came from anywhere, and checks them against the id they give.
    ///
    /// # Errors
    /// As [`Manifest::check`].
    pub fn check(bytes: &[u8]) -> Result<Self> {
        unseal(Path::new(METADATA), bytes)
    }
}

impl Manifest {
    /// All of it as it is sent, and as the image's id covers it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The manifest of `rank`, from the image's files. Blocks.
    pub fn read(image: &Image, rank: &RankImage) -> Result<Vec<u8>> {
        Ok(Self::of(image, rank)?.bytes.to_vec())
    }

    /// The same, parsed.
    pub fn of(image: &Image, rank: &RankImage) -> Result<Self> {
        let read = |name: &str| {
            let source = Source::open(&image.dir().join(name))?;
            source.bytes_at(0, source.len())
        };
        let metadata = read(METADATA)?;
        let entry = image.metadata().ranks.iter().find(|entry| entry.coordinate == rank.coordinate);
        let table = match entry {
            Some(entry) => read(&entry.table)?,
            None => Vec::new(),
        };
        let bytes = [&(metadata.len() as u64).to_le_bytes()[..], &metadata, &table].concat();
        // The files may have changed since the image was opened.
        Self::check(&bytes, image.id(), &rank.coordinate.to_string())
    }

    /// Checks a manifest that came from anywhere: it is of the image `id`, and of the rank called `rank`.
    ///
    /// # Errors
    /// What does not agree: [`Error::ImageHash`], [`Error::ImageSize`], [`Error::NotAnImage`], or a parser's.
    pub fn check(bytes: &[u8], id: &str, rank: &str) -> Result<Self> {
        let path = Path::new("manifest");
        let not_ours = |detail: String| Error::NotAnImage { path: path.into(), detail };
        let (len, rest) =
            bytes.split_first_chunk().ok_or_else(|| not_ours("a manifest is longer than 8 bytes".into()))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).unwrap_or(usize::MAX);
        let Some((metadata, table)) = rest.split_at_checked(len) else {
            return Err(not_ours(format!("its metadata is {len} bytes long, and {} are there", rest.len())));
        };
        let metadata = unseal(path, metadata)?;
        let damaged = |needed: &str, found: String| Error::ImageHash {
            file: path.into(),
            needed: needed.to_owned(),
            found,
        };
        if metadata.id != id {
            return Err(damaged(id, metadata.id));
        }
        let entry = metadata.ranks.iter().find(|entry| entry.coordinate.to_string() == rank);
        let entry = entry.ok_or_else(|| not_ours(format!("the image has no rank {rank}")))?.clone();
        let found = blake3::hash(table);
        if found != parse_hash(path, &entry.table_hash)? {
            return Err(damaged(&entry.table_hash, found.to_hex().to_string()));
        }
        let table = RankTable::parse(path, table)?;
        if table.payload_bytes() != entry.payload_bytes {
            let (needed, found) = (entry.payload_bytes, table.payload_bytes());
            return Err(Error::ImageSize { file: path.into(), needed, found });
        }
        let root = blake3::Hash::from_bytes(table.digests().root());
        if root != parse_hash(path, &entry.root)? {
            return Err(damaged(&entry.root, root.to_hex().to_string()));
        }
        Ok(Self { metadata, entry, table, bytes: bytes.into() })
    }
}
