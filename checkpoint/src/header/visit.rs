//! One pass over a header's JSON. Visitors keep the typed error in the builder and stop the parser with another.

use super::Header;
use crate::cause::FieldProblem;
use crate::error::{Error, Result};
use crate::tensors::Refused;
use crate::text::TextInto;
use flashboot_core::Dtype;
use serde::de::{self, DeserializeSeed, Deserializer as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::{collections::HashSet, fmt, path::Path};

/// Reads `object`, which is one JSON object and nothing else.
pub(super) fn read(file: &Path, object: &str) -> Result<Header> {
    let mut builder = Builder::new(file);
    let mut parser = serde_json::Deserializer::from_str(object);
    match parser.deserialize_map(Top(&mut builder)).and_then(|()| parser.end()) {
        Ok(()) => Ok(builder.header),
        Err(e) => Err(builder.explain(&e)),
    }
}

struct Builder<'f> {
    file: &'f Path,
    header: Header,
    /// The name being read; reused, so that a tensor costs no allocation.
    name: String,
    field: &'static str,
    numbers: Vec<u64>,
    has_metadata: bool,
    failed: Option<Error>,
}

impl<'f> Builder<'f> {
    fn new(file: &'f Path) -> Self {
        Self {
            file,
            header: Header::default(),
            name: String::new(),
            field: "",
            numbers: Vec::new(),
            has_metadata: false,
            failed: None,
        }
    }

    /// Keeps the typed error and gives the parser one to stop with.
    fn fail<E: de::Error>(&mut self, error: Error) -> E {
        self.failed = Some(error);
        E::custom("refused")
    }

    fn fail_field<E: de::Error>(&mut self, field: &'static str, problem: FieldProblem) -> E {
        let error = Error::Field { file: self.file.into(), tensor: self.name.clone(), field, problem };
        self.fail(error)
    }

    fn fail_twice<E: de::Error>(&mut self) -> E {
        let error = Error::Duplicate { file: self.file.into(), tensor: self.name.clone() };
        self.fail(error)
    }

    /// The typed error of a failed parse.
    fn explain(self, e: &serde_json::Error) -> Error {
        let file = self.file.to_path_buf();
        match self.failed {
            Some(error) => error,
            None if e.is_data() && !self.field.is_empty() => {
                let needed = match self.field {
                    "dtype" => "a dtype's name",
                    "shape" => "a list of sizes",
                    "data_offsets" => "a list of two offsets",
                    "__metadata__" => "an object of texts",
                    _ => "an object of `dtype`, `shape` and `data_offsets`",
                };
                let problem = FieldProblem::Form { found: e.to_string(), needed };
                Error::Field { file, tensor: self.name, field: self.field, problem }
            }
            None => Error::NotJson { file, detail: e.to_string() },
        }
    }

    fn finish_tensor<E: de::Error>(&mut self, parts: Parts) -> Result<(), E> {
        let Some(dtype) = parts.dtype else { return Err(self.fail_field("dtype", FieldProblem::Missing)) };
        let Some(shape_at) = parts.shape_at else {
            return Err(self.fail_field("shape", FieldProblem::Missing));
        };
        let Some((begin, end)) = parts.offsets else {
            return Err(self.fail_field("data_offsets", FieldProblem::Missing));
        };
        let (file, tensor) = (self.file, &self.name);
        let Some(found) = end.checked_sub(begin) else {
            let error = Error::Reversed { file: file.into(), tensor: tensor.clone(), begin, end };
            return Err(self.fail(error));
        };
        let shape = self.header.tensors.shapes.get(shape_at..).unwrap_or_default();
        let error = match dtype.bytes_of(shape) {
            Ok(needed) if needed == found => None,
            Ok(needed) => {
                Some(Error::ShapeBytes { file: file.into(), tensor: tensor.clone(), needed, found })
            }
            Err(problem) => Some(Error::Shape {
                file: file.into(),
                tensor: tensor.clone(),
                dtype,
                shape: shape.to_vec(),
                problem,
            }),
        };
        if let Some(error) = error {
            return Err(self.fail(error));
        }
        match self.header.tensors.push_with_shape_in_place(&self.name, dtype, begin, found, 0) {
            Ok(_) => Ok(()),
            Err(Refused::Twice(_)) => Err(self.fail_twice()),
            Err(Refused::TooMany) => {
                let error = Error::Layout(flashboot_core::LayoutError::TooMany(usize::MAX));
                Err(self.fail(error))
            }
        }
    }
}

struct Top<'b, 'f>(&'b mut Builder<'f>);

