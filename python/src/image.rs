//! `Image`: a packed model on disk.

use crate::{
    error::{OrRaise as _, raised},
    text,
};
use flashboot::load::{Contents, Entry, What};
use flashboot_checkpoint::{self as checkpoint, RankImage, VerifyOptions};
use flashboot_core::{Error, Kind};
use pyo3::{
    prelude::*,
    types::{PyList, PyTuple},
};
use std::{
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// A packed model whose metadata and tables were checked when it was opened.
#[pyclass(frozen, module = "flashboot")]
pub(crate) struct Image(checkpoint::Image);

#[pymethods]
impl Image {
    /// Opens the image in a directory.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| checkpoint::Image::open(&path)).or_raise(py).map(Self)
    }

    /// The image's id.
    #[getter]
    fn id(&self) -> &str {
        self.0.id()
    }

    /// Where it is.
    #[getter]
    fn path(&self) -> PathBuf {
        self.0.dir().to_owned()
    }

    /// The names of its rank images.
    #[getter]
    fn ranks(&self) -> Vec<String> {
        self.0.ranks().iter().map(|rank| rank.coordinate.to_string()).collect()
    }

    /// What the bytes are good for.
    #[getter]
    fn stage(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        text::object(py, &self.0.metadata().fingerprint.stage)
    }

    /// All of `metadata.json`.
    #[getter]
    fn metadata(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        text::object(py, self.0.metadata())
    }

    /// Payload bytes of a rank.
    #[pyo3(signature = (rank=None))]
    fn nbytes(&self, py: Python<'_>, rank: Option<&str>) -> PyResult<u64> {
        Ok(self.rank(py, rank)?.payload_bytes)
    }

    /// Every name of a rank, as tuples.
    #[pyo3(signature = (rank=None))]
    fn _tensors<'py>(&self, py: Python<'py>, rank: Option<&str>) -> PyResult<Bound<'py, PyList>> {
        let table = &self.rank(py, rank)?.table;
        let fingerprint = self.0.metadata().fingerprint.clone();
        listed(py, Contents::image(fingerprint, std::sync::Arc::clone(table)).entries())
    }

    /// Reads every payload and compares every block with its digest.
    #[pyo3(signature = (progress=None))]
    fn verify(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<Py<PyAny>> {
        let watched = Watched {
            progress,
            done: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            raised: Mutex::default(),
        };
        let report = py.detach(|| checkpoint::verify(&self.0, &VerifyOptions::default(), &watched));
        if let Some(raised) = watched.raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(raised);
        }
        let report = report.or_raise(py)?;
        let Some(block) = report.bad_blocks.first() else { return text::object(py, &report) };
        let bad: Vec<_> = report.ranks.iter().filter(|rank| !rank.bad_blocks.is_empty()).collect();
        let files: Vec<_> =
            bad.iter().map(|rank| format!("{}: blocks {:?}", rank.file, rank.bad_blocks)).collect();
        let detail = format!("{}: {}", self.0.dir().display(), files.join(", "));
        let error = Error::new(Kind::Corrupt, "verify", detail).with_chunk(*block);
        Err(raised(py, &error.with_remedy("pack or fetch the image again")))
    }

    fn __repr__(&self) -> String {
        format!(
            "<flashboot.Image {} at {}>",
            self.0.id().get(..12).unwrap_or_default(),
            self.0.dir().display()
        )
    }
}

impl Image {
    pub(crate) fn of(image: checkpoint::Image) -> Self {
        Self(image)
    }

    pub(crate) fn inner(&self) -> &checkpoint::Image {
        &self.0
    }

    /// The rank image called so, or the only one.
    pub(crate) fn rank(&self, py: Python<'_>, name: Option<&str>) -> PyResult<&RankImage> {
        let found = match (name, self.0.ranks()) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(name), all) => all.iter().find(|rank| rank.coordinate.to_string() == name),
        };
        found.ok_or_else(|| {
            let why = match name {
                None => "one of several ranks is to be named".to_owned(),
                Some(name) => format!("there is no rank {name}"),
            };
            text::invalid(
                py,
                "rank",
                &format!("{}: {why}: {}", self.0.dir().display(), self.ranks().join(", ")),
            )
        })
    }
}

/// Entries as tuples: name, dtype, offset, shape, stride, and what the name is.
pub(crate) fn listed<'py>(py: Python<'py>, entries: &[Entry]) -> PyResult<Bound<'py, PyList>> {
    let tuple = |entry: &Entry| -> PyResult<_> {
        let what = match entry.what {
            What::Tensor => "tensor",
            What::Alias => "alias",
            What::View => "view",
        };
        let (shape, stride) = (PyTuple::new(py, &entry.shape)?, PyTuple::new(py, &entry.stride)?);
        (entry.name.as_str(), entry.dtype.name(), entry.offset, shape, stride, what).into_pyobject(py)
    };
    PyList::new(py, entries.iter().map(tuple).collect::<PyResult<Vec<_>>>()?)
}

/// Python's callable as a call's progress. It is called from the call's own threads, one at a time; what it raises stops the call.
pub(crate) struct Watched {
    pub(crate) progress: Option<Py<PyAny>>,
    pub(crate) done: AtomicU64,
    pub(crate) stop: AtomicBool,
    pub(crate) raised: Mutex<Option<PyErr>>,
}

impl checkpoint::Progress for Watched {
    fn advance(&self, done: u64, total: u64) {
        // Threads overtake one another: what is told only grows.
        if self.done.fetch_max(done, Ordering::Relaxed) >= done {
            return;
        }
        let told = Python::attach(|py| {
            if let Some(progress) = &self.progress {
                progress.call1(py, (done, total))?;
            }
            // On the main thread this is where a signal is heard.
            py.check_signals()
        });
        if let Err(e) = told {
            self.stop.store(true, Ordering::Relaxed);
            self.raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        }
    }

    fn cancelled(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
