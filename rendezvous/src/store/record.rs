//! What a store holds: where the one service of a fleet is, as JSON that other releases can read.
//!
//! `format` is looked at first. A release may add fields, and passes over those that it does not know; it raises `format`
//! only where an older one would go wrong, and the older one then refuses by name.

use flashboot_channel::Endpoint;
use flashboot_core::{Error, Kind};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::time::Duration;

/// The form of a record that this release writes; it reads no newer one.
pub const FORMAT: u32 = 1;
/// The longest record.
pub const MAX_RECORD: usize = 4 << 10;
/// Bounds of a lease: what is outside was written by nobody.
const LEASES: std::ops::RangeInclusive<u64> = 100..=24 * 3_600_000;

/// Where the one service is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// See [`FORMAT`].
    pub format: u32,
    /// What members dial.
    #[serde(serialize_with = "write_endpoint", deserialize_with = "read_endpoint")]
    pub endpoint: Endpoint,
    /// The service's release, for people.
    pub release: String,
    /// Which service: random, another each time that one takes the post.
    pub id: u64,
    /// Grows with every renewal, where the store itself keeps no leases.
    pub beat: u64,
    /// The record is of a living service only if it changes within so many milliseconds, where the store itself keeps
    /// no leases.
    pub lease_ms: u64,
}

/// Why no service is found at a store that answers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoService {
    /// Nobody has said where it is.
    #[error("no service has said where it is")]
    Empty,
    /// Whoever said so has not for a whole lease.
    #[error("the service at {endpoint} has not renewed its record for {silent:?}, its lease is {lease:?}")]
    Stale {
        /// Where it was.
        endpoint: String,
        /// For how long.
        silent: Duration,
        /// How long it may.
        lease: Duration,
    },
    /// The record is none.
    #[error("what stands there is no record of a service: {0}")]
    Garbage(String),
    /// The record is of a later release.
    #[error("the record there has form {found}; this release ({release}) reads form {FORMAT}", release = env!("CARGO_PKG_VERSION"))]
    Format {
        /// Its form.
        found: u32,
    },
}

impl NoService {
    /// As the boundary's error, from the store called `store`. Only another form is a refusal; the rest may be otherwise
    /// in a moment.
    pub fn into_error(self, store: &str) -> Error {
        let (kind, remedy) = match &self {
            Self::Format { .. } => (Kind::Mismatch, "run releases that read each other's records"),
            Self::Garbage(_) => (Kind::Unavailable, "remove what stands there, if nobody needs it"),
            Self::Empty | Self::Stale { .. } => (
                Kind::Unavailable,
                "start a seed with this --rendezvous, or `flashboot rendezvous --store` with it",
            ),
        };
        Error::new(kind, "rendezvous", self.to_string()).with_peer(store).with_remedy(remedy)
    }
}

impl Record {
    /// As it is stored.
    pub fn encode(&self) -> Vec<u8> {
        // A plain struct of texts and numbers serialises.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Reads what stands in a store.
    ///
    /// # Errors
    /// [`NoService::Format`] for a later form, whatever else it says; [`NoService::Garbage`].
    pub fn decode(bytes: &[u8]) -> Result<Self, NoService> {
        #[derive(Deserialize)]
        struct Form {
            format: u32,
        }
        if bytes.len() > MAX_RECORD {
            return Err(NoService::Garbage(format!("{} bytes, of at most {MAX_RECORD}", bytes.len())));
        }
        let garbage = |e: serde_json::Error| NoService::Garbage(e.to_string());
        let Form { format } = serde_json::from_slice(bytes).map_err(garbage)?;
        if format > FORMAT {
            return Err(NoService::Format { found: format });
        }
        let record: Self = serde_json::from_slice(bytes).map_err(garbage)?;
        if format == 0 || !LEASES.contains(&record.lease_ms) {
            return Err(NoService::Garbage(format!("form {format} with a lease of {} ms", record.lease_ms)));
        }
        Ok(record)
    }

    /// How long the record may stand unchanged.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }
}

fn write_endpoint<S: Serializer>(endpoint: &Endpoint, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(endpoint)
}

fn read_endpoint<'de, D: Deserializer<'de>>(d: D) -> Result<Endpoint, D::Error> {
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> Record {
        Record {
            format: FORMAT,
            endpoint: "10.0.0.1:7400".parse().unwrap(),
            release: "0.1.0".into(),
            id: u64::MAX,
            beat: 3,
            lease_ms: 10_000,
        }
    }

    #[test]
    fn a_record_is_read_as_written_and_by_whom_does_not_know_a_field() {
        let bytes = record().encode();
        assert_eq!(Record::decode(&bytes), Ok(record()));
        let text = String::from_utf8(bytes).unwrap().replacen('{', r#"{"later":[1],"#, 1);
        assert_eq!(Record::decode(text.as_bytes()), Ok(record()));
    }

    #[test]
    fn a_later_form_is_refused_by_name_whatever_else_it_says() {
        let refused = Record::decode(br#"{"format":2,"endpoints":[]}"#).unwrap_err();
        assert_eq!(refused, NoService::Format { found: 2 });
        let error = refused.into_error("dir:x");
        assert_eq!((error.kind(), error.peer()), (Kind::Mismatch, Some("dir:x")));
    }

    #[test]
    fn garbage_is_garbage_by_name() {
        let long = vec![b' '; MAX_RECORD + 1];
        let port = br#"{"format":1,"endpoint":"a:0","release":"","id":1,"beat":1,"lease_ms":1000}"#;
        let lease = br#"{"format":1,"endpoint":"a:1","release":"","id":1,"beat":1,"lease_ms":0}"#;
        for bytes in [&b""[..], b"{}", b"\xff", b"null", b"[1]", b"{\"format\":1}", &long, port, lease] {
            let found = Record::decode(bytes);
            assert!(matches!(found, Err(NoService::Garbage(_))), "{found:?}");
            let error = found.unwrap_err().into_error("etcd://a:1/x");
            assert_eq!(error.kind(), Kind::Unavailable, "waited out, and said at the end");
        }
    }

    proptest! {
        #[test]
        fn a_record_cut_or_changed_is_never_another_service(at in any::<prop::sample::Index>(), byte: u8) {
            let whole = record().encode();
            let cut = &whole[..at.index(whole.len())];
            prop_assert!(Record::decode(cut).is_err());
            let mut changed = whole.clone();
            let at = at.index(whole.len());
            changed[at] = byte;
            if let Ok(read) = Record::decode(&changed) {
                prop_assert_eq!(Record::decode(&read.encode()), Ok(read));
            }
        }
    }
}
