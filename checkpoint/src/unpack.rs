//! Image → the checkpoint it was packed from, bit for bit.

use crate::blocks::{PACK_WORKERS, Progress, each_block, geometry, hash_block, workers};
use crate::direct::{DirectFile, reserve};
use crate::error::{Error, Result};
use crate::header::Header;
use crate::image::{Image, RankImage, RankTable, Stage};
use crate::staging::{Staging, write_file};
use flashboot_core::ByteRange;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// How to unpack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnpackOptions {
    /// Whether a directory that holds nothing but safetensors files and an index is replaced.
    pub replace: bool,
    /// Threads, each with a slab of 4 MiB; by default two more than cores, and never more than 8.
    pub workers: Option<usize>,
}

/// What was unpacked.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct UnpackReport {
    /// Where the checkpoint is.
    #[serde(serialize_with = "crate::text::lossy")]
    pub checkpoint: PathBuf,
    /// The image's id.
    pub id: String,
    /// Tensors, aliases not counted.
    pub tensors: u64,
    /// Bytes of all files, headers and index included.
    pub bytes: u64,
    /// Files, the index included.
    pub files: u64,
}

/// Writes the checkpoint that `image` was packed from into the directory `dest`, which appears whole or not at
/// all. Every block is checked against its digest on the way.
///
/// Side files (`config.json`, tokenizers) are no part of an image and so not of what is written.
pub fn unpack(
    image: &Image,
    dest: &Path,
    options: &UnpackOptions,
    progress: &dyn Progress,
) -> Result<UnpackReport> {
    let refuse = |reason: String| Error::NotUnpackable { dir: image.dir().into(), reason };
    let Some(rank) = image.ranks().first() else { return Err(refuse("it has no ranks".into())) };
    let stage = image.metadata().fingerprint.stage;
    if stage != Stage::Sliced {
        let why = match stage {
            Stage::EngineParams => "its stage is engine-params: reshard it without --target, and unpack that",
            _ => {
                "its stage is kernel-ready, which is not the checkpoint's own bytes: pack it from the checkpoint"
            }
        };
        return Err(refuse(why.into()));
    }
    let table = &*rank.table;
    let split = image.ranks().len() > 1 || table.iter().any(|t| !t.parts.is_empty());
    if !split {
        check_complete(image.dir(), table)?;
    }
    let staging = Staging::begin(dest, options.replace.then_some(is_replaceable))?;
    let needed = table.sources().iter().fold(table.index().map_or(0, |(_, b)| b.len() as u64), |sum, s| {
        sum.saturating_add(file_len(s.header.len() as u64, s.data_bytes, s.trailing.len() as u64))
    });
    staging.check_space(needed)?;
    let mut tensors = table.len() as u64;
    let written = if split {
        let outs = || Outs::create(staging.dir(), table);
        crate::ranks::unpack_ranks(image, staging.dir(), outs, options.workers, progress).map(|n| tensors = n)
    } else {
        write_files(&staging, rank, options, progress)
    };
    let written = written.and_then(|()| write_index(&staging, table));
    written.map_err(|e| staging.explain(e, needed))?;
    staging.publish()?;
    Ok(UnpackReport {
        checkpoint: dest.into(),
        id: image.id().into(),
        tensors,
        bytes: needed,
        files: table.sources().len() as u64 + u64::from(table.index().is_some()),
    })
}

fn file_len(header: u64, data: u64, trailing: u64) -> u64 {
    header.saturating_add(8).saturating_add(data).saturating_add(trailing)
}

/// Checks that every header's tensors are the table's, so that each byte of each file comes from somewhere.
fn check_complete(dir: &Path, table: &RankTable) -> Result<()> {
    let refuse = |reason: String| Error::NotUnpackable { dir: dir.into(), reason };
    let mut found = 0usize;
    for (number, source) in table.sources().iter().enumerate() {
        let header = Header::parse(Path::new(&source.name), &source.header)?;
        let prefix = (source.header.len() as u64).saturating_add(8);
        let len = prefix.saturating_add(source.data_bytes);
        header.check_coverage(Path::new(&source.name), prefix, len, false)?;
        for tensor in header.tensors.iter() {
            let packed = table.find(tensor.name).and_then(|i| table.at(i));
            let same = packed.is_some_and(|p| {
                p.parts.is_empty()
                    && p.name == tensor.name
                    && p.dtype == tensor.dtype
                    && p.shape == tensor.shape
                    && (p.source, p.source_offset, p.bytes) == (number, tensor.begin, tensor.bytes)
            });
            if !same {
                return Err(refuse(format!(
                    "tensor `{}` of `{}` is not whole in it",
                    tensor.name, source.name
                )));
            }
        }
        found = found.saturating_add(header.tensors.len());
    }
    if found != table.len() {
        return Err(refuse(format!("{} tensors, its source headers have {found}", table.len())));
    }
    Ok(())
}

