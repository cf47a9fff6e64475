//! An image as the model it was made of: the tensors of its checkpoint, and where in its payloads their bytes are.

use super::set::Provider;
use crate::cause::Names;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::gather::{Gather, compose};
use crate::header::Header;
use crate::image::{Image, RankTable, Stage};
use crate::parallel::Refused;
use crate::source::Source;
use crate::stream::Origin;
use crate::tensors::Tensors;
use std::collections::HashSet;
use std::path::Path;

/// Runs of one tensor that are looked at one by one to see whether they cover it.
const RUNS: u64 = 1 << 20;

/// Blocks of rows of one tensor that are compared with one another.
const MOST_BLOCKS: usize = 1 << 13;

/// A part of a tensor in a payload: from the tensor's bytes to the payload's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    file: u32,
    gather: Gather,
}

/// What was taken from one rank and need not be from another.
#[derive(Default)]
struct Known {
    /// Tensor and the bytes of it: `from`, `run`, `count`, `from_step`.
    parts: HashSet<(u32, u64, u64, u64, u64)>,
    aliases: HashSet<String>,
}

/// The model in an image.
pub(crate) struct ImageModel {
    pub(crate) tensors: Tensors,
    pub(crate) aliases: Vec<(String, usize)>,
    pub(crate) config: ModelConfig,
    pub(crate) files: Vec<Source>,
    held: Vec<Vec<Held>>,
}

impl ImageModel {
    /// Reads the tables' headers and places; no payload.
    pub(crate) fn new(image: &Image) -> Result<Self> {
        let refuse = |problem: String| Error::from(Refused::Relayout { problem });
        let fingerprint = &image.metadata().fingerprint;
        if fingerprint.stage == Stage::KernelReady {
            return Err(refuse(format!(
                "{}: its stage is kernel-ready: an engine has made other bytes of the checkpoint's",
                image.dir().display()
            )));
        }
        let Some(first) = image.ranks().first() else { return Err(refuse("it has no ranks".into())) };
        let mut tensors = Tensors::default();
        for (number, source) in first.table.sources().iter().enumerate() {
            let path = Path::new(&source.name);
            let header = Header::parse(path, &source.header)?;
            let prefix = (source.header.len() as u64).saturating_add(8);
            header.check_coverage(path, prefix, prefix.saturating_add(source.data_bytes), false)?;
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            tensors.append(header.tensors, number).map_err(|(tensor, other)| Error::InTwoShards {
                file: path.into(),
                tensor,
                other: first.table.sources().get(other).map_or_else(String::new, |s| s.name.clone()),
            })?;
        }
        let config = ModelConfig {
            model_type: fingerprint.model_type.clone(),
            tied_embeddings: false,
            quantisation: fingerprint.quantisation.clone(),
            numbers: image.metadata().layout.numbers.clone(),
            unreadable: None,
        };
        let held = vec![Vec::new(); tensors.len()];
        let mut known = Known::default();
        let mut model = Self { tensors, aliases: Vec::new(), config, files: Vec::new(), held };
        let places = model.places(first.table.sources().len());
        for rank in image.files() {
            if let Some(view) = rank.table.views().first() {
                return Err(refuse(format!(
                    "`{}` is a view of an engine's tensor, which nothing cuts",
                    view.name
                )));
            }
            if rank.table.sources() != first.table.sources() || rank.table.index() != first.table.index() {
                return Err(refuse("its ranks were made from several checkpoints".into()));
            }
            let file = u32::try_from(model.files.len()).unwrap_or(u32::MAX);
            model.files.push(Source::open(&rank.path)?);
            model.take(&rank.table, file, &places, &mut known).map_err(refuse)?;
        }
        Ok(model)
    }

    /// The tensors of each source by where they begin.
    fn places(&self, sources: usize) -> Vec<Vec<(u64, u32)>> {
        let mut places = vec![Vec::new(); sources];
        for (number, tensor) in self.tensors.iter().enumerate() {
            // An empty one holds nothing, and begins where another does.
            if let (Some(own), Ok(number), true) =
                (places.get_mut(tensor.shard), u32::try_from(number), tensor.bytes > 0)
            {
                own.push((tensor.begin, number));
            }
        }
        places.iter_mut().for_each(|own| own.sort_unstable());
        places
    }

