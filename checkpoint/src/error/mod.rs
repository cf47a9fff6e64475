//! What can be wrong with a checkpoint, an image, or the disk they lie on. Every variant names the file, and
//! where there is one the tensor, the field, the size found and the size needed, and says what to do next.

mod boundary;

use crate::cause::{FieldProblem, IoCause, Names};
use flashboot_core::LayoutError;
use std::{io, path::Path, path::PathBuf};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything this crate can refuse or fail with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path that is not there.
    #[error("{}: there is no such file or directory; check the path", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// EACCES or EPERM: it may well be there.
    #[error("{}: permission denied to {op}; give this user access to it and to every directory above it", path.display())]
    NotPermitted {
        /// The call.
        op: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// A directory where a file is needed.
    #[error("{}: is a directory, a file is needed; move it away or name the file you mean", path.display())]
    IsDirectory {
        /// The path.
        path: PathBuf,
    },
    /// A pipe, socket or device where a file is needed.
    #[error("{}: is neither a regular file nor a directory; copy its bytes into a file first", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
    },
    /// No room on the file system.
    #[error("{}: the file system is full: {needed} bytes needed, {found} available; free space or choose another place", path.display())]
    NoSpace {
        /// What was being written.
        path: PathBuf,
        /// Bytes still needed.
        needed: u64,
        /// Bytes available.
        found: u64,
    },
    /// Any other failed system call.
    #[error("{}: {op} failed: {cause}{}", path.display(), appended(cause.remedy()))]
    Io {
        /// The call.
        op: &'static str,
        /// The path.
        path: PathBuf,
        /// What the system said.
        cause: IoCause,
    },
    /// The destination exists.
    #[error("{}: already exists; choose another name or allow replacing it", path.display())]
    Exists {
        /// The destination.
        path: PathBuf,
    },
    /// Replacing was allowed, but what is there is nothing this would have written.
    #[error("{}: will not be replaced, because it holds `{entry}`, which is no part of {what}; remove it by hand", path.display())]
    NotReplaceable {
        /// The destination.
        path: PathBuf,
        /// What is in the way.
        entry: String,
        /// What would have been replaced.
        what: &'static str,
    },
    /// A source file changed while it was read.
    #[error("{}: changed while it was being read (its header, size or time is another than at opening); try again when nobody writes to it", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },

    /// No safetensors in a directory.
    #[error("{}: holds no *.safetensors file and no index; point at a directory of a stock checkpoint", dir.display())]
    NoSafetensors {
        /// The directory.
        dir: PathBuf,
    },
    /// Several indices.
    #[error("{}: holds several indices ({names}); name the one you mean", dir.display())]
    SeveralIndices {
        /// The directory.
        dir: PathBuf,
        /// Their names.
        names: Names,
    },
    /// A file shorter than the 8 bytes that say how long its header is.
    #[error("{}: {found} bytes are no safetensors file, which begins with an 8-byte header length: needed 8, found {found}; fetch it again", file.display())]
    TooShort {
        /// The file.
        file: PathBuf,
        /// Its length.
        found: u64,
    },
    /// A header above the cap; nothing of that size was allocated.
    #[error("{}: the header is {size} bytes, above the cap of {cap}; if the file is sound, raise the header cap", file.display())]
    HeaderOverCap {
        /// The file.
        file: PathBuf,
        /// The header's length.
        size: u64,
        /// The cap.
        cap: u64,
    },
    /// A header past the file's end.
    #[error("{}: the header ends past the file: {needed} bytes needed, {found} found; fetch it again", file.display())]
    HeaderPastEnd {
        /// The file.
        file: PathBuf,
        /// Bytes that prefix and header need.
        needed: u64,
        /// The file's length.
        found: u64,
    },
    /// A header of length zero.
    #[error("{}: the header is empty (length 0), it must hold at least `{{}}`; fetch the file again", file.display())]
    HeaderEmpty {
        /// The file.
        file: PathBuf,
    },
    /// A header that does not begin with `{`.
    #[error("{}: the header begins with {found}, it must be a JSON object and begin with `{{`; fetch the file again", file.display())]
    HeaderNotObject {
        /// The file.
        file: PathBuf,
        /// The first byte, printable.
        found: String,
    },
    /// A file that should be JSON and is not.
    #[error("{}: not valid JSON: {detail}; fetch the file again", file.display())]
    NotJson {
        /// The file.
        file: PathBuf,
        /// Where and why, in the parser's words.
        detail: String,
    },
    /// One field of one tensor.
    #[error("{}: tensor `{tensor}`: field `{field}` {problem}", file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// The tensor (or `__metadata__`).
        tensor: String,
        /// The field.
        field: &'static str,
        /// What is wrong.
        problem: FieldProblem,
    },
    /// Two entries of one name in one header, index or table.
    #[error("{}: `{tensor}` is there twice; a name may appear once", file.display())]
    Duplicate {
        /// The file.
        file: PathBuf,
        /// The name.
        tensor: String,
    },
    /// A dtype outside the format.
    #[error("{}: tensor `{tensor}`: field `dtype` is `{dtype}`, which is no safetensors dtype; a newer format may need a newer flashboot", file.display())]
    UnknownDtype {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The dtype.
        dtype: String,
    },
    /// A shape without a size in bytes.
    #[error("{}: tensor `{tensor}`: field `shape` {shape:?} of {dtype}: {problem}", file.display())]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: flashboot_core::Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Why.
        problem: flashboot_core::SizeError,
    },
    /// A shape whose bytes are not its range's.
    #[error("{}: tensor `{tensor}`: field `data_offsets` spans {found} bytes, its shape needs {needed}", file.display())]
    ShapeBytes {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Bytes the shape needs.
        needed: u64,
        /// Bytes the range has.
        found: u64,
    },
    /// A range that ends before it begins.
    #[error("{}: tensor `{tensor}`: field `data_offsets` ends at {end}, before it begins at {begin}", file.display())]
    Reversed {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its begin.
        begin: u64,
        /// Its end.
        end: u64,
    },
    /// Bytes between tensors that no tensor owns.
    #[error("{}: tensor `{tensor}`: field `data_offsets` begins at {begin}, {needed} needed: {} bytes before it belong to no tensor", file.display(), begin.saturating_sub(*needed))]
    Hole {
        /// The file.
        file: PathBuf,
        /// The tensor after the hole.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where it must begin.
        needed: u64,
    },
    /// Two tensors that share bytes.
    #[error("{}: tensor `{tensor}`: field `data_offsets` begins at {begin}, inside tensor `{other}` that ends at {end}", file.display())]
    Overlap {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The one it overlaps.
        other: String,
        /// Where the tensor begins.
        begin: u64,
        /// Where the other ends.
        end: u64,
    },
    /// A file that ends before its last tensor.
    #[error("{}: truncated at tensor `{tensor}`: {needed} bytes needed, {found} found; fetch the file again", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The first tensor that is not all there.
        tensor: String,
        /// Bytes the header asks for.
        needed: u64,
        /// The file's length.
        found: u64,
    },
    /// Bytes past the last tensor.
    #[error("{}: {} bytes after the last tensor belong to no tensor: {needed} bytes needed, {found} found; allow trailing bytes if that is meant", file.display(), found.saturating_sub(*needed))]
    Trailing {
        /// The file.
        file: PathBuf,
        /// Bytes the header asks for.
        needed: u64,
        /// The file's length.
        found: u64,
    },

    /// An index entry that names a file outside the index's directory.
    #[error("{}: tensor `{tensor}`: `{entry}` {problem}; an index may only name files below its own directory", index.display())]
    IndexPath {
        /// The index.
        index: PathBuf,
        /// The tensor of the entry.
        tensor: String,
        /// The file it names.
        entry: String,
        /// Why it is refused.
        problem: &'static str,
    },
    /// A shard that the index names and that is not there.
    #[error("{}: shard `{shard}` is missing ({} looked for); fetch it", index.display(), path.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The shard as named there.
        shard: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// An index that does not describe its shards.
    #[error("{}: the index is stale:{not_in_shard}{elsewhere}{not_in_index}; fetch the index and the shards of one revision",
        index.display(),
        not_in_shard = listed(" named in the index but in no shard: ", not_in_shard),
        elsewhere = listed(" in another shard than the index says: ", elsewhere),
        not_in_index = listed(" in a shard but not in the index: ", not_in_index))]
    StaleIndex {
        /// The index.
        index: PathBuf,
        /// Named by the index, in no shard.
        not_in_shard: Names,
        /// In another shard than the index says.
        elsewhere: Names,
        /// In a shard, not named by the index.
        not_in_index: Names,
    },
    /// Shards beside an index that it does not name.
    #[error("{}: the index is stale: it names nothing of {names}, which lie beside it and are numbered as its shards are; fetch the index and the shards of one revision, or move those files away", index.display())]
    ShardNotInIndex {
        /// The index.
        index: PathBuf,
        /// The files.
        names: Names,
    },
    /// One name in two shards.
    #[error("{}: tensor `{tensor}` is in `{other}` too; a name may appear in one shard", file.display())]
    InTwoShards {
        /// One shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The other shard.
        other: String,
    },
    /// Trailing bytes too many to carry in a table.
    #[error("{}: {found} trailing bytes, at most {cap} can be packed; cut the file to its tensors", file.display())]
    TrailingOverCap {
        /// The file.
        file: PathBuf,
        /// How many there are.
        found: u64,
        /// How many can be kept.
        cap: u64,
    },
    /// Tensors that cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),

    /// An image where a checkpoint is needed.
    #[error("{}: is an image already, a checkpoint is needed; unpack it first or name a checkpoint", path.display())]
    IsImage {
        /// The image.
        path: PathBuf,
    },
    /// Not an image: no `metadata.json` of ours.
    #[error("{}: is not an image: {detail}", path.display())]
    NotAnImage {
        /// The path.
        path: PathBuf,
        /// What is missing.
        detail: String,
    },
    /// A directory without the `metadata.json` that makes it an image.
    #[error("{}: is not an image: it has no metadata.json{found}; {remedy}", dir.display())]
    NoMetadata {
        /// The directory.
        dir: PathBuf,
        /// What it has instead.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// Another version of the format.
    #[error("{}: image format version {found}, this flashboot reads version {needed}; use the flashboot that wrote it or pack again", file.display())]
    ImageVersion {
        /// `metadata.json`.
        file: PathBuf,
        /// Its version.
        found: u64,
        /// Ours.
        needed: u64,
    },
    /// The metadata is not what the image id was made of.
    #[error("{}: image id {found} does not match its content, which gives {needed}; the image is damaged: pack or fetch it again", file.display())]
    ImageId {
        /// `metadata.json`.
        file: PathBuf,
        /// The id recorded.
        found: String,
        /// The id of what is there.
        needed: String,
    },
    /// A file of an image whose length is not the one recorded.
    #[error("{}: {needed} bytes needed, {found} found; the image is damaged: pack or fetch it again", file.display())]
    ImageSize {
        /// The file.
        file: PathBuf,
        /// The length recorded.
        needed: u64,
        /// The length found.
        found: u64,
    },
    /// A table or payload whose hash is not the one recorded.
    #[error("{}: BLAKE3 {found} found, {needed} needed; the image is damaged: pack or fetch it again", file.display())]
    ImageHash {
        /// The file.
        file: PathBuf,
        /// The hash recorded.
        needed: String,
        /// The hash found.
        found: String,
    },
    /// A block of a payload whose digest is not the one recorded.
    #[error("{}: block {block} (bytes {begin}..{end}) does not match its digest; the image is damaged: pack or fetch it again", file.display())]
    BadBlock {
        /// The payload.
        file: PathBuf,
        /// The block's number.
        block: u64,
        /// Its first byte.
        begin: u64,
        /// One past its last.
        end: u64,
    },
    /// An image that cannot be turned back into a checkpoint.
    #[error("{}: cannot be unpacked: {reason}", dir.display())]
    NotUnpackable {
        /// The image.
        dir: PathBuf,
        /// Why.
        reason: String,
    },
    /// A layout that does not fit the model.
    #[error(transparent)]
    Refused(#[from] crate::parallel::Refused),
    /// Memory that could not be mapped.
    #[error(transparent)]
    Memory(flashboot_core::Error),
    /// A text that is no recipe.
    #[error(transparent)]
    Recipe(#[from] crate::recipe::RecipeError),
    /// The caller asked to stop.
    #[error("{}: stopped on request; nothing was left behind", path.display())]
    Cancelled {
        /// The destination.
        path: PathBuf,
    },
}

fn listed(title: &str, names: &Names) -> String {
    if names.is_empty() { String::new() } else { format!("{title}{names}") }
}

fn appended(remedy: Option<&str>) -> String {
    remedy.map_or_else(String::new, |remedy| format!("; {remedy}"))
}

impl Error {
    /// From a failed call on `path`; EACCES, ENOENT, EISDIR and ENOSPC become what they mean.
    pub(crate) fn io(op: &'static str, path: &Path, e: &io::Error) -> Self {
        let path = path.to_path_buf();
        match e.kind() {
            io::ErrorKind::NotFound => Self::Missing { path },
            io::ErrorKind::PermissionDenied => Self::NotPermitted { op, path },
            io::ErrorKind::IsADirectory => Self::IsDirectory { path },
            _ => Self::Io { op, path, cause: e.into() },
        }
    }
}
