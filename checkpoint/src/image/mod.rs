//! A packed model on disk: image format 1, described for other readers in `docs/image-format.md`.

mod id;
mod manifest;
mod metadata;
mod read;
mod table;
mod write;

pub use id::FORMAT_VERSION;
pub(crate) use id::{FieldHasher, METADATA, seal};
pub use manifest::Manifest;
pub use metadata::{Coordinate, Fingerprint, LayoutInfo, Metadata, ModelPart, RankEntry, Stage, World};
pub(crate) use read::is_image;
pub use read::{Image, RankImage};
pub use table::{ImageTensor, RankTable, Segment, SourceFile};
pub(crate) use write::{TableParts, write_table};
