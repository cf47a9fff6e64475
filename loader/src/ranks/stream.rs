//! The tensors of a plan, one after the other, read ahead as far as the budget allows.

use super::{PartialTensor, ReadPlan, ShardPlan, StockTensor};
use crate::{
    gather::{self, Requested},
    io::{Io, SourceFile},
    slab::{OpenSlab, SlabPlan, SlabPool},
    source::open_as,
};
use flashboot_checkpoint::Gather;
use flashboot_core::{Error, Kind, Result};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Bytes of a slab that one thread fills at a time.
const BATCH: u64 = 8 << 20;

/// How a plan is read.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// How files are read.
    pub io: Io,
    /// Threads that fill one slab.
    pub threads: usize,
    /// Where slabs come from; its budget bounds how far ahead is read.
    pub pool: SlabPool,
    /// The longest a slab is waited for: as long as the consumer may keep what it was given.
    pub patience: Duration,
    /// Read nothing: every tensor is left to whoever wants it. For looking at what a plan would do.
    pub observe: bool,
}

/// What a stream gives.
#[derive(Debug)]
pub enum Tensor {
    /// Read, all of it or the rank's slice.
    Read(PartialTensor),
    /// Not read: the checkpoint has it there.
    Stock(StockTensor),
}

/// Tensors, shard by shard, in the order of their names; then those that are stock. Dropping it ends the reading.
#[derive(Debug)]
pub struct TensorStream {
    from: Option<Receiver<Result<Vec<PartialTensor>>>>,
    ready: VecDeque<Tensor>,
    stock: VecDeque<StockTensor>,
    stop: Arc<AtomicBool>,
    requested: Arc<Requested>,
    reader: Option<JoinHandle<()>>,
}

impl TensorStream {
    /// Begins to read on a thread of its own.
    ///
    /// # Errors
    /// No thread to be had.
    pub fn start(plan: ReadPlan, config: &StreamConfig) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let requested = Arc::new(Requested::default());
        let mut stock: VecDeque<_> = plan.stock.clone().into();
        if config.observe {
            let all = plan
                .shards
                .iter()
                .flat_map(|shard| shard.tensors.iter().filter_map(|tensor| shard.as_stock(tensor)));
            let mut all: VecDeque<_> = all.collect();
            all.append(&mut stock);
            return Ok(Self {
                from: None,
                ready: VecDeque::new(),
                stock: all,
                stop,
                requested,
                reader: None,
            });
        }
        let (give, from) = sync_channel(1);
        let (config, told, counts) = (config.clone(), Arc::clone(&stop), Arc::clone(&requested));
        let read = move || {
            for shard in &plan.shards {
                let done =
                    read_shard(shard, &config, &told, &counts, &mut |tensors| give.send(Ok(tensors)).is_ok());
                match done {
                    Ok(true) => {}
                    // Nobody listens any more.
                    Ok(false) => return,
                    Err(e) => return drop(give.send(Err(e))),
                }
            }
        };
        let reader = thread::Builder::new().name("flashboot-read".into()).spawn(read);
        let reader = reader.map_err(|e| Error::from_io("clone", &e, "a thread that reads ahead"))?;
        Ok(Self { from: Some(from), ready: VecDeque::new(), stock, stop, requested, reader: Some(reader) })
    }

    /// What was read so far.
    pub fn requested(&self) -> &Requested {
        &self.requested
    }
}

impl Iterator for TensorStream {
    type Item = Result<Tensor>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty()
            && let Some(from) = &self.from
        {
            match from.recv() {
                Ok(Ok(tensors)) => self.ready.extend(tensors.into_iter().map(Tensor::Read)),
                Ok(Err(e)) => {
                    self.from = None;
                    self.stock.clear();
                    return Some(Err(e));
                }
                Err(_) => self.from = None,
            }
        }
        self.ready
            .pop_front()
            .map(Ok)
            .or_else(|| self.stock.pop_front().map(|stock| Ok(Tensor::Stock(stock))))
    }
}

impl Drop for TensorStream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.from = None;
        self.ready.clear();
        if let Some(reader) = self.reader.take() {
            // It ends with the slab that it is filling, or waiting for.
            let _ = reader.join();
        }
    }
}