impl<'de> Visitor<'de> for Top<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let builder = self.0;
        while map.next_key_seed(TextInto(&mut builder.name))?.is_some() {
            if builder.name == "__metadata__" {
                if std::mem::replace(&mut builder.has_metadata, true) {
                    return Err(builder.fail_twice());
                }
                builder.field = "__metadata__";
                map.next_value_seed(Metadata(builder))?;
            } else {
                builder.field = "tensor";
                map.next_value_seed(TensorEntry(builder))?;
            }
            builder.field = "";
        }
        Ok(())
    }
}

struct Metadata<'b, 'f>(&'b mut Builder<'f>);

impl<'de> DeserializeSeed<'de> for Metadata<'_, '_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value::<String>()?;
            if !seen.insert(key.clone()) {
                let (file, tensor) = (self.0.file.into(), format!("__metadata__.{key}"));
                return Err(self.0.fail(Error::Duplicate { file, tensor }));
            }
            self.0.header.metadata.push((key, value));
        }
        Ok(())
    }
}

#[derive(Default)]
struct Parts {
    dtype: Option<Dtype>,
    shape_at: Option<usize>,
    offsets: Option<(u64, u64)>,
}

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Dtype,
    Shape,
    DataOffsets,
    #[serde(other)]
    Other,
}

struct TensorEntry<'b, 'f>(&'b mut Builder<'f>);

impl<'de> DeserializeSeed<'de> for TensorEntry<'_, '_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TensorEntry<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of `dtype`, `shape` and `data_offsets`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let builder = self.0;
        let mut parts = Parts::default();
        while let Some(field) = map.next_key::<Field>()? {
            match field {
                Field::Dtype => {
                    builder.field = "dtype";
                    if parts.dtype.is_some() {
                        return Err(builder.fail_field("dtype", FieldProblem::Twice));
                    }
                    parts.dtype = Some(map.next_value_seed(DtypeName(builder))?);
                }
                Field::Shape => {
                    builder.field = "shape";
                    if parts.shape_at.is_some() {
                        return Err(builder.fail_field("shape", FieldProblem::Twice));
                    }
                    parts.shape_at = Some(builder.header.tensors.shapes.len());
                    // The list is lent out while the builder stays reachable for errors.
                    let mut shapes = std::mem::take(&mut builder.header.tensors.shapes);
                    map.next_value_seed(Numbers { builder, into: &mut shapes })?;
                    builder.header.tensors.shapes = shapes;
                }
                Field::DataOffsets => {
                    builder.field = "data_offsets";
                    if parts.offsets.is_some() {
                        return Err(builder.fail_field("data_offsets", FieldProblem::Twice));
                    }
                    let mut numbers = std::mem::take(&mut builder.numbers);
                    numbers.clear();
                    map.next_value_seed(Numbers { builder, into: &mut numbers })?;
                    let [begin, end] = numbers[..] else {
                        let found = format!("a list of {}", numbers.len());
                        let problem = FieldProblem::Form { found, needed: "a list of two offsets" };
                        return Err(builder.fail_field("data_offsets", problem));
                    };
                    builder.numbers = numbers;
                    parts.offsets = Some((begin, end));
                }
                Field::Other => {
                    builder.field = "";
                    map.next_value::<IgnoredAny>()?;
                }
            }
            builder.field = "tensor";
        }
        builder.finish_tensor(parts)
    }
}

struct DtypeName<'b, 'f>(&'b mut Builder<'f>);

impl<'de> DeserializeSeed<'de> for DtypeName<'_, '_> {
    type Value = Dtype;
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<Dtype, D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for DtypeName<'_, '_> {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a dtype's name")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Dtype, E> {
        Dtype::from_name(name).ok_or_else(|| {
            let (file, tensor) = (self.0.file.into(), self.0.name.clone());
            self.0.fail(Error::UnknownDtype { file, tensor, dtype: name.to_owned() })
        })
    }
}

/// A list of numbers from 0, appended to `into`.
struct Numbers<'b, 'f> {
    builder: &'b mut Builder<'f>,
    into: &'b mut Vec<u64>,
}

impl<'de> DeserializeSeed<'de> for Numbers<'_, '_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of numbers from 0")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(number) = list.next_element_seed(Number(self.builder))? {
            self.into.push(number);
        }
        Ok(())
    }
}

struct Number<'b, 'f>(&'b mut Builder<'f>);

impl<'de> DeserializeSeed<'de> for Number<'_, '_> {
    type Value = u64;
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<u64, D::Error> {
        d.deserialize_u64(self)
    }
}

impl Visitor<'_> for Number<'_, '_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number from 0")
    }

    fn visit_u64<E: de::Error>(self, n: u64) -> Result<u64, E> {
        Ok(n)
    }

    fn visit_i64<E: de::Error>(self, n: i64) -> Result<u64, E> {
        u64::try_from(n).map_err(|_| {
            let field = self.0.field;
            self.0.fail_field(field, FieldProblem::Negative(n))
        })
    }
}
