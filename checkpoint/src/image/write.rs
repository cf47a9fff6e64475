//! Writes a table as a stream: a header of 100 MB, or a million tensors, is never a second time in memory.

use super::table::Segment;
use crate::error::{Error, Result};
use crate::open::Checkpoint;
use crate::source::Source;
use crate::tensors::strides;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use flashboot_core::layout::Place;
use flashboot_core::{BLOCK, Digests, Layout};
use std::io::{self, Write};
use std::path::Path;

/// A whole number of base64's 3-byte groups, so that pieces join without padding between them.
const PIECE: usize = 3 << 18;

pub(crate) struct TableParts<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) sources: &'a [Source],
    pub(crate) layout: &'a Layout,
    pub(crate) digests: &'a Digests,
}

/// Writes the table. `path` names it in errors.
pub(crate) fn write_table(path: &Path, out: &mut impl Write, parts: &TableParts<'_>) -> Result<()> {
    let TableParts { checkpoint, layout, digests, .. } = parts;
    let io = |e: io::Error| Error::io("write", path, &e);
    write!(
        out,
        "{{\"format\":{},\"payload\":{{\"bytes\":{},\"separator\":{},\"block\":{BLOCK},\"digests\":",
        super::FORMAT_VERSION,
        layout.payload(),
        layout.separator(),
    )
    .map_err(io)?;
    json(path, out, digests.values())?;
    out.write_all(b"},\"sources\":[").map_err(io)?;
    write_sources(path, out, parts)?;
    out.write_all(b"],\"index\":").map_err(io)?;
    match checkpoint.index() {
        None => out.write_all(b"null").map_err(io)?,
        Some(index) => {
            let source = index.reopen()?;
            out.write_all(b"{\"file\":").map_err(io)?;
            json(path, out, &index.name)?;
            out.write_all(b",\"content\":\"").map_err(io)?;
            base64(path, out, &source, 0, source.len())?;
            out.write_all(b"\"}").map_err(io)?;
        }
    }
    out.write_all(b",\"aliases\":{").map_err(io)?;
    let tensors = checkpoint.tensors();
    for (i, (alias, number)) in checkpoint.aliases().iter().enumerate() {
        out.write_all(if i == 0 { b"" } else { b"," }).map_err(io)?;
        json(path, out, alias)?;
        out.write_all(b":").map_err(io)?;
        json(path, out, tensors.at(*number).map_or("", |t| t.name))?;
    }
    out.write_all(b"},\"tensors\":{").map_err(io)?;
    write_tensors(path, out, parts)?;
    out.write_all(b"}}\n").map_err(io)
}

fn write_tensors(path: &Path, out: &mut impl Write, parts: &TableParts<'_>) -> Result<()> {
    let io = |e: io::Error| Error::io("write", path, &e);
    for (i, number) in parts.layout.order().enumerate() {
        let tensor = parts.checkpoint.tensors().at(number);
        let (Some(tensor), Some(offset)) = (tensor, parts.layout.offset(number)) else { continue };
        let segment = match crate::experts::place(tensor.name) {
            Place::Expert { .. } => Segment::Experts,
            Place::NonExpert => Segment::NonExperts,
        };
        out.write_all(if i == 0 { b"\n" } else { b",\n" }).map_err(io)?;
        json(path, out, tensor.name)?;
        out.write_all(b":{\"segment\":").map_err(io)?;
        json(path, out, &segment)?;
        write!(out, ",\"offset\":{offset},\"shape\":").map_err(io)?;
        json(path, out, tensor.shape)?;
        out.write_all(b",\"stride\":").map_err(io)?;
        json(path, out, &strides(tensor.shape))?;
        write!(
            out,
            ",\"dtype\":\"{}\",\"nbytes\":{},\"source\":{},\"source_offset\":{}}}",
            tensor.dtype, tensor.bytes, tensor.shard, tensor.begin
        )
        .map_err(io)?;
    }
    Ok(())
}

fn write_sources(path: &Path, out: &mut impl Write, parts: &TableParts<'_>) -> Result<()> {
    let io = |e: io::Error| Error::io("write", path, &e);
    for (i, (shard, source)) in parts.checkpoint.shards().iter().zip(parts.sources).enumerate() {
        out.write_all(if i == 0 { b"{\"file\":" } else { b",{\"file\":" }).map_err(io)?;
        json(path, out, &shard.name)?;
        write!(out, ",\"data_bytes\":{},\"header\":\"", shard.data_bytes).map_err(io)?;
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
    Ok(())
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

fn json<T: serde::Serialize + ?Sized>(path: &Path, out: &mut impl Write, value: &T) -> Result<()> {
    serde_json::to_writer(out, value).map_err(|e| match e.io_error_kind() {
        Some(_) => Error::io("write", path, &io::Error::from(e)),
        None => Error::NotJson { file: path.into(), detail: e.to_string() },
    })
}
