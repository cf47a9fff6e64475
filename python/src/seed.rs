//! `seed`: a holder that serves, on a thread of its own, until it is stopped.

use crate::{
    arena::Arena,
    error::{OrRaise as _, raised},
    image::Image,
    load::{configured, seat, seconds},
    text::{invalid, object, parsed},
};
use flashboot::service::{Running, SeedFrom, SeedRequest, Starting, Waited};
use flashboot_core::{Error, Kind};
use flashboot_rendezvous::store::Address;
use pyo3::prelude::*;
use std::{
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// How often a wait looks at signals.
const EVERY: Duration = Duration::from_millis(50);

/// A seed that serves.
#[pyclass(frozen, module = "flashboot")]
pub(crate) struct Seed {
    report: Py<PyAny>,
    running: Mutex<Option<Running>>,
    /// Threads stay behind when a process forks.
    process: u32,
}

/// What is to be served: an image's rank, or memory that is there already.
#[derive(FromPyObject)]
pub(crate) enum Served<'py> {
    Image(PyRef<'py, Image>),
    Arena(PyRef<'py, Arena>),
}

/// Fills memory from an image, or takes an arena as it lies, and serves it.
#[pyfunction]
#[pyo3(signature = (image, *, rank=None, model=None, revision="", rendezvous=None, embed=None, name=None, device=None, transport=None, config=None, lease=10.0, patience=60.0, drain=30.0))]
#[expect(clippy::too_many_arguments, reason = "keywords of one call")]
pub(crate) fn seed(
    py: Python<'_>,
    image: Served<'_>,
    rank: Option<&str>,
    model: Option<String>,
    revision: &str,
    rendezvous: Option<&str>,
    embed: Option<&str>,
    name: Option<String>,
    device: Option<&str>,
    transport: Option<&str>,
    config: Option<&Bound<'_, PyAny>>,
    lease: f64,
    patience: f64,
    drain: f64,
) -> PyResult<Seed> {
    let config = configured(py, config, device, transport)?;
    let lease = seconds(py, "lease", lease)?;
    if !(Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&lease) {
        return Err(invalid(py, "lease", &"a lease is between 1 and 3600 seconds"));
    }
    let drain = seconds(py, "drain", drain)?;
    let (from, folder) = match &image {
        Served::Image(image) => {
            let folder = image.inner().dir().file_name().map(|name| name.to_string_lossy().into_owned());
            let from = Box::new((image.inner().clone(), image.rank(py, rank)?.clone()));
            (SeedFrom::Image(from), folder)
        }
        Served::Arena(arena) => (arena.served(py, rank)?, None),
    };
    let request = SeedRequest {
        from,
        model: model.or(folder).unwrap_or_else(|| "model".into()),
        revision: revision.to_owned(),
        rendezvous: rendezvous.map(|text| parsed::<Address>(py, "rendezvous", text)).transpose()?,
        embed: embed.map(|text| parsed::<SocketAddr>(py, "embed", text)).transpose()?,
        lease,
        seat: seat(py, config, name, patience, drain)?,
    };
    let mut starting = Starting::begin(request).or_raise(py)?;
    loop {
        match py.detach(move || starting.wait(EVERY)).or_raise(py)? {
            Waited::Serving(serving, running) => {
                let running = Mutex::new(Some(running));
                return Ok(Seed { report: object(py, &*serving)?, running, process: std::process::id() });
            }
            Waited::Starting(still) => {
                // What it raises gives the seed up.
                py.check_signals()?;
                starting = still;
            }
        }
    }
}

#[pymethods]
impl Seed {
    /// What is served, and where.
    #[getter]
    fn report(&self, py: Python<'_>) -> Py<PyAny> {
        self.report.clone_ref(py)
    }

    /// Whether it serves: until it is stopped, or another member of its name came.
    #[getter]
    fn serving(&self) -> bool {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        self.process == std::process::id() && running.as_ref().is_some_and(Running::is_serving)
    }

    /// Says goodbye, drains readers and ends; a second call does nothing. Raises what ended it before.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != std::process::id() {
            let error =
                Error::new(Kind::Invalid, "stop", "this seed is another process's, from before a fork");
            return Err(raised(py, &error.with_remedy("stop it in the process that began it")));
        }
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        running.map_or(Ok(()), |running| py.detach(|| running.stop()).or_raise(py))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let at: String = self.report.bind(py).get_item("rendezvous")?.extract()?;
        Ok(format!("<flashboot.Seed at {at}>"))
    }
}
