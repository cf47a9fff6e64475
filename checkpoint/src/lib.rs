//! Checkpoints (stock safetensors) and images (packed models), and the way between them.
//!
//! Owns: reading safetensors strictly, finding experts by name, the image format's files, and `pack`, `unpack`,
//! `inspect`, `verify`, `diff`. Blocking; no environment variable is read, no log is installed.
//!
//! Must never: map a file (a bad disk is an error, not a signal), trust a length before it is bounded by the
//! file, or leave anything half-made where a whole thing is expected.
#![forbid(unsafe_code)]

mod aliases;
mod assign;
mod blocks;
mod capture;
mod cause;
mod config;
mod cost;
mod diff;
mod direct;
mod error;
mod experts;
mod gather;
mod header;
mod image;
mod index;
mod inspect;
mod open;
mod pack;
mod parallel;
mod plan;
mod quant;
mod ranks;
mod recipe;
mod source;
mod staging;
mod stream;
mod tensors;
mod text;
mod unpack;
mod verify;

pub use assign::{LayoutOptions, Slicing};
pub use blocks::Progress;
pub use capture::{Captured, CapturedTensor, NewView, TensorBytes, capture, capture_into};
pub use cause::{FieldProblem, IoCause, Names};
pub use config::ModelConfig;
pub use cost::{Cost, CostOptions, PlanReport, RankCost, plan};
pub use diff::{DiffReport, Difference, DifferenceKind, diff};
pub use error::{Error, Result};
pub use experts::place;
pub use gather::Gather;
pub use header::Header;
pub use image::{
    Coordinate, Engine, FORMAT_VERSION, Fingerprint, Image, ImageHead, ImageTensor, ImageView, Kernel,
    LayoutInfo, Manifest, Metadata, Mismatch, ModelPart, RankEntry, RankImage, RankTable, Segment,
    SourceFile, Stage, World, is_image,
};
pub use index::Index;
pub use inspect::{InspectedFile, InspectedKind, Inspection, Opened, inspect};
pub use open::{Checkpoint, IndexFile, OpenOptions, Shard};
pub use pack::{PackOptions, PackReport, pack};
pub use parallel::{ExpertMap, Parallel, Rank, Refused};
pub use ranks::{PackedRanks, PlannedTensor, RankPlan, Relayout, pack_ranks, reshard};
pub use recipe::{Recipe, RecipeError, Target};
pub use tensors::{Tensor, Tensors, strides};
pub use unpack::{UnpackOptions, UnpackReport, unpack};
pub use verify::{VerifiedRank, VerifyOptions, VerifyReport, verify};
