//! Checkpoint → image.

use crate::blocks::{PACK_WORKERS, Progress, each_block, geometry, hash_block, workers};
use crate::direct::DirectFile;
use crate::error::{Error, Result};
use crate::image::{
    Coordinate, Fingerprint, LayoutInfo, METADATA, Metadata, RankEntry, RowFrom, Stage, TableOrigin,
    TableParts, TableRow, World, seal, write_table,
};
use crate::open::Checkpoint;
use crate::plan::PackPlan;
use crate::source::Source;
use crate::staging::{Staging, write_file};
use crate::tensors::Tensors;
use flashboot_core::layout::{PAYLOAD_ALIGN, TENSOR_ALIGN};
use flashboot_core::{BLOCK, BlockDigest, ByteRange, ByteSize, Digests, Dtype};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes after a file's last tensor that a table will carry.
pub(crate) const TRAILING_CAP: u64 = 1 << 20;

/// How to pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackOptions {
    /// Whether an image that is there is replaced (atomically: readers see the old or the new one).
    pub replace: bool,
    /// Threads, each with a slab of 4 MiB; by default two more than cores, and never more than 8.
    pub workers: Option<usize>,
    /// For images of many ranks: whether what a killed call has written is gone on from, and kept if this one fails.
    pub resume: bool,
    /// For images of many ranks: after so many bytes what was written is synced, so that it can be gone on from.
    pub sync_every: ByteSize,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self { replace: false, workers: None, resume: false, sync_every: ByteSize::gib(8) }
    }
}

/// What was packed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PackReport {
    /// Where the image is.
    #[serde(serialize_with = "crate::text::lossy")]
    pub image: PathBuf,
    /// Its id.
    pub id: String,
    /// Tensors, aliases not counted.
    pub tensors: u64,
    /// Bytes of the payload.
    pub bytes: u64,
    /// Where its non-experts begin.
    pub separator: u64,
    /// Rank images.
    pub ranks: u64,
    /// The payload's BLAKE3 hash.
    pub root: String,
    /// What a person should know of the checkpoint: [`Checkpoint::notes`].
    pub notes: Vec<String>,
}

