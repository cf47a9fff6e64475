//! A rank image's table as JSON says it: the form alone, each tensor in itself. What holds between them is
//! [`RankTable::parse`](super::RankTable::parse)'s to check.

use super::table::Segment;
use super::view::RawViews;
use crate::gather::Gather;
use crate::tensors::{Tensors, strides};
use flashboot_core::{BlockDigest, Dtype};
use serde::de::{self, MapAccess, Visitor};
use std::{borrow::Cow, collections::BTreeMap, fmt};

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File<'a> {
    pub(super) format: u64,
    pub(super) payload: Payload,
    #[serde(borrow)]
    pub(super) sources: Vec<RawSource<'a>>,
    #[serde(borrow)]
    pub(super) index: Option<Named<'a>>,
    pub(super) aliases: Aliases,
    #[serde(default)]
    pub(super) views: RawViews,
    pub(super) tensors: TensorMap,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Payload {
    pub(super) bytes: u64,
    pub(super) separator: u64,
    pub(super) block: u64,
    pub(super) digests: Vec<BlockDigest>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawSource<'a> {
    pub(super) file: String,
    pub(super) data_bytes: u64,
    #[serde(borrow)]
    pub(super) header: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) trailing: Cow<'a, str>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named<'a> {
    pub(super) file: String,
    #[serde(borrow)]
    pub(super) content: Cow<'a, str>,
}

/// Alias → name; a map whose keys may appear once.
pub(super) struct Aliases(pub(super) BTreeMap<String, String>);

impl<'de> serde::Deserialize<'de> for Aliases {
    fn deserialize<D: de::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Aliases;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of aliases")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Aliases, A::Error> {
                let mut found = BTreeMap::new();
                while let Some((alias, name)) = map.next_entry::<String, String>()? {
                    if found.insert(alias.clone(), name).is_some() {
                        return Err(de::Error::custom(format!("alias `{alias}` is there twice")));
                    }
                }
                Ok(Aliases(found))
            }
        }
        d.deserialize_map(Pairs)
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    segment: Segment,
    offset: u64,
    shape: Vec<u64>,
    stride: Vec<u64>,
    dtype: Dtype,
    nbytes: u64,
    source: Option<u32>,
    source_offset: Option<u64>,
    parts: Option<Vec<[u64; 7]>>,
}

#[derive(Default)]
pub(super) struct TensorMap {
    pub(super) tensors: Tensors,
    pub(super) places: Vec<(u64, Segment)>,
    pub(super) parts: Vec<Gather>,
    pub(super) parts_ends: Vec<usize>,
}

impl TensorMap {
    fn push(&mut self, name: &str, raw: &RawTensor) -> Result<(), String> {
        let needed = raw.dtype.bytes_of(&raw.shape).map_err(|e| format!("tensor `{name}`: {e}"))?;
        if needed != raw.nbytes {
            return Err(format!("tensor `{name}`: `nbytes` is {}, its shape needs {needed}", raw.nbytes));
        }
        let contiguous = strides(&raw.shape);
        if raw.stride != contiguous {
            return Err(format!("tensor `{name}`: `stride` is {:?}, needed {contiguous:?}", raw.stride));
        }
        let before = self.parts.len();
        for &[source, from, at, run, count, from_step, at_step] in raw.parts.iter().flatten() {
            let source = u32::try_from(source).map_err(|_| format!("tensor `{name}`: no source {source}"))?;
            self.parts.push(Gather { source, from, at, run, count, from_step, at_step });
        }
        let (source, begin) = match (raw.source, raw.source_offset, self.parts.get(before)) {
            (Some(source), Some(begin), None) if raw.parts.is_none() => (source, begin),
            (None, None, Some(first)) => (first.source, first.from),
            // A part of nothing: a tensor without elements, or padding alone.
            (None, None, None) if raw.parts.is_some() => (0, 0),
            _ => {
                let needed = "either `source` and `source_offset` or `parts`";
                return Err(format!("tensor `{name}`: it must have {needed}"));
            }
        };
        self.parts_ends.push(self.parts.len());
        self.tensors.shapes.extend_from_slice(&raw.shape);
        let pushed = self.tensors.push_with_shape_in_place(name, raw.dtype, begin, raw.nbytes, source);
        pushed.map_err(|_| format!("tensor `{name}` is there twice"))?;
        self.places.push((raw.offset, raw.segment));
        Ok(())
    }
}

impl<'de> serde::Deserialize<'de> for TensorMap {
    fn deserialize<D: de::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = TensorMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TensorMap, A::Error> {
                let mut found = TensorMap::default();
                while let Some(name) = map.next_key::<String>()? {
                    let raw: RawTensor = map.next_value()?;
                    found.push(&name, &raw).map_err(de::Error::custom)?;
                }
                Ok(found)
            }
        }
        d.deserialize_map(Entries)
    }
}
