//! A view: a name for some of a tensor's bytes in another shape, stride or dtype. Checkpoints have none; an engine's live
//! parameters do (a transposed weight, parts of a fused one, a row of a table).

use crate::cause::FieldProblem;
use crate::error::{Error, Result};
use crate::tensors::Tensors;
use flashboot_core::Dtype;
use serde::de::{self, MapAccess, Visitor};
use std::{collections::BTreeMap, fmt, path::Path};

/// A further name, for bytes of a tensor seen otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageView {
    /// Its name.
    pub name: String,
    /// The number of the tensor whose bytes it sees.
    pub of: usize,
    /// Its first byte, counted from the tensor's.
    pub offset: u64,
    /// Its element type, of whole bytes.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its strides in elements; 0 repeats.
    pub stride: Vec<u64>,
}

impl ImageView {
    /// Whether every element lies, aligned to its own size, inside a tensor of `bytes`; else what is wrong.
    pub(crate) fn check(&self, bytes: u64) -> Result<(), String> {
        let Self { offset, dtype, shape, stride, .. } = self;
        if shape.len() != stride.len() {
            return Err(format!("{} dimensions and {} strides", shape.len(), stride.len()));
        }
        if dtype.bits() < 8 {
            return Err(format!("{dtype}, whose elements are no whole bytes"));
        }
        let size = dtype.bits() / 8;
        if !offset.is_multiple_of(size) {
            return Err(format!("offset {offset}, which is no multiple of {dtype}'s {size} bytes"));
        }
        let end = if shape.contains(&0) { Some(*offset) } else { self.end(size) };
        match end {
            Some(end) if end <= bytes => Ok(()),
            _ => Err(format!("offset {offset}, shape {shape:?}, stride {stride:?} of {dtype}")),
        }
    }

    /// One past its last byte.
    fn end(&self, size: u64) -> Option<u64> {
        let steps = self.shape.iter().zip(&self.stride);
        let mut last = steps.map(|(dim, stride)| dim.checked_sub(1)?.checked_mul(*stride));
        let last = last.try_fold(0u64, |sum, step| sum.checked_add(step?))?;
        last.checked_add(1)?.checked_mul(size)?.checked_add(self.offset)
    }
}

/// A view as a table's JSON has it, under its name.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawView {
    pub(super) of: String,
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    pub(super) stride: Vec<u64>,
    pub(super) dtype: Dtype,
}

/// A map whose keys may appear once; mostly not there.
#[derive(Default)]
pub(super) struct RawViews(BTreeMap<String, RawView>);

impl<'de> serde::Deserialize<'de> for RawViews {
    fn deserialize<D: de::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawViews;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of views")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawViews, A::Error> {
                let mut found = BTreeMap::new();
                while let Some((name, view)) = map.next_entry::<String, RawView>()? {
                    if found.insert(name.clone(), view).is_some() {
                        return Err(de::Error::custom(format!("view `{name}` is there twice")));
                    }
                }
                Ok(RawViews(found))
            }
        }
        d.deserialize_map(Entries)
    }
}

/// The views of a table, checked against its tensors and its aliases.
pub(super) fn read_views(
    path: &Path,
    raw: RawViews,
    tensors: &Tensors,
    aliases: &[(String, usize)],
) -> Result<Vec<ImageView>> {
    raw.0.into_iter().map(|(name, raw)| read_view(path, name, raw, tensors, aliases)).collect()
}

fn read_view(
    path: &Path,
    name: String,
    raw: RawView,
    tensors: &Tensors,
    aliases: &[(String, usize)],
) -> Result<ImageView> {
    // Aliases are sorted: a table is written, and read, in the order of their names.
    if tensors.find(&name).is_some() || aliases.binary_search_by(|(alias, _)| alias.cmp(&name)).is_ok() {
        return Err(Error::Duplicate { file: path.into(), tensor: name });
    }
    let wrong = |found: String, needed: String| Error::Field {
        file: path.into(),
        tensor: name.clone(),
        field: "views",
        problem: FieldProblem::Value { found, needed },
    };
    let found = tensors.find(&raw.of).and_then(|of| Some((of, tensors.at(of)?.bytes)));
    let Some((of, bytes)) = found else {
        return Err(wrong(raw.of, "a tensor of this table".into()));
    };
    let RawView { offset, shape, stride, dtype, .. } = raw;
    let view = ImageView { name: name.clone(), of, offset, dtype, shape, stride };
    view.check(bytes).map_err(|found| wrong(found, format!("a view inside {bytes} bytes")))?;
    Ok(view)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(offset: u64, dtype: Dtype, shape: &[u64], stride: &[u64]) -> ImageView {
        ImageView { name: "v".into(), of: 0, offset, dtype, shape: shape.into(), stride: stride.into() }
    }

    #[test]
    fn a_view_lies_inside_its_tensor_or_is_refused() {
        let fits = |v: ImageView| v.check(24).is_ok();
        assert!(fits(view(0, Dtype::F32, &[3, 2], &[1, 3])), "transposed");
        assert!(fits(view(8, Dtype::F32, &[2, 2], &[2, 1])), "a slice");
        assert!(fits(view(20, Dtype::F32, &[100], &[0])), "one element, repeated");
        assert!(fits(view(24, Dtype::F32, &[0, 7], &[7, 1])), "nothing, at the end");
        assert!(fits(view(20, Dtype::F32, &[], &[])), "a scalar");
        for outside in [
            view(24, Dtype::F32, &[], &[]),
            view(4, Dtype::F32, &[3, 2], &[2, 1]),
            view(2, Dtype::F32, &[1], &[1]),
            view(28, Dtype::F32, &[0], &[1]),
            view(0, Dtype::F4, &[2], &[1]),
            view(0, Dtype::F32, &[2], &[]),
            view(0, Dtype::F32, &[u64::MAX, 2], &[u64::MAX, 1]),
            view(u64::MAX - 3, Dtype::F32, &[2], &[1]),
        ] {
            assert!(outside.check(24).is_err(), "{outside:?}");
        }
    }
}