    fn take(
        &mut self,
        table: &RankTable,
        file: u32,
        places: &[Vec<(u64, u32)>],
        known: &mut Known,
    ) -> Result<(), String> {
        for t in table.iter() {
            let whole = [Gather::contiguous(
                u32::try_from(t.source).unwrap_or(u32::MAX),
                t.source_offset,
                0,
                t.bytes,
            )];
            let parts = if t.parts.is_empty() && t.bytes > 0 && self.is_whole(&t) { &whole } else { t.parts };
            for part in parts.iter().filter(|part| part.bytes() > 0) {
                let outside = || format!("tensor `{}`: a part of it is in no tensor of its source", t.name);
                let own = places.get(part.source as usize).ok_or_else(outside)?;
                let at = own.partition_point(|(begin, _)| *begin <= part.from);
                let (begin, number) = at.checked_sub(1).and_then(|i| own.get(i)).ok_or_else(outside)?;
                let source = self.tensors.at(*number as usize).ok_or_else(outside)?;
                let end = begin.saturating_add(source.bytes);
                if part.from_end().is_none_or(|e| e > end) || source.dtype != t.dtype {
                    return Err(outside());
                }
                let gather = Gather {
                    source: 0,
                    from: part.from - begin,
                    at: t.offset.saturating_add(part.at),
                    ..*part
                };
                let part = (*number, gather.from, gather.run, gather.count, gather.from_step);
                if let Some(held) = self.held.get_mut(*number as usize)
                    && known.parts.insert(part)
                {
                    held.push(Held { file, gather });
                }
            }
        }
        for (alias, number) in table.aliases() {
            let name = table.at(*number).and_then(|t| self.tensors.find(t.name));
            if let Some(number) = name
                && known.aliases.insert(alias.clone())
            {
                self.aliases.push((alias.clone(), number));
            }
        }
        Ok(())
    }

    fn is_whole(&self, t: &crate::image::ImageTensor<'_>) -> bool {
        let source = self.tensors.find(t.name).and_then(|i| self.tensors.at(i));
        source.is_some_and(|s| (s.shard, s.begin, s.bytes) == (t.source, t.source_offset, t.bytes))
    }

    /// Whether all of a tensor's bytes are in some payload.
    pub(crate) fn has(&self, tensor: usize) -> bool {
        let bytes = self.tensors.at(tensor).map_or(0, |t| t.bytes);
        let held = self.held.get(tensor).map(Vec::as_slice).unwrap_or_default();
        bytes == 0 || covers(bytes, held.iter().map(|h| h.gather.normal()).collect())
    }

    /// The tensors, of those that `wanted` says yes to, that are not all there.
    pub(crate) fn missing(&self, wanted: impl Fn(usize) -> bool) -> Names {
        let mut names = Names::default();
        for number in (0..self.tensors.len()).filter(|n| wanted(*n) && !self.has(*n)) {
            names.push(self.tensors.at(number).map_or("", |t| t.name));
        }
        names
    }
}

/// Whether gathers take every one of the first `bytes` bytes.
fn covers(bytes: u64, gathers: Vec<Gather>) -> bool {
    if let Some((pitch, rows)) = blocks_of_rows(bytes, &gathers) {
        return covers_rows(bytes / pitch, pitch, &rows);
    }
    let total = gathers.iter().fold(0u64, |sum, g| sum.saturating_add(g.count));
    if total > RUNS {
        return false;
    }
    let mut runs: Vec<(u64, u64)> = Vec::with_capacity(usize::try_from(total).unwrap_or(0));
    for g in &gathers {
        runs.extend((0..g.count).map(|i| {
            let from = g.from.saturating_add(i.saturating_mul(g.from_step));
            (from, from.saturating_add(g.run))
        }));
    }
    runs.sort_unstable();
    let mut end = 0;
    for (from, to) in runs {
        if from > end {
            // What comes after a hole may be past the tensor's end.
            break;
        }
        end = end.max(to);
    }
    end >= bytes
}

/// Some columns of some rows: both half-open, columns in bytes.
struct Rows {
    rows: (u64, u64),
    columns: (u64, u64),
}

