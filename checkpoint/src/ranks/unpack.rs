//! The images of all ranks → the checkpoint they were packed from, bit for bit.

use super::model::ImageModel;
use super::reshard::refuse_damaged;
use super::set::Provider as _;
use crate::blocks::{PACK_WORKERS, Progress, workers};
use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::image::Image;
use crate::stream::{Intake, Job, Sink, Work, memory, run};
use crate::unpack::Outs;
use std::collections::HashMap;
use std::path::Path;

/// Writes every source file of `image` through `outs`, which are in the order of the tables' sources. Every block is
/// verified first, and every tensor must be in some rank, whole.
pub(crate) fn unpack_ranks(
    image: &Image,
    staging: &Path,
    outs: impl FnOnce() -> Result<Outs>,
    workers_asked: Option<usize>,
    progress: &dyn Progress,
) -> Result<u64> {
    let model = ImageModel::new(image)?;
    let missing = model.missing(|_| true);
    if !missing.is_empty() {
        let reason = format!("it does not hold all of {missing}");
        return Err(Error::NotUnpackable { dir: image.dir().into(), reason });
    }
    refuse_damaged(image)?;
    let outs = outs()?;
    let streams: Vec<_> = outs.data_bytes.iter().map(|bytes| (*bytes, 0)).collect();
    let mut order: Vec<usize> = (0..model.tensors.len()).collect();
    order.sort_by_key(|n| model.tensors.at(*n).map(|t| (t.shard, t.begin)));
    let job = Job {
        what: staging,
        files: &model.files,
        streams: &streams,
        piece: memory(streams.len()),
        sink: &outs,
        progress,
        total: streams.iter().map(|(bytes, _)| bytes).sum(),
        threads: workers(workers_asked, PACK_WORKERS),
    };
    run(&job, |take| {
        let mut origins = HashMap::new();
        for number in order {
            let Some(tensor) = model.tensors.at(number) else { continue };
            let mut work = Work::default();
            origins.clear();
            let mut gathers = Vec::new();
            let wanted = Gather::contiguous(0, 0, tensor.begin, tensor.bytes);
            model.resolve(u32::try_from(number).unwrap_or(u32::MAX), &wanted, &mut |origin, g| {
                let fresh = u32::try_from(work.origins.len()).unwrap_or(u32::MAX);
                let local = *origins.entry((origin.file, origin.offset)).or_insert(fresh);
                if local == fresh {
                    work.origins.push(origin);
                }
                gathers.push(Gather { source: local, ..g });
            });
            let (stream, end) =
                (u32::try_from(tensor.shard).unwrap_or(u32::MAX), tensor.begin + tensor.bytes);
            work.intakes.push(Intake { stream, start: tensor.begin, end, holes: Vec::new(), gathers });
            take(&work)?;
        }
        Ok(())
    })?;
    outs.sync()?;
    Ok(model.tensors.len() as u64)
}

impl Sink for Outs {
    fn put(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()> {
        self.write(stream, start, bytes)
    }

    fn spill(&self, stream: usize, start: u64, bytes: &[u8]) -> Result<()> {
        self.write(stream, start, bytes)
    }

    fn reload(&self, stream: usize, start: u64, into: &mut [u8]) -> Result<()> {
        self.read(stream, start, into)
    }
}
