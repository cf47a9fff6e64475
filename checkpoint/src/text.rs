//! Texts out of JSON without an allocation each.

use serde::de::{self, DeserializeSeed, Visitor};
use std::fmt;

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
