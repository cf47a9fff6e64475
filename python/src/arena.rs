//! `Arena`: one rank's bytes in memory.

use crate::{
    edge::{self, Region},
    error::{OrRaise as _, raised},
    image::listed,
    text,
};
use flashboot::{
    load::{Contents, Placed, Seen, verify},
    service::SeedFrom,
};
use flashboot_core::{Arena as Memory, Error, Kind};
use pyo3::{ffi, prelude::*, types::PyList};
use std::{ffi::c_int, sync::Arc};

/// One rank's bytes in memory, and what lies where. Tensors that see them keep them, whatever becomes of this.
#[pyclass(frozen, module = "flashboot")]
pub(crate) struct Arena {
    memory: Arc<dyn Memory>,
    region: Region,
    read_only: bool,
    contents: Contents,
    device: String,
    report: Py<PyAny>,
}

impl Arena {
    /// What a load has placed.
    pub(crate) fn new(py: Python<'_>, placed: Placed) -> PyResult<Self> {
        let Placed { arena, loaded, contents } = placed;
        let report = text::object(py, &loaded)?;
        Self::made(py, arena, contents, report)
    }

    /// Memory with what lies where in it, and its account.
    pub(crate) fn made(
        py: Python<'_>,
        memory: Arc<dyn Memory>,
        contents: Contents,
        report: Py<PyAny>,
    ) -> PyResult<Self> {
        let seen = Seen::of(&memory).or_raise(py)?;
        let (device, read_only) = (seen.device(), seen.is_read_only());
        let region = Region::of_arena(seen, memory.payload())?;
        Ok(Self { memory, region, read_only, contents, device, report })
    }

    /// The memory, to be served as it lies, if every block of it is still what its digest says.
    pub(crate) fn served(&self, py: Python<'_>, rank: Option<&str>) -> PyResult<SeedFrom> {
        // Another process's, attached where it is.
        if self.read_only {
            let error = Error::new(
                Kind::Invalid,
                "seed",
                "the node agent holds this memory, which is not ours to serve",
            );
            return Err(raised(py, &error.with_remedy("seed the image, or attach private")));
        }
        let made = py.detach(|| {
            let manifest = self.contents.manifest()?;
            let found = manifest.entry.coordinate.to_string();
            if rank.is_some_and(|rank| rank != found) {
                let detail = format!("the arena has {found}, {} is wanted", rank.unwrap_or_default());
                return Err(Error::new(Kind::Invalid, "seed", detail));
            }
            verify(&*self.memory, manifest.table.digests())?;
            Ok(SeedFrom::Arena(Arc::clone(&self.memory), manifest))
        });
        made.or_raise(py)
    }
}

#[pymethods]
impl Arena {
    /// Payload bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.memory.payload()
    }

    fn __len__(&self) -> usize {
        self.region.len()
    }

    /// `cpu`, or `cuda:N` by the GPU's number in this process.
    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    /// Whether a write to it ends this process.
    #[getter]
    fn read_only(&self) -> bool {
        self.read_only
    }

    /// The account of the load.
    #[getter]
    fn report(&self, py: Python<'_>) -> Py<PyAny> {
        self.report.clone_ref(py)
    }

    /// What the bytes are good for; `None` for a stock checkpoint.
    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.contents.fingerprint().map(|fingerprint| text::object(py, fingerprint)).transpose()
    }

    /// Every name, as tuples.
    fn _tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        listed(py, self.contents.entries())
    }

    /// Compares every block, as it is in memory now, with the image's digests.
    fn verify(&self, py: Python<'_>) -> PyResult<u64> {
        let Some(table) = self.contents.table() else {
            return Err(text::invalid(py, "verify", &"nothing proves a stock checkpoint: pack it first"));
        };
        py.detach(|| verify(&*self.memory, table.digests())).or_raise(py)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Py<PyAny>>,
        max_version: Option<Py<PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        // A load has ended: whatever the stream, the bytes are there. Any version reads the capsule of the first.
        let _ = (stream, max_version);
        refuse_moves(py, &self.region, dl_device, copy)?;
        edge::capsule(py, &self.region)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.region.device().pair()
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: the interpreter calls this slot with a view to be filled.
        unsafe { edge::fill_buffer(slf.as_any(), &slf.get().region, view, flags) }
    }

    fn __repr__(&self) -> String {
        format!("<flashboot.Arena of {} bytes on {}>", self.memory.payload(), self.device)
    }
}

/// Refuses what a capsule cannot give: memory elsewhere, or a copy.
pub(crate) fn refuse_moves(
    py: Python<'_>,
    region: &Region,
    wanted: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<()> {
    if copy == Some(true) || wanted.is_some_and(|wanted| wanted != region.device().pair()) {
        return Err(text::invalid(py, "__dlpack__", &"this memory is shown where it lies, without a copy"));
    }
    Ok(())
}
