//! `load` and `doctor`.

use crate::{
    arena::Arena,
    blocking::{teller, wait},
    error::OrRaise as _,
    text::{invalid, object, settings},
};
use flashboot::{
    config::{Attach, Config},
    doctor as diagnosis,
    load::{self as loading, AttachRequest, FromObject, Progress, Wish, choose, place},
    service::{Labels, Seat},
};
use pyo3::prelude::*;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// Loads one rank into memory.
#[pyfunction]
#[pyo3(signature = (path=None, *, checkpoint=None, object=None, object_options=None, rendezvous=None, model=None, revision=None, rank=None, image_id=None, sources=None, device=None, transport=None, config=None, patience=60.0, progress=None))]
#[expect(clippy::too_many_arguments, reason = "keywords of one call")]
pub(crate) fn load(
    py: Python<'_>,
    path: Option<PathBuf>,
    checkpoint: Option<PathBuf>,
    object: Option<String>,
    object_options: Option<Vec<(String, String)>>,
    rendezvous: Option<String>,
    model: Option<String>,
    revision: Option<String>,
    rank: Option<String>,
    image_id: Option<String>,
    sources: Option<Vec<String>>,
    device: Option<&str>,
    transport: Option<&str>,
    config: Option<&Bound<'_, PyAny>>,
    patience: f64,
    progress: Option<Py<PyAny>>,
) -> PyResult<Arena> {
    let wish = Wish {
        path,
        checkpoint,
        object: object.map(|url| FromObject { url, options: object_options.unwrap_or_default() }),
        rendezvous,
        model,
        revision,
        rank,
        image_id,
        sources,
        config: configured(py, config, device, transport)?,
        patience: seconds(py, "patience", patience)?,
        directory: directory(),
    };
    let request = wish.request().or_raise(py)?;
    let now = Progress::default();
    let mut tell = teller(progress, {
        let now = now.clone();
        move || now.now()
    });
    let placed = wait(py, move || place(request, now), &mut tell)?;
    tell(py)?;
    Arena::new(py, placed)
}

/// Attaches what the node agent holds.
#[pyfunction]
#[pyo3(signature = (path=None, *, image_id=None, rank=None, device=None, private=false, agent=None, config=None, progress=None))]
#[expect(clippy::too_many_arguments, reason = "keywords of one call")]
pub(crate) fn attach(
    py: Python<'_>,
    path: Option<PathBuf>,
    image_id: Option<String>,
    rank: Option<String>,
    device: Option<&str>,
    private: bool,
    agent: Option<PathBuf>,
    config: Option<&Bound<'_, PyAny>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Arena> {
    let mut config = configured(py, config, device, None)?;
    if private {
        config.load.attach = Attach::Private;
    }
    if agent.is_some() {
        config.agent.directory = agent;
    }
    let request = AttachRequest { image: path, id: image_id, rank, config };
    let now = Progress::default();
    let mut tell = teller(progress, {
        let now = now.clone();
        move || now.now()
    });
    let placed = wait(py, move || loading::attach(request, now), &mut tell)?;
    tell(py)?;
    Arena::new(py, placed)
}

/// What works on this machine.
#[pyfunction]
#[pyo3(signature = (*, device=None, config=None, timeout=30.0))]
pub(crate) fn doctor(
    py: Python<'_>,
    device: Option<String>,
    config: Option<&Bound<'_, PyAny>>,
    timeout: f64,
) -> PyResult<Py<PyAny>> {
    let config = configured(py, config, None, None)?;
    let timeout = seconds(py, "timeout", timeout)?;
    let request = diagnosis::Request { device, directory: directory(), network: config.network(), timeout };
    let found = wait(py, move || diagnosis::doctor(request), |_| Ok(()))?;
    object(py, &found)
}

/// Settings out of a dictionary, with what has an argument of its own over them.
pub(crate) fn configured(
    py: Python<'_>,
    config: Option<&Bound<'_, PyAny>>,
    device: Option<&str>,
    transport: Option<&str>,
) -> PyResult<Config> {
    let mut config: Config = config.map(settings).transpose()?.unwrap_or_default();
    choose(&mut config, device, transport).or_raise(py)?;
    Ok(config)
}

/// A place at a service.
pub(crate) fn seat(
    py: Python<'_>,
    config: Config,
    name: Option<String>,
    patience: f64,
    drain: Duration,
) -> PyResult<Seat> {
    let patience = seconds(py, "patience", patience)?;
    let labels = Labels { name, ..Labels::default() };
    Ok(Seat { labels, patience, drain, ..Seat::new(config, directory()) })
}

pub(crate) fn seconds(py: Python<'_>, what: &'static str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|e| invalid(py, what, &e))
}

/// Where directories for sockets are made: their names may not be long.
fn directory() -> PathBuf {
    const LONGEST: usize = 60;
    let wanted = std::env::temp_dir();
    if wanted.as_os_str().len() > LONGEST { Path::new("/tmp").to_owned() } else { wanted }
}
