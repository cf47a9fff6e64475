//! `model.safetensors.index.json`: which shard each tensor is said to be in. Pure: takes bytes.

use crate::cause::FieldProblem;
use crate::error::{Error, Result};
use crate::text::TextInto;
use serde::de::{self, DeserializeSeed, Deserializer as _, IgnoredAny, MapAccess, Visitor};
use std::{collections::HashMap, fmt, path::Path};

/// An index: which files it names, and how many tensors. The tensors themselves are handed out while it is read,
/// so that an index of a million costs no memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    /// The distinct files, in order of first mention.
    pub files: Vec<String>,
    /// How many tensors it names.
    pub tensors: u64,
}

impl Index {
    /// Parses an index and calls `each` with every tensor's name and the number of its file in
    /// [`files`](Self::files). `path` is for errors only. File names are checked, not looked up.
    pub fn parse(path: &Path, json: &[u8], mut each: impl FnMut(&str, usize)) -> Result<Self> {
        let not_json = |detail: String| Error::NotJson { file: path.into(), detail };
        let text = std::str::from_utf8(json).map_err(|e| not_json(e.to_string()))?;
        let mut top = Top {
            path,
            each: &mut each,
            index: Self::default(),
            by_name: HashMap::new(),
            name: String::new(),
            seen: false,
            failed: None,
        };
        let mut parser = serde_json::Deserializer::from_str(text);
        match parser.deserialize_map(&mut top).and_then(|()| parser.end()) {
            Ok(()) if top.seen => Ok(top.index),
            Ok(()) => Err(field(path, FieldProblem::Missing)),
            Err(e) => Err(top.failed.unwrap_or_else(|| {
                if e.is_data() {
                    let needed = "an object of tensor names and file names";
                    field(path, FieldProblem::Form { found: e.to_string(), needed })
                } else {
                    not_json(e.to_string())
                }
            })),
        }
    }
}

fn field(path: &Path, problem: FieldProblem) -> Error {
    Error::Field { file: path.into(), tensor: "(index)".into(), field: "weight_map", problem }
}

/// Why `name` may not be joined to a directory, if so. Lexical only: caches link their files elsewhere, so a
/// symbolic link is followed.
pub(crate) fn path_problem(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("is empty");
    }
    if name.starts_with('/') {
        return Some("is an absolute path");
    }
    if name.contains('\0') {
        return Some("holds a NUL");
    }
    name.split('/').find_map(|component| match component {
        ".." => Some("leaves the directory with `..`"),
        "." | "" => Some("has an empty or `.` component"),
        _ => None,
    })
}

struct Top<'p> {
    path: &'p Path,
    each: &'p mut dyn FnMut(&str, usize),
    index: Index,
    by_name: HashMap<String, usize>,
    /// The name being read; reused, so that an entry costs no allocation.
    name: String,
    seen: bool,
    failed: Option<Error>,
}

impl<'de> Visitor<'de> for &mut Top<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if std::mem::replace(&mut self.seen, true) {
                self.failed = Some(field(self.path, FieldProblem::Twice));
                return Err(de::Error::custom("refused"));
            } else {
                map.next_value_seed(WeightMap(self))?;
            }
        }
        Ok(())
    }
}

struct WeightMap<'t, 'p>(&'t mut Top<'p>);

impl<'de> DeserializeSeed<'de> for WeightMap<'_, '_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor names and file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(TextInto(&mut self.0.name))?.is_some() {
            let file = map.next_value_seed(FileNumber(self.0))?;
            (self.0.each)(&self.0.name, file);
            self.0.index.tensors = self.0.index.tensors.saturating_add(1);
        }
        Ok(())
    }
}

struct FileNumber<'t, 'p>(&'t mut Top<'p>);

impl<'de> DeserializeSeed<'de> for FileNumber<'_, '_> {
    type Value = usize;
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<usize, D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for FileNumber<'_, '_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a file name")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<usize, E> {
        let Top { path, index, by_name, failed, name: tensor, .. } = self.0;
        if let Some(&number) = by_name.get(name) {
            return Ok(number);
        }
        if let Some(problem) = path_problem(name) {
            let (index, tensor) = ((*path).into(), tensor.clone());
            *failed = Some(Error::IndexPath { index, tensor, entry: name.into(), problem });
            return Err(E::custom("refused"));
        }
        let number = index.files.len();
        index.files.push(name.to_owned());
        by_name.insert(name.to_owned(), number);
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Index> {
        Index::parse(Path::new("i.json"), text.as_bytes(), |_, _| ())
    }

    #[test]
    fn entries_come_in_order_with_their_files() {
        let text = br#"{"metadata":{},"weight_map":{"b":"y","a":"x","c":"y"}}"#;
        let mut entries = Vec::new();
        let index = Index::parse(Path::new("i"), text, |name, file| entries.push((name.to_owned(), file)));
        assert_eq!(index, Ok(Index { files: vec!["y".into(), "x".into()], tensors: 3 }));
        assert_eq!(entries, [("b".into(), 0), ("a".into(), 1), ("c".into(), 0)]);
    }

    #[test]
    fn names_outside_the_directory_are_refused_with_their_tensor() {
        for (entry, why) in [
            ("../x", "`..`"),
            ("a/../x", "`..`"),
            ("/x", "absolute"),
            ("", "empty"),
            ("a//x", "empty"),
            ("./x", "`.`"),
            ("a\\u0000", "NUL"),
        ] {
            let text = format!(r#"{{"weight_map":{{"t":"fine","u":"{entry}"}}}}"#);
            match parse(&text) {
                Err(e @ Error::IndexPath { .. }) => {
                    assert!(e.to_string().contains(why) && e.to_string().contains("`u`"), "{e}");
                }
                other => panic!("{entry}: {other:?}"),
            }
        }
    }

    #[test]
    fn what_is_no_index_is_refused() {
        let missing = Err(field(Path::new("i.json"), FieldProblem::Missing));
        assert_eq!(parse("{}"), missing);
        let twice = Err(field(Path::new("i.json"), FieldProblem::Twice));
        assert_eq!(parse(r#"{"weight_map":{},"weight_map":{}}"#), twice);
        assert!(matches!(parse("["), Err(Error::NotJson { .. } | Error::Field { .. })));
        assert!(matches!(parse(r#"{"weight_map":{"a":1}}"#), Err(Error::Field { .. })));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Index::parse(Path::new("i"), &bytes, |_, _| ());
        }
    }
}
