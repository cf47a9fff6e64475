//! A packed model on disk: image format 1, described for other readers in `docs/image-format.md`.

mod fingerprint;
mod id;
mod json;
mod lacking;
mod manifest;
mod metadata;
mod origin;
mod read;
mod table;
mod view;
mod write;

pub use fingerprint::{Engine, Fingerprint, Kernel, Mismatch, Stage};
pub use id::FORMAT_VERSION;
pub(crate) use id::{METADATA, seal};
pub(crate) use lacking::is_half_an_image;
pub use manifest::Manifest;
pub use metadata::{Coordinate, LayoutInfo, Metadata, ModelPart, RankEntry, World};
pub(crate) use origin::TableOrigin;
pub use read::{Image, ImageHead, RankImage, is_image};
pub use table::{ImageTensor, RankTable, Segment, SourceFile};
pub use view::ImageView;
pub(crate) use write::{RowFrom, TableParts, TableRow, write_table};
