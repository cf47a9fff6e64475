//! Writes a table as a stream: a header of 100 MB, or a million tensors, is never a second time in memory.

use super::origin::TableOrigin;
use super::table::Segment;
use super::view::{ImageView, RawView};
use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::tensors::strides;
use flashboot_core::layout::Place;
use flashboot_core::{BLOCK, Digests, Dtype};
use std::io::{self, Write};
use std::path::Path;

/// What a table is made of; its tensors are handed in one by one.
pub(crate) struct TableParts<'a> {
    pub(crate) origin: TableOrigin<'a>,
    /// Alias and name.
    pub(crate) aliases: &'a [(&'a str, &'a str)],
    /// Views, by name, each with its tensor's name.
    pub(crate) views: &'a [(&'a ImageView, &'a str)],
    pub(crate) separator: u64,
    pub(crate) digests: &'a Digests,
}

/// One tensor.
pub(crate) struct TableRow<'a> {
    pub(crate) name: &'a str,
    pub(crate) place: Place,
    pub(crate) offset: u64,
    pub(crate) shape: &'a [u64],
    pub(crate) dtype: Dtype,
    pub(crate) bytes: u64,
    pub(crate) from: RowFrom<'a>,
}

/// Where a tensor's bytes came from.
pub(crate) enum RowFrom<'a> {
    /// It is a tensor of a source, whole: the source's number and the place in its data.
    Whole(usize, u64),
    /// Gathers out of sources' data, `at` counted from the tensor's first byte.
    Parts(&'a [Gather]),
}

/// Takes rows, in payload order.
pub(crate) type TakeRow<'t> = dyn FnMut(&TableRow<'_>) -> Result<()> + 't;

/// Writes the table. `path` names it in errors; `rows` gives each tensor to what it is handed.
pub(crate) fn write_table(
    path: &Path,
    out: &mut impl Write,
    parts: &TableParts<'_>,
    rows: impl FnOnce(&mut TakeRow<'_>) -> Result<()>,
) -> Result<()> {
    let io = |e: io::Error| Error::io("write", path, &e);
    write!(
        out,
        "{{\"format\":{},\"payload\":{{\"bytes\":{},\"separator\":{},\"block\":{BLOCK},\"digests\":",
        super::FORMAT_VERSION,
        parts.digests.payload(),
        parts.separator,
    )
    .map_err(io)?;
    json(path, out, parts.digests.values())?;
    out.write_all(b"},").map_err(io)?;
    parts.origin.write(path, out)?;
    out.write_all(b",\"aliases\":{").map_err(io)?;
    for (i, (alias, name)) in parts.aliases.iter().enumerate() {
        out.write_all(if i == 0 { b"" } else { b"," }).map_err(io)?;
        json(path, out, alias)?;
        out.write_all(b":").map_err(io)?;
        json(path, out, name)?;
    }
    out.write_all(b"},").map_err(io)?;
    write_views(path, out, parts.views)?;
    out.write_all(b"\"tensors\":{").map_err(io)?;
    let mut first = true;
    rows(&mut |row| {
        out.write_all(if std::mem::take(&mut first) { b"\n" } else { b",\n" }).map_err(io)?;
        write_row(path, out, row)
    })?;
    out.write_all(b"}}\n").map_err(io)
}

/// The member `views`, which is there only if there are any.
fn write_views(path: &Path, out: &mut impl Write, views: &[(&ImageView, &str)]) -> Result<()> {
    if views.is_empty() {
        return Ok(());
    }
    let io = |e: io::Error| Error::io("write", path, &e);
    out.write_all(b"\"views\":{").map_err(io)?;
    for (i, (view, of)) in views.iter().enumerate() {
        out.write_all(if i == 0 { b"\n" } else { b",\n" }).map_err(io)?;
        json(path, out, &view.name)?;
        out.write_all(b":").map_err(io)?;
        let ImageView { offset, shape, stride, dtype, .. } = view;
        let (shape, stride) = (shape.clone(), stride.clone());
        json(path, out, &RawView { of: (*of).to_owned(), offset: *offset, shape, stride, dtype: *dtype })?;
    }
    out.write_all(b"},").map_err(io)
}

fn write_row(path: &Path, out: &mut impl Write, row: &TableRow<'_>) -> Result<()> {
    let io = |e: io::Error| Error::io("write", path, &e);
    let segment = match row.place {
        Place::Expert { .. } => Segment::Experts,
        Place::NonExpert => Segment::NonExperts,
    };
    json(path, out, row.name)?;
    out.write_all(b":{\"segment\":").map_err(io)?;
    json(path, out, &segment)?;
    write!(out, ",\"offset\":{},\"shape\":", row.offset).map_err(io)?;
    json(path, out, row.shape)?;
    out.write_all(b",\"stride\":").map_err(io)?;
    json(path, out, &strides(row.shape))?;
    write!(out, ",\"dtype\":\"{}\",\"nbytes\":{},", row.dtype, row.bytes).map_err(io)?;
    match &row.from {
        RowFrom::Whole(source, offset) => {
            write!(out, "\"source\":{source},\"source_offset\":{offset}}}").map_err(io)
        }
        RowFrom::Parts(parts) => {
            out.write_all(b"\"parts\":[").map_err(io)?;
            for (i, g) in parts.iter().enumerate() {
                let comma = if i == 0 { "" } else { "," };
                let Gather { source, from, at, run, count, from_step, at_step } = g;
                write!(out, "{comma}[{source},{from},{at},{run},{count},{from_step},{at_step}]")
                    .map_err(io)?;
            }
            out.write_all(b"]}").map_err(io)
        }
    }
}

pub(super) fn json<T: serde::Serialize + ?Sized>(path: &Path, out: &mut impl Write, value: &T) -> Result<()> {
    serde_json::to_writer(out, value).map_err(|e| match e.io_error_kind() {
        Some(_) => Error::io("write", path, &io::Error::from(e)),
        None => Error::NotJson { file: path.into(), detail: e.to_string() },
    })
}
