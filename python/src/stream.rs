//! `Stream`: what one rank needs of a stock checkpoint, tensor by tensor, for an engine's own loader.

use crate::{
    edge::Region,
    error::OrRaise as _,
    file::Block,
    load::configured,
    text::{self, settings},
};
use flashboot::load::{coordinate, open_options, read_config};
use flashboot_checkpoint::{Checkpoint, LayoutOptions, Parallel, RankPlan, Slicing, Target};
use flashboot_core::{Error, Kind, Result};
use flashboot_loader::{
    ranks::{PartialTensor, ReadPlan, Slice, StreamConfig, Tensor, TensorStream},
    slab::{SlabConfig, SlabPool},
};
use pyo3::prelude::*;
use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// How a checkpoint is laid out over ranks, as the flags of `flashboot pack` say it.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Layout {
    tp: u32,
    dp: u32,
    ep: u32,
    moe_tp: Option<u32>,
    pp: u32,
    slice: Option<String>,
    target: Option<String>,
    experimental: bool,
    allow_unclaimed: bool,
    exclude: Vec<String>,
    draft: bool,
}

impl Default for Layout {
    fn default() -> Self {
        let Parallel { tp, dp, ep, moe_tp, pp } = Parallel::default();
        let LayoutOptions { experimental, allow_unclaimed, exclude, draft, .. } = LayoutOptions::default();
        let (slice, target) = (None, None);
        Self { tp, dp, ep, moe_tp, pp, slice, target, experimental, allow_unclaimed, exclude, draft }
    }
}

impl Layout {
    fn options(self) -> Result<LayoutOptions> {
        let Self { tp, dp, ep, moe_tp, pp, experimental, allow_unclaimed, exclude, draft, .. } = self;
        let invalid = |what: &str| Error::new(Kind::Invalid, "layout", what.to_owned());
        let slicing = match self.slice.as_deref() {
            None => None,
            Some("off") => Some(Slicing::Off),
            Some("experts") => Some(Slicing::Experts),
            Some("all") => Some(Slicing::All),
            Some(other) => return Err(invalid(&format!("slice: `{other}` is none of off, experts, all"))),
        };
        let target = self.target.as_deref().map(|name| {
            Target::from_name(name).ok_or_else(|| {
                invalid(&format!("target: `{name}` is none of checkpoint, transformers, vllm, sglang"))
            })
        });
        Ok(LayoutOptions {
            parallel: Parallel { tp, dp, ep, moe_tp, pp },
            slicing,
            target: target.transpose()?.unwrap_or_default(),
            experimental,
            allow_unclaimed,
            exclude,
            draft,
            ..LayoutOptions::default()
        })
    }
}

/// Tensors as they are read.
#[pyclass(frozen, module = "flashboot")]
pub(crate) struct Stream(Mutex<TensorStream>);

/// Begins to read what a rank needs.
#[pyfunction]
#[pyo3(signature = (checkpoint, *, rank=None, layout=None, config=None, patience=60.0))]
pub(crate) fn stream(
    py: Python<'_>,
    checkpoint: PathBuf,
    rank: Option<&str>,
    layout: Option<&Bound<'_, PyAny>>,
    config: Option<&Bound<'_, PyAny>>,
    patience: f64,
) -> PyResult<Stream> {
    let config = configured(py, config, None, None)?;
    let layout = layout.map(settings::<Layout>).transpose()?.unwrap_or_default().options().or_raise(py)?;
    let patience: Duration = crate::load::seconds(py, "patience", patience)?;
    let begin = || -> Result<TensorStream> {
        let checkpoint = Checkpoint::open(&checkpoint, &open_options(&config))?;
        let plan = RankPlan::new(&checkpoint, &layout, coordinate(&layout, rank)?)?;
        let read = read_config(&config)?;
        // No slab larger than a quarter of what all of them may be: the next is read while the last is used.
        let slab = SlabConfig::default();
        let slab = SlabConfig { slab: slab.slab.min(flashboot_core::ByteSize(read.budget.limit() / 4)) };
        let pool = SlabPool::new(read.budget, None);
        let stream = StreamConfig { io: read.io, threads: read.threads, pool, patience, observe: false };
        TensorStream::start(ReadPlan::new(&checkpoint, &plan, slab), &stream)
    };
    py.detach(begin).or_raise(py).map(|stream| Stream(Mutex::new(stream)))
}

/// Name, dtype, the checkpoint's shape, what is there of it (dimension and runs; `None`: all), and the bytes that are.
type Item = (String, &'static str, Vec<u64>, Option<(usize, Vec<(u64, u64)>)>, Block);

#[pymethods]
impl Stream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Item>> {
        let next = py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).next());
        match next.transpose().or_raise(py)? {
            None => Ok(None),
            Some(Tensor::Read(tensor)) => Ok(Some(item(&tensor))),
            Some(Tensor::Stock(tensor)) => {
                Err(text::invalid(py, "stream", &format!("`{}` was not read", tensor.name)))
            }
        }
    }
}

fn item(tensor: &PartialTensor) -> Item {
    let slice = tensor.slice().map(|Slice { dim, runs }| (*dim, runs.clone()));
    let block = Block::new(Region::of_view(tensor.view().clone()));
    (tensor.name().to_owned(), tensor.dtype().name(), tensor.shape().to_vec(), slice, block)
}
