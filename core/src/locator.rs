//! What an exporter publishes so that any number of readers can reach an arena by one transport.
//!
//! As text: `flashboot1.` + base64url(JSON) + `.` + the first 16 hexadecimal digits of the BLAKE3 hash of
//! everything before that dot. The hash is there to find damage, not to keep anyone out.

use crate::{Arena, Error, Generation, Kind, Location, TransportName};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use std::{fmt, str::FromStr};

const PREFIX: &str = "flashboot1.";
const SUM: usize = 16;
/// A longer text is refused unread.
const MAX_LOCATOR: usize = 16 << 10;

/// How to reach one filling of one arena by one transport.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Locator {
    /// The transport that understands `endpoint`.
    pub transport: TransportName,
    /// The filling it names.
    #[serde(with = "generation_hex")]
    pub generation: Generation,
    /// Payload bytes.
    pub payload: u64,
    /// Bytes of the allocation, so that both sides agree on the rounding.
    pub capacity: u64,
    /// Number of progress words.
    pub shards: u32,
    /// Where the memory is.
    pub location: Location,
    /// The responder's address, in the transport's own form (a socket path, host:port).
    pub endpoint: String,
}

/// Why a text is no locator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LocatorError {
    /// Longer than any locator.
    #[error("{0} bytes is longer than any locator ({MAX_LOCATOR})")]
    TooLong(usize),
    /// Another prefix: no locator, or one of another release.
    #[error("does not begin with `{PREFIX}`: not a locator, or one of another release")]
    Prefix,
    /// The sum does not match: cut or damaged on the way.
    #[error("is damaged: its checksum does not match")]
    Damaged,
    /// The sum matches but the content is not what this release writes.
    #[error("does not parse: {0}")]
    Content(String),
}

impl From<LocatorError> for Error {
    fn from(e: LocatorError) -> Self {
        let kind = match e {
            LocatorError::Prefix | LocatorError::Content(_) => Kind::Mismatch,
            LocatorError::TooLong(_) | LocatorError::Damaged => Kind::Corrupt,
        };
        Self::new(kind, "locator", e.to_string()).with_remedy("fetch the locator from its exporter again")
    }
}

impl Locator {
    /// Of `arena`, which holds `generation`.
    pub fn of(arena: &dyn Arena, generation: Generation, transport: TransportName, endpoint: String) -> Self {
        Self {
            transport,
            generation,
            payload: arena.payload(),
            capacity: arena.capacity(),
            shards: arena.shards(),
            location: arena.location(),
            endpoint,
        }
    }

    /// What an arena holds that is to be exported.
    ///
    /// # Errors
    /// [`Kind::Invalid`] where it holds nothing.
    pub fn filling(seen: Option<Generation>) -> Result<Generation, Error> {
        seen.ok_or_else(|| {
            Error::new(Kind::Invalid, "export", "the arena is retired: it holds no filling")
                .with_remedy("begin a generation first")
        })
    }

    /// The text form.
    pub fn encode(&self) -> String {
        // A struct of strings and integers: serialising cannot fail.
        let json = serde_json::to_vec(self).unwrap_or_default();
        let body = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(json));
        let sum = sum(&body);
        format!("{body}.{sum}")
    }

    /// Refuses an arena of another size.
    ///
    /// # Errors
    /// [`Kind::Mismatch`], with both sides' numbers.
    pub fn check_fits(&self, into: &dyn Arena) -> crate::Result<()> {
        let (theirs, ours) = ((self.payload, self.shards), (into.payload(), into.shards()));
        if theirs == ours {
            return Ok(());
        }
        let detail = format!(
            "the peer has {} bytes in {} shards, the arena to fill {} in {}",
            theirs.0, theirs.1, ours.0, ours.1
        );
        Err(Error::new(Kind::Mismatch, "import", detail))
    }
}

fn sum(body: &str) -> String {
    let mut hex = blake3::hash(body.as_bytes()).to_hex().to_string();
    hex.truncate(SUM);
    hex
}

impl FromStr for Locator {
    type Err = LocatorError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() > MAX_LOCATOR {
            return Err(LocatorError::TooLong(text.len()));
        }
        if !text.starts_with(PREFIX) {
            return Err(LocatorError::Prefix);
        }
        let (body, found) = text.rsplit_once('.').ok_or(LocatorError::Damaged)?;
        if found != sum(body) {
            return Err(LocatorError::Damaged);
        }
        let encoded = body.strip_prefix(PREFIX).ok_or(LocatorError::Damaged)?;
        let json = URL_SAFE_NO_PAD.decode(encoded).map_err(|e| LocatorError::Content(e.to_string()))?;
        serde_json::from_slice(&json).map_err(|e| LocatorError::Content(e.to_string()))
    }
}

impl fmt::Display for Locator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.encode())
    }
}

mod generation_hex {
    use crate::Generation;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(g: &Generation, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(g)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Generation, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        u64::from_str_radix(&text, 16)
            .ok()
            .and_then(Generation::from_word)
            .ok_or_else(|| D::Error::custom(format!("`{text}` is not a generation")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn locator() -> Locator {
        Locator {
            transport: TransportName::Ipc,
            generation: Generation::from_random(77),
            payload: 123,
            capacity: 8192,
            shards: 1,
            location: Location::Host { boot_id: "b".into(), numa_node: None },
            endpoint: "/run/x.sock".into(),
        }
    }

    #[test]
    fn a_locator_reads_back() {
        assert_eq!(locator().encode().parse(), Ok(locator()));
    }

    #[test]
    fn what_is_no_locator_is_refused() {
        assert_eq!("".parse::<Locator>(), Err(LocatorError::Prefix));
        assert_eq!("flashboot2.x.y".parse::<Locator>(), Err(LocatorError::Prefix));
        assert_eq!("x".repeat(20_000).parse::<Locator>(), Err(LocatorError::TooLong(20_000)));
        let body = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode("{}"));
        let text = format!("{body}.{}", sum(&body));
        assert!(matches!(text.parse::<Locator>(), Err(LocatorError::Content(_))));
    }

    proptest! {
        #[test]
        fn every_changed_byte_is_found(at: prop::sample::Index, to in 33u8..127) {
            let mut text = locator().encode().into_bytes();
            let at = at.index(text.len());
            prop_assume!(text[at] != to);
            text[at] = to;
            prop_assert!(String::from_utf8(text).unwrap().parse::<Locator>().is_err());
        }

        #[test]
        fn every_cut_is_found(keep: prop::sample::Index) {
            let text = locator().encode();
            prop_assert!(text[..keep.index(text.len())].parse::<Locator>().is_err());
        }

        #[test]
        fn no_text_panics(text in ".{0,200}") {
            let _ = text.parse::<Locator>();
        }
    }
}
