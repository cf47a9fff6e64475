//! Manifests: what proves a content, brought by its seed and fetched by its clones.
//!
//! Parts come in order. A manifest is served once all of it is there and its hash is the one it was announced by; who
//! fetches one checks it against the image's id all the same.

use super::{
    message::{Answer, PART},
    refusal::{Reason, Refusal},
    service::{RETRY_MS, Service, wait},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use std::collections::BTreeMap;

/// By hash.
#[derive(Debug, Clone, Default)]
pub(super) struct Manifests(BTreeMap<String, Manifest>);

#[derive(Debug, Clone)]
struct Manifest {
    whole: u64,
    bytes: Vec<u8>,
}

impl Manifests {
    /// Makes a place for one of `whole` bytes; how much of it is there.
    pub(super) fn announce(&mut self, hash: &str, whole: u64) -> u64 {
        let manifest = self.0.entry(hash.to_owned()).or_insert_with(|| Manifest { whole, bytes: Vec::new() });
        manifest.bytes.len() as u64
    }

    /// Keeps those that `used` says are of use.
    pub(super) fn retain(&mut self, used: impl Fn(&str) -> bool) {
        self.0.retain(|hash, _| used(hash));
    }

    /// Bytes of all of them, when they are whole.
    pub(super) fn bytes(&self) -> u64 {
        self.0.values().fold(0, |sum, manifest| sum.saturating_add(manifest.whole))
    }

    /// Takes a part; one that is there already changes nothing.
    pub(super) fn upload(&mut self, hash: &str, offset: u64, part: &[u8]) -> Result<(), Refusal> {
        let unknown =
            || Refusal::new(Reason::UnknownMember, format!("no seed has announced the manifest {hash}"));
        let manifest = self.0.get_mut(hash).ok_or_else(unknown)?;
        let malformed = |detail| Err(Refusal::new(Reason::Malformed, detail));
        let has = manifest.bytes.len() as u64;
        let end = offset.saturating_add(part.len() as u64);
        if end <= has {
            return Ok(());
        }
        if part.len() > PART || offset != has || end > manifest.whole {
            return malformed(format!(
                "a part of {} bytes at {offset} of a manifest of {} bytes that has {has}",
                part.len(),
                manifest.whole
            ));
        }
        manifest.bytes.extend_from_slice(part);
        if end == manifest.whole && blake3::hash(&manifest.bytes).to_hex().as_str() != hash {
            // The next seed begins anew.
            manifest.bytes = Vec::new();
            return malformed(format!("the manifest's hash is not {hash}"));
        }
        Ok(())
    }

    /// A part, `None` while it is not whole.
    pub(super) fn fetch(&self, hash: &str, offset: u64) -> Option<&[u8]> {
        let manifest = self.0.get(hash).filter(|m| m.bytes.len() as u64 == m.whole)?;
        let rest = manifest.bytes.get(usize::try_from(offset).ok()?..)?;
        Some(rest.get(..PART).unwrap_or(rest))
    }
}

impl Service {
    /// Takes a part of a manifest.
    pub(super) fn upload(&mut self, manifest: &str, offset: u64, part: &str) -> Result<Answer, Refusal> {
        let part =
            STANDARD.decode(part).map_err(|e| Refusal::new(Reason::Malformed, format!("a part: {e}")))?;
        self.manifests.upload(manifest, offset, &part)?;
        Ok(Answer::Done)
    }

    /// Gives a part of one.
    pub(super) fn fetch(&self, manifest: &str, offset: u64) -> Result<Answer, Refusal> {
        match self.manifests.fetch(manifest, offset) {
            Some(part) => Ok(Answer::Part { offset, part: STANDARD.encode(part) }),
            None if self.groups.values().any(|g| g.content.manifest == manifest) => {
                Ok(wait(RETRY_MS, "a seed that brings the manifest"))
            }
            None => Err(Refusal::new(Reason::NoSuchImage, "no seed has announced this manifest")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_make_a_whole_of_the_right_hash_or_nothing() {
        let bytes = vec![7; PART + 9];
        let hash = blake3::hash(&bytes).to_hex().to_string();
        let mut manifests = Manifests::default();
        assert!(manifests.upload(&hash, 0, b"x").is_err(), "not announced");
        assert_eq!(manifests.announce(&hash, bytes.len() as u64), 0);
        manifests.upload(&hash, 0, &bytes[..PART]).unwrap();
        manifests.upload(&hash, 0, &bytes[..PART]).unwrap();
        assert_eq!(manifests.announce(&hash, bytes.len() as u64), PART as u64);
        assert_eq!(manifests.fetch(&hash, 0), None);
        assert!(manifests.upload(&hash, 1 + PART as u64, &bytes[PART..]).is_err(), "a gap");
        manifests.upload(&hash, PART as u64, b"bad bytes").unwrap_err();
        assert_eq!(manifests.announce(&hash, bytes.len() as u64), 0);
        manifests.upload(&hash, 0, &bytes[..PART]).unwrap();
        manifests.upload(&hash, PART as u64, &bytes[PART..]).unwrap();
        assert_eq!(manifests.fetch(&hash, 0).map(<[u8]>::len), Some(PART));
        assert_eq!(manifests.fetch(&hash, PART as u64).map(<[u8]>::len), Some(9));
        assert_eq!(manifests.fetch(&hash, u64::MAX), None);
        manifests.retain(|_| false);
        assert_eq!(manifests.bytes(), 0);
    }
}
