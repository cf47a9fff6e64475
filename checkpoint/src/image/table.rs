//! A rank image's table: what lies where in its payload, what proves it, and where it came from.
//!
//! Parsing bounds everything by the payload: what a table holds after [`RankTable::parse`] can be read without
//! another check.

use super::json::{Aliases, File, Named, Payload, RawSource, TensorMap};
use super::view::{ImageView, read_views};
use crate::cause::FieldProblem;
use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::tensors::{Tensors, strides};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use flashboot_core::layout::{PAYLOAD_ALIGN, TENSOR_ALIGN};
use flashboot_core::{BLOCK, Digests, Dtype};
use std::{collections::HashMap, fmt, path::Path};

/// Which half of the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Segment {
    /// Before the separator.
    Experts,
    /// From the separator on.
    NonExperts,
}

/// One tensor of a rank image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageTensor<'t> {
    /// Its name.
    pub name: &'t str,
    /// Its half of the payload.
    pub segment: Segment,
    /// Where it begins, counted from the payload's first byte.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: &'t [u64],
    /// The number of its source file in [`RankTable::sources`]; of a tensor in parts, its first part's.
    pub source: usize,
    /// Where it begins in that file's data; of a tensor in parts, where its first part does.
    pub source_offset: u64,
    /// The parts it was put together from: `source` is a source file's number, `from` counts in that file's data and
    /// `at` from the tensor's first byte. Empty for a tensor that is whole.
    pub parts: &'t [Gather],
}

impl ImageTensor<'_> {
    /// Its strides in elements (tensors of format 1 are contiguous).
    pub fn stride(&self) -> Vec<u64> {
        strides(self.shape)
    }
}

/// A safetensors file the tensors came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Its name below the checkpoint's directory.
    pub name: String,
    /// Bytes of its tensors.
    pub data_bytes: u64,
    /// Its header, byte for byte, without the 8 that give its length.
    pub header: Vec<u8>,
    /// What followed its last tensor, where that was allowed.
    pub trailing: Vec<u8>,
}

/// A parsed table.
#[derive(Debug, Clone)]
pub struct RankTable {
    pub(super) separator: u64,
    pub(super) digests: Digests,
    /// `begin` and `shard` of these are source offset and source.
    pub(super) tensors: Tensors,
    pub(super) places: Vec<(u64, Segment)>,
    /// All tensors' parts, and one past the last of each tensor's.
    pub(super) parts: Vec<Gather>,
    pub(super) parts_ends: Vec<usize>,
    pub(super) aliases: Vec<(String, usize)>,
    pub(super) views: Vec<ImageView>,
    pub(super) sources: Vec<SourceFile>,
    pub(super) index: Option<(String, Vec<u8>)>,
}

impl RankTable {
    /// Bytes of the payload.
    pub fn payload_bytes(&self) -> u64 {
        self.digests.payload()
    }

    /// Where the non-experts begin.
    pub fn separator(&self) -> u64 {
        self.separator
    }

    /// The value of every block.
    pub fn digests(&self) -> &Digests {
        &self.digests
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Tensor `index`; they are in payload order.
    pub fn at(&self, index: usize) -> Option<ImageTensor<'_>> {
        let tensor = self.tensors.at(index)?;
        let &(offset, segment) = self.places.get(index)?;
        Some(ImageTensor {
            name: tensor.name,
            segment,
            offset,
            bytes: tensor.bytes,
            dtype: tensor.dtype,
            shape: tensor.shape,
            source: tensor.shard,
            source_offset: tensor.begin,
            parts: parts_of(&self.parts, &self.parts_ends, index),
        })
    }

