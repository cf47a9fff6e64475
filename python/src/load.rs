//! `load` and `doctor`.

use crate::{
    arena::Arena,
    blocking::{teller, wait},
    error::OrRaise as _,
    text::{invalid, object, parsed, settings},
};
use flashboot::{
    config::{Choice, Config, Devices},
    doctor as diagnosis,
    load::{FromCheckpoint, FromObject, FromPeer, Progress, Request, place},
    observe::Observed,
    service::{CloneRequest, Labels, Seat},
};
use flashboot_checkpoint::{LayoutOptions, OpenOptions, is_image};
use flashboot_rendezvous::{protocol::Wanted, store::Address};
use pyo3::prelude::*;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// How many readers a member serves at once, as the command has it.
const READERS: u32 = 4;

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
    rendezvous: Option<&str>,
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
    let mut config = configured(py, config, device, transport)?;
    if let Some(sources) = sources {
        let kinds = sources.iter().map(|name| parsed(py, "sources", name));
        config.load.sources = kinds.collect::<PyResult<_>>()?;
    }
    let (image, checkpoint) = named(py, path, checkpoint)?;
    let open = open_options(&config);
    let peer = rendezvous.map(|address| {
        let rendezvous: Address = parsed(py, "rendezvous", address)?;
        let seat = seat(py, config.clone(), None, patience, Duration::from_secs(30))?;
        let wanted = Wanted { image: image_id.clone(), model, revision, rank: rank.clone() };
        let request =
            CloneRequest { wanted, rendezvous, expect: None, output: None, leave: true, kill: None, seat };
        PyResult::Ok(FromPeer { request })
    });
    let request = Request {
        rank,
        id: image_id,
        image,
        object: object.map(|url| FromObject { url, options: object_options.unwrap_or_default() }),
        checkpoint: checkpoint.map(|path| FromCheckpoint { path, open, layout: LayoutOptions::default() }),
        peer: peer.transpose()?,
        output: None,
        config,
    };
    let now = Progress::default();
    let mut tell = teller(progress, {
        let now = now.clone();
        move || now.now()
    });
    let placed = wait(py, move || place(request, now), &mut tell)?;
    tell(py)?;
    Arena::new(py, placed)
}

/// An image or a checkpoint, whichever lies there; and a checkpoint named besides.
fn named(
    py: Python<'_>,
    path: Option<PathBuf>,
    mut checkpoint: Option<PathBuf>,
) -> PyResult<(Option<PathBuf>, Option<PathBuf>)> {
    let Some(path) = path else { return Ok((None, checkpoint)) };
    if is_image(&path).or_raise(py)? {
        return Ok((Some(path), checkpoint));
    }
    if checkpoint.replace(path).is_some() {
        return Err(invalid(py, "load", &"two checkpoints were named"));
    }
    Ok((None, checkpoint))
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
    if let Some(device) = device {
        // As frameworks name the host.
        let device = if device == "cpu" { "host" } else { device };
        config.replicate.device = parsed::<Devices>(py, "device", device)?;
    }
    if let Some(transport) = transport {
        config.replicate.transport = parsed::<Choice>(py, "transport", transport)?;
    }
    Ok(config)
}

pub(crate) fn open_options(config: &Config) -> OpenOptions {
    OpenOptions {
        header_cap: config.pack.header_cap,
        allow_trailing_bytes: config.pack.allow_trailing,
        ..OpenOptions::default()
    }
}

/// A place at a service.
pub(crate) fn seat(
    py: Python<'_>,
    config: Config,
    name: Option<String>,
    patience: f64,
    drain: Duration,
) -> PyResult<Seat> {
    Ok(Seat {
        config,
        directory: directory(),
        labels: Labels { name, ..Labels::default() },
        readers: READERS,
        patience: seconds(py, "patience", patience)?,
        drain,
        observed: Observed::default(),
    })
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
