//! `capture`: tensors in memory become an image.

use crate::{
    edge::Foreign,
    error::OrRaise as _,
    image::{Image, Watched},
    text::{invalid, settings},
};
use flashboot_checkpoint::{
    self as checkpoint, Captured, CapturedTensor, Engine, Kernel, ModelConfig, NewView, PackOptions, Stage,
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
}

type NamedBytes<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);
type NamedView = (String, String, u64, String, Vec<u64>, Vec<u64>);

/// Writes an image of tensors (name, dtype, shape, bytes), aliases (name, tensor) and views (name, tensor, offset, dtype, shape,
/// stride). `model_config` is the text of a `config.json`.
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
    let Purpose { stage, engine, kernel } = settings(purpose)?;
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
    let captured = Captured {
        tensors: tensors.into_iter().map(tensor).collect::<PyResult<_>>()?,
        aliases,
        views: views.into_iter().map(view).collect::<PyResult<_>>()?,
        stage,
        engine,
        kernel,
        config: model_config.map(|text| ModelConfig::parse(text.as_bytes())).unwrap_or_default(),
    };
    let watched =
        Watched { progress, done: AtomicU64::new(0), stop: AtomicBool::new(false), raised: Mutex::default() };
    let options = PackOptions { replace, ..PackOptions::default() };
    let written = py.detach(|| {
        checkpoint::capture(&captured, &path, &options, &watched)?;
        checkpoint::Image::open(&path)
    });
    if let Some(raised) = watched.raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(raised);
    }
    Ok(Image::of(written.or_raise(py)?))
}
