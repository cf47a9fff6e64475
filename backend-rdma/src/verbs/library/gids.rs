//! A port's GID table: by the one call that newer libraries have, else index by index.

use super::Library;
use crate::verbs::{Gid, GidKind, Handle, sys};
use std::{ffi::c_int, fs};

fn kind_of(code: u32) -> Option<GidKind> {
    match code {
        0 => Some(GidKind::Infiniband),
        1 => Some(GidKind::RoceV1),
        2 => Some(GidKind::RoceV2),
        _ => None,
    }
}

fn gid_bytes(words: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    let (front, back) = bytes.split_at_mut(8);
    front.copy_from_slice(&words[0].to_ne_bytes());
    back.copy_from_slice(&words[1].to_ne_bytes());
    bytes
}

pub(super) fn gid_words(bytes: [u8; 16]) -> [u64; 2] {
    let word =
        |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes);
    [word(0), word(8)]
}

impl Library {
    /// By the one call that newer libraries have.
    pub(super) fn gid_table(&self, context: Handle, port: u8, len: u32) -> Option<Vec<Gid>> {
        let query = self.symbols.query_gid_table?;
        // Every port's entries come in one table; a device has few ports.
        let mut entries = vec![sys::GidEntry::default(); (len as usize).saturating_mul(4).min(1 << 14)];
        let size = size_of::<sys::GidEntry>();
        // SAFETY: the table has room for as many entries as are said, of the size that is said.
        let found = unsafe { query(context.0, entries.as_mut_ptr(), entries.len(), 0, size) };
        let found = usize::try_from(found).ok()?;
        let of_port = |entry: &&sys::GidEntry| entry.port_num == u32::from(port);
        let gids = entries.iter().take(found).filter(of_port).filter_map(|entry| {
            Some(Gid { index: entry.gid_index, kind: kind_of(entry.gid_type)?, bytes: gid_bytes(entry.gid) })
        });
        Some(gids.collect())
    }

    /// Index by index, the kinds from sysfs.
    pub(super) fn gids_one_by_one(&self, context: Handle, device: &str, port: u8, len: u32) -> Vec<Gid> {
        let mut gids = Vec::new();
        for index in 0..len.min(1 << 12) {
            let mut words = [0; 2];
            // SAFETY: room for one GID; the index is the table's.
            let code = unsafe { (self.symbols.query_gid)(context.0, port, index as c_int, &raw mut words) };
            if code != 0 || words == [0; 2] {
                continue;
            }
            let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
            let kind = match fs::read_to_string(path).unwrap_or_default().trim() {
                "RoCE v2" => GidKind::RoceV2,
                "IB/RoCE v1"
                    if fs::metadata(format!("/sys/class/infiniband/{device}/device/net")).is_ok() =>
                {
                    GidKind::RoceV1
                }
                _ => GidKind::Infiniband,
            };
            gids.push(Gid { index, kind, bytes: gid_bytes(words) });
        }
        gids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_reads_back() {
        let bytes = std::array::from_fn(|i| i as u8);
        assert_eq!(gid_bytes(gid_words(bytes)), bytes);
    }
}
