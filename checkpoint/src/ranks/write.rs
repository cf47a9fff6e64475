//! Writes the images of a set of ranks, whatever they are made of.

use super::set::{Provider, RankSet};
use super::sink::ImageSink;
use super::turns::Turns;
use crate::blocks::{PACK_WORKERS, Progress, workers};
use crate::error::Result;
use crate::gather::Gather;
use crate::image::{
    Coordinate, Engine, Fingerprint, LayoutInfo, METADATA, Metadata, RankEntry, RowFrom, Stage, TableOrigin,
    TableParts, TableRow, World, seal, write_table,
};
use crate::pack::{PackOptions, PackReport, main_dtype, write_hashed};
use crate::recipe::Target;
use crate::source::Source;
use crate::staging::{Staging, write_file};
use crate::stream::{Job, memory, run, writers};
use flashboot_core::layout::{PAYLOAD_ALIGN, TENSOR_ALIGN};
use flashboot_core::{BLOCK, Digests};
use std::path::Path;

/// What images are made of.
pub(super) struct Made<'w> {
    pub(super) provider: &'w dyn Provider,
    pub(super) files: &'w [Source],
    pub(super) origin: TableOrigin<'w>,
}

/// An upper bound on the bytes of `set`'s tables, and its payloads.
pub(super) fn needed(set: &RankSet<'_, '_>, origin: &TableOrigin<'_>) -> u64 {
    let (headers, index) = origin.head_bytes();
    let head = headers.saturating_add(index).saturating_mul(4).div_ceil(3).saturating_add(1 << 16);
    set.images.iter().fold(1 << 20, |sum: u64, image| {
        let tensors = image.groups.len() as u64;
        let digests = image.layout.payload() / BLOCK * 68;
        let own = tensors.saturating_mul(400).saturating_add(digests).saturating_add(image.layout.payload());
        sum.saturating_add(own).saturating_add(head).saturating_add(headers)
    })
}

/// Writes payloads, tables and metadata into the staging directory; gives the metadata and bytes gone on from.
pub(super) fn write(
    staging: &Staging,
    set: &RankSet<'_, '_>,
    made: &Made<'_>,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<(Metadata, u64)> {
    let piece = memory(set.images.len());
    let threads = workers(options.workers, PACK_WORKERS);
    let turns = Turns::for_writers(writers(threads));
    let sink = ImageSink::open(staging.dir(), set, piece, options.sync_every.0, turns)?;
    let streams = sink.streams();
    let floors: Vec<u64> = streams.iter().map(|(bytes, n)| n.saturating_mul(piece).min(*bytes)).collect();
    let job = Job {
        what: staging.dir(),
        files: made.files,
        streams: &streams,
        piece,
        sink: &sink,
        progress,
        total: set.bytes(),
        threads,
    };
    run(&job, |take| set.produce(made.provider, &floors, take))?;
    let digests = sink.finish(staging.dir())?;
    let mut entries = Vec::with_capacity(set.images.len());
    for (number, digests) in digests.iter().enumerate() {
        entries.push(write_table_of(staging.dir(), set, number, &made.origin, digests)?);
    }
    let roots: Vec<_> = digests.iter().map(|d| blake3::Hash::from_bytes(d.root())).collect();
    let metadata = metadata(set, &entries, &made.origin, &roots)?;
    Ok((publishable(staging.dir(), metadata)?, floors.iter().sum()))
}

fn publishable(dir: &Path, mut metadata: Metadata) -> Result<Metadata> {
    let path = dir.join(METADATA);
    let sealed = seal(&path, &mut metadata)?;
    // One that a killed writer left.
    let _ = std::fs::remove_file(&path);
    write_file(&path, &sealed)?;
    Ok(metadata)
}