impl ShardPlan {
    /// A tensor of it as the checkpoint has it.
    fn as_stock(&self, tensor: &super::plan::Eager) -> Option<StockTensor> {
        let (bytes, offset) = (tensor.dtype.bytes_of(&tensor.shape).ok()?, tensor.begin);
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Some(StockTensor { name, dtype: tensor.dtype, shape, path: self.path.clone(), offset, bytes })
    }
}

/// Reads a shard slab by slab; whether somebody still wants the rest.
fn read_shard(
    shard: &ShardPlan,
    config: &StreamConfig,
    stop: &AtomicBool,
    counts: &Requested,
    give: &mut dyn FnMut(Vec<PartialTensor>) -> bool,
) -> Result<bool> {
    let file = [open_as(&config.io, &shard.path, shard.len)?];
    for (number, slab) in shard.packing.slabs.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let Some(mut open) = wait_for(slab.capacity, config, stop)? else { return Ok(false) };
        fill_slab(shard, number, slab, &mut open, &file, config, counts)?;
        if !give(seal(shard, slab, open)) {
            return Ok(false);
        }
    }
    let [file] = file;
    file.unchanged()?;
    Ok(true)
}

/// A buffer, waited for as long as there is patience; `None` once nobody wants it any more.
fn wait_for(capacity: u64, config: &StreamConfig, stop: &AtomicBool) -> Result<Option<OpenSlab>> {
    const LOOK: Duration = Duration::from_millis(20);
    let began = Instant::now();
    loop {
        let left = config.patience.saturating_sub(began.elapsed());
        match config.pool.take(capacity, left.min(LOOK)) {
            Err(_) if stop.load(Ordering::Relaxed) => return Ok(None),
            Err(e) if e.kind() == Kind::Deadline && left > LOOK => {}
            other => return other.map(Some),
        }
    }
}

fn fill_slab(
    shard: &ShardPlan,
    number: usize,
    slab: &SlabPlan,
    open: &mut OpenSlab,
    file: &[SourceFile],
    config: &StreamConfig,
    counts: &Requested,
) -> Result<()> {
    let len = usize::try_from(slab.bytes).unwrap_or(usize::MAX);
    let bytes = open.as_mut_slice().get_mut(..len).unwrap_or_default();
    let batch = usize::try_from(BATCH).unwrap_or(usize::MAX);
    let queue = Mutex::new(bytes.chunks_mut(batch).zip(0u64..));
    let first_error = Mutex::new(None);
    let places = shard.packing.places.get(slab.tensors.clone()).unwrap_or_default();
    let tensors = shard.tensors.get(slab.tensors.clone()).unwrap_or_default();
    debug_assert!(places.iter().all(|place| place.slab == number));
    let work = || {
        let mut lane = config.io.lane();
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((into, index)) = next else { return };
            let start = index * BATCH;
            let end = start + into.len() as u64;
            let first = places.partition_point(|place| place.offset + place.bytes <= start);
            let mut parts: Vec<Gather> = Vec::new();
            let here = places.iter().zip(tensors).skip(first).take_while(|(place, _)| place.offset < end);
            for (place, tensor) in here {
                for g in &tensor.gathers {
                    let in_slab = Gather { at: g.at + place.offset, ..*g };
                    in_slab.landing_within(start, end, |part| {
                        parts.push(Gather { at: part.at - start, ..part });
                    });
                }
            }
            if let Err(e) = gather::read(&mut lane, file, &parts, into, counts) {
                first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                // The others find the queue empty.
                queue.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                return;
            }
        }
    };
    let threads = config.threads.clamp(1, len.div_ceil(batch).max(1));
    thread::scope(|scope| {
        for _ in 1..threads {
            // This thread works too.
            if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    first_error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn seal(shard: &ShardPlan, slab: &SlabPlan, open: OpenSlab) -> Vec<PartialTensor> {
    let places = shard.packing.places.get(slab.tensors.clone()).unwrap_or_default();
    let tensors = shard.tensors.get(slab.tensors.clone()).unwrap_or_default();
    let named = places.iter().zip(tensors).map(|(place, tensor)| {
        let at = usize::try_from(place.offset).unwrap_or(usize::MAX);
        (tensor.name.clone(), at..at.saturating_add(usize::try_from(place.bytes).unwrap_or(0)))
    });
    let views = open.seal(named.collect());
    let made = views.into_iter().zip(tensors);
    made.map(|(view, t)| PartialTensor::new(t.dtype, t.shape.clone(), t.slice.clone(), view)).collect()
}