/// Packs `checkpoint` as the single coordinate of an unsplit model into the directory `dest`, which appears whole
/// or not at all.
///
/// Blocks until the image is on the disk. Memory: workers × 4 MiB, and tables. Fails without a trace left, and
/// so does being killed, except for a hidden directory that the next `pack` to the same place removes.
pub fn pack(
    checkpoint: &Checkpoint,
    dest: &Path,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<PackReport> {
    let plan = PackPlan::new(checkpoint)?;
    for shard in checkpoint.shards() {
        if shard.trailing() > TRAILING_CAP {
            let (file, found) = (shard.path.clone(), shard.trailing());
            return Err(Error::TrailingOverCap { file, found, cap: TRAILING_CAP });
        }
    }
    let sources = checkpoint.shards().iter().map(|s| s.reopen()).collect::<Result<Vec<_>>>()?;
    let staging = Staging::begin(dest, options.replace.then_some(is_replaceable))?;
    let needed = plan.layout().payload().saturating_add(table_estimate(checkpoint));
    staging.check_space(needed)?;
    let packed = write_image(&staging, checkpoint, &plan, &sources, options, progress);
    let (metadata, separator) = match packed {
        Ok(packed) => packed,
        Err(e) => return Err(staging.explain(e, needed)),
    };
    for source in &sources {
        let now = Source::from_file(&source.path, clone(source)?)?;
        if now.identity != source.identity {
            return Err(Error::Changed { path: source.path.clone() });
        }
    }
    staging.publish()?;
    let first = metadata.ranks.first();
    Ok(PackReport {
        image: dest.into(),
        id: metadata.id.clone(),
        tensors: checkpoint.tensors().len() as u64,
        bytes: plan.layout().payload(),
        separator,
        ranks: metadata.ranks.len() as u64,
        root: first.map_or_else(String::new, |rank| rank.root.clone()),
        notes: checkpoint.notes().to_vec(),
    })
}

fn clone(source: &Source) -> Result<File> {
    source.file.try_clone().map_err(|e| Error::io("dup", &source.path, &e))
}

fn write_image(
    staging: &Staging,
    checkpoint: &Checkpoint,
    plan: &PackPlan<'_>,
    sources: &[Source],
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<(Metadata, u64)> {
    let coordinate = Coordinate::WHOLE;
    let (payload_name, table_name) = (format!("{coordinate}.img"), format!("{coordinate}.json"));
    let payload_path = staging.dir().join(&payload_name);
    let fill = |piece, bytes: &mut [u8]| plan.fill(piece, bytes, sources);
    let digests = write_payload(&payload_path, plan.layout().payload(), fill, options, progress)?;
    let table_path = staging.dir().join(&table_name);
    let (tensors, layout) = (checkpoint.tensors(), plan.layout());
    let name = |number: usize| tensors.at(number).map_or("", |t| t.name);
    let aliases: Vec<_> = checkpoint.aliases().iter().map(|(a, n)| (a.as_str(), name(*n))).collect();
    let origin = TableOrigin::Checkpoint(checkpoint, sources);
    let separator = layout.separator();
    let parts = TableParts { origin, aliases: &aliases, views: &[], separator, digests: &digests };
    let (table_bytes, table_hash) = write_hashed(&table_path, |out| {
        write_table(&table_path, out, &parts, |take| {
            for number in layout.order() {
                let (Some(t), Some(offset)) = (tensors.at(number), layout.offset(number)) else { continue };
                let place = crate::experts::place(t.name);
                let from = RowFrom::Whole(t.shard, t.begin);
                take(&TableRow {
                    name: t.name,
                    place,
                    offset,
                    shape: t.shape,
                    dtype: t.dtype,
                    bytes: t.bytes,
                    from,
                })?;
            }
            Ok(())
        })
    })?;
    let root = blake3::Hash::from_bytes(digests.root());
    let fingerprint = Fingerprint {
        source: origin.hash(&[root])?.to_hex().to_string(),
        layout: LayoutInfo::NAME.into(),
        stage: Stage::Sliced,
        dtype: main_dtype(tensors).map_or_else(String::new, |d| d.name().into()),
        quantisation: checkpoint.config().quantisation.clone(),
        model_type: checkpoint.config().model_type.clone(),
        engine: None,
        kernel: None,
    };
    let entry = RankEntry {
        coordinate,
        payload: payload_name,
        payload_bytes: plan.layout().payload(),
        root: root.to_hex().to_string(),
        table: table_name,
        table_bytes,
        table_hash: table_hash.to_hex().to_string(),
    };
    let numbers = checkpoint.config().numbers.clone();
    Ok((write_metadata(staging, fingerprint, numbers, World::ONE, entry)?, plan.layout().separator()))
}

/// Writes the metadata of an image of one rank, with its id.
pub(crate) fn write_metadata(
    staging: &Staging,
    fingerprint: Fingerprint,
    numbers: BTreeMap<String, u64>,
    world: World,
    entry: RankEntry,
) -> Result<Metadata> {
    let path = staging.dir().join(METADATA);
    let (metadata, sealed) = sealed(&path, fingerprint, numbers, world, entry)?;
    write_file(&path, &sealed)?;
    Ok(metadata)
}

/// The metadata of an image of one rank, of so many, with its id; and its bytes.
pub(crate) fn sealed(
    path: &Path,
    fingerprint: Fingerprint,
    numbers: BTreeMap<String, u64>,
    world: World,
    entry: RankEntry,
) -> Result<(Metadata, Vec<u8>)> {
    let mut metadata = Metadata {
        flashboot_image: 0,
        id: String::new(),
        fingerprint,
        layout: LayoutInfo {
            name: LayoutInfo::NAME.into(),
            tensor_align: TENSOR_ALIGN,
            payload_align: PAYLOAD_ALIGN,
            block: BLOCK,
            world,
            numbers,
        },
        ranks: vec![entry],
    };
    let sealed = seal(path, &mut metadata)?;
    Ok((metadata, sealed))
}

/// Writes a payload of `bytes`, which `fill` gives piece by piece, and syncs it.
pub(crate) fn write_payload(
    path: &Path,
    bytes: u64,
    fill: impl Fn(ByteRange, &mut [u8]) -> Result<()> + Sync,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<Digests> {
    let out = DirectFile::create(path, bytes)?;
    let write = |piece: ByteRange, bytes: &[u8]| out.write_at(piece.start, bytes);
    let digests = hash_payload(path, bytes, fill, write, options, progress)?;
    out.sync()?;
    Ok(digests)
}

/// Hashes a payload of `bytes`, which `fill` gives piece by piece, and gives each piece to `put`.
pub(crate) fn hash_payload(
    path: &Path,
    bytes: u64,
    fill: impl Fn(ByteRange, &mut [u8]) -> Result<()> + Sync,
    put: impl Fn(ByteRange, &[u8]) -> Result<()> + Sync,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<Digests> {
    let geometry = geometry(bytes)?;
    let count = usize::try_from(geometry.blocks()).unwrap_or(usize::MAX);
    let values = Mutex::new(vec![BlockDigest([0; 32]); count]);
    let threads = workers(options.workers, PACK_WORKERS);
    each_block(path, &geometry, threads, progress, |index, range, slab| {
        let value = hash_block(&geometry, range, slab, &fill, &put)?;
        let mut values = values.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = usize::try_from(index).ok().and_then(|i| values.get_mut(i)) {
            *slot = value;
        }
        Ok(())
    })?;
    let values = values.into_inner().unwrap_or_else(PoisonError::into_inner);
    Digests::new(geometry.payload(), geometry.block(), values)
        .map_err(|e| Error::NotJson { file: path.into(), detail: e.to_string() })
}

/// Writes a file through `write`, syncs it, and returns its length and hash.
pub(crate) fn write_hashed(
    path: &Path,
    write: impl FnOnce(&mut Hashed<BufWriter<File>>) -> Result<()>,
) -> Result<(u64, blake3::Hash)> {
    let file =
        File::options().write(true).create_new(true).open(path).map_err(|e| Error::io("create", path, &e))?;
    let mut out = Hashed { out: BufWriter::with_capacity(1 << 20, file), hasher: blake3::Hasher::new() };
    write(&mut out)?;
    out.flush().map_err(|e| Error::io("write", path, &e))?;
    out.out.get_ref().sync_all().map_err(|e| Error::io("fsync", path, &e))?;
    Ok((out.hasher.count(), out.hasher.finalize()))
}

pub(crate) struct Hashed<W> {
    out: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hasher.update(bytes.get(..written).unwrap_or_default());
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// The dtype with the most bytes; of several the first in the format's order.
pub(crate) fn main_dtype(tensors: &Tensors) -> Option<Dtype> {
    let mut totals = BTreeMap::<Dtype, u64>::new();
    for tensor in tensors.iter() {
        let total = totals.entry(tensor.dtype).or_default();
        *total = total.saturating_add(tensor.bytes);
    }
    totals.into_iter().rev().max_by_key(|&(_, bytes)| bytes).map(|(dtype, _)| dtype)
}

/// An upper bound on the tables' bytes: headers and index in base64, and an entry for each tensor whose name and
/// shape its header holds already.
fn table_estimate(checkpoint: &Checkpoint) -> u64 {
    let index = checkpoint.index().map_or(0, |i| i.identity.len);
    let tensors = checkpoint.tensors().len() as u64;
    let digests = checkpoint.data_bytes() / BLOCK * 68;
    let headers = checkpoint.header_bytes();
    headers
        .saturating_add(index)
        .saturating_mul(4)
        .div_ceil(3)
        .saturating_add(headers.saturating_mul(2))
        .saturating_add(tensors.saturating_mul(256))
        .saturating_add(digests)
        .saturating_add(1 << 20)
}

/// Whether everything in `dir` is an image's.
pub(crate) fn is_replaceable(dir: &Path) -> Result<()> {
    let refuse = |entry: String| Error::NotReplaceable { path: dir.into(), entry, what: "an image" };
    if !crate::image::is_image(dir)? {
        return Err(refuse("files, but no metadata.json".into()));
    }
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io("readdir", dir, &e))? {
        let name = entry.map_err(|e| Error::io("readdir", dir, &e))?.file_name();
        let name = name.to_string_lossy();
        let rank = name.starts_with("target-") || name.starts_with("draft-");
        let ours = name == METADATA || (rank && (name.ends_with(".img") || name.ends_with(".json")));
        if !ours {
            return Err(refuse(name.into_owned()));
        }
    }
    Ok(())
}
