//! Whether two models are the same, tensor by tensor: checkpoints, images, or one of each. How the tensors are
//! spread over files, and in what order, makes no difference; nor does how an image cut them for its ranks, unless both
//! are images of one layout: those are compared rank by rank.

mod side;

use crate::direct::zeroes;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::inspect::Opened;
use crate::open::OpenOptions;
use crate::verify::{VerifyOptions, verify};
use flashboot_core::{BLOCK, Dtype};
use side::{Entry, Side, as_model};
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
    /// Its name; where images of several ranks are compared rank by rank with the rank before it.
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
    /// A view of other bytes, or one where the other is a tensor of its own.
    View,
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
    let (model_a, model_b) = (as_model(&a, &b)?, as_model(&b, &a)?);
    let (side_a, side_b) = (Side::new(&a, model_a.as_ref())?, Side::new(&b, model_b.as_ref())?);
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

fn compare(a: &Side<'_>, one: &Entry<'_>, b: &Side<'_>, other: &Entry<'_>) -> Result<Option<DifferenceKind>> {
    if one.dtype != other.dtype {
        return Ok(Some(DifferenceKind::Dtype { a: one.dtype, b: other.dtype }));
    }
    if one.shape != other.shape {
        return Ok(Some(DifferenceKind::Shape { a: one.shape.to_vec(), b: other.shape.to_vec() }));
    }
    if one.view != other.view {
        return Ok(Some(DifferenceKind::View));
    }
    // One dtype and one shape are one length; a view's bytes are compared with the tensor that has them.
    let len = usize::try_from(one.bytes).unwrap_or(PIECE).min(PIECE);
    let buffer = |side: &Side<'_>, entry: &Entry<'_>| zeroes(side.path(entry), len);
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
