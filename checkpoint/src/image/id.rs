//! The image id: one hash that every byte of both kinds of `.json`, and through the roots every byte of every
//! payload, goes into.
//!
//! `metadata.json` begins `{"flashboot_image":1,"id":"`, then the id's 64 hexadecimal digits. The id is BLAKE3
//! over a sequence of fields, each preceded by its length as 8 little-endian bytes: the domain text, the bytes
//! of `metadata.json` with those 64 digits set to `0`, then for each rank in order the 32 bytes of its table's
//! hash and the 32 bytes of its payload's root.

use super::metadata::Metadata;
use crate::error::{Error, Result};
use std::path::Path;

/// The version this crate writes and reads.
pub const FORMAT_VERSION: u64 = 1;

/// The file that makes a directory an image.
pub(crate) const METADATA: &str = "metadata.json";

pub(super) const OPENING: &str = "{\"flashboot_image\":";
const PREFIX: &str = "{\"flashboot_image\":1,\"id\":\"";
const DIGITS: usize = 64;
const DOMAIN: &[u8] = b"flashboot image id, format 1";

/// A hash over fields that cannot run into each other.
pub(crate) struct FieldHasher(blake3::Hasher);

impl FieldHasher {
    pub(crate) fn new(domain: &[u8]) -> Self {
        let mut hasher = Self(blake3::Hasher::new());
        hasher.field(domain);
        hasher
    }

    pub(crate) fn field(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    pub(crate) fn finish(&self) -> blake3::Hash {
        self.0.finalize()
    }
}

/// The bytes of `metadata.json`, with the id filled in (there and in `metadata`).
pub(crate) fn seal(path: &Path, metadata: &mut Metadata) -> Result<Vec<u8>> {
    metadata.flashboot_image = FORMAT_VERSION;
    metadata.id = "0".repeat(DIGITS);
    let mut text = serde_json::to_string(metadata)
        .map_err(|e| Error::NotJson { file: path.into(), detail: e.to_string() })?;
    text.push('\n');
    metadata.id = id_of(path, metadata, text.as_bytes())?;
    text.replace_range(PREFIX.len()..PREFIX.len() + DIGITS, &metadata.id);
    Ok(text.into_bytes())
}

/// Reads the bytes of a `metadata.json` and checks them against their id.
pub(super) fn unseal(path: &Path, bytes: &[u8]) -> Result<Metadata> {
    let not_ours = |detail: &str| Error::NotAnImage { path: path.into(), detail: detail.into() };
    let text = std::str::from_utf8(bytes).map_err(|_| not_ours("metadata.json is not UTF-8"))?;
    let Some(rest) = text.strip_prefix(OPENING) else {
        return Err(not_ours("metadata.json does not begin with `flashboot_image`"));
    };
    let version = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    match version.parse::<u64>() {
        Ok(FORMAT_VERSION) => {}
        Ok(found) => {
            return Err(Error::ImageVersion { file: path.into(), found, needed: FORMAT_VERSION });
        }
        Err(_) => return Err(not_ours("metadata.json gives no format version")),
    }
    if !text.starts_with(PREFIX) {
        return Err(not_ours("in metadata.json the id does not follow the version"));
    }
    let metadata: Metadata = serde_json::from_str(text)
        .map_err(|e| Error::NotJson { file: path.into(), detail: e.to_string() })?;
    let needed = id_of(path, &metadata, bytes)?;
    if metadata.id != needed {
        return Err(Error::ImageId { file: path.into(), found: metadata.id, needed });
    }
    if let Err(problem) = metadata.fingerprint.check() {
        return Err(Error::NotJson { file: path.into(), detail: problem.into() });
    }
    Ok(metadata)
}

fn id_of(path: &Path, metadata: &Metadata, text: &[u8]) -> Result<String> {
    let mut hasher = FieldHasher::new(DOMAIN);
    let mut zeroed = text.to_vec();
    zeroed.iter_mut().skip(PREFIX.len()).take(DIGITS).for_each(|digit| *digit = b'0');
    hasher.field(&zeroed);
    for rank in &metadata.ranks {
        for hash in [&rank.table_hash, &rank.root] {
            hasher.field(parse_hash(path, hash)?.as_bytes());
        }
    }
    Ok(hasher.finish().to_hex().to_string())
}

/// A hash from its 64 lower-case digits.
pub(super) fn parse_hash(path: &Path, text: &str) -> Result<blake3::Hash> {
    let hash = blake3::Hash::from_hex(text).ok().filter(|h| h.to_hex().as_str() == text);
    hash.ok_or_else(|| Error::NotJson {
        file: path.into(),
        detail: format!("`{text}` is no BLAKE3 hash (64 lower-case hexadecimal digits)"),
    })
}