fn write_table_of(
    dir: &Path,
    set: &RankSet<'_, '_>,
    number: usize,
    origin: &TableOrigin<'_>,
    digests: &Digests,
) -> Result<RankEntry> {
    let missing = || crate::error::Error::Missing { path: dir.into() };
    let image = set.images.get(number).ok_or_else(missing)?;
    let view = set.views.get(image.view).ok_or_else(missing)?;
    let coordinate: Coordinate = image.coordinate;
    let table = format!("{coordinate}.json");
    let path = dir.join(&table);
    let _ = std::fs::remove_file(&path);
    let tensors = set.assignment.model.tensors;
    let name = |n: usize| tensors.at(n).map_or("", |t| t.name);
    let here = |name: &str| {
        let has = |g: &u32| set.all.0.get(*g as usize).is_some_and(|g| set.assignment.name_of(g) == name);
        image.groups.iter().any(has)
    };
    let aliases = set.assignment.model.aliases.iter().map(|(alias, n)| (alias.as_str(), name(*n)));
    let aliases: Vec<_> = aliases.filter(|(_, name)| here(name)).collect();
    let separator = image.layout.separator();
    let parts = TableParts { origin: *origin, aliases: &aliases, views: &[], separator, digests };
    let (table_bytes, table_hash) = write_hashed(&path, |out| {
        write_table(&path, out, &parts, |take| {
            for (position, group) in image.groups.iter().enumerate() {
                let (Some(group), Some(offset)) =
                    (set.all.0.get(*group as usize), image.layout.offset(position))
                else {
                    continue;
                };
                let Some(tensor) = view.tensor(group)? else { continue };
                let gathers: Vec<Gather> = tensor.gathers.iter().map(|g| in_file(set, g)).collect();
                let name = set.assignment.name_of(group);
                let whole = whole(set, name, &tensor.gathers, tensor.bytes);
                let from = match whole {
                    Some((source, offset)) => RowFrom::Whole(source, offset),
                    None => RowFrom::Parts(&gathers),
                };
                let row = TableRow {
                    name,
                    place: group.place,
                    offset,
                    shape: &tensor.shape,
                    dtype: tensor.dtype,
                    bytes: tensor.bytes,
                    from,
                };
                take(&row)?;
            }
            Ok(())
        })
    })?;
    Ok(RankEntry {
        coordinate,
        payload: format!("{coordinate}.img"),
        payload_bytes: image.layout.payload(),
        root: blake3::Hash::from_bytes(digests.root()).to_hex().to_string(),
        table,
        table_bytes,
        table_hash: table_hash.to_hex().to_string(),
    })
}

/// A gather of a tensor's bytes as one of its file's data.
fn in_file(set: &RankSet<'_, '_>, g: &Gather) -> Gather {
    match set.assignment.model.tensors.at(g.source as usize) {
        Some(tensor) => g.moved(u32::try_from(tensor.shard).unwrap_or(u32::MAX), tensor.begin, 0),
        None => *g,
    }
}

/// The source of a tensor that is one of the checkpoint, whole.
fn whole(set: &RankSet<'_, '_>, name: &str, gathers: &[Gather], bytes: u64) -> Option<(usize, u64)> {
    let tensors = set.assignment.model.tensors;
    let source = match gathers {
        [] => tensors.find(name)?,
        [one] if (one.from, one.at, one.bytes()) == (0, 0, bytes) && one.count == 1 => one.source as usize,
        _ => return None,
    };
    let tensor = tensors.at(source).filter(|t| t.bytes == bytes && t.name == name)?;
    Some((tensor.shard, tensor.begin))
}

fn metadata(
    set: &RankSet<'_, '_>,
    entries: &[RankEntry],
    origin: &TableOrigin<'_>,
    roots: &[blake3::Hash],
) -> Result<Metadata> {
    let assignment = set.assignment;
    let options = &assignment.options;
    let (parallel, config) = (&options.parallel, assignment.model.config);
    let engine = (options.target != Target::Checkpoint)
        .then(|| Engine { name: options.target.name().into(), version: options.target.version().into() });
    let ranks = set.ranks.iter().filter_map(|(rank, image)| {
        Some(RankEntry { coordinate: rank.coordinate, ..entries.get(*image)?.clone() })
    });
    let name = LayoutInfo::NAME;
    Ok(Metadata {
        flashboot_image: 0,
        id: String::new(),
        fingerprint: Fingerprint {
            source: origin.hash(roots)?.to_hex().to_string(),
            layout: format!("{name}/{}", assignment.name()),
            stage: if engine.is_some() { Stage::EngineParams } else { Stage::Sliced },
            dtype: main_dtype(assignment.model.tensors).map_or_else(String::new, |d| d.name().into()),
            quantisation: config.quantisation.clone(),
            model_type: config.model_type.clone(),
            engine,
            kernel: None,
        },
        layout: LayoutInfo {
            name: name.into(),
            tensor_align: TENSOR_ALIGN,
            payload_align: PAYLOAD_ALIGN,
            block: BLOCK,
            world: World {
                pp: parallel.pp,
                tp: parallel.tp,
                ep: parallel.ep,
                dp: parallel.dp,
                moe_tp: parallel.moe_tp,
            },
            numbers: config.numbers.clone(),
        },
        ranks: ranks.collect(),
    })
}

/// What a report says of an image of many ranks.
pub(super) fn report(
    dest: &Path,
    set: &RankSet<'_, '_>,
    metadata: &Metadata,
    notes: Vec<String>,
) -> PackReport {
    PackReport {
        image: dest.into(),
        id: metadata.id.clone(),
        tensors: set.images.iter().map(|image| image.groups.len() as u64).sum(),
        bytes: set.bytes(),
        separator: set.images.first().map_or(0, |image| image.layout.separator()),
        ranks: metadata.ranks.len() as u64,
        root: metadata.ranks.first().map_or_else(String::new, |rank| rank.root.clone()),
        notes,
    }
}
