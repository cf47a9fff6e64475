//! A safetensors header, strictly: JSON in one pass into compact tables, every field checked as it comes.
//!
//! Pure: takes bytes, gives tensors or the typed reason. Must never panic, whatever the bytes, nor allocate
//! more than a few times their length.

mod visit;

use crate::error::{Error, Result};
use crate::tensors::Tensors;
use std::path::Path;

/// What a header says.
#[derive(Debug, Clone, Default)]
pub struct Header {
    /// Its tensors, in its order.
    pub tensors: Tensors,
    /// `__metadata__`, in its order.
    pub metadata: Vec<(String, String)>,
}

impl Header {
    /// Parses the JSON of one header (the bytes after the 8-byte length). `file` is for errors only.
    pub fn parse(file: &Path, json: &[u8]) -> Result<Self> {
        match json.first() {
            None => return Err(Error::HeaderEmpty { file: file.into() }),
            Some(b'{') => {}
            Some(&other) => {
                let found = format!("`{}`", other.escape_ascii());
                return Err(Error::HeaderNotObject { file: file.into(), found });
            }
        }
        let not_json = |detail: String| Error::NotJson { file: file.into(), detail };
        let text = std::str::from_utf8(json).map_err(|e| not_json(e.to_string()))?;
        // Padding is spaces and nothing else, so that other writers' headers mean one thing.
        let object = text.trim_end_matches(' ');
        if !object.ends_with('}') {
            return Err(not_json(format!(
                "the object must end with `}}` and only spaces may follow, found {:?}",
                object.chars().next_back().unwrap_or(' ')
            )));
        }
        visit::read(file, object)
    }

    /// Checks that the tensors cover the data exactly: no hole, no overlap, nothing missing, nothing left.
    ///
    /// `prefix` is 8 + the header's length and `file_len` the file's. Returns the bytes of data.
    pub fn check_coverage(
        &self,
        file: &Path,
        prefix: u64,
        file_len: u64,
        allow_trailing: bool,
    ) -> Result<u64> {
        let key = |&i: &u32| self.tensors.at(i as usize).map(|t| (t.begin, t.begin.saturating_add(t.bytes)));
        let mut order: Vec<u32> = (0..u32::try_from(self.tensors.len()).unwrap_or(u32::MAX)).collect();
        if !order.is_sorted_by_key(key) {
            order.sort_unstable_by_key(key);
        }
        let name = |i: usize| self.tensors.at(i).map_or_else(String::new, |t| t.name.to_owned());
        let (mut end, mut last, mut cut) = (0u64, 0usize, None);
        let available = file_len.saturating_sub(prefix);
        for i in order.into_iter().map(|i| i as usize) {
            let Some(tensor) = self.tensors.at(i) else { continue };
            let begin = tensor.begin;
            if begin > end {
                return Err(Error::Hole { file: file.into(), tensor: name(i), begin, needed: end });
            }
            if begin < end {
                return Err(Error::Overlap {
                    file: file.into(),
                    tensor: name(i),
                    other: name(last),
                    begin,
                    end,
                });
            }
            // begin + bytes is the `end` the header gave, so it fits.
            end = begin.saturating_add(tensor.bytes);
            last = i;
            if end > available && cut.is_none() {
                cut = Some(i);
            }
        }
        let needed = prefix.saturating_add(end);
        match cut {
            Some(i) => Err(Error::Truncated { file: file.into(), tensor: name(i), needed, found: file_len }),
            None if end < available && !allow_trailing => {
                Err(Error::Trailing { file: file.into(), needed, found: file_len })
            }
            None => Ok(end),
        }
    }
}