    /// All tensors, in payload order.
    pub fn iter(&self) -> impl Iterator<Item = ImageTensor<'_>> {
        (0..self.len()).filter_map(|i| self.at(i))
    }

    /// The number of the tensor of that name, or of that alias.
    pub fn find(&self, name: &str) -> Option<usize> {
        let alias = || self.aliases.iter().find(|(alias, _)| alias == name).map(|&(_, number)| number);
        self.tensors.find(name).or_else(alias)
    }

    /// Further names of tensors, with the number of the tensor each names.
    pub fn aliases(&self) -> &[(String, usize)] {
        &self.aliases
    }

    /// Names of tensors' bytes in another shape, stride or dtype, by name.
    pub fn views(&self) -> &[ImageView] {
        &self.views
    }

    /// The files the tensors came from.
    pub fn sources(&self) -> &[SourceFile] {
        &self.sources
    }

    /// The name and bytes of the checkpoint's index, if it had one.
    pub fn index(&self) -> Option<(&str, &[u8])> {
        self.index.as_ref().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }

    /// Parses the bytes of a table. `path` is for errors only.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        let not_json = |e: &dyn fmt::Display| Error::NotJson { file: path.into(), detail: e.to_string() };
        let text = std::str::from_utf8(json).map_err(|e| not_json(&e))?;
        let file: File<'_> = serde_json::from_str(text).map_err(|e| not_json(&e))?;
        let field = |tensor: &str, field: &'static str, found: u64, needed: String| Error::Field {
            file: path.into(),
            tensor: tensor.into(),
            field,
            problem: FieldProblem::Value { found: found.to_string(), needed },
        };
        let Payload { bytes, separator, block, digests } = file.payload;
        if file.format != super::FORMAT_VERSION {
            return Err(Error::ImageVersion {
                file: path.into(),
                found: file.format,
                needed: super::FORMAT_VERSION,
            });
        }
        if block != BLOCK {
            return Err(field("(payload)", "block", block, BLOCK.to_string()));
        }
        if !bytes.is_multiple_of(PAYLOAD_ALIGN) {
            return Err(field("(payload)", "bytes", bytes, format!("a multiple of {PAYLOAD_ALIGN}")));
        }
        if separator > bytes || !separator.is_multiple_of(TENSOR_ALIGN) {
            let needed = format!("a multiple of {TENSOR_ALIGN} up to {bytes}");
            return Err(field("(payload)", "separator", separator, needed));
        }
        let digests = Digests::new(bytes, block, digests).map_err(|e| not_json(&e))?;
        let sources = read_sources(path, file.sources)?;
        let TensorMap { tensors, places, parts, parts_ends } = file.tensors;
        let mut end = 0;
        for (number, (tensor, &(offset, segment))) in tensors.iter().zip(&places).enumerate() {
            let needed = |what: String| field(tensor.name, "offset", offset, what);
            if offset < end || !offset.is_multiple_of(TENSOR_ALIGN) {
                return Err(needed(format!(
                    "a multiple of {TENSOR_ALIGN} from {end} on, where the tensor before ends"
                )));
            }
            let (from, to) = match segment {
                Segment::Experts => (0, separator),
                Segment::NonExperts => (separator, bytes),
            };
            end = offset.saturating_add(tensor.bytes);
            if offset < from || end > to {
                return Err(needed(format!("{} bytes of it inside {from}..{to}", tensor.bytes)));
            }
            let own = parts_of(&parts, &parts_ends, number);
            if !own.is_empty() {
                for part in own {
                    check_part(path, tensor.name, part, tensor.bytes, &sources)?;
                }
                continue;
            }
            let Some(source) = sources.get(tensor.shard) else {
                return Err(field(
                    tensor.name,
                    "source",
                    tensor.shard as u64,
                    format!("below {}", sources.len()),
                ));
            };
            if tensor.begin.saturating_add(tensor.bytes) > source.data_bytes {
                let needed = format!("{} bytes of it inside {}", tensor.bytes, source.data_bytes);
                return Err(field(tensor.name, "source_offset", tensor.begin, needed));
            }
        }
        let aliases = read_aliases(path, file.aliases, &tensors)?;
        let views = read_views(path, file.views, &tensors, &aliases)?;
        let index = match file.index {
            None => None,
            Some(Named { file, content }) => {
                check_name(path, &file)?;
                Some((file, decode(path, "index", &content)?))
            }
        };
        Ok(Self { separator, digests, tensors, places, parts, parts_ends, aliases, views, sources, index })
    }
}

fn parts_of<'p>(parts: &'p [Gather], ends: &[usize], index: usize) -> &'p [Gather] {
    let start = index.checked_sub(1).and_then(|before| ends.get(before)).copied().unwrap_or(0);
    let end = ends.get(index).copied().unwrap_or(start);
    parts.get(start..end).unwrap_or_default()
}

/// Whether a part lies inside its source's data and its tensor's bytes, its runs apart from one another.
fn check_part(path: &Path, tensor: &str, part: &Gather, bytes: u64, sources: &[SourceFile]) -> Result<()> {
    let data = sources.get(part.source as usize).map(|source| source.data_bytes);
    let inside = |end: Option<u64>, bytes: u64| end.is_some_and(|end| end <= bytes);
    let sound = part.is_sound() && inside(part.at_end(), bytes);
    if sound && data.is_some_and(|data| inside(part.from_end(), data)) {
        return Ok(());
    }
    let problem = FieldProblem::Value {
        found: format!("{part:?}"),
        needed: format!("runs apart, inside {bytes} bytes of the tensor and inside a source's data"),
    };
    Err(Error::Field { file: path.into(), tensor: tensor.into(), field: "parts", problem })
}

fn check_name(path: &Path, name: &str) -> Result<()> {
    match crate::index::path_problem(name) {
        None => Ok(()),
        Some(problem) => Err(Error::IndexPath {
            index: path.into(),
            tensor: "(sources)".into(),
            entry: name.into(),
            problem,
        }),
    }
}

fn decode(path: &Path, what: &str, base64: &str) -> Result<Vec<u8>> {
    let bad = |e| Error::NotJson { file: path.into(), detail: format!("base64 of {what}: {e}") };
    BASE64.decode(base64).map_err(bad)
}

fn read_sources(path: &Path, raw: Vec<RawSource<'_>>) -> Result<Vec<SourceFile>> {
    let mut names = HashMap::new();
    raw.into_iter()
        .enumerate()
        .map(|(number, source)| {
            check_name(path, &source.file)?;
            if names.insert(source.file.clone(), number).is_some() {
                return Err(Error::Duplicate { file: path.into(), tensor: source.file });
            }
            Ok(SourceFile {
                header: decode(path, &source.file, &source.header)?,
                trailing: decode(path, &source.file, &source.trailing)?,
                data_bytes: source.data_bytes,
                name: source.file,
            })
        })
        .collect()
}

fn read_aliases(path: &Path, raw: Aliases, tensors: &Tensors) -> Result<Vec<(String, usize)>> {
    raw.0
        .into_iter()
        .map(|(alias, name)| {
            if tensors.find(&alias).is_some() {
                return Err(Error::Duplicate { file: path.into(), tensor: alias });
            }
            let number = tensors.find(&name).ok_or_else(|| Error::Field {
                file: path.into(),
                tensor: alias.clone(),
                field: "aliases",
                problem: FieldProblem::Value { found: name, needed: "a tensor of this table".into() },
            })?;
            Ok((alias, number))
        })
        .collect()
}
