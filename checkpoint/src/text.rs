//! Texts out of JSON without an allocation each, and paths into it.

use serde::de::{self, DeserializeSeed, Visitor};
use std::{fmt, path::Path};

/// Serialises a path that need not be UTF-8: work that is done is not reported as failed for its name.
pub(crate) fn lossy<S: serde::Serializer>(path: &Path, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&path.to_string_lossy())
}

/// Reads a text into a buffer that is kept.
pub(crate) struct TextInto<'b>(pub(crate) &'b mut String);

impl<'de> DeserializeSeed<'de> for TextInto<'_> {
    type Value = ();
    fn deserialize<D: de::Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for TextInto<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        self.0.clear();
        self.0.push_str(text);
        Ok(())
    }
}
