//! What an image was made of, as its tables and its fingerprint repeat it: a checkpoint's files, or the tables of the
//! image that it was made from.

use super::id::FieldHasher;
use super::table::{RankTable, SourceFile};
use crate::error::{Error, Result};
use crate::open::Checkpoint;
use crate::source::Source;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use std::io::{self, Write};
use std::path::Path;

/// A whole number of base64's 3-byte groups, so that pieces join without padding between them.
const PIECE: usize = 3 << 18;

/// Where headers and index come from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TableOrigin<'o> {
    /// A checkpoint, and its shards' open files.
    Checkpoint(&'o Checkpoint, &'o [Source]),
    /// Another image's table.
    Image(&'o RankTable),
    /// A file that never was: what tensors in memory would be as one.
    Memory(&'o SourceFile),
}

impl TableOrigin<'_> {
    /// BLAKE3 over names, headers, trailing bytes, index and the payloads' roots, each payload once.
    pub(crate) fn hash(&self, roots: &[blake3::Hash]) -> Result<blake3::Hash> {
        let mut hasher = FieldHasher::new(b"flashboot source, format 1");
        match self {
            Self::Checkpoint(checkpoint, sources) => {
                for (shard, source) in checkpoint.shards().iter().zip(*sources) {
                    hasher.field(shard.name.as_bytes());
                    hasher.field(blake3::Hash::as_bytes(&shard.header_hash));
                    let mut trailing = Vec::new();
                    if shard.trailing() > 0 {
                        let start = shard.data_start().saturating_add(shard.data_bytes);
                        trailing = source.bytes_at(start, shard.trailing())?;
                    }
                    hasher.field(&trailing);
                }
                if let Some(index) = checkpoint.index() {
                    hasher.field(index.name.as_bytes());
                    let source = index.reopen()?;
                    let mut bytes = blake3::Hasher::new();
                    source.stream(0, source.len(), 1 << 20, |part| {
                        bytes.update(part);
                        Ok(())
                    })?;
                    hasher.field(bytes.finalize().as_bytes());
                }
            }
            Self::Image(_) | Self::Memory(_) => {
                for source in self.kept() {
                    hasher.field(source.name.as_bytes());
                    hasher.field(blake3::hash(&source.header).as_bytes());
                    hasher.field(&source.trailing);
                }
                if let Some((name, bytes)) = self.kept_index() {
                    hasher.field(name.as_bytes());
                    hasher.field(blake3::hash(bytes).as_bytes());
                }
            }
        }
        roots.iter().for_each(|root| hasher.field(root.as_bytes()));
        Ok(hasher.finish())
    }

    /// The files whose headers are in memory.
    fn kept(&self) -> &[SourceFile] {
        match self {
            Self::Checkpoint(..) => &[],
            Self::Image(table) => table.sources(),
            Self::Memory(source) => std::slice::from_ref(*source),
        }
    }

    fn kept_index(&self) -> Option<(&str, &[u8])> {
        match self {
            Self::Image(table) => table.index(),
            Self::Checkpoint(..) | Self::Memory(_) => None,
        }
    }

    /// Bytes of all headers and the index.
    pub(crate) fn head_bytes(&self) -> (u64, u64) {
        match self {
            Self::Checkpoint(checkpoint, _) => {
                (checkpoint.header_bytes(), checkpoint.index().map_or(0, |i| i.identity.len))
            }
            Self::Image(_) | Self::Memory(_) => {
                let headers = self.kept().iter().map(|s| s.header.len() as u64).sum();
                (headers, self.kept_index().map_or(0, |(_, bytes)| bytes.len() as u64))
            }
        }
    }

    /// Writes the members `sources` and `index` of a table.
    pub(super) fn write(&self, path: &Path, out: &mut impl Write) -> Result<()> {
        let io = |e: io::Error| Error::io("write", path, &e);
        out.write_all(b"\"sources\":[").map_err(io)?;
        match self {
            Self::Checkpoint(checkpoint, sources) => {
                for (i, (shard, source)) in checkpoint.shards().iter().zip(*sources).enumerate() {
                    begin_source(path, out, i, &shard.name, shard.data_bytes)?;
                    let hash = base64(path, out, source, 8, shard.header_len)?;
                    if hash != shard.header_hash {
                        return Err(Error::Changed { path: shard.path.clone() });
                    }
                    out.write_all(b"\"").map_err(io)?;
                    if shard.trailing() > 0 {
                        out.write_all(b",\"trailing\":\"").map_err(io)?;
                        let start = shard.data_start().saturating_add(shard.data_bytes);
                        base64(path, out, source, start, shard.trailing())?;
                        out.write_all(b"\"").map_err(io)?;
                    }
                    out.write_all(b"}").map_err(io)?;
                }
            }
            Self::Image(_) | Self::Memory(_) => {
                for (i, source) in self.kept().iter().enumerate() {
                    begin_source(path, out, i, &source.name, source.data_bytes)?;
                    out.write_all(BASE64.encode(&source.header).as_bytes()).map_err(io)?;
                    out.write_all(b"\"").map_err(io)?;
                    if !source.trailing.is_empty() {
                        let trailing = BASE64.encode(&source.trailing);
                        write!(out, ",\"trailing\":\"{trailing}\"").map_err(io)?;
                    }
                    out.write_all(b"}").map_err(io)?;
                }
            }
        }
        out.write_all(b"],\"index\":").map_err(io)?;
        let mut index = |name: &str, content: &mut dyn FnMut(&mut dyn Write) -> Result<()>| -> Result<()> {
            out.write_all(b"{\"file\":").map_err(io)?;
            super::write::json(path, out, name)?;
            out.write_all(b",\"content\":\"").map_err(io)?;
            content(out)?;
            out.write_all(b"\"}").map_err(io)
        };
        match self {
            Self::Checkpoint(checkpoint, _) if checkpoint.index().is_some() => {
                let Some(file) = checkpoint.index() else { return Ok(()) };
                let source = file.reopen()?;
                index(&file.name, &mut |mut out| base64(path, &mut out, &source, 0, source.len()).map(drop))
            }
            _ => match self.kept_index() {
                Some((name, bytes)) => {
                    index(name, &mut |out| out.write_all(BASE64.encode(bytes).as_bytes()).map_err(io))
                }
                None => out.write_all(b"null").map_err(io),
            },
        }
    }
}

fn begin_source(path: &Path, out: &mut impl Write, i: usize, name: &str, data_bytes: u64) -> Result<()> {
    let io = |e: io::Error| Error::io("write", path, &e);
    out.write_all(if i == 0 { b"{\"file\":" } else { b",{\"file\":" }).map_err(io)?;
    super::write::json(path, out, name)?;
    write!(out, ",\"data_bytes\":{data_bytes},\"header\":\"").map_err(io)
}

/// Writes a part of `source` as base64 and returns the hash of that part.
fn base64(path: &Path, out: &mut impl Write, source: &Source, start: u64, len: u64) -> Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    let mut text = String::new();
    source.stream(start, len, PIECE, |part| {
        hasher.update(part);
        text.clear();
        BASE64.encode_string(part, &mut text);
        out.write_all(text.as_bytes()).map_err(|e| Error::io("write", path, &e))
    })?;
    Ok(hasher.finalize())
}
