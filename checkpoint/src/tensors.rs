//! Tensors by the million: names in one text, shapes in one list, 32 bytes an entry, and a hash table of
//! numbers over the names. A header of 100 MB costs a few times its own size and no allocation per tensor.

use flashboot_core::Dtype;
use hashbrown::HashTable;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;

/// Names in the order they came, each findable by its text.
#[derive(Debug, Clone, Default)]
pub(crate) struct NameTable {
    text: String,
    ends: Vec<usize>,
    /// Each name's hash: a table that grows, or goes into another one, hashes no name again.
    hashes: Vec<u64>,
    by_hash: HashTable<u32>,
}

/// Why a name could not be added.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Twice(usize),
    TooMany,
}

/// One key for all tables of a process, which nobody outside knows.
fn hash(name: &str) -> u64 {
    static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEY.hash_one(name)
}

impl NameTable {
    pub(crate) fn name(&self, index: usize) -> Option<&str> {
        name_at(&self.text, &self.ends, index)
    }

    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.find_hashed(name, hash(name))
    }

    fn find_hashed(&self, name: &str, hash: u64) -> Option<usize> {
        let same =
            |&i: &u32| self.hashes.get(i as usize) == Some(&hash) && self.name(i as usize) == Some(name);
        self.by_hash.find(hash, same).map(|&i| i as usize)
    }

    /// Adds `name`, which must be new.
    pub(crate) fn insert(&mut self, name: &str) -> Result<usize, Refused> {
        self.insert_hashed(name, hash(name))
    }

    fn insert_hashed(&mut self, name: &str, hash: u64) -> Result<usize, Refused> {
        let index = self.ends.len();
        let number = u32::try_from(index).map_err(|_| Refused::TooMany)?;
        if let Some(there) = self.find_hashed(name, hash) {
            return Err(Refused::Twice(there));
        }
        self.text.push_str(name);
        self.ends.push(self.text.len());
        self.hashes.push(hash);
        let Self { hashes, by_hash, .. } = self;
        by_hash.insert_unique(hash, number, |&i| hashes.get(i as usize).copied().unwrap_or_default());
        Ok(index)
    }

    /// Adds another table's names in their order; gives the first that is here already, and what is there.
    pub(crate) fn append<'o>(&mut self, other: &'o Self) -> Result<(), (&'o str, Refused)> {
        self.text.reserve(other.text.len());
        self.ends.reserve(other.ends.len());
        self.hashes.reserve(other.hashes.len());
        let Self { hashes, by_hash, .. } = self;
        by_hash.reserve(other.hashes.len(), |&i| hashes.get(i as usize).copied().unwrap_or_default());
        for (i, &hash) in other.hashes.iter().enumerate() {
            let name = other.name(i).unwrap_or_default();
            self.insert_hashed(name, hash).map_err(|refused| (name, refused))?;
        }
        Ok(())
    }
}

fn name_at<'t>(text: &'t str, ends: &[usize], index: usize) -> Option<&'t str> {
    let end = *ends.get(index)?;
    let start = match index.checked_sub(1) {
        Some(before) => *ends.get(before)?,
        None => 0,
    };
    text.get(start..end)
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor<'t> {
    /// Its name; never used as a path.
    pub name: &'t str,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions; empty for a scalar.
    pub shape: &'t [u64],
    /// The number of its shard in [`Checkpoint::shards`](crate::Checkpoint::shards).
    pub shard: usize,
    /// Where its bytes begin, counted from the first byte after the shard's header.
    pub begin: u64,
    /// Its size.
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    begin: u64,
    bytes: u64,
    shape_end: usize,
    shard: u32,
    dtype: Dtype,
}

/// The tensors of a checkpoint, in the order of its headers.
#[derive(Debug, Clone, Default)]
pub struct Tensors {
    names: NameTable,
    entries: Vec<Entry>,
    pub(crate) shapes: Vec<u64>,
}

impl Tensors {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Tensor `index`, or `None` past the last.
    pub fn at(&self, index: usize) -> Option<Tensor<'_>> {
        let entry = self.entries.get(index)?;
        let shape_start = match index.checked_sub(1) {
            Some(before) => self.entries.get(before)?.shape_end,
            None => 0,
        };
        Some(Tensor {
            name: self.names.name(index)?,
            dtype: entry.dtype,
            shape: self.shapes.get(shape_start..entry.shape_end)?,
            shard: entry.shard as usize,
            begin: entry.begin,
            bytes: entry.bytes,
        })
    }

    /// The number of the tensor called `name`.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.names.find(name)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = Tensor<'_>> {
        (0..self.len()).filter_map(|i| self.at(i))
    }

    /// Adds a tensor whose dimensions are the end of `shapes` already.
    pub(crate) fn push_with_shape_in_place(
        &mut self,
        name: &str,
        dtype: Dtype,
        begin: u64,
        bytes: u64,
        shard: u32,
    ) -> Result<usize, Refused> {
        let index = self.names.insert(name)?;
        self.entries.push(Entry { begin, bytes, shape_end: self.shapes.len(), shard, dtype });
        Ok(index)
    }

    /// Moves `other`'s tensors here as those of `shard`; gives the name that is here already, if one is.
    pub(crate) fn append(&mut self, other: Self, shard: u32) -> Result<(), (String, usize)> {
        if self.is_empty() {
            *self = other;
            self.entries.iter_mut().for_each(|e| e.shard = shard);
            return Ok(());
        }
        self.names.append(&other.names).map_err(|(name, refused)| {
            let there = match refused {
                Refused::Twice(i) => self.entries.get(i).map_or(0, |e| e.shard as usize),
                Refused::TooMany => usize::MAX,
            };
            (name.to_owned(), there)
        })?;
        let base = self.shapes.len();
        self.shapes.extend_from_slice(&other.shapes);
        let moved = |e: &Entry| Entry { shape_end: base.saturating_add(e.shape_end), shard, ..*e };
        self.entries.extend(other.entries.iter().map(moved));
        Ok(())
    }
}

/// A contiguous tensor's strides in elements, last dimension fastest; torch's values, also for empty tensors.
pub fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    let mut step = 1u64;
    for (stride, &dim) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul(dim.max(1));
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_taken_once() {
        let mut names = NameTable::default();
        for i in 0..1000usize {
            assert_eq!(names.insert(&format!("layer.{i}")), Ok(i));
        }
        assert_eq!(names.insert("layer.7"), Err(Refused::Twice(7)));
        assert_eq!(names.find("layer.999"), Some(999));
        assert_eq!(names.find("layer.1000"), None);
        assert_eq!(names.name(1000), None);
        let mut more = NameTable::default();
        for name in ["layer.1000", "layer.1001", "layer.12"] {
            more.insert(name).unwrap();
        }
        assert_eq!(names.append(&more), Err(("layer.12", Refused::Twice(12))));
        assert_eq!((names.find("layer.1001"), names.name(1000)), (Some(1001), Some("layer.1000")));
    }

    #[test]
    fn strides_are_torchs() {
        assert_eq!(strides(&[2, 3, 4]), [12, 4, 1]);
        assert_eq!(strides(&[]), [0u64; 0]);
        assert_eq!(strides(&[3, 0, 4]), [4, 4, 1]);
    }
}