fn write_files(
    staging: &Staging,
    rank: &RankImage,
    options: &UnpackOptions,
    progress: &dyn Progress,
) -> Result<()> {
    let table = &*rank.table;
    let outs = Outs::create(staging.dir(), table)?;
    let geometry = geometry(table.payload_bytes())?;
    let payload = DirectFile::open(&rank.path)?;
    let threads = workers(options.workers, PACK_WORKERS);
    each_block(staging.dir(), &geometry, threads, progress, |index, range, slab| {
        let read = |piece: ByteRange, bytes: &mut [u8]| payload.read_at(piece.start, bytes);
        // Written before the block is known to be good: a bad one fails the whole, and nothing is published.
        let write = |piece, bytes: &[u8]| scatter(table, piece, bytes, &outs);
        let found = hash_block(&geometry, range, slab, read, write)?;
        if !table.digests().mismatches(index, &[found]).is_empty() {
            let (begin, end) = (range.start, range.end);
            return Err(Error::BadBlock { file: rank.path.clone(), block: index, begin, end });
        }
        Ok(())
    })?;
    outs.sync()
}

fn write_index(staging: &Staging, table: &RankTable) -> Result<()> {
    if let Some((name, bytes)) = table.index() {
        let path = staging.dir().join(name);
        make_parent(&path)?;
        write_file(&path, bytes)?;
    }
    Ok(())
}

/// The safetensors files that are being written: everything but their tensors is there.
pub(crate) struct Outs {
    /// Path, file, and where its data begins.
    files: Vec<(PathBuf, File, u64)>,
    /// Bytes of each one's tensors.
    pub(crate) data_bytes: Vec<u64>,
}

impl Outs {
    fn create(dir: &Path, table: &RankTable) -> Result<Self> {
        let mut files = Vec::with_capacity(table.sources().len());
        for source in table.sources() {
            let path = dir.join(&source.name);
            make_parent(&path)?;
            let create = File::options().read(true).write(true).create_new(true).open(&path);
            let file = create.map_err(|e| Error::io("create", &path, &e))?;
            let header_len = source.header.len() as u64;
            reserve(&path, &file, file_len(header_len, source.data_bytes, source.trailing.len() as u64))?;
            let data_start = header_len.saturating_add(8);
            let write =
                |bytes: &[u8], at| file.write_all_at(bytes, at).map_err(|e| Error::io("pwrite", &path, &e));
            write(&header_len.to_le_bytes(), 0)?;
            write(&source.header, 8)?;
            write(&source.trailing, data_start.saturating_add(source.data_bytes))?;
            files.push((path, file, data_start));
        }
        Ok(Self { files, data_bytes: table.sources().iter().map(|s| s.data_bytes).collect() })
    }

    /// Writes bytes of a file's tensors, counted from the first byte after its header.
    pub(crate) fn write(&self, number: usize, at: u64, bytes: &[u8]) -> Result<()> {
        let Some((path, file, data_start)) = self.files.get(number) else { return Ok(()) };
        let at = data_start.saturating_add(at);
        file.write_all_at(bytes, at).map_err(|e| Error::io("pwrite", path, &e))
    }

    /// Reads such bytes back.
    pub(crate) fn read(&self, number: usize, at: u64, into: &mut [u8]) -> Result<()> {
        let Some((path, file, data_start)) = self.files.get(number) else { return Ok(()) };
        file.read_exact_at(into, data_start.saturating_add(at)).map_err(|e| Error::io("pread", path, &e))
    }

    /// Waits until all of it is on the disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.files
            .iter()
            .try_for_each(|(path, file, _)| file.sync_all().map_err(|e| Error::io("fsync", path, &e)))
    }
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent).map_err(|e| Error::io("mkdir", parent, &e))
}

/// Writes the parts of tensors that lie in `range` of the payload to their files.
fn scatter(table: &RankTable, range: ByteRange, bytes: &[u8], outs: &Outs) -> Result<()> {
    // Tensors are in payload order: the first that ends past the range's start.
    let (mut low, mut high) = (0, table.len());
    while low < high {
        let middle = low + (high - low) / 2;
        match table.at(middle) {
            Some(t) if t.offset.saturating_add(t.bytes) <= range.start => low = middle + 1,
            _ => high = middle,
        }
    }
    for tensor in (low..table.len()).map_while(|i| table.at(i)) {
        if tensor.offset >= range.end {
            break;
        }
        let from = tensor.offset.max(range.start);
        let to = tensor.offset.saturating_add(tensor.bytes).min(range.end);
        let index = |at: u64| usize::try_from(at.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let Some(part) = bytes.get(index(from)..index(to)) else { continue };
        outs.write(tensor.source, tensor.source_offset.saturating_add(from - tensor.offset), part)?;
    }
    Ok(())
}

/// Whether everything in `dir` is what `unpack` writes.
fn is_replaceable(dir: &Path) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io("readdir", dir, &e))? {
        let entry = entry.map_err(|e| Error::io("readdir", dir, &e))?;
        let kind = entry.file_type().map_err(|e| Error::io("stat", &entry.path(), &e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if kind.is_dir() {
            is_replaceable(&entry.path())?;
        } else if !(name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) {
            let what = "an unpacked checkpoint";
            return Err(Error::NotReplaceable { path: dir.into(), entry: name, what });
        }
    }
    Ok(())
}
