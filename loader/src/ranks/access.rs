//! What an engine can ask of a tensor.

use std::fmt;

/// One thing asked of a tensor. A whole tensor grants all of it; a part of one grants what lies inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// `start..start + len` of dimension `dim`, and all of the others.
    Narrow {
        /// The dimension.
        dim: usize,
        /// The first index.
        start: u64,
        /// How many.
        len: u64,
    },
    /// One index of a dimension, which goes away.
    Select {
        /// The dimension.
        dim: usize,
        /// The index.
        index: u64,
    },
    /// Every `step`-th index of `start..end` of a dimension.
    Slice {
        /// The dimension.
        dim: usize,
        /// The first index.
        start: u64,
        /// One past the last.
        end: u64,
        /// From one to the next.
        step: u64,
    },
    /// Any other indexing: several dimensions, lists, masks, ellipses.
    Index,
    /// Equal parts of a dimension.
    Chunk,
    /// Given parts of a dimension.
    Split,
    /// Another shape of the same bytes.
    Reshape,
    /// Another order of the dimensions.
    Transpose,
    /// Dimensions of size one, added or taken away.
    Squeeze,
    /// The same bytes as another type.
    View,
    /// Another type.
    Convert,
    /// Another device.
    Move,
    /// A copy of all of it.
    Clone,
    /// All of it, to be copied somewhere else.
    CopyFrom,
    /// Something written into it.
    CopyInto,
    /// All of it in contiguous memory.
    Contiguous,
    /// One value.
    Item,
    /// Its values, one after the other.
    Iterate,
    /// A computation.
    Compute,
    /// A comparison.
    Compare,
    /// Put together with others.
    Concatenate,
    /// The address of its first byte.
    Pointer,
    /// All of its bytes, for another library or a file.
    Export,
}

impl Access {
    /// Everything that asks for all of a tensor: none of it is granted by a part of one.
    pub const WHOLE: [Self; 20] = [
        Self::Index,
        Self::Chunk,
        Self::Split,
        Self::Reshape,
        Self::Transpose,
        Self::Squeeze,
        Self::View,
        Self::Convert,
        Self::Move,
        Self::Clone,
        Self::CopyFrom,
        Self::CopyInto,
        Self::Contiguous,
        Self::Item,
        Self::Iterate,
        Self::Compute,
        Self::Compare,
        Self::Concatenate,
        Self::Pointer,
        Self::Export,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Narrow { .. } => "narrow",
            Self::Select { .. } => "select",
            Self::Slice { .. } => "slice",
            Self::Index => "index",
            Self::Chunk => "chunk",
            Self::Split => "split",
            Self::Reshape => "reshape",
            Self::Transpose => "transpose",
            Self::Squeeze => "squeeze",
            Self::View => "view",
            Self::Convert => "to another type",
            Self::Move => "to another device",
            Self::Clone => "clone",
            Self::CopyFrom => "copy from it",
            Self::CopyInto => "copy into it",
            Self::Contiguous => "contiguous",
            Self::Item => "item",
            Self::Iterate => "iterate",
            Self::Compute => "compute with it",
            Self::Compare => "compare",
            Self::Concatenate => "concatenate",
            Self::Pointer => "its address",
            Self::Export => "export",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Narrow { dim, start, len } => write!(f, "narrow({dim}, {start}, {len})"),
            Self::Select { dim, index } => write!(f, "select({dim}, {index})"),
            Self::Slice { dim, start, end, step } => write!(f, "slice({dim}, {start}..{end} by {step})"),
            other => f.write_str(other.name()),
        }
    }
}
