//! A tensor of which one rank has its slice.

use super::Access;
use crate::slab::View;
use flashboot_core::{Dtype, Error, Kind, Result};

/// Which part of a tensor is there: some runs of indices of one dimension, and all of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The dimension.
    pub dim: usize,
    /// Half-open runs of its indices, in the order in which they lie in memory.
    pub runs: Vec<(u64, u64)>,
}

/// A tensor under its checkpoint name, with the bytes that this rank read of it. Cloning shares them.
#[derive(Debug, Clone)]
pub struct PartialTensor {
    dtype: Dtype,
    shape: Vec<u64>,
    slice: Option<Slice>,
    view: View,
}

/// Bytes that were granted: contiguous, in the shape asked for.
#[derive(Debug, Clone)]
pub struct Granted<'t> {
    /// The dimensions.
    pub shape: Vec<u64>,
    /// The bytes.
    pub bytes: &'t [u8],
}

impl PartialTensor {
    pub(super) fn new(dtype: Dtype, shape: Vec<u64>, slice: Option<Slice>, view: View) -> Self {
        Self { dtype, shape, slice, view }
    }

    /// Its name in the checkpoint.
    pub fn name(&self) -> &str {
        self.view.name()
    }

    /// Its element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The dimensions that the checkpoint says, whatever is there of it.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// What is there of it; `None`: all.
    pub fn slice(&self) -> Option<&Slice> {
        self.slice.as_ref()
    }

    /// The bytes that are there, and what keeps them: what copies that are queued are paced by.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Grants `access`, or refuses it with the tensor's name and what is there of it.
    ///
    /// # Errors
    /// [`Kind::Mismatch`]: bytes that were not read. [`Kind::Invalid`]: indices that the tensor does not have.
    pub fn ask(&self, access: Access) -> Result<Granted<'_>> {
        match (access, &self.slice) {
            (Access::Narrow { dim, start, len }, _) => self.narrow(access, dim, start, len),
            (Access::Slice { dim, start, end, step: 1 }, _) if start <= end => {
                self.narrow(access, dim, start, end - start)
            }
            (Access::Select { dim: 0, index }, _) => {
                let mut one = self.narrow(access, 0, index, 1)?;
                one.shape.remove(0);
                Ok(one)
            }
            (Access::CopyInto, _) | (_, Some(_)) => Err(self.refuse(access)),
            // What a whole tensor becomes is its owner's business; all of its bytes are here.
            (_, None) => Ok(Granted { shape: self.shape.clone(), bytes: self.view.as_slice() }),
        }
    }

    fn narrow(&self, access: Access, dim: usize, start: u64, len: u64) -> Result<Granted<'_>> {
        let size = self.shape.get(dim).copied();
        let end = start.checked_add(len).filter(|end| size.is_some_and(|size| *end <= size));
        let Some(end) = end else {
            let detail = format!("{}: {access} of a tensor of {:?}", self.name(), self.shape);
            return Err(Error::new(Kind::Invalid, "tensor", detail));
        };
        let mut shape = self.shape.clone();
        if let Some(size) = shape.get_mut(dim) {
            *size = len;
        }
        let rest: u64 = self.shape.iter().skip(dim + 1).product();
        let above: u64 = self.shape.iter().take(dim).product();
        // Bytes from index `from` of the dimension on, where they lie in one run.
        let run = |from: u64| {
            let bits = rest.saturating_mul(self.dtype.bits());
            let byte = |n: u64| n.checked_mul(bits).filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
            let (first, bytes) = (byte(from)?, byte(len)?);
            let first = usize::try_from(first).ok()?;
            self.view.as_slice().get(first..first.checked_add(usize::try_from(bytes).ok()?)?)
        };
        let bytes = match &self.slice {
            // All of the dimension is there.
            None if above == 1 || (start == 0 && Some(end) == size) => {
                if above == 1 {
                    run(start)
                } else {
                    Some(self.view.as_slice())
                }
            }
            // Columns of a whole tensor are not in one run: whoever wants them copies them out of the whole.
            None => None,
            Some(slice) if slice.dim == dim => match slice.runs.as_slice() {
                // Exactly what is there, or rows of it.
                [(from, to)] if (*from, *to) == (start, end) => Some(self.view.as_slice()),
                [(from, to)] if start >= *from && end <= *to && above == 1 => run(start - from),
                _ => None,
            },
            Some(_) => None,
        };
        bytes.map(|bytes| Granted { shape, bytes }).ok_or_else(|| self.refuse(access))
    }

    /// The refusal of `access`.
    pub fn refuse(&self, access: Access) -> Error {
        let there = match &self.slice {
            None => "it is read-only and contiguous".to_owned(),
            Some(Slice { dim, runs }) => {
                let runs: Vec<_> = runs.iter().map(|(from, to)| format!("{from}..{to}")).collect();
                format!("this rank read {} of dimension {dim}", runs.join(" and "))
            }
        };
        let detail = format!("{} {:?}: {access} is refused: {there}", self.name(), self.shape);
        Error::new(Kind::Mismatch, "tensor", detail)
            .with_remedy("narrow it to the rank's own slice, or load without slicing (--slice off)")
    }
}
