//! `capture` and `compact`: tensors in memory become an image, on disk or in an arena.

use crate::{
    arena::Arena,
    blocking::runtime,
    edge::Foreign,
    error::OrRaise as _,
    image::{Image, Watched},
    load::configured,
    text::{invalid, object, settings},
};
use flashboot::load;
use flashboot_checkpoint::{
    self as checkpoint, Captured, CapturedTensor, Coordinate, Engine, Kernel, ModelConfig, NewView,
    PackOptions, Stage, World,
};
use flashboot_core::Dtype;
use pyo3::{prelude::*, types::PyDict};
use std::{
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64},
    },
};

/// What the bytes are good for.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Purpose {
    stage: Stage,
    #[serde(default)]
    engine: Option<Engine>,
    #[serde(default)]
    kernel: Option<Kernel>,
    /// Which part of the model, by a rank's name, and how many ranks there are.
    #[serde(default)]
    rank: Option<String>,
    #[serde(default)]
    world: Option<World>,
}

type NamedBytes<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);
type NamedView = (String, String, u64, String, Vec<u64>, Vec<u64>);

/// Tensors (name, dtype, shape, bytes), aliases (name, tensor) and views (name, tensor, offset, dtype, shape, stride).
fn captured(
    py: Python<'_>,
    tensors: Vec<NamedBytes<'_>>,
    aliases: Vec<(String, String)>,
    views: Vec<NamedView>,
    purpose: &Bound<'_, PyDict>,
    model_config: Option<&str>,
) -> PyResult<Captured> {
    let Purpose { stage, engine, kernel, rank, world } = settings(purpose)?;
    let coordinate = match rank {
        Some(rank) => rank.parse::<Coordinate>().map_err(|e| invalid(py, "capture", &e))?,
        None => Coordinate::WHOLE,
    };
    let dtype = |name: &str| {
        Dtype::from_name(name).ok_or_else(|| invalid(py, "capture", &format!("`{name}` is no dtype")))
    };
    let tensor = |(name, of, shape, bytes): NamedBytes<'_>| {
        let bytes = Box::new(Foreign::new(&bytes)?);
        PyResult::Ok(CapturedTensor { name, dtype: dtype(&of)?, shape, bytes })
    };
    let view = |(name, of, offset, code, shape, stride): NamedView| {
        PyResult::Ok(NewView { name, of, offset, dtype: dtype(&code)?, shape, stride })
    };
    Ok(Captured {
        tensors: tensors.into_iter().map(tensor).collect::<PyResult<_>>()?,
        aliases,
        views: views.into_iter().map(view).collect::<PyResult<_>>()?,
        part: (coordinate, world.unwrap_or(World::ONE)),
        stage,
        engine,
        kernel,
        config: model_config.map(|text| ModelConfig::parse(text.as_bytes())).unwrap_or_default(),
    })
}

/// Writes an image. `model_config` is the text of a `config.json`.
#[pyfunction]
#[pyo3(signature = (path, tensors, aliases, views, purpose, *, model_config=None, replace=false, progress=None))]
#[expect(clippy::too_many_arguments, reason = "keywords of one call")]
pub(crate) fn capture(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<NamedBytes<'_>>,
    aliases: Vec<(String, String)>,
    views: Vec<NamedView>,
    purpose: &Bound<'_, PyDict>,
    model_config: Option<&str>,
    replace: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<Image> {
    let captured = captured(py, tensors, aliases, views, purpose, model_config)?;
    let watched = watched(progress);
    let options = PackOptions { replace, ..PackOptions::default() };
    let written = py.detach(|| {
        checkpoint::capture(&captured, &path, &options, &watched)?;
        checkpoint::Image::open(&path)
    });
    raised_by(watched)?;
    Ok(Image::of(written.or_raise(py)?))
}

/// The same into an arena.
#[pyfunction]
#[pyo3(signature = (tensors, aliases, views, purpose, *, model_config=None, device=None, config=None, progress=None))]
#[expect(clippy::too_many_arguments, reason = "keywords of one call")]
pub(crate) fn compact(
    py: Python<'_>,
    tensors: Vec<NamedBytes<'_>>,
    aliases: Vec<(String, String)>,
    views: Vec<NamedView>,
    purpose: &Bound<'_, PyDict>,
    model_config: Option<&str>,
    device: Option<&str>,
    config: Option<&Bound<'_, PyAny>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Arena> {
    let config = configured(py, config, device, None)?;
    let captured = captured(py, tensors, aliases, views, purpose, model_config)?;
    let watched = watched(progress);
    let made = py.detach(|| {
        let device = runtime()?.block_on(load::one_device(&config))?;
        load::live(&captured, device.as_ref(), &config, &watched)
    });
    raised_by(watched)?;
    let (memory, contents) = made.or_raise(py)?;
    let (image, rank) = {
        let manifest = contents.manifest().or_raise(py)?;
        (manifest.metadata.id.clone(), manifest.entry.coordinate.to_string())
    };
    let report = Compacted { source: "live", image, rank, bytes: memory.payload(), verified: true };
    Arena::made(py, memory, contents, object(py, &report)?)
}

/// The account of a compact capture, in a load's words.
#[derive(serde::Serialize)]
struct Compacted {
    source: &'static str,
    image: String,
    rank: String,
    bytes: u64,
    verified: bool,
}

fn watched(progress: Option<Py<PyAny>>) -> Watched {
    Watched { progress, done: AtomicU64::new(0), stop: AtomicBool::new(false), raised: Mutex::default() }
}

fn raised_by(watched: Watched) -> PyResult<()> {
    watched.raised.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
