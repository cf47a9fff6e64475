//! Whether two models are the same, tensor by tensor: checkpoints, images, or one of each. How the tensors are
//! spread over files, and in what order, makes no difference.

use crate::direct::zeroes;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::inspect::Opened;
use crate::open::{Checkpoint, OpenOptions};
use crate::source::Source;
use crate::verify::{VerifyOptions, verify};
use flashboot_core::{BLOCK, Dtype};
use std::collections::BTreeMap;
use std::path::Path;

/// At most this many differences are listed.
const LISTED: usize = 1000;
const PIECE: usize = 4 << 20;

/// What was compared.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DiffReport {
    /// Whether both hold the same names with the same dtypes, shapes and bytes.
    pub equal: bool,
    /// The first thousand differences, by name.
    pub differences: Vec<Difference>,
    /// How many there are in all.
    pub count: u64,
    /// Tensors and aliases of the first.
    pub tensors_a: u64,
    /// Tensors and aliases of the second.
    pub tensors_b: u64,
}

/// One tensor that is not the same.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Difference {
    /// Its name; of an image of several ranks with the rank before it.
    pub tensor: String,
    /// What differs.
    #[serde(flatten)]
    pub what: DifferenceKind,
}

/// In what two tensors differ.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DifferenceKind {
    /// The second has none of that name.
    OnlyInA,
    /// The first has none of that name.
    OnlyInB,
    /// Another element type.
    Dtype {
        /// The first's.
        a: Dtype,
        /// The second's.
        b: Dtype,
    },
    /// Another shape.
    Shape {
        /// The first's.
        a: Vec<u64>,
        /// The second's.
        b: Vec<u64>,
    },
    /// Other bytes.
    Bytes {
        /// The first byte that differs, counted from the tensor's first.
        first_at: u64,
    },
}

/// Compares what `a` and `b` hold. Images of one id, and an image whose bytes differ, are verified: damage is
/// [`Error::BadBlock`], no difference, and never equal.
pub fn diff(a: &Path, b: &Path, options: &OpenOptions) -> Result<DiffReport> {
    let (a, b) = (Opened::open(a, options)?, Opened::open(b, options)?);
    let (side_a, side_b) = (Side::new(&a)?, Side::new(&b)?);
    let mut report = DiffReport {
        equal: true,
        differences: Vec::new(),
        count: 0,
        tensors_a: side_a.entries.len() as u64,
        tensors_b: side_b.entries.len() as u64,
    };
    if let (Opened::Image(a), Opened::Image(b)) = (&a, &b)
        && a.id() == b.id()
    {
        refuse_damaged(a)?;
        refuse_damaged(b)?;
        return Ok(report);
    }
    for (name, one) in &side_a.entries {
        let what = match side_b.entries.get(name) {
            None => Some(DifferenceKind::OnlyInA),
            Some(other) => compare(&side_a, one, &side_b, other)?,
        };
        report.add(name, what);
    }
    for name in side_b.entries.keys().filter(|name| !side_a.entries.contains_key(*name)) {
        report.add(name, Some(DifferenceKind::OnlyInB));
    }
    if report.differences.iter().any(|d| matches!(d.what, DifferenceKind::Bytes { .. })) {
        // Bytes that an image has not got right are damage, no difference between two models.
        for opened in [&a, &b] {
            if let Opened::Image(image) = opened {
                refuse_damaged(image)?;
            }
        }
    }
    report.differences.sort_by(|x, y| flashboot_core::layout::natural_order(&x.tensor, &y.tensor));
    Ok(report)
}

fn refuse_damaged(image: &Image) -> Result<()> {
    let report = verify(image, &VerifyOptions::default(), &())?;
    for (found, rank) in report.ranks.iter().zip(image.files()) {
        if let Some(&block) = found.bad_blocks.first() {
            let begin = block.saturating_mul(BLOCK);
            let end = begin.saturating_add(BLOCK).min(rank.payload_bytes);
            return Err(Error::BadBlock { file: rank.path.clone(), block, begin, end });
        }
    }
    Ok(())
}

impl DiffReport {
    fn add(&mut self, tensor: &str, what: Option<DifferenceKind>) {
        let Some(what) = what else { return };
        self.equal = false;
        self.count = self.count.saturating_add(1);
        if self.differences.len() < LISTED {
            self.differences.push(Difference { tensor: tensor.to_owned(), what });
        }
    }
}