/// Gathers as blocks of rows of one pitch, if that is what they are: the parts of a tensor that is cut along two
/// dimensions are, and there may be millions of runs in them.
fn blocks_of_rows(bytes: u64, gathers: &[Gather]) -> Option<(u64, Vec<Rows>)> {
    let pitch = gathers.iter().find(|g| g.count > 1)?.from_step;
    if pitch == 0 || !bytes.is_multiple_of(pitch) || gathers.len() > MOST_BLOCKS {
        return None;
    }
    let block = |g: &Gather| {
        let (row, column) = (g.from / pitch, g.from % pitch);
        if g.count == 1 && column == 0 && g.run.is_multiple_of(pitch) {
            return Some(Rows { rows: (row, row.checked_add(g.run / pitch)?), columns: (0, pitch) });
        }
        let end = column.checked_add(g.run).filter(|end| *end <= pitch)?;
        let fits = g.count == 1 || g.from_step == pitch;
        fits.then_some(Rows { rows: (row, row.checked_add(g.count)?), columns: (column, end) })
    };
    Some((pitch, gathers.iter().map(block).collect::<Option<_>>()?))
}

/// Whether blocks hold every column of the first `count` rows: looked at between any two rows where a block begins or ends.
fn covers_rows(count: u64, pitch: u64, blocks: &[Rows]) -> bool {
    let mut edges: Vec<u64> = blocks.iter().flat_map(|b| [b.rows.0, b.rows.1]).chain([0, count]).collect();
    edges.retain(|edge| *edge <= count);
    edges.sort_unstable();
    edges.dedup();
    let mut columns = Vec::new();
    edges.iter().zip(edges.iter().skip(1)).all(|(from, to)| {
        columns.clear();
        let here = blocks.iter().filter(|b| b.rows.0 <= *from && b.rows.1 >= *to);
        columns.extend(here.map(|b| b.columns));
        columns.sort_unstable();
        let reached = columns.iter().fold(0, |end, (a, b)| if *a <= end { end.max(*b) } else { end });
        reached >= pitch
    })
}

impl Provider for ImageModel {
    fn resolve(&self, tensor: u32, wanted: &Gather, take: &mut dyn FnMut(Origin, Gather)) {
        for held in self.held.get(tensor as usize).into_iter().flatten() {
            // The payload is the origin, counted from this part's first byte: parts of one tensor are then taken
            // from one place, and those of several tensors are apart.
            let base = held.gather.at;
            compose(&held.gather, wanted, 0, &mut |g| {
                take(Origin { file: held.file, offset: base }, Gather { from: g.from - base, ..g });
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gather::tests::any_gather;
    use proptest::prelude::*;

    #[test]
    fn a_hole_past_the_end_is_none() {
        let given = vec![Gather { count: 2, from_step: 2, at_step: 1, ..Gather::contiguous(0, 0, 0, 1) }];
        assert!(covers(1, given.clone()));
        assert!(!covers(2, given));
    }

    #[test]
    fn parts_of_millions_of_rows_cover_what_they_cover() {
        // 128 experts of 2880 rows, two groups of experts by four parts of every row.
        let (rows, pitch) = (64 * 2880, 11_520);
        let part = |group: u64, k: u64| Gather {
            from: group * rows * pitch + k * pitch / 4,
            run: pitch / 4,
            count: rows,
            from_step: pitch,
            ..Gather::contiguous(0, 0, 0, 0)
        };
        let all: Vec<_> = (0..8).map(|i| part(i / 4, i % 4).normal()).collect();
        assert!(all.iter().map(|g| g.count).sum::<u64>() > RUNS);
        assert!(covers(2 * rows * pitch, all.clone()));
        for gone in 0..8 {
            let mut without = all.clone();
            without.remove(gone);
            assert!(!covers(2 * rows * pitch, without), "without part {gone}");
        }
    }

    proptest! {
        #[test]
        fn what_covers_a_tensor_is_seen_and_what_does_not_too(
            given in prop::collection::vec(any_gather(), 0..5), bytes in 1u64..40, columns in any::<bool>(),
        ) {
            let given: Vec<_> = if columns {
                let part = |g: &Gather| {
                    let (row, column) = (if g.at < 20 { 0 } else { g.at % 4 }, if g.run > 4 { 0 } else { g.from % 8 });
                    let run = if g.run > 4 { 8 } else { g.run.min(8 - column) };
                    Gather { from: row * 8 + column, run, count: (g.count + 1).min(4 - row), from_step: 8, ..*g }
                };
                given.iter().map(part).collect()
            } else {
                given
            };
            let bytes = if columns { 32 } else { bytes };
            let taken = |b: u64| given.iter().any(|g| (0..g.count).any(|i| {
                let from = g.from + i * g.from_step;
                b >= from && b < from + g.run
            }));
            prop_assert_eq!(covers(bytes, given.clone()), (0..bytes).all(taken));
        }
    }
}