struct Entry<'t> {
    dtype: Dtype,
    shape: &'t [u64],
    file: usize,
    at: u64,
    bytes: u64,
}

/// One of the two: every name, aliases included, and the files that hold the bytes.
struct Side<'t> {
    entries: BTreeMap<String, Entry<'t>>,
    files: Vec<Source>,
}

impl<'t> Side<'t> {
    fn new(opened: &'t Opened) -> Result<Self> {
        match opened {
            Opened::Checkpoint(checkpoint) => Self::of_checkpoint(checkpoint),
            Opened::Image(image) => Self::of_image(image),
        }
    }

    fn of_checkpoint(checkpoint: &'t Checkpoint) -> Result<Self> {
        let files = checkpoint.shards().iter().map(|s| s.reopen()).collect::<Result<Vec<_>>>()?;
        let (tensors, shards) = (checkpoint.tensors(), checkpoint.shards());
        let entry = |number| {
            let t = tensors.at(number)?;
            let at = shards.get(t.shard)?.data_start().saturating_add(t.begin);
            Some(Entry { dtype: t.dtype, shape: t.shape, file: t.shard, at, bytes: t.bytes })
        };
        let own = (0..tensors.len()).filter_map(|n| Some((tensors.at(n)?.name.to_owned(), entry(n)?)));
        let aliases = checkpoint.aliases().iter().filter_map(|(alias, n)| Some((alias.clone(), entry(*n)?)));
        Ok(Self { entries: own.chain(aliases).collect(), files })
    }

    fn of_image(image: &'t Image) -> Result<Self> {
        let (mut entries, mut files) = (BTreeMap::new(), Vec::new());
        for rank in image.files() {
            let (file, table) = (files.len(), &rank.table);
            files.push(Source::open(&rank.path)?);
            let prefix =
                if image.ranks().len() > 1 { format!("{}/", rank.coordinate) } else { String::new() };
            let own = (0..table.len()).filter_map(|n| table.at(n).map(|t| (t.name, n)));
            let aliases = table.aliases().iter().map(|(alias, n)| (alias.as_str(), *n));
            for (name, number) in own.chain(aliases) {
                let Some(t) = table.at(number) else { continue };
                let entry = Entry { dtype: t.dtype, shape: t.shape, file, at: t.offset, bytes: t.bytes };
                entries.insert(format!("{prefix}{name}"), entry);
            }
        }
        Ok(Self { entries, files })
    }

    fn read(&self, entry: &Entry<'_>, from: u64, into: &mut [u8]) -> Result<()> {
        match self.files.get(entry.file) {
            Some(file) => file.read_at(entry.at.saturating_add(from), into),
            None => Err(Error::NotAnImage { path: Path::new("").into(), detail: "no such file".into() }),
        }
    }
}

fn compare(a: &Side<'_>, one: &Entry<'_>, b: &Side<'_>, other: &Entry<'_>) -> Result<Option<DifferenceKind>> {
    if one.dtype != other.dtype {
        return Ok(Some(DifferenceKind::Dtype { a: one.dtype, b: other.dtype }));
    }
    if one.shape != other.shape {
        return Ok(Some(DifferenceKind::Shape { a: one.shape.to_vec(), b: other.shape.to_vec() }));
    }
    // One dtype and one shape are one length.
    let len = usize::try_from(one.bytes).unwrap_or(PIECE).min(PIECE);
    let buffer = |side: &Side<'_>, entry: &Entry<'_>| {
        zeroes(side.files.get(entry.file).map_or(Path::new(""), |file| &file.path), len)
    };
    let (mut left, mut right) = (buffer(a, one)?, buffer(b, other)?);
    let mut at = 0;
    while at < one.bytes {
        let now = usize::try_from(one.bytes - at).unwrap_or(len).min(len);
        let (left, right) =
            (left.get_mut(..now).unwrap_or_default(), right.get_mut(..now).unwrap_or_default());
        a.read(one, at, left)?;
        b.read(other, at, right)?;
        if left != right {
            let same = left.iter().zip(right.iter()).take_while(|(x, y)| x == y).count() as u64;
            return Ok(Some(DifferenceKind::Bytes { first_at: at.saturating_add(same) }));
        }
        at = at.saturating_add(now as u64);
    }
    Ok(None)
}
